"""How finely slack is told apart.

Tables that know the slack in 2, 10 or 100 steps (FLD) and by every latency that occurs (MD), on the
image task: 60 workers, SLO 150 ms, constant load. The paper prints no figures beside its curves; it
says that more steps are better, with diminishing returns, and that 100 are as good as MD.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis.systems import (
    IMAGE_WORKERS,
    LOADS,
    cluster,
    image_task,
    ramsis,
    rows_of,
    under_load,
)

SOURCE = "RAMSIS Appendix C, Figure 10"
SLO_MS = 150.0
STEPS = {
    "FLD, D = 2": {"num_slacks": 2},
    "FLD, D = 10": {"num_slacks": 10},
    "FLD, D = 100": {"num_slacks": 100},
    "MD": {"discretization": "model_based"},
}


def run(quick: bool, seed: int) -> list[Row]:
    points = under_load(
        cluster(image_task(), SLO_MS / 1e3, IMAGE_WORKERS),
        lambda load: {name: ramsis(load, options=options) for name, options in STEPS.items()},
        quick=quick,
        seed=seed,
        loads=(800, 2400) if quick else LOADS,
    )
    return rows_of(f"image, SLO {SLO_MS:g} ms, {IMAGE_WORKERS} workers", points, "{:g}/s")


plot = partial(plot_series, x_label="load (requests/s)")
