"""InferLine and Proteus as planners: a detector that finds 2, a recogniser; two variants each."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.loki.terms import Problem, Task, Variant, as_auto
from benchmarks.peers import proteus
from benchmarks.peers.inferline import InferLineBrain
from ray_slo.core import LatencyProfile
from ray_slo.planning import auto
from ray_slo.planning.auto import Plan
from ray_slo.planning.brains.brain import Counts, Seen, WorkerSays
from ray_slo.planning.result import Infeasible, best
from ray_slo.simulation.application import auto_brain


def flat(ms: float) -> LatencyProfile:
    return LatencyProfile([ms / 1e3] * 2)


DETECT = Task("detect", (Variant("d", 90.0, flat(20), {"name": 2.0}), Variant("e", 60.0, flat(10))))
NAME = Task("name", (Variant("small", 60.0, flat(10)), Variant("large", 90.0, flat(20))), "detect")
PROBLEM = Problem((DETECT, NAME), 90.0, 6, 0.2, batch_sizes=(1, 2))


def workers(plan: Plan) -> dict[str, int]:
    return dict(Counter(variant for slot in plan.slots for variant in slot.variants))


def loads(plan: Plan) -> dict[str, float]:
    found = Counter[str]()
    for part in (part for slot in plan.slots for part in slot.parts):
        found[part.variant] += part.load
    return dict(found)


def planned(problem: Problem, **rates: float) -> Plan | Infeasible[Plan]:
    return proteus.plan(as_auto(problem), rates)


def seen(problem: Problem) -> Seen:
    profiles = {(v.name, "worker"): v.profile for t in problem.tasks for v in t.variants}
    there = [f"w{i}" for i in range(problem.workers)]
    return Seen({w: WorkerSays(w, "worker") for w in there}, profiles)


def inferline(problem: Problem) -> Plan:
    brain = auto_brain(as_auto(problem), InferLineBrain)
    return best(brain.solve(brain.problem(0.0, seen(problem))).whole)


# -- InferLine -------------------------------------------------------------------------------------


def test_inferline_scales_hardware_as_loki_does() -> None:
    assert workers(inferline(PROBLEM)) == {"d": 1, "large": 2}
    assert workers(best(auto.plan(as_auto(PROBLEM)))) == {"d": 1, "large": 2}


def test_inferline_never_scales_accuracy_but_serves_a_share_that_all_tasks_can() -> None:
    # 2 of 6 workers detect 200 frames per second, 4 recognise 400 names.
    asked = replace(PROBLEM, demand=250.0)
    made = inferline(asked)
    assert workers(made) == {"d": 2, "large": 4}
    assert made.served["detect"] == pytest.approx(0.8, abs=1e-4)
    assert isinstance(auto.plan(as_auto(asked)), Plan)


# -- Proteus ---------------------------------------------------------------------------------------


def test_proteus_plans_every_task_for_what_arrives_there() -> None:
    made = planned(PROBLEM, detect=90.0, name=180.0)
    assert isinstance(made, Plan)
    # d and large have 100 per second each: 1 and 2 suffice; the others go where there is the least
    # to spare: 90 of 100, 180 of 200; 90 of 200 after that, and so on.
    assert workers(made) == {"d": 2, "large": 4}
    assert loads(made) == pytest.approx({"d": 90, "large": 180})
    assert made.accuracy == pytest.approx(81)


def test_proteus_does_not_know_what_a_detector_will_find() -> None:
    # Nothing was found yet: all that is left is for the detectors.
    made = planned(replace(PROBLEM, demand=400.0), detect=400.0, name=0.0)
    assert isinstance(made, Plan)
    assert workers(made) == {"d": 6}


def test_proteus_gives_up_accuracy_where_requests_are_many() -> None:
    # 1 worker of 200 or 100 for 150 frames, and 5 for 600 names: 4 · 100 + 200 make all of them,
    # so one small for the names and "e" for the frames. Or two "d", and 2 · 100 + 2 · 200.
    made = planned(PROBLEM, detect=150.0, name=600.0)
    assert isinstance(made, Plan)
    assert workers(made) == {"e": 1, "large": 4, "small": 1}
    assert loads(made) == pytest.approx({"e": 150, "large": 400, "small": 200})
    assert made.accuracy == pytest.approx(100 * 0.6 * (4 * 0.9 + 2 * 0.6) / 6)


def test_proteus_serves_a_common_share_in_overload() -> None:
    made = planned(PROBLEM, detect=400.0, name=2000.0)
    assert isinstance(made, Infeasible)
    # One detector of 200 and five of 200: half of either.
    assert workers(made.best_effort) == {"e": 1, "small": 5}
    assert made.best_effort.served["detect"] == pytest.approx(0.5, abs=1e-5)


def test_proteus_divides_the_slo_into_equal_parts() -> None:
    # 80 ms: 40 for each task, of which waiting takes half: 20 for a batch. With 79, "d" and "large"
    # are too slow, although a "d" before a "small" would do.
    for slo_s, used in ((0.08, {"d", "large"}), (0.079, {"e", "small"})):
        made = planned(replace(PROBLEM, slo_s=slo_s), detect=90.0, name=90.0)
        assert isinstance(made, Plan)
        assert set(workers(made)) == used
    none = planned(replace(PROBLEM, slo_s=0.03), detect=90.0, name=90.0)
    assert best(none).served == {"detect": 0.0}


def test_proteus_has_the_headroom_of_loki_at_every_task() -> None:
    asked = replace(PROBLEM, headroom_quantile=0.95)
    made = planned(asked, detect=90.0, name=90.0)
    assert isinstance(made, Plan)
    assert asked.planned_demand > 90
    assert loads(made) == pytest.approx({"d": asked.planned_demand, "large": asked.planned_demand})


def test_proteus_counts_what_arrives_at_each_task() -> None:
    brain = auto_brain(as_auto(PROBLEM), proteus.ProteusBrain)
    first = best(brain.solve(brain.problem(0.0, seen(PROBLEM))).whole)
    assert loads(first) == pytest.approx({"d": 90, "large": 180})  # as expected
    for second in range(30):
        brain.counted(second + 1.0, 1.0, Counts({"detect": 90}, {"d": 90}, {"d": {"name": 90}}))
    later = best(brain.solve(brain.problem(30.0, seen(PROBLEM))).whole)
    assert loads(later) == pytest.approx({"d": 90, "large": 90}, rel=0.05)
