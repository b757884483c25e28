"""Time of the planner `auto`, and whether it finds what Loki's finds on Loki's problems.

*Three kinds, two trees, nine variants*: a pipeline of a detector and a classifier, and a single
model with two SLO classes. Each model has three variants. The three kinds of workers have prices
and memory. Demand goes from little to more than half of what all workers can serve. With `headroom`
(room for bursts), a plan solves several mixed-integer programs. *Warm* plans start from the
previous plan, for a demand that was 3 % lower.

*Loki's problems*: the published traffic pipeline on 20 workers of one kind, with one variant per
worker and without headroom, as Loki plans. Both planners solve the same problems, one after the
other. Times are CPU times of all threads. *Equal*: share of the problems with the same result. The
step must be the same, and the share of the demand. With hardware scaling the number of workers must
be the same, else the accuracy (within the solver's gap).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.loki import terms as loki
from benchmarks.loki.data import CARS, FACES, traffic
from benchmarks.loki.published import plan
from benchmarks.loki.systems import best_plan
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.result import Infeasible

SOURCE = "Loki §4, ray-slo"
ASKED = [
    ("3 kinds*cold", "median", "≤", 200),
    ("3 kinds*warm", "median", "≤", 50),
    ("Loki*", "equal", "≥", 100),
]
CLOSE = 1e-3  # tolerance of shares; also of accuracies, as shares of 1


def run(quick: bool, seed: int) -> list[Row]:
    points = 6 if quick else 40
    rows = _times("3 kinds × 2 trees × 9 variants", _mixed(seed), points)
    for name, children in (("two tasks", (CARS,)), ("three tasks", (CARS, FACES))):
        problem = loki.Problem(
            traffic(children), demand=0.0, workers=20, slo_s=0.25, fits_alone=False, seed=seed
        )
        if name == "two tasks" or not quick:
            rows += _against_loki(name, replace(problem, backend="highs"), 5 if quick else 25)
    return rows


def _mixed(seed: int) -> auto.Problem:
    """Return a problem whose kinds differ in speed, and in the price of this speed."""
    speeds = {"large": 1.0, "medium": 2.2, "small": 5.0}
    models = []
    for name, base_ms in (("detect", 4.0), ("classify", 2.0), ("rank", 3.0)):
        variants = []
        for size, factor, accuracy in (("l", 3.0, 96.0), ("m", 1.7, 90.0), ("s", 1.0, 81.0)):
            profiles = {
                kind: LatencyProfile.linear(
                    base_ms * factor * s / 1e3, 1.5 * base_ms * factor * s / 1e3, 64
                )
                for kind, s in speeds.items()
            }
            memory = dict.fromkeys(speeds, 700.0 * factor)
            variants.append(auto.Variant(f"{name}-{size}", accuracy, profiles, memory))
        models.append(auto.Model(name, tuple(variants)))
    found = {f"detect-{size}": {"classify": n} for size, n in (("l", 3.0), ("m", 2.5), ("s", 2.0))}
    scene = Tree(
        "scene",
        (TreeTask("detect", "detect", None, found), TreeTask("classify", "classify", "detect")),
        {"": 0.3},
    )
    return auto.Problem(
        tuple(models),
        (scene, Tree.of_model("rank", {"": 0.25, "gold": 0.1})),
        {"scene": auto.Demand(60.0), "rank": auto.Demand(80.0), "rank@gold": auto.Demand(30.0)},
        (
            auto.Kind("large", 0, 6, 3.0, 8000.0),
            auto.Kind("medium", 0, 8, 1.2, 4000.0),
            auto.Kind("small", 1, 12, 0.4, 4000.0),
        ),
        backend="highs",
        seed=seed,
    )


def _scaled(problem: auto.Problem, by: float) -> auto.Problem:
    demand = {s: replace(d, rate=by * d.rate) for s, d in problem.demand.items()}
    return replace(problem, demand=demand)


def _best(made: Any) -> Any:
    return made.best_effort if isinstance(made, Infeasible) else made


def _times(case: str, problem: auto.Problem, points: int) -> list[Row]:
    grid = [0.25 * 1.5**i for i in range(6)]
    grid = [grid[0] * (grid[-1] / grid[0]) ** (i / (points - 1)) for i in range(points)]
    _best(auto.plan(problem))  # so that imports are not timed
    rows = []
    for name, headroom in (("", True), (", no headroom", False)):
        asked = [_scaled(replace(problem, headroom=headroom), by) for by in grid]
        cold = [_timed(auto.plan, one) for one in asked]
        warm = [
            _timed(auto.plan, _scaled(one, 1.03), _best(last))
            for one, (_, last) in zip(asked, cold, strict=True)
        ]
        rows += _rows(f"{case}{name}, cold", [used for used, _ in cold])
        rows += _rows(f"{case}{name}, warm", [used for used, _ in warm])
    return rows


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Return the CPU time of a call in all threads, in ms, and its result."""
    began = time.process_time()
    made = call(*args)
    return 1e3 * (time.process_time() - began), made


def _rows(case: str, used: Iterable[float]) -> list[Row]:
    times = sorted(used)
    return [
        Row(case, "median", "ms CPU", statistics.median(times)),
        Row(case, "largest", "ms CPU", times[-1]),
    ]


def _against_loki(case: str, problem: loki.Problem, points: int) -> list[Row]:
    most = loki.capacity(problem)
    ours, theirs, equal = [], [], []
    for i in range(points):
        asked = replace(problem, demand=most * (0.02 + 1.18 * i / (points - 1)))
        used, made = _timed(best_plan, asked)
        ours.append(used)
        used, (published, _) = _timed(plan, asked)
        theirs.append(used)
        equal.append(_same(made, published))
    label = f"Loki's problems · {case}"
    return [
        Row(label, "equal", "%", 100 * statistics.mean(equal)),
        Row(
            label,
            "median",
            "ms CPU",
            statistics.median(ours),
            None,
            {"loki": statistics.median(theirs)},
        ),
        Row(label, "largest", "ms CPU", max(ours), None, {"loki": max(theirs)}),
        Row(label, "time over loki's", "×", statistics.median(ours) / statistics.median(theirs)),
    ]


def _same(ours: loki.Plan, theirs: loki.Plan) -> bool:
    if ours.step != theirs.step or abs(ours.shed_share - theirs.shed_share) > CLOSE:
        return False
    if ours.step == "hardware":
        return ours.workers == theirs.workers
    return abs(ours.accuracy - theirs.accuracy) <= 100 * CLOSE
