"""Time of a plan and of routing tables; where hardware and accuracy scaling end.

The published profiles of the traffic pipeline, 20 workers, 250 ms, no headroom. *Capacity* is the
largest demand for which there is a plan. It is given with the most accurate variants alone, at a
mean end-to-end accuracy of 13 points less, and at any accuracy. The paper's ratio of the second to
the first is 2.5×. Its times are ~500 ms for a plan and ~0.15 ms for the tables. Its absolute
demands (560 to 1765 in Figure 1) do not follow from the published profiles, so they are not shown.

The result depends on YOLOv5s. In the published table it has 89.5 % and is faster than YOLOv5m with
73.8 %, but its paths have no end-to-end accuracy. Without it, the gain is that of the paper; with
it, the gain is larger. *Any batch size* allows 1 to 64 instead of powers of two.

Plan times are over a grid of demands from 1 % of the capacity to 20 % above it. They are CPU times
of all threads, and elapsed times on the present machine. Tables are for a plan
that uses all 20 workers; their time is the shortest of several rounds.

*What tables make of plans*: means over demands between the two capacities. The rows have the
requests that tables send on paths too slow for the SLO, those without capacity, and the accuracy of
the plan. The published program only checks the paths that its own shares use, and Algorithm 1
ignores paths. Algorithm 1 also saturates accurate detectors, which find more items than the plan
assumes. `any_route` in the planner and `as_planned` in the tables correct both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from importlib.util import find_spec

from benchmarks.harness.rows import Row
from benchmarks.loki import published
from benchmarks.loki import terms as loki
from benchmarks.loki.data import CARS, FACES, traffic
from benchmarks.loki.systems import best_plan, capacities
from benchmarks.loki.terms.plans import workers_of
from ray_slo.papers.routing import most_accurate_first
from ray_slo.planning.milp import Backend

SOURCE = "Loki §4, §6.5, Figure 1"
ASKED = [
    ("capacity* · two tasks", "hardware scaling", "≥", 207.9),
    ("capacity* · two tasks", "at any accuracy", "≥", 2305),
    ("capacity* · two tasks*", "gain", "≥", 2.5),
    ("plan · two tasks, gurobi*", "median on the clock", "≤", 100),
    ("plan · two tasks, highs*", "median on the clock", "≤", 100),
    ("routing tables · two tasks*", "time", "≤", 0.15),
]
SERVERS, SLO_S = 20, 0.250
DROP = 13.0
PAPER_GAIN, PAPER_PLAN_MS, PAPER_TABLES_MS = 2.5, 500.0, 0.15
ANY = tuple(range(1, 65))


def run(quick: bool, seed: int) -> list[Row]:
    chain = _problem(traffic(), seed)
    tree = _problem(traffic((CARS, FACES)), seed)
    rows = [
        *_capacities("two tasks", chain),
        *_capacities("two tasks, no YOLOv5s", _problem(traffic(without={"yolov5s"}), seed)),
    ]
    if not quick:
        fine = replace(_problem(traffic(batch_sizes=ANY), seed), batch_sizes=ANY)
        rows += _capacities("two tasks, any batch size", fine)
        rows += _capacities("three tasks", tree)
    backends: list[Backend] = ["gurobi", "highs"] if find_spec("gurobipy") else ["highs"]
    for backend in backends:
        for name, problem in (("two tasks", chain), ("three tasks", tree)):
            if name == "two tasks" or not quick:
                rows += _times(name, replace(problem, backend=backend), 5 if quick else 25)
    rows += _routes(chain, 4 if quick else 16)
    return [*rows, *_tables("two tasks", chain, quick), *_tables("three tasks", tree, quick)]


def _problem(tasks: tuple[loki.Task, ...], seed: int) -> loki.Problem:
    return loki.Problem(tasks, demand=0.0, workers=SERVERS, slo_s=SLO_S, seed=seed)


def _capacities(case: str, problem: loki.Problem) -> list[Row]:
    label = f"capacity, {SERVERS} workers, {1000 * SLO_S:g} ms · {case}"
    problem = replace(problem, relative_gap=1e-6)
    hardware, dropped, most = capacities(problem, DROP)
    last = best_plan(replace(problem, demand=most * 0.9999)).accuracy
    return [
        Row(label, "hardware scaling", "req/s", hardware),
        Row(label, f"at a drop of {DROP:g} points", "req/s", dropped),
        Row(label, "gain", "×", dropped / hardware, PAPER_GAIN),
        Row(label, "at any accuracy", "req/s", most),
        Row(label, "accuracy at that", "%", last),
    ]


def _times(case: str, problem: loki.Problem, points: int) -> list[Row]:
    most = loki.capacity(problem)
    grid = [most * (0.01 + 1.19 * i / (points - 1)) for i in range(points)]
    best_plan(replace(problem, demand=grid[0]))  # so that imports and the licence are not timed
    clock, cpu = [], []
    for demand in grid:
        began, used = time.perf_counter(), time.process_time()
        best_plan(replace(problem, demand=demand))
        clock.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - used))
    label = f"plan · {case}, {problem.backend}, cold"
    return [
        Row(label, "median", "ms CPU", statistics.median(cpu), PAPER_PLAN_MS),
        Row(label, "largest", "ms CPU", max(cpu)),
        Row(label, "median on the clock", "ms", statistics.median(clock)),
        Row(label, "within 100 ms", "%", 100 * sum(t <= 100 for t in clock) / points),
    ]


def _routes(problem: loki.Problem, points: int) -> list[Row]:
    rows = []
    first, last = loki.capacity(problem, most_accurate=True), loki.capacity(problem)
    grid = [first + (last - first) * (i + 0.5) / points for i in range(points)]
    parents = {t.name: t.parent for t in problem.order}
    for name, any_route, as_planned in (
        ("as published", False, False),
        ("any_route", True, False),
        ("any_route, as_planned", True, True),
    ):
        slow, lost, accuracy = [], [], []
        for demand in grid:
            asked = replace(problem, demand=demand)
            plan = best_plan(asked) if any_route else published.plan(asked, any_route=False)[0]
            workers = {w.id: w for w in workers_of(asked, plan, as_planned=as_planned)}
            made = most_accurate_first(parents, workers.values(), demand)
            sent = late = 0.0
            for sender, tables in made.tables.items():
                for entry in tables.get(CARS, ()):
                    routed = made.incoming[sender] * workers[sender].factors[CARS]
                    sent += routed * entry.probability
                    path_s = workers[sender].execution_s + workers[entry.worker].execution_s
                    if asked.waiting_factor * path_s > SLO_S + 1e-9:
                        late += routed * entry.probability
            slow.append(100 * late / sent)
            lost.append(100 * made.unrouted[CARS] / (sent + made.unrouted[CARS]))
            accuracy.append(plan.accuracy)
        label = f"what tables make of plans · {name}"
        rows += [
            Row(label, "on paths too slow", "%", statistics.mean(slow)),
            Row(label, "without capacity", "%", statistics.mean(lost)),
            Row(label, "accuracy of the plan", "%", statistics.mean(accuracy)),
        ]
    return rows


def _tables(case: str, problem: loki.Problem, quick: bool) -> list[Row]:
    most = loki.capacity(problem)
    demand = next(
        d
        for d in (most * x for x in (0.5, 0.6, 0.7, 0.8, 0.9, 0.999))
        if best_plan(replace(problem, demand=d)).workers == SERVERS
    )
    problem = replace(problem, demand=demand)
    workers = workers_of(problem, best_plan(problem))
    parents = {t.name: t.parent for t in problem.order}
    rounds, best = 200 if quick else 1000, float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            most_accurate_first(parents, workers, demand)
        best = min(best, 1e3 * (time.perf_counter() - began) / rounds)
    label = f"routing tables · {case}, {len(workers)} workers"
    return [Row(label, "time", "ms", best, PAPER_TABLES_MS)]
