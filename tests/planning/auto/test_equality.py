"""`auto` finds what the planners of the papers find on their own problems."""

import numpy as np
import pytest

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto, loki
from ray_slo.planning.result import Infeasible


def random_loki(seed):
    """A chain or a tree of two or three tasks, with a demand between little and too much."""
    rng = np.random.default_rng(seed)
    shapes = [{"a": None}, {"a": None, "b": "a"}, {"a": None, "b": "a", "c": "a"}]
    shapes.append({"a": None, "b": "a", "c": "b"})
    tasks = []
    shape = shapes[rng.integers(len(shapes))]
    for task, parent in shape.items():
        children = [t for t, p in shape.items() if p == task]
        variants = []
        for i in range(rng.integers(1, 4)):
            profile = LatencyProfile.linear(rng.uniform(1, 6) / 1e3, rng.uniform(0, 8) / 1e3, 16)
            factors = {child: float(rng.uniform(0.5, 3)) for child in children}
            accuracy = float(np.round(rng.uniform(60, 99), 2))
            variants.append(loki.Variant(f"{task}{i}", accuracy, profile, factors))
        tasks.append(loki.Task(task, tuple(variants), parent))
    return loki.Problem(
        tuple(tasks),
        demand=float(rng.uniform(20, 900)),
        workers=int(rng.integers(3, 9)),
        slo_s=float(rng.uniform(0.05, 0.25)),
        batch_sizes=(1, 2, 4, 8, 16),
        communication_s=float(rng.choice([0.0, 0.002])),
        accuracy_floor=float(rng.choice([0.0, 65.0])),
        fits_alone=False,
        relative_gap=1e-6,
        backend="highs",
    )


def as_auto(problem, **kwargs):
    """The same problem, on one kind of worker with one variant each."""
    models, tasks = [], []
    for task in problem.tasks:
        variants = [auto.Variant(v.name, v.accuracy, {"k": v.profile}) for v in task.variants]
        models.append(auto.Model(task.name, tuple(variants)))
        factors = {v.name: v.factors for v in task.variants}
        tasks.append(TreeTask(task.name, task.name, task.parent, factors))
    tree = Tree("all", tuple(tasks), {"": problem.slo_s}, problem.path_accuracies)
    given = {
        "models": tuple(models),
        "trees": (tree,),
        "demand": {"all": auto.Demand(problem.demand)},
        "kinds": (auto.Kind("k", 0, problem.workers),),
        "sharing": False,
        "headroom": False,
        "batch_sizes": problem.batch_sizes,
        "communication_s": problem.communication_s,
        "accuracy_floor": problem.accuracy_floor,
        "relative_gap": problem.relative_gap,
        "backend": "highs",
    }
    return auto.Problem(**{**given, **kwargs})


def best(made):
    return made.best_effort if isinstance(made, Infeasible) else made


@pytest.mark.parametrize("seed", range(60))
def test_loki(seed):
    """The same step; then as few workers, or the same accuracy, or the same share served."""
    problem = random_loki(seed)
    theirs, ours = loki.plan(problem), auto.plan(as_auto(problem))
    assert isinstance(ours, Infeasible) == isinstance(theirs, Infeasible)
    theirs, ours = best(theirs), best(ours)
    assert ours.step == theirs.step
    assert ours.served["all"] == pytest.approx(1 - theirs.shed_share, abs=1e-4)
    if theirs.step == "hardware":
        assert ours.workers["k"] == theirs.workers
    if ours.served["all"]:
        assert ours.accuracy == pytest.approx(theirs.accuracy, rel=1e-4)
