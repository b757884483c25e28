"""All that waits in one batch, or any part of it.

Image task, 60 workers, SLO 150 ms, constant load; slack in 100 steps (20 when quick). The paper
prints no figures beside its curves; it says that the difference is negligible.
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

SOURCE = "RAMSIS Appendix D, Figure 11"
SLO_MS = 150.0


def run(quick: bool, seed: int) -> list[Row]:
    steps = 20 if quick else 100
    points = under_load(
        cluster(image_task(), SLO_MS / 1e3, IMAGE_WORKERS),
        lambda load: {
            f"{batching} batching": ramsis(
                load, options={"batching": batching, "num_slacks": steps}
            )
            for batching in ("maximal", "variable")
        },
        quick=quick,
        seed=seed,
        loads=(2400,) if quick else LOADS,
    )
    return rows_of(f"image, SLO {SLO_MS:g} ms, {IMAGE_WORKERS} workers", points, "{:g}/s")


plot = partial(plot_series, x_label="load (requests/s)")
