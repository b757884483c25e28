"""Time of a HERD plan up to a million streams, its gap, and the ILP by each solver.

As in the paper, there are ten serving groups and one worker per model. We chose what the paper
leaves open so that the problem is hard enough. Rates are heavy-tailed (log-normal, σ = 2), the
average load is 70 % of the cluster, and memory is 90 % full. α and β are those of Table 4 with 20 %
spread. "Four affinity sets": dissimilar models may not share a group. "Groups of 12": the limit of
§7.1. Both may use more groups. The last case is small enough for the ILP itself, by every solver
that is installed. Times are CPU seconds of the process on one core of the present machine. The
paper's are those of a commercial solver on its own machine.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.zoos import load
from ray_slo.papers import herd
from ray_slo.planning.milp import Backend

SOURCE = "SHEPHERD §4, Table 5"
ASKED = [("1,000,000 streams*", "solve", "≤", 13)]
PAPER_S = {200: 0.55, 400: 2.51, 600: 4.28, 800: 8.53, 1000: 13.26}
MAX_BATCH = 128
GROUPS = 10


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for size in (200, 1000) if quick else sorted(PAPER_S):
        rows += _case(f"{1000 * size:,} streams, {size} models and workers", size, seed)
    rows += _case("1,000,000 streams · four affinity sets", 1000, seed, sets=4)
    rows += _case("1,000,000 streams · groups of 12", 1000, seed, limit=12)
    return rows + _solvers(seed)


def instance(
    size: int, seed: int, sets: int = 1, limit: int | None = None
) -> tuple[herd.Problem, float]:
    """Return a problem of `size` models and workers with 1000 · size streams.

    Also returns the CPU seconds that the aggregation of the streams took.
    """
    rng = np.random.default_rng(seed)
    zoo = np.array([(m.alpha_ms, m.beta_ms) for m in load("shepherd_v100").values()])
    alpha, beta = (zoo[np.arange(size) % len(zoo)] * rng.uniform(0.8, 1.2, (size, 1))).T / 1000
    throughput = MAX_BATCH / (MAX_BATCH * alpha + beta)
    model = rng.permutation(np.arange(1000 * size) % size)  # round robin, as in §7
    rates = rng.lognormal(0.0, 2.0, 1000 * size)
    began = time.process_time()
    loads = np.bincount(model, rates, size) / throughput
    took = time.process_time() - began
    loads *= 0.7 * size / loads.sum()
    memory = rng.uniform(16, 550, size)  # MB, MobileNet to VGG
    kinds = np.argsort(np.argsort(alpha * MAX_BATCH + beta)) * sets // size
    models = tuple(
        herd.ModelStream(f"m{k}", float(loads[k]), float(memory[k]), int(kinds[k]))
        for k in range(size)
    )
    groups = GROUPS if limit is None else size // limit
    return (
        herd.Problem(
            models,
            workers=size,
            group_worker_limit=limit or size // GROUPS,
            memory_mb=float(memory.sum()) / groups / 0.9,
            max_groups=GROUPS if limit is None and sets == 1 else None,
        ),
        took,
    )


def _case(case: str, size: int, seed: int, **options: Any) -> list[Row]:
    problem, aggregation = instance(size, seed, **options)
    began = time.process_time()
    plan = herd.plan(problem)
    took = time.process_time() - began
    assert isinstance(plan, herd.Plan), plan.reason
    plain = not options
    return [
        Row(case, "aggregate", "ms", 1000 * aggregation),
        Row(case, "solve", "s", took, PAPER_S[size] if plain else None),
        Row(case, "burst tolerance", "×", plan.burst_tolerance),
        Row(case, "gap at most", "%", 100 * plan.gap),
        Row(case, "least headroom", "×", plan.headroom),
        Row(case, "groups", "", len(plan.groups)),
    ]


def _solvers(seed: int) -> list[Row]:
    """Solve 10 models, 20 workers and 3 groups, by the ILP (Eq. 2) with each solver and by ours."""
    rng = np.random.default_rng(seed)
    loads, memory = rng.lognormal(0, 1, 10), rng.uniform(16, 550, 10)
    loads *= 0.7 * 20 / loads.sum()
    problem = herd.Problem(
        tuple(herd.ModelStream(f"m{k}", loads[k], memory[k]) for k in range(10)),
        workers=20,
        group_worker_limit=8,
        memory_mb=float(memory.sum()) / 3 / 0.85,
        max_groups=3,
    )
    backends: list[Backend] = ["highs"]
    if find_spec("gurobipy"):
        backends.append("gurobi")
    rows = []
    for backend in backends:
        milp, _, _ = herd.program(problem)
        began = time.perf_counter()  # HiGHS and Gurobi run threads of their own
        solution = milp.solve(backend)
        took = time.perf_counter() - began
        rows += _exact(f"10 models, 20 workers, 3 groups · the ILP by {backend}",
                       took, solution.objective)  # fmt: skip
    began = time.perf_counter()
    plan = herd.plan(problem)
    took = time.perf_counter() - began
    assert isinstance(plan, herd.Plan), plan.reason
    return rows + _exact(
        "10 models, 20 workers, 3 groups · the planner", took, plan.burst_tolerance
    )


def _exact(case: str, took: float, tolerance: float) -> list[Row]:
    return [
        Row(case, "solve (wall)", "s", took),
        Row(case, "least burst tolerance", "×", tolerance),
    ]
