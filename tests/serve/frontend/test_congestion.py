"""The limit of requests on their way to a frontend that has too little CPU time."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.serve.frontend.congestion import Congestion

PURE = settings(derandomize=True, database=None, deadline=None, max_examples=200)
SLO_S, SLOW_S, QUICK_S = 0.2, 0.02, 0.001


def cut(inside=100):
    one = Congestion()
    one.answered(0.0, inside, SLOW_S, SLO_S)
    return one


def test_there_is_no_limit_while_the_event_loop_keeps_up():
    one = Congestion()
    for i in range(1000):
        one.answered(i / 1000, 500, QUICK_S, SLO_S)
    assert one.limit == math.inf


def test_slow_turns_lower_it_once_per_half_an_slo():
    one = cut()
    assert one.limit == 80
    one.answered(0.05, 80, SLOW_S, SLO_S)
    assert one.limit == 80
    one.answered(0.11, 80, SLOW_S, SLO_S)
    assert one.limit == 64
    for i in range(100):
        one.answered(1.0 + i, 80, SLOW_S, SLO_S)
    assert one.limit == 16


def test_what_is_slow_depends_on_the_slo():
    one = Congestion()
    one.answered(0.0, 100, SLOW_S, 2.0)
    assert one.limit == math.inf
    one.answered(0.0, 100, 0.1, 2.0)
    assert one.limit == 80


def test_answers_raise_it_only_while_it_is_used():
    one = cut()
    one.answered(0.2, 39, QUICK_S, SLO_S)
    assert one.limit == 80
    one.answered(0.2, 40, QUICK_S, SLO_S)
    assert one.limit == 80.5


def test_a_calm_time_ends_it():
    one = cut()
    one.answered(9.9, 1, QUICK_S, SLO_S)
    assert one.limit == 80
    one.answered(10.1, 1, QUICK_S, SLO_S)
    assert one.limit == math.inf


@PURE
@given(st.integers(50, 400), st.integers(2, 6))
def test_in_overload_the_frontend_answers_as_much_as_it_can(capacity_per_s, times):
    """A frontend that shares its time among all its requests: a turn of its event loop is as long
    as the requests on their way need. Without a limit, each of them would take its whole SLO."""
    one, inside, now, answered, late = Congestion(), [], 0.0, 0, 0
    due = 0.0
    while now < 30.0:
        turn_s = max(len(inside) / 8 / capacity_per_s, 1e-3)
        now += turn_s
        while due < now:
            if len(inside) < one.limit:
                inside.append(due)
            due += 1 / (times * capacity_per_s)
        done, inside = inside[: len(inside) // 8 + 1], inside[len(inside) // 8 + 1 :]
        for arrival in done:
            one.answered(now, len(inside), turn_s, SLO_S)
            if now > 5.0:
                answered += 1
                late += now - arrival > SLO_S
    assert late <= 0.02 * answered
    assert answered >= 0.9 * 25.0 * capacity_per_s
