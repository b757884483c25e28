"""What planners say of some problems is what they said when this was recorded.

Other tests check that plans are right. These notice any other change of a figure. Plans of which
there may be several equally good ones are compared only by what they are worth.
"""

import dataclasses
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.loki import terms as loki
from benchmarks.loki.terms.plans import workers_of
from ray_slo.core.demand import Holt
from ray_slo.core.load import LoadMonitor
from ray_slo.papers import herd, kairos, partition, routing
from ray_slo.papers.kairos.bounds import fluid_bounds, paper_bounds
from ray_slo.papers.ramsis import Empirical, Gamma, pareto_front, solve
from ray_slo.planning import Infeasible, auto
from ray_slo.planning.auto import Demand
from ray_slo.planning.auto.expected import bad_share, expected
from ray_slo.planning.auto.headroom import bad_rate, occupancy
from ray_slo.planning.auto.overflow import late_by_stream
from ray_slo.planning.auto.pack import pack
from ray_slo.planning.auto.taken import most_busy, room
from ray_slo.policies.shared import fluid, queue_value
from tests.kept import condensed, kept
from tests.planning.auto.cases import linear, photo, variant
from tests.planning.examples import (
    fluid as fluid_examples,
)
from tests.planning.examples import (
    kairos as kairos_examples,
)
from tests.planning.examples import (
    loki as loki_examples,
)
from tests.planning.examples import (
    partition as partition_examples,
)
from tests.planning.examples import (
    queue_value as queue_value_examples,
)
from tests.planning.examples import (
    ramsis as ramsis_examples,
)

FILE = "planning/plans"


def figures(value):
    """A dataclass, mapping, array or sequence as JSON, without what is derived or chosen freely."""
    if isinstance(value, Infeasible):
        return {
            "infeasible": figures(
                {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            )
        }
    if dataclasses.is_dataclass(value):
        return {f.name: figures(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return figures(value._asdict())
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): figures(one) for key, one in sorted(value.items(), key=str)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [
            figures(one)
            for one in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
    return value


def worth(made):
    """What a plan of `auto` is worth, by whatever workers and batches."""
    plan = made.best_effort if isinstance(made, Infeasible) else made
    return {
        "feasible": not isinstance(made, Infeasible),
        "accuracy": plan.accuracy,
        "served": dict(plan.served),
        "cost": plan.cost_per_hour,
        "step": plan.step,
    }


@pytest.mark.parametrize("times", [0.2, 1.0, 3.0, 8.0])
@pytest.mark.parametrize(
    "changes",
    [{}, {"accuracy_floor": 82.0}, {"budget_per_hour": 3.0}, {"headroom": False, "sharing": False}],
    ids=str,
)
def test_auto(times, changes):
    demand = {s: Demand(d.rate * times) for s, d in photo().demand.items()}
    problem = photo(demand=demand, **changes)
    kept(FILE, f"auto × {times}, {changes}", worth(auto.plan(problem)))


def one_slot(**kwargs):
    model = auto.Model(
        "a",
        (
            variant("slow", 90.0, 60.0, gpu=linear(4, 6, 16)),
            variant("quick", 80.0, 60.0, gpu=linear(1, 3, 16)),
        ),
    )
    tree = a_tree()
    return auto.Problem(
        (model,),
        (tree,),
        {"a": Demand(90.0, 2.0)},
        (auto.Kind("gpu", 1, 3, memory_mb=100.0),),
        **kwargs,
    )


def a_tree():
    from ray_slo.core.trees import Tree, TreeTask

    return Tree("a", (TreeTask("a", "a"),), {"": 0.1})


@pytest.mark.parametrize("load", [0.3, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("dispersion", [0.5, 1.0, 8.0])
def test_what_a_plan_loses(load, dispersion):
    problem = one_slot()
    made = auto.plan(problem)
    plan = made.best_effort if isinstance(made, Infeasible) else made
    actual = {"a": Demand(90.0 * load, dispersion)}
    lost = late_by_stream(problem, plan, actual)
    kept(FILE, f"lost, {load}, {dispersion}", lost)
    factors = {"a": load}
    kept(FILE, f"expected, {load}", figures(expected(problem, plan, factors)))
    kept(FILE, f"bad share, {load}", bad_share(problem, plan, factors))


def test_headroom():
    busy = [0.2, 0.7, 0.95, 1.0, 1.3, 3.0]
    rates = [
        [bad_rate(b * n, n, r, v) for b in busy]
        for n in (1, 4, 32)
        for r in (0.01, 0.2, 3.0)
        for v in (0.01, 0.1, 2.0)
    ]
    kept(FILE, "headroom, bad rate", rates)
    levels = [
        occupancy(n, r, v, t)
        for n in (1, 4, 32)
        for r in (0.01, 0.2, 3.0)
        for v in (0.01, 0.1)
        for t in (0.001, 0.01, 0.1)
    ]
    kept(FILE, "headroom, occupancy", levels)


def test_interruptions():
    kept(
        FILE,
        "busy",
        [
            [most_busy(n, there, loss) for n in (1, 2, 5, 40)]
            for there in (0.5, 0.9, 0.99)
            for loss in (0.001, 0.05)
        ],
    )
    kept(FILE, "room", [figures(room(b, 0.9, 0.01, 20)) for b in (0.5, 3.0, 11.0)])


@pytest.mark.parametrize("seed", range(4))
def test_packing(seed):
    rng = random.Random(seed)
    found = []
    for _ in range(40):
        names = [f"v{i}" for i in range(rng.randint(1, 5))]
        busy = {name: rng.uniform(0.05, 1.5) for name in names}
        workers = rng.randint(1, 6)
        needs = {name: rng.choice([0.0, 20.0, 40.0, 60.0]) for name in names}
        found.append(pack(busy, workers, needs, 100.0, rng.choice([0.7, 1.0])))
    assert any(found) and not all(found)
    kept(FILE, f"pack {seed}", condensed(found))


@pytest.mark.parametrize("seed", range(3))
def test_kairos_and_its_bounds(seed):
    problem = kairos_examples.random_problem(seed)
    counts = np.array([[a, b, c] for a in range(4) for b in range(4) for c in range(3)])
    bounds, base = paper_bounds(problem, counts)
    kept(FILE, f"kairos bounds {seed}", [bounds.tolist(), base.tolist()])
    kept(FILE, f"kairos fluid {seed}", fluid_bounds(problem, counts).tolist())
    for bound in ("fluid", "paper"):
        made = kairos.plan(problem, bound)
        kept(FILE, f"kairos plan {seed} {bound}", figures(made))


@pytest.mark.parametrize("demand", [20.0, 120.0, 500.0, 3000.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_loki_plans(demand, shape):
    problem = replace(getattr(loki_examples, shape)(), demand=demand)
    made = loki.plan(problem)
    plan = made.best_effort if isinstance(made, Infeasible) else made
    rows = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    rows = {k: v for k, v in rows.items() if isinstance(v, float | int)}
    kept(FILE, f"loki {shape}, {demand}", rows | {"capacity": loki.capacity(problem)})
    parents = {task.name: task.parent for task in problem.tasks}
    tables = routing.most_accurate_first(parents, workers_of(problem, plan), demand)
    kept(FILE, f"routes {shape}, {demand}", figures(tables))


@pytest.mark.parametrize("rate", [5.0, 60.0, 140.0, 400.0])
def test_the_fluid_limit(rate):
    models = (fluid_examples.model(), fluid_examples.model("n", 0.2))
    problem = fluid.Problem(models, {"m": rate, "n": rate / 3}, {"cpu": 2.0})
    made = fluid.solve(problem)
    kept(
        FILE,
        f"fluid {rate}",
        figures(
            {
                "accuracy": made.accuracy,
                "unserved": made.unserved,
                "busy": sum(b.busy for b in made.mix),
                "rate": sum(b.rate for b in made.mix),
            }
        ),
    )


@pytest.mark.parametrize("rate", [10.0, 80.0, 200.0, 900.0])
@pytest.mark.parametrize("dispersion", [1.0, 5.0])
def test_the_value_of_a_queue(rate, dispersion):
    columns = queue_value_examples.columns(4, 0.15, *queue_value_examples.VARIANTS)
    value = queue_value.solve(columns, rate, 0.15, dispersion=dispersion)
    lengths = np.array([0, 1, 2, 3, 5, 8, 13, 40])
    kept(
        FILE,
        f"queue value {rate}, {dispersion}",
        {
            "gain": value.gain,
            "at": value.at(lengths).tolist(),
            "shed": [value.shed(int(n)) for n in lengths],
            "columns": [float(value.columns(columns, int(n)).sum()) for n in lengths],
            "arrivals": value.arrivals(columns).sum(axis=-1).tolist(),
            "counts": (queue_value.arrivals(np.array([0.1, 2.0, 30.0]), dispersion) ** 2)
            .sum(axis=-1)
            .tolist(),
        },
    )


@pytest.mark.parametrize("rate", [20.0, 120.0, 400.0])
@pytest.mark.parametrize("arrivals", [None, Gamma(0.5)], ids=["poisson", "gamma"])
@pytest.mark.parametrize("batching", ["maximal", "variable"])
def test_ramsis_tables(rate, arrivals, batching):
    fields = {} if arrivals is None else {"arrivals": arrivals}
    problem = ramsis_examples.problem(rate=rate, num_slacks=12, batching=batching, **fields)
    table = solve(problem)
    kept(
        FILE,
        f"ramsis {rate}, {arrivals}, {batching}",
        {
            "accuracy": table.expected_accuracy,
            "violations": table.violation_rate,
            "mix": table.variant_mix,
        },
    )


def test_arrivals_that_were_measured():
    gaps = np.random.default_rng(1).gamma(0.5, 0.02, 400)
    measured = Empirical(np.cumsum(gaps))
    problem = ramsis_examples.problem(rate=50.0, num_slacks=10, arrivals=measured)
    table = solve(problem)
    kept(FILE, "ramsis, measured", [table.expected_accuracy, table.violation_rate])
    front = pareto_front(ramsis_examples.VARIANTS, 0.15)
    kept(FILE, "pareto", [v[0] for v in front])


@pytest.mark.parametrize("seed", range(3))
def test_groups_and_sub_clusters(seed):
    rng = random.Random(seed)
    models = tuple(
        herd.ModelStream(f"m{i}", rng.uniform(0.1, 1.5), rng.uniform(5, 30), i % 2)
        for i in range(8)
    )
    made = herd.plan(herd.Problem(models, 12, 5, 60.0, min_headroom=0.5))
    plan = made.best_effort if isinstance(made, Infeasible) else made
    kept(FILE, f"herd {seed}", [plan.burst_tolerance, plan.bound, plan.spare_workers])
    rates = [rng.uniform(1, 30) for _ in range(9)]
    parts = partition.plan(partition_examples.problem(rates, sub_clusters=3))
    assert not isinstance(parts, Infeasible)
    kept(FILE, f"partition {seed}", [parts.objective, parts.bound, parts.rate_spread])


@pytest.mark.parametrize("kind", ["ewma", "peak", "holt"])
def test_predicted_demand(kind):
    rng, now, rates = random.Random(7), 0.0, []
    source = (
        Holt(0.5, horizon_s=2.0)
        if kind == "holt"
        else LoadMonitor(kind, 0.5, min_arrivals=1, hold_windows=4)
    )
    for i in range(3000):
        now += rng.expovariate(80 + 60 * math.sin(i / 300))
        source.arrived(now, 1 + i % 3)
        if i % 150 == 149:
            rates.append(source.rate(now + 0.01))
    kept("planning/plans", f"demand {kind}", rates)
