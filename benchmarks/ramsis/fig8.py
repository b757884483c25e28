"""9 models against 60, with ModelSwitching.

100 workers, constant load. The 51 additional models are interpolated between neighbours on the
front, every half percent of accuracy. With them, ModelSwitching can pick a model that just suits
the load. RAMSIS mixes models anyway, and gains almost nothing. Image task, SLO 150 ms. The paper
prints no figures, only curves.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis import systems

SOURCE = "RAMSIS §7.3.2, Figure 8"
WORKERS, SLO_MS = 100, 150.0


def run(quick: bool, seed: int) -> list[Row]:
    points: systems.Measured = {}
    loads = (2400,) if quick else systems.LOADS
    few = systems.image_task()
    for variants in (few, systems.interpolated(few)):
        here = systems.cluster(variants, SLO_MS / 1e3, WORKERS)
        limits = systems.switching_limits(here, quick=quick, loads=loads, slos=100.0)
        label = f"{len(variants)} models"

        def systems_at(
            load: float, limits: dict[str, float] = limits, label: str = label
        ) -> dict[str, systems.System]:
            return {
                f"{systems.RAMSIS}, {label}": systems.ramsis(load),
                f"{systems.SWITCHING}, {label}": systems.switching(limits, load),
            }

        points |= systems.under_load(here, systems_at, quick=quick, seed=seed, loads=loads)
    return systems.rows_of(f"image, SLO {SLO_MS:g} ms, {WORKERS} workers", points, "{:g}/s")


plot = partial(plot_series, x_label="load (requests/s)")
