"""Properties of every plan, and the explanations of plans."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Hosted, Kind, Model, Problem, Variant
from ray_slo.planning.result import Infeasible
from tests.planning.auto.cases import linear, photo, variant


def best(made):
    return made.best_effort if isinstance(made, Infeasible) else made


def rates_of(plan):
    """Requests per second by variant."""
    found = {}
    for slot in plan.slots:
        for part in slot.parts:
            found[part.variant] = found.get(part.variant, 0.0) + part.load
    return found


def check(problem, plan):
    """Bounds, budget, memory, throughput, and path latency of a plan."""
    for kind in problem.kinds:
        count = plan.workers[kind.name]
        if problem.present is not None:
            assert count == problem.present.get(kind.name, 0)
        else:
            assert kind.min_workers <= count <= kind.max_workers
        assert sum(slot.kind == kind.name for slot in plan.slots) <= count
    cost = sum(kind.price_per_hour * plan.workers[kind.name] for kind in problem.kinds)
    assert plan.cost_per_hour == pytest.approx(cost)
    if problem.budget_per_hour is not None and problem.present is None:
        assert cost <= problem.budget_per_hour + 1e-6
    sizes = {}
    for slot in plan.slots:
        needs = [problem.variant[v].memory_mb.get(slot.kind, 0.0) for v in slot.variants]
        assert sum(needs) <= problem.kind[slot.kind].memory_mb + 1e-6
        assert {part.variant for part in slot.parts} <= set(slot.variants)
        assert problem.sharing or len(slot.parts) == 1
        busy = 0.0
        for part in slot.parts:
            profile = problem.variant[part.variant].profiles[slot.kind]
            items = problem.model[model_of(problem, part.variant)].items
            latency_s = profile.latency(math.ceil(part.batch_size * items - 1e-9))
            busy += part.load * latency_s / part.batch_size
            sizes.setdefault((part.variant, slot.kind), set()).add(part.batch_size)
        assert busy <= 1 + 1e-5
    assert all(len(batch_sizes) == 1 for batch_sizes in sizes.values())
    check_flow(problem, plan)
    check_paths(problem, plan)
    assert all(0 <= share <= 1 for share in plan.served.values())
    assert 0 <= plan.bad_rate <= 1
    assert all(price >= 0 for price in plan.prices.worker_s.values())


def model_of(problem, name):
    return next(m.name for m in problem.models if any(v.name == name for v in m.variants))


def check_flow(problem, plan):
    """The models' rates are between what the least and the greatest factors make of the demand."""
    rates = rates_of(plan)
    least, most = ({model.name: 0.0 for model in problem.models} for _ in range(2))
    for stream in problem.streams:
        tree = problem.tree_of(stream)
        served = problem.rate(stream) * plan.served[stream]
        arriving = {tree.root: (served, served)}
        for task in tree.order:
            low, high = arriving[task.name]
            least[task.model] += low
            most[task.model] += high
            for child in tree.children(task.name):
                names = [v.name for v in problem.model[task.model].variants]
                factors = [task.factor(name, child) for name in names]
                arriving[child] = low * min(factors), high * max(factors)
    for model in problem.models:
        rate = sum(rates.get(v.name, 0.0) for v in model.variants)
        assert least[model.name] * (1 - 1e-4) - 1e-3 <= rate <= most[model.name] * (1 + 1e-4) + 1e-3


def check_paths(problem, plan):
    """Where a model has one user only, its slowest batches add up to no more than the SLO."""
    users = [task.model for tree in problem.trees for task in tree.tasks for _ in tree.slos_s]
    for tree in problem.trees:
        if len(tree.slos_s) > 1 or any(users.count(task.model) > 1 for task in tree.tasks):
            continue
        own = {}
        for task in tree.tasks:
            names = {v.name for v in problem.model[task.model].variants}
            times = [0.0]
            for slot in plan.slots:
                for part in slot.parts:
                    if part.variant in names:
                        profile = problem.variant[part.variant].profiles[slot.kind]
                        items = math.ceil(part.batch_size * problem.model[task.model].items - 1e-9)
                        times.append(profile.latency(items) * problem.waiting_factor)
            own[task.name] = max(times)
        for task in tree.tasks:
            assert sum(own[name] for name in tree.path(task.name)) <= tree.slo_s + 1e-9


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    kinds = []
    for name, speed in (("gpu", 1.0), ("cpu", 4.0))[: int(rng.integers(1, 3))]:
        least = int(rng.integers(0, 2))
        most = least + int(rng.integers(1, 8))
        memory = float(rng.choice([math.inf, 1000.0]))
        kinds.append((Kind(name, least, most, float(rng.choice([0.0, 1.0])), memory), speed))
    models = []
    for m in "abc"[: int(rng.integers(1, 4))]:
        variants = []
        for i in range(int(rng.integers(1, 4))):
            alpha, beta = rng.uniform(0.5, 4), rng.uniform(0.5, 8)
            profiles = {kind.name: linear(alpha * s, beta * s, 16) for kind, s in kinds}
            memory = float(rng.choice([0.0, 300.0, 600.0]))
            variants.append(variant(f"{m}{i}", float(rng.uniform(50, 99)), memory, **profiles))
        models.append(Model(m, tuple(variants), float(rng.choice([1.0, 1.5]))))
    trees = []
    for t in range(int(rng.integers(1, 3))):
        tasks = []
        for depth, model in enumerate(rng.choice(models, int(rng.integers(1, 4)))):
            parent = None if not depth else f"{t}-{int(rng.integers(0, depth))}"
            tasks.append(TreeTask(f"{t}-{depth}", model.name, parent))
        slos = {"": float(rng.uniform(0.03, 0.5))}
        if rng.random() < 0.3:
            slos["gold"] = slos[""] / 2
        trees.append(Tree(f"t{t}", tuple(tasks), slos))
    streams = [stream for tree in trees for stream, _ in tree.streams()]
    demand = {s: Demand(float(rng.uniform(0, 150)), float(rng.choice([1, 3]))) for s in streams}
    kinds = tuple(kind for kind, _ in kinds)
    return Problem(
        tuple(models),
        tuple(trees),
        demand,
        kinds,
        objective=str(rng.choice(["accuracy", "cost"])),
        budget_per_hour=float(rng.choice([3.0, 100.0])) if rng.random() < 0.5 else None,
        accuracy_floor=float(rng.choice([0.0, 60.0])),
        sharing=bool(rng.random() < 0.7),
        present={k.name: int(rng.integers(0, 5)) for k in kinds} if rng.random() < 0.3 else None,
        batch_sizes=(1, 2, 4, 8, 16),
        headroom=bool(rng.random() < 0.7),
        backend="highs",
        time_limit_s=2.0,
    )


@given(problems())
@settings(max_examples=15)
def test_every_plan_can_be_carried_out(problem):
    least = sum(kind.price_per_hour * kind.min_workers for kind in problem.kinds)
    made = auto.plan(problem)
    plan = best(made)
    if problem.budget_per_hour is not None and least > problem.budget_per_hour:
        assert isinstance(made, Infeasible)
        return
    check(problem, plan)
    if not isinstance(made, Infeasible):
        assert all(share == 1 for share in plan.served.values())
    else:
        assert made.reason


def test_plans_are_the_same_for_the_same_problem():
    assert auto.plan(photo()) == auto.plan(photo())


def test_more_workers_are_no_worse():
    accuracies = [
        best(auto.plan(photo(present={"gpu": n, "cpu": 0}, headroom=False))).accuracy
        for n in (1, 2, 3)
    ]
    assert accuracies == sorted(accuracies)


def test_dispersion_asks_for_more():
    def cost(dispersion):
        demand = {s: Demand(60.0, dispersion) for s in photo().streams}
        return best(auto.plan(photo(demand=demand))).cost_per_hour

    assert cost(0.0) <= cost(1.0) < cost(8.0)


def test_a_model_of_a_group_is_served_by_its_workers():
    kinds = (Kind("gpu", 0, 4, group="a"), Kind("cpu", 0, 8, group="b"))
    made = auto.plan(photo(kinds=kinds, group_of={"detect": "b", "name": "a"}))
    for slot in best(made).slots:
        assert all(part.variant[0] == {"gpu": "n", "cpu": "d"}[slot.kind] for part in slot.parts)


def test_what_fits_no_worker_is_left_out_with_the_reason():
    large = variant("n-l", 95.0, 900.0, gpu=linear(3, 5), cpu=linear(15, 15))
    models = (photo().models[0], Model("name", (large,)))
    kinds = (Kind("gpu", 0, 4, memory_mb=800.0), Kind("cpu", 0, 0))
    made = auto.plan(photo(models=models, kinds=kinds))
    assert isinstance(made, Infeasible)
    assert "n-l needs 900 MB, gpu has 800 MB" in made.reason
    assert set(made.best_effort.served.values()) == {0.0}


def test_shares_are_fair_where_not_all_can_be_served():
    demand = {s: Demand(300.0) for s in photo().streams}
    made = auto.plan(photo(present={"gpu": 0, "cpu": 1}, demand=demand))
    assert isinstance(made, Infeasible)
    assert "the workers that are there (0 gpu, 1 cpu)" in made.reason
    shares = list(made.best_effort.served.values())
    assert max(shares) - min(shares) < 1e-3
    assert 0 < made.best_effort.bad_rate < 1
    assert made.best_effort.prices.worker_s["cpu"] > 0


def test_a_stream_that_is_too_slow_does_not_stop_the_others():
    trees = (photo().trees[0], Tree("face", (TreeTask("face", "name"),), {"": 0.2, "gold": 0.001}))
    made = auto.plan(photo(trees=trees))
    assert isinstance(made, Infeasible)
    assert made.reason.startswith("the SLO of face@gold, 0.001 s, is too short: the fastest path")
    assert made.best_effort.served == {"photo": 1.0, "face": 1.0, "face@gold": 0.0}


def test_what_is_loaded_stays_where_it_suffices():
    first = best(auto.plan(photo()))
    current = tuple(
        Hosted(f"w{i}", slot.kind, frozenset(slot.variants)) for i, slot in enumerate(first.slots)
    )
    more = {s: Demand(1.05 * photo().rate(s)) for s in photo().streams}
    second = best(auto.plan(photo(demand=more, current=current, swap_cost=1.0)))
    there = {h.worker: (h.kind, h.variants) for h in current}
    placed = auto.place(second, there)
    assert all(set(s.variants) <= there[w][1] for w, s in placed.items())


def test_a_batch_of_large_requests_has_fewer_of_them():
    models = tuple(replace(m, items=4.0) for m in photo().models)
    plan = best(auto.plan(photo(models=models, demand={"face": Demand(5.0)}, headroom=False)))
    check(photo(models=models, demand={"face": Demand(5.0)}), plan)
    assert max(part.batch_size for slot in plan.slots for part in slot.parts) <= 16


def test_urgent_requests_do_not_wait_for_long_batches():
    """A quick model with 50 ms, and a slow one with 2 s whose batches take up to 1 s."""
    models = (
        Model("quick", (variant("q", 90.0, gpu=linear(2, 2, 16)),)),
        Model("slow", (variant("s", 90.0, gpu=linear(15, 30, 64)),)),
    )
    trees = Tree.of_model("quick", {"": 0.05}), Tree.of_model("slow", {"": 2.0})
    demand = {"quick": Demand(50.0), "slow": Demand(5.0)}
    plan = best(auto.plan(Problem(models, trees, demand, (Kind("gpu", 0, 4),))))
    for slot in plan.slots:
        sizes = {part.variant: part.batch_size for part in slot.parts}
        if set(sizes) == {"q", "s"}:
            assert 30 + 15 * sizes["s"] + 2 + 2 * sizes["q"] <= 50


@pytest.mark.parametrize("sharing", [True, False])
def test_a_plan_from_the_last_one_is_about_as_good(sharing):
    """Limits that were found for about this demand are taken over; the plan is checked again."""
    problem = photo(sharing=sharing)
    last = best(auto.plan(problem))
    more = {s: Demand(1.1 * problem.rate(s)) for s in problem.streams}
    asked = replace(problem, demand=more)
    warm, cold = auto.plan(asked, last), auto.plan(asked)
    check(asked, best(warm))
    assert best(warm).bad_rate <= 0.01
    assert best(warm).cost_per_hour <= 1.5 * best(cold).cost_per_hour
    far = replace(problem, demand={s: Demand(3 * problem.rate(s)) for s in problem.streams})
    assert auto.plan(far, last) == auto.plan(far)
    slower = replace(problem, models=tuple(_slower(model) for model in problem.models))
    assert auto.plan(slower, last) == auto.plan(slower)


def _slower(model):
    variants = (
        replace(v, profiles={k: p.scaled(1.25) for k, p in v.profiles.items()})
        for v in model.variants
    )
    return replace(model, variants=tuple(variants))


def test_room_for_bursts_is_left():
    for made in (auto.plan(photo()), auto.plan(photo(sharing=False))):
        assert not isinstance(made, Infeasible)
        assert made.bad_rate <= 0.01
    alone = photo(demand={"photo": Demand(70.0)}, accuracy_floor=85.4)
    tight = best(auto.plan(replace(alone, headroom=False)))
    assert tight.bad_rate > 0.01
    made = auto.plan(replace(alone, present=tight.workers))
    assert isinstance(made, Infeasible)
    assert "no room for bursts with the workers that are there" in made.reason
    assert set(made.best_effort.served.values()) == {1.0}
    assert 0.01 < made.best_effort.bad_rate < tight.bad_rate


def test_a_plan_that_falls_short_names_every_limit():
    profile = LatencyProfile([0.01])
    problem = Problem(
        (Model("m", (Variant("v", 90.0, {"gpu": profile}),)),),
        (Tree.of_model("m", {"": 0.1}),),
        {"m": Demand(900)},
        (Kind("gpu", 0, 4, 1.0),),
        budget_per_hour=2.0,
        accuracy_floor=80.0,
    )
    found = auto.plan(problem)
    assert isinstance(found, Infeasible)
    limits = "4 gpu, a budget of 2 per hour, an accuracy of at least 80 %"
    assert f"demand 900 req/s is out of reach with {limits}: 22" in found.reason
