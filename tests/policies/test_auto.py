"""`auto`: its choices, when it rehearses, and that a change of setting loses no request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Dispatch,
    DispatchDelay,
    LatencyProfile,
    Model,
    Preempt,
    Request,
    Upstream,
    Variant,
)
from ray_slo.core.rehearsal import Rehearsed, Score
from ray_slo.core.trees import Tree
from ray_slo.policies import auto_floor, make_policy
from ray_slo.policies.auto import Auto
from ray_slo.policies.auto_choice import Choice, Evidence
from ray_slo.policies.auto_settings import Shape, candidates, collapses
from ray_slo.policies.auto_traffic import Recent, Story
from ray_slo.policies.deferred import Deferred
from ray_slo.policies.registry import policy_for
from tests.policies.contract import CHAIN, SHARED, Script, make_cluster, operation, worker_kind
from tests.policies.harness import Host, one_model

LINE = LatencyProfile.linear(0.002, 0.01, 16)


def rehearsed(number: int, scores: dict[str, Score], at: float = 0.0, rate: float = 100.0) -> Any:
    """An answer with 12 stretches of 100 requests for model "m"."""
    return Rehearsed(number, at, rate, ("m",), (1200,), (100,) * 12, scores)


def score(values: list[float] | float, p50_s: float = 0.05) -> Score:
    """Values per request, by stretch."""
    values = values if isinstance(values, list) else [values] * 12
    return Score(tuple(100 * v for v in values), (round(100 * sum(values)),), (100.0,), p50_s)


class Swaps(Script):
    """Also has a rehearsal come out in favour of one setting."""

    def __init__(self, host: Host, sized: bool) -> None:
        super().__init__(host, sized)
        self.number = 0

    def swap(self, which: int) -> None:
        self.number += 1
        labels = list(self.host.policy._settings)
        best = labels[which % len(labels)]
        scores = {label: score(1.0 if label == best else 0.5) for label in labels}
        # Another load each time, and changes are rare: what was seen under others does not count.
        answer = rehearsed(self.number, scores, at=1e4 * self.number, rate=4.0**self.number)
        self.host._feed("solved", [answer])
        assert self.host.policy._label == best
        self.host.decide()


either = st.one_of(operation, operation, st.tuples(st.just("swap"), st.integers(0, 20)))

APPLICATIONS: list[dict[str, Any]] = [
    {"preempt": True},
    {"trees": [tree.to_json() for tree in CHAIN]},
    {"trees": [tree.to_json() for tree in SHARED], "preempt": True},
    {"candidates": ["kairos", "flex", "price", "deferred_flex", "deferred"], "preempt": True},
    {"planned": True},
    {"fairness": 1.0},
]


@pytest.mark.slow
@settings(max_examples=15, phases=[Phase.generate])
@given(
    kinds=st.lists(worker_kind, max_size=3),
    control_s=st.sampled_from([0.0, 0.004, 0.015]),
    operations=st.lists(either, min_size=10, max_size=60),
    hung=st.booleans(),
    sized=st.booleans(),
)
def test_swaps_lose_nothing(**events: Any) -> None:
    """In any application. All meet the same events, because it takes long to draw them."""
    for kwargs in APPLICATIONS:
        loses_nothing(kwargs, **events)


def loses_nothing(
    kwargs: dict[str, Any],
    kinds: list[tuple[str, int]],
    control_s: float,
    operations: list[tuple[Any, ...]],
    hung: bool,
    sized: bool,
) -> None:
    cluster = make_cluster(kinds, control_s=control_s)
    host = Host(lambda: Auto(**kwargs), cluster, now=1000.0, strict=False)
    script = Swaps(host, sized)
    with patch.object(auto_floor, "_FEW", 1), patch.object(auto_floor, "_WINDOW_S", 0.01):
        for op in operations:
            script.do(*op)
            assert {r.id: r for r in host.policy._held} == host.waiting
        last = max((r.deadline for r in script.requests), default=0.0)
        host.advance(max(host.now, last + 1e-5), ends=not hung)
        assert not host.waiting
        host.check_replay()


def test_what_waits_goes_over_in_order_of_arrival() -> None:
    """And the new policy knows when workers that it did not send to fall free."""
    host = Host(Auto, one_model(LatencyProfile.linear(0.001, 0.01, 4), 0.1, 1), strict=False)
    host.arrive([Request(i, "m", 0.0, 0.2) for i in range(4)])
    assert [s.ids for s in host.sent] == [[0, 1, 2, 3]]
    host.now = 0.001
    # 5 is due before 4, 6 and 7 are due together.
    host.arrive([Request(i, "m", 0.001, d) for i, d in ((4, 0.3), (5, 0.29), (6, 0.31), (7, 0.31))])
    answer = rehearsed(1, {"eager": score(1.0), "deferred": score(0.5)})
    host._feed("solved", [answer])
    assert host.policy.story()[-1]["setting"] == "eager"
    assert host.decide().actions == []  # the worker is busy until 0.014
    host.advance(1.0)
    assert [(s.at, s.ids) for s in host.sent[1:]] == [(pytest.approx(0.014), [5, 4, 6, 7])]


def test_learned_load_goes_over() -> None:
    """A policy of the same kind need not measure the load anew."""
    auto = Auto()
    auto.cluster_changed(0.0, one_model(LINE, 0.1, 2))
    for i in range(400):
        now = i / 200
        auto.requests_arrived(now, [Request(i, "m", now, now + 0.1)])
        auto.decide(now)
    former: Any = auto._inner
    answer = rehearsed(1, {"deferred objective=consolidate": score(1.0), "deferred": score(0.5)})
    auto.solved(2.0, [answer])
    inner: Any = auto._inner
    assert inner is not former
    assert inner._models["m"].rate == former._models["m"].rate == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    ("scores", "current", "expected"),
    [
        # More value in time.
        ({"a": score(0.9), "b": score(0.95)}, "a", "b"),
        # Not by more than chance may.
        (
            {"a": score([0.5, 0.9] * 6), "b": score([0.9, 0.52] * 6)},
            "a",
            "a",
        ),
        # Equal value: the quicker one; not for less than 1 %.
        ({"a": score(0.99, 0.05), "b": score(0.99, 0.04)}, "a", "b"),
        ({"a": score(0.99, 0.05), "b": score(0.99, 0.0498)}, "a", "a"),
        # The quicker one gives up too much.
        ({"a": score(1.0, 0.05), "b": score(0.99, 0.04)}, "a", "a"),
        # What failed, or was given up, is not chosen.
        ({"a": score(0.5), "b": Score(error="ValueError: no")}, "a", "a"),
        ({"a": score(0.5), "b": Score((100.0,) * 4, (400,), (100.0,))}, "a", "a"),
        ({"a": Score(error="ValueError: no"), "b": Score(error="the same")}, "a", "a"),
    ],
)
def test_choice(scores: dict[str, Score], current: str, expected: str) -> None:
    evidence = Evidence(0.0)
    evidence.add(rehearsed(1, scores))
    assert evidence.choose(current).label == expected


def by_model(good: tuple[int, int], value: float) -> Score:
    return Score((value * 100,) * 10, good, (100.0, 100.0), 0.05)


def test_fairness_and_models_that_starve() -> None:
    """The floor excludes what starves a model; without it, 0.7 % of value is given to keep every
    model under 1 % bad."""
    roots, arrived, stretches = ("x", "y"), (500, 500), (100,) * 10
    starves, keeps = by_model((500, 200), 0.7), by_model((300, 300), 0.6)
    for fairness, label in ((0.0, "starves"), (0.9, "keeps")):
        evidence = Evidence(fairness)
        scores = {"starves": starves, "keeps": keeps}
        evidence.add(Rehearsed(1, 0.0, 100.0, roots, arrived, stretches, scores))
        assert evidence.choose("starves").label == label
    evidence = Evidence(0.0)
    scores = {"more": by_model((500, 470), 0.98), "clean": by_model((500, 500), 0.975)}
    evidence.add(Rehearsed(1, 0.0, 100.0, roots, arrived, stretches, scores))
    choice = evidence.choose("more")
    assert choice.label == "clean"
    assert "under 1 % bad" in choice.why


def test_evidence_adds_up_under_one_load() -> None:
    """A gain that one rehearsal cannot show, several do; another load begins anew."""
    a, b = score([0.9, 0.8] * 6), score([0.88, 0.86] * 6)
    wide = {"a": a, "b": b}
    evidence = Evidence(0.0)
    evidence.add(rehearsed(1, wide))
    assert evidence.choose("a").label in ("a", "b")
    assert not evidence.add(rehearsed(2, wide, rate=110.0))
    assert evidence.add(rehearsed(3, {"a": score(0.9), "b": score(0.5)}, rate=400.0))
    assert evidence.choose("a").label == "a"


def feed(auto: Auto, begin_s: float, end_s: float, rate: float, first: int = 0) -> int:
    """Requests at even gaps, on workers that take no time; the number of the next one."""
    count = round((end_s - begin_s) * rate)
    for i in range(count):
        now = begin_s + i / rate
        auto.requests_arrived(now, [Request(first + i, "m", now, now + 0.1)])
        for action in auto.decide(now).actions:
            if isinstance(action, Dispatch):
                outcome = BatchOutcome(action.batch_id, action.requests, now, now)
                auto.batch_finished(now, action.worker, outcome)
    return first + count


def test_rehearsals_come_soon_then_rarely_and_at_once_when_the_load_steps() -> None:
    auto = Auto()
    auto.cluster_changed(0.0, one_model(LINE, 0.1, 4))
    feed(auto, 0.0, 0.9, 200)
    assert auto.wanted() == []  # 180 requests are too few
    n = feed(auto, 0.9, 1.5, 200, 180)
    (first,) = auto.wanted()
    assert len(first.traffic) == n == 300
    assert first.settings[0].label == "deferred"
    same = {"deferred": score(1.0)}
    auto.solved(1.5, [rehearsed(1, same, at=1.495, rate=200.0)])
    assert first.calm  # no request was bad: the next one is four times as late
    n = feed(auto, 1.5, 5.4, 200, n)
    assert auto.wanted() == []
    n = feed(auto, 5.4, 5.6, 200, n)
    (second,) = auto.wanted()  # only what came since counts
    assert second.traffic.arrival[second.traffic.before] == pytest.approx(1.5)
    assert second.traffic.arrival[0] == pytest.approx(1.0)  # five SLOs to warm up
    auto.solved(5.6, [rehearsed(2, same, at=5.595, rate=200.0)])
    n = feed(auto, 5.6, 7.6, 200, n)
    assert auto.wanted() == []
    feed(auto, 7.6, 9.0, 500, n)
    (third,) = auto.wanted()  # a step: with what came since
    arrival = third.traffic.arrival[third.traffic.before :]
    rate = len(arrival) / (arrival[-1] - arrival[0])
    assert rate == pytest.approx(500, rel=0.02)


def test_settings_without_any_value_are_equal() -> None:
    """Nothing was in time, so there is no error of a share of the value, either."""
    evidence = Evidence(0.0)
    evidence.add(rehearsed(1, {"a": score(0.0), "b": score(0.0)}))
    assert evidence.choose("b").label == "b"


SCATTERED = [1.01 + 0.06 * (-1) ** i for i in range(12)]


@pytest.mark.parametrize(
    ("values", "elsewhere", "expected"),
    [
        # The error is 0.02, and the spread that is expected 0.03: 9 / 13 of the gain is believed,
        # and of −0.005, the gain without any rehearsal, the rest.
        ([1.01], 0.0, (9 * 0.01 - 4 * 0.005) / 13),
        # Two rehearsals have half of the squared error.
        ([1.01, 1.01], 0.0, (9 * 0.01 - 2 * 0.005) / 11),
        # Differences of 0.06 in 12 stretches add 0.0003 to the squared error of 0.0004.
        ([SCATTERED], 0.0, (9 * 0.01 - 7 * 0.005) / 16),
        # A gain of 2.5 errors is no chance: 0.0025 − 0.0004 = 0.0021 is the squared spread.
        ([1.05], 0.0, (21 * 0.05 - 4 * 0.005) / 25),
        # Half of a gain of 0.01 and half of a loss of 0.03, each with an error of 0.02.
        ([1.01], 0.5, (9 * -0.01 - 2 * 0.005) / 11),
    ],
)
def test_gains_are_believed_as_far_as_they_are_no_chance(
    values: list[Any], elsewhere: float, expected: float
) -> None:
    evidence = Evidence(0.0)
    evidence.begin("a", ["b"])
    if elsewhere:
        evidence.add(rehearsed(0, {"a": score(1.0), "b": score(0.97)}, rate=400.0))
    for number, value in enumerate(values, 1):
        fall = replace(score(value), fall=0.0)
        evidence.add(rehearsed(number, {"a": score(1.0), "b": fall}))
    assert evidence._expected("b", "a", elsewhere, 1.0) == pytest.approx(expected)
    assert evidence._expected("a", "a", elsewhere, 1.0) == 0.0
    evidence.planned = True
    assert evidence._expected("b", "a", elsewhere, 1.0) == pytest.approx(expected - 0.02)


@pytest.mark.parametrize(
    ("falls", "risk"), [([None], 0.015), ([0.3], 0.03), ([0.3, None, 0.1], 0.02)]
)
def test_the_risk_of_a_collapse_is_a_tenth_of_what_a_rise_costs(
    falls: list[float | None], risk: float
) -> None:
    evidence = Evidence(0.0)
    for number, fall in enumerate(falls):
        evidence.add(rehearsed(number, {"a": score(1.0), "b": replace(score(1.0), fall=fall)}))
    assert evidence._risk("b") == pytest.approx(risk)


def test_rates_are_of_the_time_in_which_a_change_is_seen() -> None:
    """Half a second, or six SLOs; or as long as all requests are known."""
    recent = Recent()
    assert recent.lag_s == 0.5
    assert recent.rates(0.0) == {}

    def add(numbers: range) -> None:
        """200 requests per second: one item for "a", then two for "b"."""
        for i in numbers:
            now = 1.0 + i / 200
            recent.add(now, [Request(i, "ab"[i % 2], now, now + 1.0, 1 + i % 2)])

    add(range(60))
    # All but the first: since that one, all are known.
    assert recent.rates(1.3) == pytest.approx({"a": 29 / 0.3, "b": 60 / 0.3})
    add(range(60, 200))
    assert recent.rates(2.0025) == pytest.approx({"a": 49 / 0.5, "b": 100 / 0.5})
    assert recent.rates(2.3325) == pytest.approx({"a": 16 / 0.5, "b": 34 / 0.5})
    assert recent.rates(2.3375) == {}  # 48 items are too few
    recent.slo_s = 0.1
    assert recent.lag_s == pytest.approx(0.6)
    assert recent.rates(2.0025) == pytest.approx({"a": 59 / 0.6, "b": 120 / 0.6})


@pytest.mark.parametrize(("fall", "chosen"), [(None, "a"), (0.0, "b"), (0.3, "a")])
def test_a_setting_that_may_collapse_answers_for_what_it_would_lose(fall, chosen) -> None:
    """b is as good as a, and quicker."""
    evidence = Evidence(0.0)
    evidence.begin("a", ["b"])
    for number in range(1, 4):
        quick = replace(score(1.0, p50_s=0.02), fall=fall)
        evidence.add(rehearsed(number, {"a": score(1.0, p50_s=0.04), "b": quick}))
    assert evidence.choose("a").label == chosen


def test_slow_settings_are_left_out_every_second_time_while_all_is_well() -> None:
    evidence = Evidence(0.0)
    evidence.begin("a")
    quick, slow = score(1.0, p50_s=0.02), score(1.0, p50_s=0.05)
    evidence.add(rehearsed(1, {"a": quick, "b": quick, "c": slow}))
    assert evidence.worth(["a", "b", "c"]) == ["a", "b"]
    evidence.add(rehearsed(2, {"a": quick, "b": quick}))
    assert evidence.worth(["a", "b", "c"]) == ["a", "b", "c"]
    busy = score(0.8, p50_s=0.05)
    evidence.add(rehearsed(3, {"a": score(0.8, p50_s=0.02), "b": busy, "c": busy}))
    assert evidence.worth(["a", "b", "c"]) == ["a", "b", "c"]


def test_the_first_guess_stays_unless_more_than_chance_speaks_against_it() -> None:
    lucky = [0.7 + 0.2 * (i % 2) for i in range(12)]
    for first, chosen in (("a", "a"), ("b", "b")):
        evidence = Evidence(0.0)
        evidence.begin(first)
        values = {"a": score(0.8), "b": score([x + 0.001 for x in lucky])}
        evidence.add(rehearsed(1, values))
        assert evidence.choose(first).label == chosen
    evidence.add(rehearsed(2, {"a": score(0.8), "b": score(0.7)}))
    assert evidence.choose("b").label == "a"


@pytest.mark.parametrize(("every_s", "chosen"), [(100.0, "b"), (2.0, "a")])
def test_other_loads_count_where_they_come_before_they_are_seen(every_s, chosen) -> None:
    """b gains 3 % in the calm and loses 20 % in a burst; a change is seen after a second."""
    evidence = Evidence(0.0)
    evidence.begin("a")
    for i in range(7):
        burst = i % 2
        values = {"a": score(0.8), "b": score(0.64 if burst else 0.824)}
        evidence.add(rehearsed(i, values, at=every_s * i, rate=300.0 if burst else 100.0))
    assert evidence.choose("a", lag_s=1.0).label == chosen


@pytest.mark.parametrize(
    ("gain", "fragile", "planned", "chosen"),
    [
        (0.010, False, False, "other"),
        (0.010, True, False, "first"),
        (0.010, False, True, "first"),
        (0.025, True, False, "other"),
        (0.030, False, True, "other"),
    ],
)
def test_what_may_collapse_and_what_a_planner_answers_to_must_gain_more(
    gain: float, fragile: bool, planned: bool, chosen: str
) -> None:
    evidence = Evidence(0.0)
    evidence.begin("first", ["other"] if fragile else [])
    evidence.planned = planned
    for number in range(1, 7):
        evidence.add(rehearsed(number, {"first": score(0.8), "other": score(0.8 * (1 + gain))}))
    assert evidence.choose("first").label == chosen


def test_settings_that_collapse() -> None:
    cluster = Cluster.uniform(
        [Model(m, 0.1, (Variant(f"{m}.0", {"default": LINE}),)) for m in "ab"], 2
    )
    shape = Shape.of(cluster, sizes=True)
    found = {s.label for s in candidates(shape, (), preempt=True) if collapses(s)}
    assert found == {"eager", "kairos batch=True", "deferred gathering=prefix"}


def test_wanted_changes_nothing() -> None:
    auto, other = Auto(), Auto()
    for one in (auto, other):
        one.cluster_changed(0.0, one_model(LINE, 0.1, 1))
    feed(auto, 0.0, 2.0, 300)
    for i in range(600):
        now = i / 300
        other.requests_arrived(now, [Request(i, "m", now, now + 0.1)])
        other.wanted()
        other.decide(now)
    a, b = auto.wanted()[0], other.wanted()[0]
    assert a.traffic.arrival.tolist() == b.traffic.arrival.tolist()


def test_it_says_what_it_expects_and_why() -> None:
    auto = Auto()
    auto.cluster_changed(0.0, one_model(LINE, 0.1, 1))
    assert auto.expected() == {}
    (told,) = auto.story()
    assert (told["setting"], told["why"]) == ("deferred", "first guess for this application")
    auto.solved(1.0, [rehearsed(1, {"deferred": score(0.6), "eager": score(0.9)})])
    assert auto.expected()["m"].bad_rate == pytest.approx(0.1)
    (told,) = auto.story()
    assert told["setting"] == "eager"
    assert told["tried"]["deferred"]["bad"] == pytest.approx(0.4)
    assert told["predicted_bad"] == pytest.approx(0.1)
    n = feed(auto, 1.0, 2.0, 100)
    auto.decide(3.0)
    auto.solved(3.0, [rehearsed(2, {"deferred": score(0.6), "eager": score(0.9)})])
    assert n == 100
    assert 0 <= auto.story()[0]["measured_bad"] <= 1


class Counts(Deferred):
    """Takes every request for one item."""

    counts_requests = True


def test_sizes_exclude_what_counts_requests() -> None:
    auto = Auto(candidates=[f"{__name__}:Counts", "deferred"])
    auto.cluster_changed(0.0, one_model(LINE, 0.1, 2))
    assert auto._label.endswith("Counts")
    auto.requests_arrived(0.0, [Request(1, "m", 0.0, 0.1, 3)])
    assert auto._label == "deferred"
    actions = auto.decide(0.0).actions + auto.decide(0.05).actions + auto.decide(0.08).actions
    assert [r.id for a in actions if isinstance(a, Dispatch) for r in a.requests] == [1]
    only = Auto(candidates=[f"{__name__}:Counts"])
    only.cluster_changed(0.0, one_model(LINE, 0.1, 2))
    with pytest.raises(ValueError, match="none of them can serve requests with sizes"):
        only.requests_arrived(0.0, [Request(1, "m", 0.0, 0.1, 3)])


def test_it_preempts_only_where_it_may() -> None:
    assert not Auto().preempts
    assert Auto(preempt=True).preempts
    auto = Auto()
    auto.cluster_changed(0.0, one_model(LINE, 0.1, 1))
    assert not any(auto._make(s).preempts for s in auto._settings.values())  # type: ignore[attr-defined]


def test_a_batch_that_is_being_stopped_is_not_stopped_again() -> None:
    """By the policy that takes over."""
    small, large = LatencyProfile.linear(0.0, 0.079, 1), LatencyProfile.linear(0.0005, 0.02, 128)
    models = [
        Model("slow", 0.09, (Variant("slow", {"default": small}),)),
        Model("m", 0.09, (Variant("quick", {"default": large}),)),
    ]
    auto = Auto(candidates=["flex", {"policy": "flex", "kwargs": {"lambda_": 2.0}}], preempt=True)
    auto.cluster_changed(0.0, Cluster.uniform(models, 1, delay=DispatchDelay()))
    auto.requests_arrived(0.0, [Request(0, "slow", 0.0, 0.09)])
    (sent,) = auto.decide(0.0).actions
    assert isinstance(sent, Dispatch)
    auto.requests_arrived(0.005, [Request(i, "m", 0.005, 0.095) for i in range(1, 100)])
    (stop,) = auto.decide(0.005).actions
    assert isinstance(stop, Preempt)
    auto.solved(0.006, [rehearsed(1, {"flex lambda_=2.0": score(1.0), "flex": score(0.5)})])
    auto.requests_arrived(0.006, [Request(i, "m", 0.006, 0.096) for i in range(100, 200)])
    assert auto._label == "flex lambda_=2.0"
    assert not any(isinstance(a, Preempt) for a in auto.decide(0.006).actions)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"fairness": 2.0}, "fairness must be from 0 to 1, got 2.0"),
        ({"candidates": []}, "candidates must name at least one policy"),
        ({"candidates": ["nope"]}, r"candidates\[0\]: policy 'nope' is unknown; choose one of"),
        ({"candidates": ["auto"]}, r"candidates\[0\]: policy 'auto' cannot take over"),
        ({"candidates": ["deferred", "ramsis"]}, r"candidates\[1\]: policy 'ramsis' cannot take"),
        ({"candidates": ["flex"]}, r"candidates\[0\]: policy 'flex' preempts; set preempt"),
        (
            {"candidates": [{"policy": "kairos", "kwargs": {"late": "serve"}}]},
            r"candidates\[0\]: policy 'kairos' serves late requests",
        ),
        (
            {"candidates": [{"policy": "deferred", "kwargs": {"objektive": 1}}]},
            r"candidates\[0\]: policy 'deferred' has no argument objektive; it takes objective",
        ),
        ({"candidates": [{"name": "deferred"}]}, r"candidates\[0\] has no field 'name'; it has"),
        ({"preempt": 1}, "preempt must be true or false, got 1"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("auto", kwargs)


def test_it_is_told_of_the_application() -> None:
    made: Any = policy_for("auto", {}, CHAIN, {"a": 2}, planned=True, communication_s=0.001)
    assert made._planned
    assert made._composing["communication_s"] == 0.001
    assert [tree.name for tree in made._trees] == ["a"]
    given = Auto()
    assert policy_for(given, {}, CHAIN) is given
    assert [tree.name for tree in given._trees] == ["a"]


def test_a_pipeline_counts_beside_models_that_stand_alone() -> None:
    alone = Tree.of_model("m", {"": 0.1})
    beside, without = Auto(), Auto()
    beside.told_of([alone, *CHAIN])
    without.told_of([alone])
    assert beside.follows_assignments
    assert not without.follows_assignments
    assert beside._made is not None  # it measures how many requests a request makes
    assert without._made is None


@pytest.mark.parametrize(
    ("predicted", "bad", "surprises"),
    # 200 requests. Chance explains 3 standard deviations, and a point more is no surprise.
    [(0.0, 6, False), (0.0, 8, True), (0.5, 122, False), (0.5, 126, True), (0.9, 200, True)],
)
def test_more_bad_requests_than_chance_explains(predicted, bad, surprises) -> None:
    story = Story()
    assert not story.surprise()
    scores = {"one": replace(score(1.0), good=(round(1200 * (1 - predicted)),))}
    story.add(0.0, rehearsed(1, scores), "one", Choice("one", "first"))
    story.good, story.bad = 200 - bad, bad
    assert story.surprise() is surprises


def test_a_pipeline_is_rehearsed_with_as_many_requests_as_were_made() -> None:
    """Every request for "a" makes two for "b"."""
    auto = Auto(trees=[tree.to_json() for tree in CHAIN])
    auto.cluster_changed(0.0, make_cluster([("fast", 0)] * 4))
    number, later = 0, []
    for i in range(600):
        now, new = i / 100, [*later]
        number, later = number + 1, []
        new.append(Request(number, "a", now, now + 0.06))
        auto.requests_arrived(now, new)
        for d in auto.decide(now).actions:
            assert isinstance(d, Dispatch)
            auto.batch_finished(now, d.worker, BatchOutcome(d.batch_id, d.requests, now, now))
            for r in d.requests if d.requests[0].model == "a" else ():
                for _ in range(2):
                    number += 1
                    by = Upstream(d.worker, d.variant, 0.0)
                    later.append(Request(number, "b", now, r.deadline, upstream=by))
    (asked,) = auto.wanted()
    (key,) = asked.factors
    assert key == ("a0", "b")
    assert asked.factors[key] == pytest.approx(2.0, rel=0.02)


def noted(cluster: Cluster, *bunches: tuple[float, list[Request]]) -> list[str]:
    """The notes on all batches that `price` sends, in the order of time."""
    host = Host(lambda: Auto(candidates=["price"]), cluster, strict=False)
    host.policy.explain = True
    for at, requests in bunches:
        host.advance(at)
        host.arrive(requests)
    host.advance(host.now + 1.0, until_idle=True)
    return [
        action.note
        for decision in host.decisions
        for action in decision.actions
        if isinstance(action, Dispatch)
    ]


def test_a_note_says_why_no_more_accurate_variant_was_used() -> None:
    line = LatencyProfile.linear
    large = Variant("large", {"default": line(0.020, 0.020, 4)}, 90.0)
    small = Variant("small", {"default": line(0.004, 0.006, 16)}, 80.0)
    cluster = Cluster.uniform([Model("m", 0.1, (large, small))], 1)

    def bunch(first: int, count: int, now: float, budget_s: float) -> tuple[float, list[Request]]:
        return now, [Request(first + i, "m", now, now + budget_s) for i in range(count)]

    assert noted(cluster, bunch(0, 1, 0.0, 0.1)) == [""]
    assert noted(cluster, bunch(0, 1, 0.0, 0.03)) == ["'large' would have been 10 ms late"]
    assert noted(cluster, bunch(0, 10, 0.0, 0.1)) == ["'large' does not take 10"]


def test_a_note_says_that_a_batch_waited_for_more_requests() -> None:
    """The first batch is due at frontrun: 0.1 − ℓ(2) = 0.086."""
    cluster = one_model(LINE, 0.1, 1)
    candidates = [{"policy": "deferred", "kwargs": {"objective": "consolidate"}}]
    host = Host(lambda: Auto(candidates=candidates), cluster)
    host.policy.explain = True
    host.arrive([Request(1, "m", 0.0, 0.1)])
    host.advance(0.09)
    sent = [a for d in host.decisions for a in d.actions]
    assert [a.note for a in sent] == ["waited 86 ms beside this idle worker for a larger batch"]
