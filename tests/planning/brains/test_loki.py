"""The brain of `auto` with the settings of the planner `loki`."""

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.planning.brains.brain import Seen, WorkerSays
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.plugin import make_brain

# ℓ in seconds: "large" serves 20/s, "small" 100/s, the detector 50/s.
SECONDS = {"det": 0.02, "large": 0.05, "small": 0.01}
ALL = tuple(SECONDS)


def variant(name, accuracy, **fields):
    return {"load": "apps:Network", "args": [name, SECONDS[name]], "accuracy": accuracy, **fields}


def spec_of(max_replicas=4, rate=10.0, slo_ms=1000, **kwargs):
    detect = {"det": variant("det", 90, factors={"name": 1.0})}
    name = {"large": variant("large", 90), "small": variant("small", 70)}
    kwargs = {"headroom_quantile": None, "batch_sizes": [1], **kwargs}
    return parse_spec(
        {
            "pipeline": {
                "latency_slo_ms": slo_ms,
                "tasks": {
                    "detect": {"callable": "apps:Named", "variants": detect},
                    "name": {"callable": "apps:Named", "parent": "detect", "variants": name},
                },
            },
            "workers": {"default": {"num_replicas": 1, "max_replicas": max_replicas}},
            "planner": {"name": "loki", "rates": {"detect": rate}, "kwargs": kwargs},
        }
    )


def says(name, loaded=(), assigned=None, ready=True):
    what = () if assigned is None else (Assigned(assigned, 1),)
    return WorkerSays(name, "default", frozenset(loaded), what, ready=ready)


def seen_of(*workers):
    profiles = {(v, "default"): LatencyProfile([s]) for v, s in SECONDS.items()}
    return Seen({w.worker: w for w in workers}, profiles)


def planned(brain, seen, now=0.0):
    problem = brain.problem(now, seen)
    return brain.adopt(problem, brain.solve(problem))


def assigned(brain, seen):
    wanted = brain.wanted(0.0, seen, False)
    return {w: x.assigned[0].variant if x.assigned else None for w, x in wanted.items()}


def test_first_more_workers_and_then_less_accuracy():
    workers = [says(f"w{i}", ALL) for i in range(4)]
    found = {}
    for rate in (10.0, 40.0, 100.0):
        brain = make_brain(spec_of(rate=rate))
        verdict = planned(brain, seen_of(*workers[:1]))
        assert verdict.shortfall is None
        planned(brain, seen_of(*workers[: brain.target("default")]))
        work = assigned(brain, seen_of(*workers[: brain.target("default")]))
        found[rate] = verdict.why.partition(":")[0], sorted(work.values())
    assert found == {
        10.0: ("Hardware scaling", ["det", "large"]),
        40.0: ("Hardware scaling", ["det", "large", "large"]),
        100.0: ("Accuracy scaling", ["det", "det", "large", "small"]),
    }


def test_what_cannot_be_served_is_said_and_all_workers_are_used():
    brain = make_brain(spec_of(rate=1000.0))
    seen = seen_of(*[says(f"w{i}", ALL) for i in range(4)])
    verdict = planned(brain, seen)
    assert "out of reach with 4 default: 10 % of it can be served" in verdict.shortfall
    assert "90 % is shed" in verdict.why
    assert brain.target("default") == 4
    assert None not in assigned(brain, seen).values()


def test_while_replicas_start_those_that_are_there_trade_accuracy():
    brain = make_brain(spec_of(rate=40.0))
    seen = seen_of(says("a", ALL), says("b", ALL))
    verdict = planned(brain, seen)
    assert brain.target("default") == 3
    assert "With the 2 that are there: Accuracy scaling" in verdict.why
    assert sorted(assigned(brain, seen).values()) == ["det", "small"]
    third = seen_of(*seen.workers.values(), says("c"))
    assert brain.due(0.0, third)  # its arrival is worth a plan
    planned(brain, third)
    assert sorted(assigned(brain, third).values()) == ["det", "large", "large"]
    fourth = seen_of(*third.workers.values(), says("d"))
    assert not brain.due(0.0, fourth)  # nobody needs that one


def test_a_worker_that_starts_loads_what_it_will_do_and_the_others_go_on_meanwhile():
    brain = make_brain(spec_of(rate=40.0))
    two = says("a", ["det"], "det"), says("b", ["small"], "small")
    planned(brain, seen_of(*two))
    assert assigned(brain, seen_of(*two)) == {"a": "det", "b": "small"}
    starting = seen_of(*two, says("c", ready=False))
    assert not brain.due(0.0, starting)
    assert assigned(brain, starting) == {"a": "det", "b": "small", "c": "large"}
    up = seen_of(*two, says("c", ["large"], "large"))
    assert brain.due(0.0, up)
    planned(brain, up)
    assert assigned(brain, up) == {"a": "det", "b": "large", "c": "large"}


@pytest.mark.parametrize(("rate", "loads", "target"), [(10, "large", 2), (33, "small", 3)])
def test_with_fewer_workers_than_tasks_each_serves_all_tasks(rate, loads, target):
    brain = make_brain(spec_of(rate=float(rate)))
    seen = seen_of(says("w", ["small"]))
    assert planned(brain, seen).shortfall is None  # with the workers that there may be
    wanted = brain.wanted(0.0, seen, False)["w"]
    assert {part.variant for part in wanted.assigned} >= {"det", loads}
    assert brain.target("default") == target


def test_where_there_will_never_be_a_worker_per_task_the_plan_says_so():
    brain = make_brain(spec_of(max_replicas=1))
    shortfall = planned(brain, seen_of(says("w"))).shortfall
    assert shortfall.endswith("if each worker has one variant, so workers share")
    assert brain.target("default") == 1


def test_an_slo_that_no_variant_can_meet_is_said_and_workers_are_ready_for_other_slos():
    brain = make_brain(spec_of(slo_ms=30))
    seen = seen_of(says("a"), says("b"))
    assert "0.025 s, is too short" in planned(brain, seen).shortfall
    served = brain.wanted(0.0, seen, False).values()
    assert {part.variant for its in served for part in its.assigned} == {"det", "small"}


def test_a_budget_of_accuracy_for_swaps_and_no_headroom_beyond_what_is_asked():
    brain = make_brain(spec_of(headroom_quantile=0.9))
    problem = brain.problem(0.0, seen_of(says("w"))).whole
    assert (problem.headroom_quantile, problem.headroom, problem.swap_cost) == (0.9, False, 0.1)
    assert problem.rate("pipeline") == 14  # of Poisson arrivals at 10/s
    assert problem.slo_s("pipeline") == pytest.approx(0.995)  # the way back is kept free
