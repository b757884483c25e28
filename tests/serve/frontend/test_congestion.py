"""The limit of requests on their way to a frontend that has too little CPU time."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.serve.frontend.congestion import Congestion
from ray_slo.serve.proxy import gate

PURE = settings(max_examples=20)
SLO_S, SLOW_S, QUICK_S = 0.2, 0.02, 0.001


def run(one, begin_s, end_s, turn_s, per_s=800, slo_s=SLO_S):
    for i in range(round((end_s - begin_s) * per_s)):
        one.answered(begin_s + i / per_s, turn_s, slo_s)
    return one


def test_there_is_no_limit_while_the_event_loop_keeps_up():
    assert run(Congestion(), 0.0, 5.0, QUICK_S).limit == math.inf


def test_bursts_set_no_limit():
    one, now = Congestion(), 0.0
    for pause_s in (0.4, 1.0, 5.0) * 5:
        run(one, now, now + 0.5, SLOW_S)
        assert one.limit == math.inf
        now = now + 0.5 + pause_s
    assert run(one, now, now + 1.1, SLOW_S).limit < math.inf


def test_while_turns_are_slow_latency_is_held_at_a_third_of_the_slo():
    one = run(Congestion(), 0.0, 5.0, SLOW_S)
    assert one.limit == pytest.approx(0.3 * SLO_S * 800, rel=0.02)
    # A window with few answers does not lower it: their rate is that of the best window.
    assert run(one, 5.0, 5.5, SLOW_S, per_s=40).limit == pytest.approx(48, rel=0.02)


def test_it_rises_again_and_ends():
    one = run(Congestion(), 0.0, 5.0, SLOW_S)
    assert run(one, 5.0, 6.5, QUICK_S).limit == pytest.approx(0.55 * SLO_S * 800, rel=0.2)
    assert run(one, 6.5, 7.1, QUICK_S).limit == math.inf


def test_what_is_slow_depends_on_the_slo():
    assert run(Congestion(), 0.0, 1.0, SLOW_S, slo_s=2.0).limit == math.inf
    assert run(Congestion(), 0.0, 1.0, 0.1, slo_s=2.0).limit < 1600


@pytest.mark.parametrize(("niceness", "says_so"), [(0, False), (15, True)])
def test_the_log_has_it_once(caplog, monkeypatch, niceness, says_so):
    monkeypatch.setattr("os.getpriority", lambda which, who: niceness)
    with caplog.at_level(logging.WARNING):
        run(Congestion(), 0.0, 1.0, SLOW_S)
    (record,) = caplog.records
    assert "takes 20 ms per turn" in record.message and "num_frontends" in record.message
    assert (
        "niceness 15" in record.message and "RAY_worker_niceness=0" in record.message
    ) == says_so


@pytest.mark.slow
@PURE
@given(st.integers(500, 2000), st.integers(2, 6))
def test_in_overload_the_frontend_answers_as_much_as_it_can(capacity_per_s, times):
    """A frontend that shares its time among all its requests: a turn of its event loop is as long
    as the requests on their way need. Without a limit, none of them would be in time."""
    one, inside, now, due = Congestion(), [], 0.0, 0.0
    answered = late = 0
    while now < 20.0:
        turn_s = max(len(inside) / 8 / capacity_per_s, 1e-3)
        now += turn_s
        while due < now:
            if len(inside) < max(one.limit, gate.FEW):
                inside.append(due)
            due += 1 / (times * capacity_per_s)
        done, inside = inside[: len(inside) // 8 + 1], inside[len(inside) // 8 + 1 :]
        for arrival in done:
            one.answered(now, turn_s, SLO_S)
            if now > 8.0:  # before there is a limit, many come
                answered += 1
                late += now - arrival > SLO_S
    assert late <= 0.02 * answered
    assert answered >= 0.9 * 12.0 * capacity_per_s
