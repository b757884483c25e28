"""Accuracy by the resolution of slack in RAMSIS tables.

The tables have 2, 10 or 100 steps of slack (FLD), or every latency that occurs (MD). Image task, 60
workers, SLO 150 ms, constant load. The paper prints no figures, only curves. It says that more
steps are better, with diminishing returns, and that 100 steps are as good as MD.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis.systems import image_rows, ramsis

SOURCE = "RAMSIS Appendix C, Figure 10"
STEPS = {
    "FLD, D = 2": {"num_slacks": 2},
    "FLD, D = 10": {"num_slacks": 10},
    "FLD, D = 100": {"num_slacks": 100},
    "MD": {"discretization": "model_based"},
}


def run(quick: bool, seed: int) -> list[Row]:
    return image_rows(
        lambda load: {name: ramsis(load, options=options) for name, options in STEPS.items()},
        quick,
        seed,
    )


plot = partial(plot_series, x_label="load (requests/s)")
