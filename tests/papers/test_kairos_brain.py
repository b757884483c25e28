"""Kairos' brain: from rates, sizes, latencies and a budget to the number of each instance type."""

import re

import numpy as np
import pytest

from ray_slo.core import LatencyProfile
from ray_slo.planning.brains.brain import Counts, NotYet, Seen, Wanted, WorkerSays
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.kairos import Kairos
from ray_slo.serve.planner.plugin import make_brain

# Only "big" answers 100 items within the SLO of 1 s; "small" costs a quarter, and is half as fast
# for one item.
PROFILES = {
    "big": LatencyProfile.linear(0.002, 0.018, 100),
    "small": LatencyProfile.linear(0.02, 0.02, 100),
}
PRICES = {"big": 1.0, "small": 0.25}


def spec_of(planner="kairos", prices=PRICES, most=None, min_gain=0.1, **kwargs):
    limit = {"max_replicas": most} if most else {}
    workers = {
        kind: {"instance_type": {"price_per_hour": p}, **limit} for kind, p in prices.items()
    }
    return parse_spec(
        {
            "models": {
                "rank": {"callable": "apps:Tasks", "latency_slo_ms": 1005, "max_batch_size": 100}
            },
            "workers": workers,
            "planner": {
                "name": planner,
                "min_gain": min_gain,
                "rates": {"rank": 10},
                "kwargs": {"budget_per_hour": 3.0, **kwargs},
            },
        }
    )


def seen_of(**counts):
    workers = [f"{kind}{i}" for kind, n in counts.items() for i in range(n)]
    says = {w: WorkerSays(w, w.rstrip("0123456789")) for w in workers}
    return Seen(says, {("rank", kind): PROFILES[kind] for kind in counts})


BOTH = seen_of(big=1, small=1)
SMALL_ONES = dict.fromkeys(range(1, 11), 0.095) | {100: 0.05}


def counted(brain, sizes, rate, start=0.0, seconds=10):
    values = list(sizes)
    share = np.array(list(sizes.values())) / sum(sizes.values())
    rng = np.random.default_rng(int(start))
    for i in range(2 * seconds):
        drawn = rng.choice(values, size=rate // 2, p=share).tolist()
        counts = {int(s): drawn.count(s) for s in set(drawn)}
        brain.counted(
            start + 0.5 * (i + 1), 0.5, Counts({"rank": len(drawn)}, sizes={"rank": counts})
        )


def planned(brain, now=0.0, seen=BOTH):
    job = brain.problem(now, seen)
    return brain.adopt(job, brain.solve(job))


def targets(brain):
    return {kind: brain.target(kind) for kind in PRICES}


def cost(brain):
    return sum(PRICES[kind] * n for kind, n in targets(brain).items())


def test_nothing_is_decided_before_latencies_and_sizes_are_known():
    brain = make_brain(spec_of())
    with pytest.raises(NotYet, match="no requests"):
        brain.problem(0.0, BOTH)
    with pytest.raises(NotYet, match="rank not measured yet"):
        says = BOTH.workers
        make_brain(spec_of(sizes={1: 1})).problem(0.0, Seen(says, seen_of(big=1).profiles))
    assert brain.target("big") is None
    assert brain.wanted(0.0, BOTH, False)["big0"] == Wanted((), ("rank",))


def test_until_more_workers_are_there_the_plan_tells_what_the_present_ones_can_do():
    brain = make_brain(spec_of())
    counted(brain, SMALL_ONES, rate=40)
    assert planned(brain, 10.0).shortfall is None
    assert cost(brain) > 1.25
    why = brain.adopt(job := brain.problem(10.0, BOTH), brain.solve(job)).why
    told = float(
        re.search(r"With the 2 that are there: 1 big \+ 1 small, about (.*) req/s", why)[1]
    )
    assert brain.outcome()["served"]["rank"] == pytest.approx(
        told / job.whole.rate("rank"), rel=0.01
    )
    assert 0 < brain.outcome()["bad_rate"] < 1


def test_the_rate_decides_how_much_of_the_budget_is_spent():
    brain = make_brain(spec_of())
    counted(brain, SMALL_ONES, rate=10)
    assert planned(brain, 10.0).shortfall is None
    cheap = cost(brain)
    assert targets(brain)["big"] == 1  # it alone serves the largest
    counted(brain, SMALL_ONES, rate=40, start=10.0)
    assert brain.due(20.0, BOTH)
    assert planned(brain, 20.0).shortfall is None
    assert cheap < cost(brain) <= 3.0
    counted(brain, SMALL_ONES, rate=400, start=20.0)
    verdict = planned(brain, 30.0)
    assert "is more than a budget of 3 per hour sustains" in verdict.shortfall
    assert cost(brain) > 2.5


def test_without_following_the_load_all_of_the_budget_is_spent():
    brain = make_brain(spec_of(follow_load=False, sizes=SMALL_ONES))
    assert planned(brain).shortfall is None
    assert cost(brain) == pytest.approx(3.0)
    counted(brain, SMALL_ONES, rate=400)
    planned(brain, 10.0)
    assert cost(brain) == pytest.approx(3.0)  # whatever the rate


def test_a_changed_budget_is_news_and_is_kept():
    brain = make_brain(spec_of(follow_load=False, sizes=SMALL_ONES))
    planned(brain)
    before = targets(brain)
    assert not brain.due(0.0, BOTH)
    assert not brain.tune({})
    assert brain.tune({"budget_per_hour": 1.5})
    assert not brain.tune({"budget_per_hour": 1.5})
    assert brain.due(0.0, BOTH)
    planned(brain)
    assert targets(brain) != before
    assert cost(brain) <= 1.5
    with pytest.raises(ValueError, match="budget_per_hour"):
        brain.tune({"budget_per_hour": -1})
    assert brain.inputs(0.0, BOTH)["budget_per_hour"] == 1.5


def test_a_limit_of_one_kind_is_news():
    brain = make_brain(spec_of(follow_load=False, sizes=SMALL_ONES))
    planned(brain)
    assert not brain.due(0.0, BOTH)
    brain.limit("big", 1)
    assert brain.due(0.0, BOTH) == "limits changed"
    planned(brain)
    assert brain.target("big") <= 1
    assert not brain.due(0.0, BOTH)


def test_a_change_of_the_sizes_is_detected_and_changes_what_is_rented():
    brain = make_brain(spec_of(follow_load=False))
    counted(brain, SMALL_ONES, rate=40)
    planned(brain, 10.0)
    small = targets(brain)
    assert small["small"] > 0
    counted(brain, SMALL_ONES, rate=40, start=10.0)
    assert not brain.due(20.0, BOTH)
    counted(brain, {90: 0.5, 100: 0.5}, rate=40, start=20.0)
    assert brain.due(30.0, BOTH)
    planned(brain, 30.0)
    assert targets(brain) == {"big": 3, "small": 0}  # which serves none of them in time
    assert brain.inputs(30.0, BOTH)["sizes"]["rank"]["changes"] == 1
    assert not brain.due(30.0, BOTH)


def test_what_runs_is_kept_while_nothing_is_much_better():
    brain = make_brain(spec_of(min_gain=0.3))
    counted(brain, SMALL_ONES, rate=20)
    planned(brain, 10.0)
    before = targets(brain)
    counted(brain, SMALL_ONES, rate=18, start=10.0)
    planned(brain, 20.0)
    assert targets(brain) == before


def test_limits_hold():
    brain = make_brain(spec_of(most=2, follow_load=False, sizes=SMALL_ONES))
    planned(brain)
    assert targets(brain) == {"big": 2, "small": 2}


def test_a_budget_that_serves_nobody_in_time_is_said():
    brain = make_brain(spec_of(budget_per_hour=0.6, sizes=SMALL_ONES))
    verdict = planned(brain)
    assert "the budget is 0.6" in verdict.shortfall
    assert targets(brain) == {"big": 0, "small": 2}


def test_a_type_that_nobody_has_measured_is_left_alone():
    brain = make_brain(spec_of(sizes=SMALL_ONES))
    planned(brain, seen=seen_of(big=1))
    assert brain.target("small") is None
    assert brain.target("big") >= 1
    assert brain.due(0.0, BOTH)  # now there is one


def test_kairos_plus_simulates_what_it_chooses_from():
    kwargs = {"sizes": {1: 0.9, 20: 0.1}, "requests": 150, "max_evaluations": 3}
    brain = make_brain(spec_of("kairos_plus", budget_per_hour=1.5, follow_load=False, **kwargs))
    verdict = planned(brain)
    assert "in the simulator, the most of" in verdict.why
    tried, attained = re.search(r"of (\d+) that were tried.*, (\d+)% of that", verdict.why).groups()
    assert 1 <= int(tried) <= 3
    assert 30 < int(attained) <= 100
    assert cost(brain) <= 1.5


def test_mistakes_in_arguments_name_the_field():
    with pytest.raises(ValueError, match=r"planner\.kwargs\.budget_per_hour: required"):
        Kairos.arguments({})
    with pytest.raises(ValueError, match=r"kwargs.budget: unknown key.*budget_per_hour"):
        Kairos.arguments({"budget": 3, "budget_per_hour": 3})
    with pytest.raises(ValueError, match=r"planner\.kwargs\.xi: .*at most 1, got 2"):
        Kairos.arguments({"xi": 2, "budget_per_hour": 3})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"workers": {"big": {}}},
            "workers.big.price_per_hour, or instance_type: required by",
        ),
        ({"workers": {"b": {"instance_type": "p9.huge"}}}, "no type 'p9.huge' in the catalogue"),
        ({"planner": {"name": "kairos"}}, "planner.kwargs.budget_per_hour: required"),
        ({"planner": {"name": "kairos", "memory_mb": {"a": 1}}}, "memory_mb: not for the planner"),
        ({"models": {}}, "models: required"),
        (
            {"planner": {"name": "kairos", "kwargs": {"budget_per_hour": 1, "sizes": {99: 1}}}},
            "sizes: 99 is more than max_batch_size of the model 'rank', 64",
        ),
    ],
)
def test_mistakes_in_the_application_name_the_field(change, says):
    args = {
        "models": {"rank": {"callable": "apps:Tasks", "latency_slo_ms": 100}},
        "workers": {"big": {"instance_type": "r5n.large"}},
        "planner": {"name": "kairos", "kwargs": {"budget_per_hour": 1}},
    }
    assert parse_spec(args).policy.name == "kairos"
    with pytest.raises(ValueError, match=says):
        parse_spec({**args, **change})


def test_replicas_are_bounded_by_the_budget_and_resources_come_with_the_type():
    spec = spec_of()
    assert spec.workers["big"].replica_bounds == (0, 3)
    assert spec.workers["small"].replica_bounds == (0, 12)
    assert spec_of(most=2).workers["small"].replica_bounds == (0, 2)
    typed = {"w": {"instance_type": "r5n.large", "min_replicas": 1}}
    args = {**spec.model_dump(include={"models"}), "workers": typed}
    args["planner"] = {"name": "kairos", "kwargs": {"budget_per_hour": 0.3}}
    spec = parse_spec(args)
    assert spec.workers["w"].ray_actor_options == {"num_cpus": 2}
    assert spec.workers["w"].replica_bounds == (1, 2)


# -- several models, and variants ----------------------------------------------------------


def two_models(**kwargs):
    return parse_spec(
        {
            "models": {
                "rank": {"callable": "apps:Tasks", "latency_slo_ms": 1005, "max_batch_size": 100},
                "read": {
                    "callable": "apps:Tasks",
                    "latency_slo_ms": 1005,
                    "max_batch_size": 100,
                    "variants": {
                        "large": {"accuracy": 90.0, "load": "apps:load"},
                        "small": {"accuracy": 80.0, "load": "apps:load"},
                    },
                },
            },
            "workers": {
                kind: {"instance_type": {"price_per_hour": p}} for kind, p in PRICES.items()
            },
            "planner": {
                "name": "kairos",
                "rates": {"rank": 10, "read": 10},
                "kwargs": {"budget_per_hour": 3.0, **kwargs},
            },
        }
    )


def seen_with_variants(spec):
    workers = BOTH.workers
    known = {
        (variant, kind): PROFILES[kind].scaled(1.0 if variant == "small" else 2.0)
        for variant in spec.variants()
        for kind in PRICES
    }
    return Seen(workers, known)


def test_a_second_model_and_variants_share_the_budget():
    spec = two_models()
    seen, brain = seen_with_variants(spec), make_brain(spec)
    counts = Counts({"rank": 30, "read": 30}, sizes={"rank": {5: 30}, "read": {1: 15, 20: 15}})
    brain.counted(10.0, 10.0, counts)
    assert planned(brain, 10.0, seen).shortfall is None
    few = cost(brain)
    assert 0 < few <= 3.0
    brain = make_brain(two_models(follow_load=False))
    brain.counted(10.0, 10.0, counts)
    assert planned(brain, 10.0, seen).shortfall is None
    assert few < cost(brain) <= 3.0


def test_two_models_beyond_the_budget_are_told():
    spec = two_models()
    seen, brain = seen_with_variants(spec), make_brain(spec)
    sizes = {"rank": {5: 9000}, "read": {20: 9000}}
    brain.counted(10.0, 10.0, Counts({"rank": 9000, "read": 9000}, sizes=sizes))
    assert planned(brain, 10.0, seen).shortfall
    assert 2.0 < cost(brain) <= 3.0
