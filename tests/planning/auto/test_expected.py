"""What a plan expects of each root."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_slo.core import Assigned, LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.auto.expected import bad_share, expected
from ray_slo.planning.auto.plan import Plan, Prices, Slot
from ray_slo.planning.auto.problem import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.result import Infeasible

FIXED = {"gpu": LatencyProfile([0.01])}


def model(name, **variants):
    return Model(name, tuple(Variant(v, accuracy, FIXED) for v, accuracy in variants.items()))


def tree(name, slos_s=None, **paths):
    tasks = (TreeTask(name, name),)
    return Tree(name, tasks, slos_s or {"": 0.1}, **paths)


def plan_of(loads, served, accuracy=85.0):
    parts = tuple(Assigned(variant, 1, load) for variant, load in loads.items())
    slot = Slot("gpu", parts, tuple(loads))
    return Plan({"gpu": 1}, (slot,), accuracy, served, 0.0, 0.0, Prices(), "accuracy", "")


def test_the_only_root_has_the_accuracy_of_the_plan():
    problem = Problem(
        (model("a", small=80, large=90),),
        (tree("a", {"": 0.1, "gold": 0.05}),),
        {"a": Demand(30), "a@gold": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    plan = plan_of({"small": 10, "large": 20}, {"a": 0.9, "a@gold": 1.0})
    found = expected(problem, plan)
    assert found == {"a": (85.0, pytest.approx(0.0, abs=1e-4))}  # 40 of the 100 that are possible


def test_in_overload_what_workers_cannot_do_is_lost():
    problem = Problem((model("a", one=90),), (tree("a"),), {"a": Demand(400)}, (Kind("gpu", 0, 1),))
    plan = plan_of({"one": 100}, {"a": 0.25})
    assert expected(problem, plan)["a"].bad_rate == pytest.approx(0.75, abs=1e-3)
    # Planned for four times of what comes: half of what is possible.
    there = expected(problem, plan, {"a": 8.0})
    assert there["a"].bad_rate == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("made", "lost"), [(0.4, 0.4 / 1.4), (1.0, 1 / 2), (4.0, 4 / 5)])
def test_requests_that_make_many_are_lost_rather_than_those_that_make_few(made, lost):
    """Half of the child's work is lost. Its share of the requests is E[M]²/E[M²] of that."""
    tasks = (TreeTask("a", "a", None, {"one": {"b": made}}), TreeTask("b", "b", "a"))
    rate = 200 / made  # the child's worker does 100 per second
    quick = Model("a", (Variant("one", 90, {"gpu": LatencyProfile([1e-4])}),))
    problem = Problem(
        (quick, model("b", two=80)),
        (Tree("a", tasks, {"": 0.1}),),
        {"a": Demand(rate, 0)},
        (Kind("gpu", 0, 2),),
    )
    slots = tuple(Slot("gpu", (Assigned(v, 1, 100.0),), (v,)) for v in ("one", "two"))
    plan = Plan({"gpu": 2}, slots, 85.0, {"a": 0.5}, 0.0, 0.0, Prices(), "share", "")
    assert bad_share(problem, plan) == pytest.approx(0.5 * lost, abs=0.01)


def quick_and_slow(memory_mb=100.0, **kwargs):
    variants = (
        Variant("slow", 90, {"gpu": LatencyProfile([0.01])}, {"gpu": 60.0}),
        Variant("quick", 80, {"gpu": LatencyProfile([0.005])}, {"gpu": 60.0}),
    )
    return Problem(
        (Model("a", variants),),
        (tree("a"),),
        {"a": Demand(150)},
        (Kind("gpu", 0, 1, memory_mb=memory_mb),),
        **kwargs,
    )


def test_the_quick_variant_is_a_reserve_where_there_is_memory_and_no_floor():
    plan = plan_of({"slow": 100}, {"a": 2 / 3})
    roomy = expected(quick_and_slow(memory_mb=120.0), plan)["a"].bad_rate
    tight = expected(quick_and_slow(), plan)["a"].bad_rate
    floor = expected(quick_and_slow(memory_mb=120.0, accuracy_floor=85.0), plan)["a"].bad_rate
    assert roomy < 0.01
    assert tight == floor == pytest.approx(1 / 3, abs=1e-3)


def test_more_workers_more_time_less_dispersion_are_better():
    def bad(rate=95.0, dispersion=1.0, slo_s=0.05, workers=1):
        problem = Problem(
            (model("a", one=90),),
            (tree("a", {"": slo_s}),),
            {"a": Demand(rate, dispersion)},
            (Kind("gpu", 0, 9),),
        )
        one = plan_of({"one": rate / workers}, {"a": 1.0})
        return expected(problem, replace(one, slots=one.slots * workers))["a"].bad_rate

    assert 0 < bad() < 0.2
    assert bad(rate=80.0) < bad() < bad(rate=110.0)
    assert bad(dispersion=0.5) < bad() < bad(dispersion=4.0)
    assert bad(slo_s=0.1) < bad() < bad(slo_s=0.03)
    assert bad(rate=190.0, workers=2) < bad()


def test_roots_have_accuracies_and_losses_of_their_own():
    first = TreeTask("a", "a"), TreeTask("b-of", "b", "a"), TreeTask("c-of", "c", "a")
    problem = Problem(
        (model("a", one=90), model("b", small=80, large=90), model("c", other=50)),
        (Tree("p", first, {"": 0.1}), tree("b"), tree("c")),
        {"p": Demand(10), "b": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    plan = plan_of({"one": 10, "small": 5, "large": 15, "other": 10}, {"p": 0.8, "b": 1.0})
    found = expected(problem, plan)
    assert set(found) == {"p", "b"}  # nobody asks for "c"
    assert found["b"] == (pytest.approx(87.5), pytest.approx(0.0, abs=1e-3))
    assert found["p"].accuracy == pytest.approx((0.9 * 87.5 + 0.9 * 50) / 2)


def test_what_is_not_known():
    problem = Problem(
        (model("a", one=90), model("b", two=80)),
        (tree("a", path_accuracies={("one",): 70.0}), tree("b")),
        {"a": Demand(10), "b": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    found = expected(problem, plan_of({"one": 10}, {"a": 1.0, "b": 0.0}))
    assert found == {"a": (None, pytest.approx(0.0, abs=1e-4)), "b": (None, 1.0)}
    idle = Problem(problem.models, problem.trees, {}, problem.kinds)
    assert expected(idle, plan_of({}, {})) == {}


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
    assert [one.bad_rate for one in found.values()] == [pytest.approx(1 / 3)] * 2
    assert found["a"].accuracy == pytest.approx(90)
    assert found["b"].accuracy == pytest.approx(70)


def test_of_all_requests():
    problem = Problem(
        (model("a", one=90), model("b", two=80)),
        (tree("a"), tree("b")),
        {"a": Demand(30), "b": Demand(10)},
        (Kind("gpu", 0, 1),),
    )
    only_a = plan_of({"one": 30}, {"a": 1.0, "b": 0.0})
    assert bad_share(problem, only_a) == pytest.approx(0.25, abs=1e-3)
    assert bad_share(replace(problem, demand={}), only_a) == 0.0


def test_a_plan_without_a_load_divides_its_workers_evenly():
    problem = Problem(
        (model("a", one=90), model("b", two=90)),
        (tree("a"), tree("b")),
        {"a": Demand(30), "b": Demand(45)},
        (Kind("gpu", 0, 1),),
    )
    served = {"a": 1.0, "b": 1.0}
    idle = expected(problem, plan_of({"one": 0.0, "two": 0.0}, served))
    even = expected(problem, plan_of({"one": 30, "two": 30}, served))
    for root, of in even.items():
        assert idle[root].bad_rate == pytest.approx(of.bad_rate)
        assert of.bad_rate > 1e-6


def test_workers_that_have_loaded_a_model_serve_it_in_a_burst():
    problem = Problem(
        (model("a", one=90), model("b", two=90)),
        (tree("a"), tree("b")),
        {"a": Demand(110), "b": Demand(40)},
        (Kind("gpu", 0, 2),),
    )
    slots = [Slot("gpu", (Assigned(v, 1, 75.0),), (v,)) for v in ("one", "two")]
    apart = Plan({"gpu": 2}, tuple(slots), 90.0, {}, 0.0, 0.0, Prices(), "share", "")
    both = tuple(replace(slot, variants=("one", "two")) for slot in slots)
    assert expected(problem, apart)["a"].bad_rate > 0.09
    assert expected(problem, replace(apart, slots=both))["a"].bad_rate < 0.02
    # A model that is loaded and has no part in the plan is not served.
    others = replace(both[0], variants=("one", "two", "unmeasured"))
    left_out = replace(apart, slots=(others,) * 2)
    assert expected(problem, left_out)["b"].bad_rate == 1.0


@pytest.mark.parametrize(("children", "lost"), [("b", 0.5), ("bc", 1 - 0.6**2)])
def test_branches_lose_apart(children, lost):
    """A request makes four at each task below. All share workers, which can do half of the work. A
    child that loses half of its work loses 0.5 · 4/5 of the requests."""
    made = {"one": dict.fromkeys(children, 4.0)}
    tasks = (TreeTask("a", "a", None, made), *(TreeTask(c, c, "a") for c in children))
    quick = Model("a", (Variant("one", 90, {"gpu": LatencyProfile([1e-6])}),))
    names = ("one", *(f"v{c}" for c in children))
    problem = Problem(
        (quick, *(model(c, **{f"v{c}": 80}) for c in children)),
        (Tree("a", tasks, {"": 0.1}),),
        {"a": Demand(200 / len(children), 0)},
        (Kind("gpu", 0, 4),),
    )
    parts = tuple(Assigned(v, 1, 100.0) for v in names)
    slots = (Slot("gpu", parts, names),) * 4
    plan = Plan({"gpu": 4}, slots, 85.0, {}, 0.0, 0.0, Prices(), "share", "")
    assert bad_share(problem, plan) == pytest.approx(lost, abs=0.02)


def test_children_have_the_requests_that_the_planned_variants_make():
    """The variants of `a` make none and 4. Nine of ten are planned for the first."""
    tasks = (
        TreeTask("a", "a", None, {"few": {"b": 0.0}, "many": {"b": 4.0}}),
        TreeTask("b", "b", "a"),
    )
    quick = {"gpu": LatencyProfile([1e-4])}
    problem = Problem(
        (Model("a", (Variant("few", 90, quick), Variant("many", 95, quick))), model("b", two=80)),
        (Tree("a", tasks, {"": 0.1}),),
        {"a": Demand(200, 0)},
        (Kind("gpu", 0, 2),),
    )

    def bad(few, many):
        parts = (Assigned("few", 1, few), Assigned("many", 1, many))
        slots = (
            Slot("gpu", parts, ("few", "many")),
            Slot("gpu", (Assigned("two", 1, 99.0),), ("two",)),
        )
        return bad_share(
            problem, Plan({"gpu": 2}, slots, 85.0, {}, 0.0, 0.0, Prices(), "share", "")
        )

    assert bad(180.0, 20.0) < 0.02  # 80 per second, of 100
    assert bad(100.0, 100.0) > 0.3  # 400
