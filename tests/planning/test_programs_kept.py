"""The programs that planners hand to a solver are what they were when this was recorded.

A plan may be the same although its program changed: another plan is as good, or a limit does not
bind. So these tests compare the programs: every cell, bound, cost and label.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto, herd, loki, partition
from ray_slo.planning.auto import Demand, Hosted, Kind
from ray_slo.planning.auto.groups import choose
from ray_slo.planning.auto.limits import Limits, Room
from ray_slo.planning.auto.problem import Size
from ray_slo.planning.auto.program import Program
from ray_slo.planning.auto.sizes import by_size
from ray_slo.planning.loki.program import Program as LokiProgram
from ray_slo.planning.milp import Milp, Solution
from tests.kept import condensed, kept
from tests.planning.auto.cases import linear, photo, variant
from tests.planning.examples import loki as loki_examples
from tests.planning.examples import partition as partition_examples

FILE = "planning/programs"


def written(m):
    program = m._program(())
    matrix = program.matrix
    return {
        "blocks": condensed([list(m.blocks), list(m.labels), program.maximise]),
        "cost": condensed(program.cost),
        "matrix": condensed([matrix.indptr, matrix.indices, matrix.data]),
        "rows": condensed([program.row_lower, program.row_upper]),
        "variables": condensed([program.lower, program.upper, program.integer]),
    }


@pytest.fixture
def programs(monkeypatch):
    """Programs that were solved, as they are written."""
    found = []

    def not_found(self, *args, **kwargs):
        found.append(written(self) | {"arguments": condensed([list(args), kwargs])})
        return Solution("unknown", math.nan, math.nan, np.zeros(0))

    monkeypatch.setattr(Milp, "solve", not_found)
    return found


def given(count):
    """Values of variables that no solver found, from 0 to 1."""
    return (np.arange(count) * 0.37) % 1.0


SMALL = {"memory_mb": 100.0}
CURRENT = (
    Hosted("a", "gpu", frozenset({"d-l"})),
    Hosted("b", "gpu", frozenset({"n-s", "n-l"})),
    Hosted("c", "cpu"),
)


def with_memory(problem):
    models = tuple(
        replace(
            m,
            items=1.5,
            variants=tuple(
                replace(v, memory_mb=dict.fromkeys(v.profiles, 30.0 + 15 * i))
                for i, v in enumerate(m.variants)
            ),
        )
        for m in problem.models
    )
    return replace(problem, models=models)


def three_deep():
    """A chain of three tasks and a second branch, so that budgets are chosen for each task."""
    problem = photo()
    models = (
        *problem.models,
        auto.Model("ocr", (variant("o", 97.0, gpu=linear(2, 4), cpu=linear(9, 9)),)),
    )
    tasks = (
        TreeTask("detect", "detect", None, {"d-l": {"name": 3.0}, "d-s": {"name": 2.0}}),
        TreeTask("name", "name", "detect", {"n-l": {"ocr": 0.5}}),
        TreeTask("ocr", "ocr", "name"),
        TreeTask("again", "name", "detect"),
    )
    deep = Tree("photo", tasks, {"": 0.4, "gold": 0.25})
    demand = {"photo": Demand(7.0), "photo@gold": Demand(3.0, 2.0)}
    return replace(problem, models=models, trees=(deep,), demand=demand)


def sized():
    problem = photo()
    sizes = (Size(2, 1.5, 0.75), Size(6, 4.0, 0.25))
    models = tuple(replace(m, sizes=sizes, items=2.125) for m in problem.models)
    return by_size(replace(problem, models=models, batch_sizes=(1, 2, 3, 8)))


PROBLEMS = {
    "plain": photo(),
    "one variant on a worker": photo(sharing=False),
    "floor": photo(accuracy_floor=78.0),
    "cost": photo(objective="cost", accuracy_floor=70.0, budget_per_hour=9.0),
    "budget": photo(budget_per_hour=5.5, communication_s=0.002, waiting_factor=1.5),
    "memory": with_memory(
        photo(kinds=(Kind("gpu", 1, 4, 2.0, 100.0), Kind("cpu", 0, 8, 0.5, 70.0)))
    ),
    "free": photo(kinds=(Kind("gpu", 1, 4), Kind("cpu", 2, 8))),
    "present": photo(present={"gpu": 2, "cpu": 3}, swap_cost=0.25),
    "current": photo(current=CURRENT, swap_cost=0.5, max_swaps=2),
    "spot": photo(
        kinds=(Kind("gpu", 0, 4, 2.0, interruptions_per_hour=2.0), Kind("cpu", 0, 8, 0.5))
    ),
    "batches": photo(batch_sizes=(1, 3, 5, 48, 64, 200)),
    "deep": three_deep(),
    "sizes": sized(),
    "too slow": photo(communication_s=0.03),
    "unused kind": photo(kinds=(Kind("gpu", 0, 4, 2.0), Kind("cpu", 0, 0, 0.5))),
}
LIMITS = {
    "no limits": Limits(),
    "limits": Limits(
        rooms={
            ("", "gpu"): Room(0.9, 0.25),
            ("", "cpu"): Room(0.75, 0.5),
            ("d-l", "gpu"): Room(0.8),
        },
        workers={"gpu": 2},
        memory={"gpu": 0.85},
        longest_s={"cpu": 0.05},
        least={"gpu": 1, "cpu": 2},
        mixed=frozenset({"cpu"}),
    ),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_auto(name, limits):
    problem = PROBLEMS[name]
    served = {stream: 0.5 + 0.1 * i for i, stream in enumerate(problem.streams)}
    found = {}
    for objective, most_accurate in itertools.product(
        ("cost", "accuracy", "share", "value"), (False, True)
    ):
        program = Program(problem, most_accurate, LIMITS[limits])
        m = program.program(objective, served if objective == "accuracy" else None)
        found[f"{objective}, {most_accurate}"] = condensed(written(m))
    kept(FILE, f"auto, {name}, {limits}", found)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_graph_of_auto(name, limits):
    program = Program(PROBLEMS[name], limits=LIMITS[limits])
    g = program.graph
    tree_of = program.problem.tree_of
    found = {
        "configs": [[list(c.__dict__.values())[:6], str(c.size)] for c in g.configs],
        "paths": {
            tree.name: [
                [list(p.__dict__.values()), g.accuracy(tree, p)] for p in g.paths[tree.name]
            ]
            for tree in program.problem.trees
        },
        "nodes": {
            "/".join(node): [list(of.configs), of.paths, of.most, g.throughput(node)]
            for node, of in g.nodes.items()
        },
        "streams": [g.streams, g.too_slow, g.excluded, g.splits],
        "times": {s: [g.least_s(s), g.rest_s(tree_of(s), g.least_s(s))] for s in g.streams},
        "pairs": [program.pairs, program.most, program.bounds(), program.weight],
        "crowded": [program.crowded(kind.name) for kind in program.problem.kinds],
    }
    kept(FILE, f"graph, {name}, {limits}", {key: condensed(one) for key, one in found.items()})


def grouped(**kwargs):
    problem = with_memory(photo())
    alone = auto.Model(
        "ocr",
        (
            variant("o-l", 97.0, 20.0, gpu=linear(2, 4), cpu=linear(9, 9), spot=linear(5, 5)),
            variant("o-s", 90.0, 10.0, gpu=linear(1, 2), cpu=linear(4, 4)),
        ),
    )
    listed = auto.Model("listed", (variant("x", 80.0, 60.0, gpu=linear(3, 3), cpu=linear(8, 9)),))
    kinds = (
        Kind("gpu", 0, 3, 2.0, 100.0, group="large"),
        Kind("cpu", 0, 8, 0.5, 70.0, group="small"),
        Kind("spot", 0, 2, 0.25, 50.0, group="small"),
    )
    trees = (
        *problem.trees,
        Tree.of_model("ocr", {"": 0.1, "slow": 0.5}),
        Tree.of_model("listed", {"": 0.2}),
    )
    demand = {**problem.demand, "ocr": Demand(55.0), "ocr@slow": Demand(5.0), "listed": Demand(9.0)}
    given = {
        "models": (*problem.models, alone, listed),
        "trees": trees,
        "demand": demand,
        "kinds": kinds,
        "group_of": {"listed": "small"},
    }
    return replace(problem, **{**given, **kwargs})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": "cost", "accuracy_floor": 88.0},
        {"budget_per_hour": 4.0},
        {"group_now": {"detect": "large", "name": "large", "ocr": "small"}, "move_cost": 2.0},
        {"allowed_groups": {"name": ("small",)}, "present": {"gpu": 1, "cpu": 4}},
        {"demand": {"ocr": Demand(900.0)}, "communication_s": 0.01},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_groups_of_auto(programs, changes):
    chosen = choose(grouped(**changes))
    assert len(programs) == 1
    kept(FILE, f"groups, {' '.join(changes)}", [chosen, *programs])


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"any_route": True},
        {"any_route": True, "accuracy_floor": 85.0},
        {"current": {("detect", "d-large"): 1, ("classify", "c-small"): 2}, "swap_cost": 0.5},
        {"current": {("detect", "d-small"): 1}, "max_swaps": 1, "workers": 6},
    ],
    ids=str,
)
def test_loki(shape, changes):
    problem = replace(getattr(loki_examples, shape)(), **changes)
    program = LokiProgram(problem)
    found = {}
    for step, served in (("hardware", 1.0), ("accuracy", 0.75), ("share", 1.0)):
        m, x, c = program.program(step, served)
        program.x, program.c = x, c
        found[step] = condensed(written(m))
        made = program.plan(step, Solution("feasible", 2.0, 2.5, 3 * given(m.size)))
        found[f"{step}, plan"] = condensed(made)
    kept(FILE, f"loki {shape}, {changes}", found)


HERD = tuple(
    herd.ModelStream(f"m{i}", load, memory, kind)
    for i, (load, memory, kind) in enumerate(
        [(0.5, 10, 0), (1.25, 20, 1), (0.0, 5, 0), (2.0, 40, 3), (0.75, 30, 1)]
    )
)


@pytest.mark.parametrize(
    "changes", [{}, {"max_groups": 2, "min_headroom": 1.5}, {"max_groups": 1}], ids=str
)
def test_herd(changes):
    m, x, size = herd.program(herd.Problem(HERD, 7, 4, 60.0, **changes))
    kept(FILE, f"herd, {changes}", written(m) | {"which": condensed([x, size])})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sub_clusters": 3, "memory_weight": 0.5},
        {"current": (0, -1, 1, 0), "max_change_cost": 3.0, "change_cost": (1.0, 2.0, 1.5, 4.0)},
        {"max_rate": 20.0, "max_memory_mb": 50.0},
    ],
    ids=str,
)
def test_partition(changes):
    problem = partition_examples.problem([5, 8, 2, 11], [4, 8, 12, 16], [1, 0, 2, 3], **changes)
    m, x = partition.program(problem)
    kept(FILE, f"partition, {changes}", written(m) | {"which": condensed(x)})


def test_loki_of_a_solver_that_finds_nothing(programs):
    found = loki.plan(loki_examples.chain())
    kept(FILE, "loki, nothing", [condensed(found), *map(condensed, programs)])
