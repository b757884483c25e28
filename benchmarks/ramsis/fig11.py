"""Batches of all waiting requests, or of any part of them.

Image task, 60 workers, SLO 150 ms, constant load. Slack has 100 steps (20 when quick). The paper
prints no figures, only curves. It says that the difference is negligible.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis.systems import image_rows, ramsis

SOURCE = "RAMSIS Appendix D, Figure 11"


def run(quick: bool, seed: int) -> list[Row]:
    steps = 20 if quick else 100
    return image_rows(
        lambda load: {
            f"{how} batching": ramsis(load, options={"batching": how, "num_slacks": steps})
            for how in ("maximal", "variable")
        },
        quick,
        seed,
        (2400,),
    )


plot = partial(plot_series, x_label="load (requests/s)")
