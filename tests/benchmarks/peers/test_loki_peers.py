"""InferLine and Proteus as planners: a detector that finds 2, a recogniser; two variants each."""

from dataclasses import replace

import pytest

from benchmarks.peers.inferline import inferline
from benchmarks.peers.proteus import Proteus
from ray_slo.core import LatencyProfile
from ray_slo.planning import loki
from ray_slo.planning.loki import Plan, Problem, Task, Variant
from ray_slo.planning.result import Infeasible


def flat(ms: float) -> LatencyProfile:
    return LatencyProfile([ms / 1e3] * 2)


DETECT = Task("detect", (Variant("d", 90.0, flat(20), {"name": 2.0}), Variant("e", 60.0, flat(10))))
NAME = Task("name", (Variant("small", 60.0, flat(10)), Variant("large", 90.0, flat(20))), "detect")
PROBLEM = Problem((DETECT, NAME), 90.0, 6, 0.2, batch_sizes=(1, 2))


def workers(plan: Plan) -> dict[str, int]:
    return {v: n for (_, v), n in plan.loaded.items()}


def proteus(problem: Problem, **rates: float) -> Plan | Infeasible[Plan]:
    planner = Proteus()
    planner.observe(0.0, rates)
    return planner(problem)


# -- InferLine -------------------------------------------------------------------------------------


def test_inferline_scales_hardware_as_loki_does() -> None:
    assert inferline(PROBLEM) == loki.plan(PROBLEM)
    made = inferline(PROBLEM)
    assert isinstance(made, Plan)
    assert workers(made) == {"d": 1, "large": 2}


def test_inferline_never_scales_accuracy_but_serves_a_share_that_all_tasks_can() -> None:
    # 2 of 6 workers detect 200 frames per second, 4 recognise 400 names.
    asked = replace(PROBLEM, demand=250.0)
    made = inferline(asked)
    assert isinstance(made, Infeasible)
    assert workers(made.best_effort) == {"d": 2, "large": 4}
    assert made.best_effort.shed_share == pytest.approx(0.2, abs=1e-4)
    assert isinstance(loki.plan(asked), Plan)


def test_inferline_is_told_of_workers_with_other_variants() -> None:
    current = {("name", "small"): 3, ("detect", "d"): 1}
    made = inferline(replace(PROBLEM, current=current))
    assert isinstance(made, Plan)
    assert workers(made) == {"d": 1, "large": 2}


# -- Proteus ---------------------------------------------------------------------------------------


def test_proteus_plans_every_task_for_what_arrives_there() -> None:
    made = proteus(PROBLEM, detect=90.0, name=180.0)
    assert isinstance(made, Plan)
    # d and large have 100 per second each: 1 and 2 suffice; the others go where there is the least
    # to spare: 90 of 100, 180 of 200; 90 of 200 after that, and so on.
    assert workers(made) == {"d": 2, "large": 4}
    assert {a.variant: a.load for a in made.assignments} == pytest.approx({"d": 90, "large": 180})
    assert made.accuracy == pytest.approx(81)


def test_proteus_does_not_know_what_a_detector_will_find() -> None:
    # Nothing was found yet: all that is left is for the detectors.
    made = proteus(replace(PROBLEM, demand=400.0), detect=400.0, name=0.0)
    assert isinstance(made, Plan)
    assert workers(made) == {"d": 6}


def test_proteus_gives_up_accuracy_where_requests_are_many() -> None:
    # 1 worker of 200 or 100 for 150 frames, and 5 for 600 names: 4 · 100 + 200 make all of them,
    # so one small for the names and "e" for the frames. Or two "d", and 2 · 100 + 2 · 200.
    made = proteus(PROBLEM, detect=150.0, name=600.0)
    assert isinstance(made, Plan)
    assert workers(made) == {"e": 1, "large": 4, "small": 1}
    loads = {a.variant: a.load for a in made.assignments}
    assert loads == pytest.approx({"e": 150, "large": 400, "small": 200})
    assert made.accuracy == pytest.approx(100 * 0.6 * (4 * 0.9 + 2 * 0.6) / 6)


def test_proteus_serves_a_common_share_in_overload() -> None:
    made = proteus(PROBLEM, detect=400.0, name=2000.0)
    assert isinstance(made, Infeasible)
    # One detector of 200 and five of 200: half of either.
    assert workers(made.best_effort) == {"e": 1, "small": 5}
    assert made.best_effort.shed_share == pytest.approx(0.5, abs=1e-5)


def test_proteus_divides_the_slo_into_equal_parts() -> None:
    # 80 ms: 40 for each task, of which waiting takes half: 20 for a batch. With 79, "d" and "large"
    # are too slow, although a "d" before a "small" would do.
    for slo_s, used in ((0.08, {"d", "large"}), (0.079, {"e", "small"})):
        made = proteus(replace(PROBLEM, slo_s=slo_s), detect=90.0, name=90.0)
        assert isinstance(made, Plan)
        assert set(workers(made)) == used
    assert proteus(replace(PROBLEM, slo_s=0.03), detect=90.0, name=90.0).best_effort.shed_share == 1


def test_proteus_has_the_headroom_of_loki_at_every_task() -> None:
    asked = replace(PROBLEM, headroom_quantile=0.95)
    made = proteus(asked, detect=90.0, name=90.0)
    assert isinstance(made, Plan)
    assert made.planned_demand == asked.planned_demand > 90
    assert {a.variant: a.load for a in made.assignments} == pytest.approx(
        {"d": asked.planned_demand, "large": asked.planned_demand}
    )


def test_proteus_counts_swaps() -> None:
    current = {("detect", "d"): 2, ("name", "small"): 4}
    made = proteus(replace(PROBLEM, current=current), detect=90.0, name=180.0)
    assert isinstance(made, Plan)
    assert made.swaps == 4
