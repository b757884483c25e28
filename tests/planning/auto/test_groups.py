"""The choice of the group of each model that no group lists."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.auto.groups import Takes, choose, in_groups, units
from ray_slo.planning.result import Infeasible
from tests.planning.auto.cases import photo

ONE = LatencyProfile([0.01])  # a worker answers 100 a second, one by one


def problem_of(rates, kinds, trees=(), **kwargs):
    """Models of one variant each, which any worker serves alike."""
    profiles = dict.fromkeys((kind.name for kind in kinds), ONE)
    models = kwargs.pop("models", None) or tuple(
        Model(m, (Variant(m, 90.0, profiles),)) for m in rates
    )
    alone = tuple(Tree.of_model(m, {"": 0.1}) for m in rates)
    demand = {m: Demand(rate) for m, rate in rates.items()}
    return Problem(models, trees or alone, demand, tuple(kinds), **kwargs)


def two(left=2, right=2, **kwargs):
    return Kind("a", 1, left, group="left", **kwargs), Kind("b", 1, right, group="right", **kwargs)


def fullest(problem, group_of):
    """The largest share of a group's time, of models that are alike everywhere."""
    size = {kind.group: kind.max_workers for kind in problem.kinds}
    load = dict.fromkeys(size, 0.0)
    for model, group in group_of.items():
        load[group] += problem.rate(model) / 100 / size[group]
    return max(load.values())


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_as_even_as_they_can_be(seed):
    rng = np.random.default_rng(seed)
    kinds = [Kind(f"k{j}", 1, int(rng.integers(1, 5)), group=f"g{j}") for j in range(3)]
    total = 100 * sum(kind.max_workers for kind in kinds) * rng.uniform(0.75, 0.95)
    shares = rng.dirichlet(np.full(6, 2.0)) * total
    problem = problem_of(dict(zip("lmnopq", shares.tolist(), strict=True)), kinds)
    found = choose(problem)
    groups = [kind.group for kind in kinds]
    average = np.mean([[rate / 100 / k.max_workers for k in kinds] for rate in shares]) * 6 / 3

    def excess(group_of):
        size = {kind.group: kind.max_workers for kind in kinds}
        full = dict.fromkeys(groups, 0.0)
        for model, group in group_of.items():
            full[group] += problem.rate(model) / 100 / size[group]
        values = np.array(list(full.values()))
        over, beyond = np.maximum(values - 0.7, 0).sum(), np.maximum(values - 1, 0).sum()
        return 10 * over + 20 * beyond + 0.2 * values.max() / average

    least = min(
        excess(dict(zip(problem.model, some, strict=True)))
        for some in itertools.product(groups, repeat=6)
    )
    assert excess(found) <= least * (1 + 2e-3) + 1e-6


def test_burst_tolerance_is_spread_where_there_is_time_for_all():
    found = choose(problem_of({"l": 40, "m": 30, "n": 20, "o": 10}, two()))
    assert fullest(problem_of({"l": 40, "m": 30, "n": 20, "o": 10}, two()), found) == 0.25


def test_loads_are_even_however_small_they_are():
    found = choose(problem_of({"l": 5e-4, "m": 5e-5, "n": 5e-5}, two()))
    assert found["m"] == found["n"] != found["l"]


def test_models_that_a_tree_needs_or_that_trees_share_are_together():
    problem = photo(kinds=(Kind("gpu", 1, 4, group="a"), Kind("cpu", 1, 8, group="b")))
    assert units(problem) == (("detect", "name"),)
    found = in_groups(problem)
    assert len(set(found.group_of.values())) == 1
    listed = in_groups(replace(problem, group_of={"name": "b"}))
    assert listed.group_of == {"detect": "b", "name": "b"}


def test_what_is_listed_stays_and_counts():
    rates = {"l": 150, "m": 20, "n": 20}
    found = choose(problem_of(rates, two(), group_of={"l": "left"}))
    assert found == {"l": "left", "m": "right", "n": "right"}


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ({"l": 60, "m": 60, "n": 10}, "right"),  # 0.65 and 0.3: both comfortable
        ({"l": 75, "m": 60, "n": 10}, "left"),  # 0.72 is little more than comfortable
        ({"l": 110, "m": 90, "n": 10}, "left"),  # 1.05 of its time
        ({"l": 95, "m": 30, "n": 40}, "right"),
    ],
)
def test_a_model_moves_only_where_that_gains_more_than_it_costs(now, then):
    """l and m are on the left, n on the right; m may go there."""
    before = {"l": "left", "m": "left", "n": "right"}
    found = choose(problem_of(now, two(), group_now=before))
    moved = [model for model in before if found[model] != before[model]]
    gain = fullest(problem_of(now, two()), before) - fullest(problem_of(now, two()), found)
    assert not moved or gain >= 0.1 * len(moved)
    crowded = fullest(problem_of(now, two()), before) > 0.85
    assert bool(moved) == crowded
    free = choose(problem_of(now, two(), group_now=before, move_cost=0.0))
    assert fullest(problem_of(now, two()), free) <= fullest(problem_of(now, two()), found)
    never = choose(problem_of(now, two(), group_now=before, move_cost=1e6))
    assert never == before


def test_small_changes_of_the_demand_move_nothing():
    rng = np.random.default_rng(1)
    rates = {m: float(rng.uniform(20, 60)) for m in "lmnopq"}
    now = choose(problem_of(rates, two(3, 2)))
    for _ in range(30):
        noisy = {m: rate * rng.uniform(0.9, 1.1) for m, rate in rates.items()}
        assert choose(problem_of(noisy, two(3, 2), group_now=now)) == now


def test_accuracy_comes_before_cost_and_cost_before_evenness():
    kinds = (
        Kind("a", 1, 4, 1.0, group="left"),
        Kind("b", 1, 4, 3.0, group="right"),
    )
    rates = {"l": 50, "m": 50}
    assert set(choose(problem_of(rates, kinds)).values()) == {"left"}
    good = Model(
        "l",
        (
            Variant("deep", 95.0, {"a": LatencyProfile([0.3]), "b": ONE}),
            Variant("flat", 80.0, {"a": ONE, "b": ONE}),
        ),
    )
    models = good, Model("m", (Variant("m", 90.0, {"a": ONE, "b": ONE}),))
    found = choose(problem_of(rates, kinds, models=models))
    assert found == {"l": "right", "m": "left"}
    cheap = choose(problem_of(rates, kinds, models=models, objective="cost"))
    assert set(cheap.values()) == {"left"}


def test_memory_is_respected():
    kinds = (
        Kind("a", 1, 1, group="left", memory_mb=1000.0),
        Kind("b", 1, 1, group="right", memory_mb=3000.0),
    )
    profiles = {"a": ONE, "b": ONE}

    def model(name, memory_mb):
        return Model(name, (Variant(name, 90.0, profiles, dict.fromkeys("ab", memory_mb)),))

    models = model("l", 2000.0), model("m", 600.0), model("n", 600.0), model("o", 300.0)
    rates = dict.fromkeys("lmno", 10)
    found = choose(problem_of(rates, kinds, models=models))
    assert found["l"] == "right"  # it fits on no worker of the other
    used = {"left": 0.0, "right": 0.0}
    for one in models:
        used[found[one.name]] += one.variants[0].memory_mb["a"]
    assert used["left"] <= 1000 and used["right"] <= 3000


def test_groups_that_may_not_have_a_model_do_not_get_it():
    rates = {"l": 10, "m": 180}
    found = choose(problem_of(rates, two(), allowed_groups={"l": ("left",), "m": ("left",)}))
    assert found == {"l": "left", "m": "left"}


def test_too_slow_a_group_is_not_chosen():
    kinds = two()
    slow = Model("l", (Variant("l", 90.0, {"a": LatencyProfile([0.2]), "b": ONE}),))
    assert choose(problem_of({"l": 300}, kinds, models=(slow,))) == {"l": "right"}


@pytest.mark.parametrize(("slo_s", "group"), [(0.31, "left"), (0.29, "right")])
def test_the_longest_path_of_a_tree_must_be_in_time(slo_s, group):
    """On the left, the root and its two children take 50, 10 and 100 ms; twice that with waiting.
    On the right, all take half."""
    times = {"root": 0.05, "near": 0.01, "far": 0.1}
    models = tuple(
        Model(m, (Variant(m, 90.0, {"a": LatencyProfile([t]), "b": LatencyProfile([t / 2])}),))
        for m, t in times.items()
    )
    children = [TreeTask(m, m, "root") for m in ("near", "far")]
    tree = Tree("root", (TreeTask("root", "root"), *children), {"": slo_s})
    kinds = (
        Kind("a", 1, 9, group="left", price_per_hour=0.1),
        Kind("b", 1, 9, group="right", price_per_hour=1.0),
    )
    problem = problem_of({"root": 1.0}, kinds, (tree,), models=models)
    takes = [Takes(problem, group) for group in ("left", "right")]
    assert [math.isinf(t.of_unit(tuple(times))[0]) for t in takes] == [group == "right", False]
    assert choose(problem) == dict.fromkeys(times, group)
    assert (takes[0]._budgets_s(tree, slo_s) is None) is (group == "right")
    budgets = takes[1]._budgets_s(tree, 0.3)
    # Of 0.15 and of 0.06 s; a task on both paths has its part of the longer one.
    assert budgets == pytest.approx({"root": 0.1, "near": 0.05, "far": 0.2})


def test_a_plan_says_the_groups_and_its_workers_keep_them():
    problem = problem_of({"l": 120, "m": 90, "n": 30}, two(), batch_sizes=(1,))
    made = auto.plan(problem)
    made = made.best_effort if isinstance(made, Infeasible) else made
    assert made.group_of == choose(problem)
    group = {kind.name: kind.group for kind in problem.kinds}
    for slot in made.slots:
        for part in slot.parts:
            assert made.group_of[part.variant] == group[slot.kind]
    given = {"l": "left", "m": "right", "n": "left"}
    told = auto.plan(replace(problem, group_of=given))
    assert (told.best_effort if isinstance(told, Infeasible) else told).group_of == given


def test_without_groups_nothing_is_chosen():
    problem = problem_of({"l": 50}, (Kind("a", 1, 2),))
    assert in_groups(problem) is problem
    assert auto.plan(problem).group_of == {}


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"group_of": {"l": "middle"}}, "group_of: 'middle' is none of the groups left, right"),
        ({"group_now": {"l": "middle"}}, "group_now: 'middle' is none of the groups"),
        ({"group_now": {"z": "left"}}, "group_now: 'z' is none of the models l, m"),
        ({"allowed_groups": {"l": ("middle",)}}, "allowed_groups: 'middle' is none of the groups"),
        ({"allowed_groups": {"l": ()}}, "allowed_groups.l must name at least one group"),
        ({"move_cost": -1.0}, "move_cost must be at least 0"),
    ],
)
def test_mistakes_are_named(kwargs, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        problem_of({"l": 10, "m": 10}, two(), **kwargs)


def test_groups_that_cannot_be_are_refused_with_the_reason():
    kinds = (*two(), Kind("c", 1, 1))
    with pytest.raises(ValueError, match="kinds: 'c' has no group, and others have one"):
        problem_of({"l": 10}, kinds)
    tasks = (TreeTask("l", "l"), TreeTask("m", "m", "l"), TreeTask("n", "n", "l"))
    trees = (Tree("all", tasks, {"": 0.1}),)
    apart = {"l": ("left",), "m": ("right",)}
    rates = {"l": 10, "m": 10, "n": 10}
    models = problem_of(rates, two()).models
    given = Problem(models, trees, {"all": Demand(5.0)}, two(), allowed_groups=apart)
    with pytest.raises(ValueError, match="allowed_groups: no group may have all of l, m, n"):
        auto.plan(given)
    split = replace(given, allowed_groups={}, group_of={"l": "left", "m": "right"})
    with pytest.raises(ValueError, match="'n' is used together with models of the groups left, r"):
        auto.plan(split)


def test_requests_of_several_items_fill_a_batch_sooner():
    # The left worker takes two requests of two items in 50 ms, 40 a second. The right one takes 20
    # ms per request.
    left, right = LatencyProfile([0.05] * 4), LatencyProfile.linear(0.01, 0.0, 64)
    model = Model("l", (Variant("l", 90.0, {"a": left, "b": right}),), items=2.0)
    assert choose(problem_of({"l": 45}, two(1, 1), models=(model,))) == {"l": "right"}
