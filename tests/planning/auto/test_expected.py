"""What a plan expects of each root."""

from __future__ import annotations

import pytest

from ray_slo.core import Assigned, LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.auto.expected import expected
from ray_slo.planning.auto.plan import Plan, Prices, Slot
from ray_slo.planning.auto.problem import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.result import Infeasible

FIXED = {"gpu": LatencyProfile([0.01])}


def model(name, **variants):
    return Model(name, tuple(Variant(v, accuracy, FIXED) for v, accuracy in variants.items()))


def tree(name, slos_s=None, **paths):
    tasks = (TreeTask(name, name),)
    return Tree(name, tasks, slos_s or {"": 0.1}, **paths)


def plan_of(loads, served, bad_rate, accuracy=85.0):
    parts = tuple(Assigned(variant, 1, load) for variant, load in loads.items())
    slot = Slot("gpu", parts, tuple(loads))
    return Plan({"gpu": 1}, (slot,), accuracy, served, bad_rate, 0.0, Prices(), {}, "accuracy", "")


def test_the_only_root_has_what_the_plan_says():
    problem = Problem(
        (model("a", small=80, large=90),),
        (tree("a", {"": 0.1, "gold": 0.05}),),
        {"a": Demand(30), "a@gold": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    plan = plan_of({"small": 10, "large": 20}, {"a": 0.9, "a@gold": 1.0}, 0.1)
    found = expected(problem, plan)
    assert found == {"a": (85.0, pytest.approx(0.1))}  # 7.5 % shed, and what bursts make late


def test_roots_share_what_bursts_make_late_and_have_accuracies_of_their_own():
    first = TreeTask("a", "a"), TreeTask("b-of", "b", "a"), TreeTask("c-of", "c", "a")
    problem = Problem(
        (model("a", one=90), model("b", small=80, large=90), model("c", other=50)),
        (Tree("p", first, {"": 0.1}), tree("b"), tree("c")),
        {"p": Demand(10), "b": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    plan = plan_of({"one": 10, "small": 5, "large": 15, "other": 10}, {"p": 0.8, "b": 1.0}, 0.19)
    found = expected(problem, plan)
    assert set(found) == {"p", "b"}  # nobody asks for "c"
    # A tenth is shed, and of the nine tenths that are served, a tenth is late.
    assert found["p"].bad_rate == pytest.approx(1 - 0.8 * 0.9)
    assert found["b"] == (pytest.approx(87.5), pytest.approx(0.1))
    assert found["p"].accuracy == pytest.approx((0.9 * 87.5 + 0.9 * 50) / 2)


def test_what_is_not_known():
    problem = Problem(
        (model("a", one=90), model("b", two=80)),
        (tree("a", path_accuracies={("one",): 70.0}), tree("b")),
        {"a": Demand(10), "b": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    found = expected(problem, plan_of({"one": 10}, {"a": 1.0, "b": 0.0}, 0.5))
    assert found == {"a": (None, 0.0), "b": (None, 1.0)}
    idle = Problem(problem.models, problem.trees, {}, problem.kinds)
    assert expected(idle, plan_of({}, {}, 0.0)) == {}


def test_of_a_plan_that_was_made():
    problem = Problem(
        (model("a", small=80, large=90), model("b", two=70)),
        (tree("a"), tree("b")),
        {"a": Demand(150, 0), "b": Demand(150, 0)},
        (Kind("gpu", 0, 2),),
        batch_sizes=(1,),
    )
    answer = auto.plan(problem)
    assert isinstance(answer, Infeasible)  # 300 a second, of 200 that are possible
    plan = answer.best_effort
    found = expected(problem, plan)
    assert [one.bad_rate for one in found.values()] == [pytest.approx(plan.bad_rate)] * 2
    assert found["a"].accuracy == pytest.approx(90)
    assert found["b"].accuracy == pytest.approx(70)
