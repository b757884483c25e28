"""CPU time to solve one table, by discretisation, batching and number of models.

Image task, 60 workers, SLO 500 ms (batches of up to 29, as in the paper), 2000 requests/s, N = 32.
The solver stops when no state improves by more than 1e-6 percent points. The 60 models include
synthetic ones on the lines between the 9 (§7.3.2). "Expected": accuracy of requests in time,
according to the solver.

The quick run leaves out variable batching. 60 models with variable batching are always left out,
because they need more memory than a workstation has. The paper has timeouts of 24 hours there.
"""

from __future__ import annotations

import time

from benchmarks.harness.rows import Row
from benchmarks.ramsis.systems import HARDWARE, image_task, interpolated
from ray_slo.papers.ramsis import Problem, solve
from ray_slo.papers.ramsis.problem import Batching, Discretization

SOURCE = "RAMSIS Table 2"
SLO_S, WORKERS, RATE = 0.5, 60, 2000.0

# (models, discretisation, D, batching): seconds in the paper; None: more than 24 hours
PAPER: dict[tuple[int, Discretization, int, Batching], float | None] = {
    (9, "fld", 10, "maximal"): 14.62,
    (9, "fld", 100, "maximal"): 132.20,
    (9, "model_based", 100, "maximal"): 115.50,
    (9, "fld", 100, "variable"): 3014.89,
    (9, "model_based", 100, "variable"): 3693.53,
    (60, "fld", 10, "maximal"): 148.87,
    (60, "fld", 100, "maximal"): 1355.09,
    (60, "model_based", 100, "maximal"): None,
}


def run(quick: bool, seed: int) -> list[Row]:
    front = image_task()
    sets = {9: front, 60: interpolated(front)}
    rows: list[Row] = []
    for (count, discretization, slacks, batching), paper in PAPER.items():
        if quick and (batching == "variable" or (count, discretization) == (60, "model_based")):
            continue
        variants = [(v.name, v.accuracy or 0.0, v.profiles[HARDWARE]) for v in sets[count]]
        problem = Problem(
            tuple(variants),
            slo_s=SLO_S,
            rate=RATE,
            num_workers=WORKERS,
            discretization=discretization,
            num_slacks=slacks,
            max_queue=32,
            batching=batching,
            pareto=False,  # both sets are fronts already
        )
        started = time.process_time()
        table = solve(problem)
        seconds = time.process_time() - started
        name = f"FLD, D = {slacks}" if discretization == "fld" else "model-based"
        case = f"{count} models · {name}, {batching} batching"
        rows += [
            Row(case, "time", "CPU-s", seconds, paper),
            Row(case, "slacks", "", len(table.slacks_s)),
            Row(case, "improvements", "", table.improvements),
            Row(case, "expected", "%", table.expected_accuracy),
        ]
    return rows
