"""3 models instead of 9, with Jellyfish+.

The 3 models are the fastest, a middle one and a slow one (shufflenet_v2_x0_5, efficientnet_b2,
efficientnet_v2_s). Image task, 60 workers, SLO 150 ms, constant load. The paper prints no figures,
only curves. It says that RAMSIS always has the higher accuracy.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis import systems

SOURCE = "RAMSIS Appendix E, Figure 12"
SLO_MS = 150.0
FEW = ("shufflenet_v2_x0_5", "efficientnet_b2", "efficientnet_v2_s")


def run(quick: bool, seed: int) -> list[Row]:
    points: systems.Measured = {}
    every = systems.image_task()
    for variants in (every, [v for v in every if v.name in FEW]):
        label = f"{len(variants)} models"

        def systems_at(load: float, label: str = label) -> dict[str, systems.System]:
            return {
                f"{systems.RAMSIS}, {label}": systems.ramsis(load),
                f"{systems.JELLYFISH}, {label}": systems.jellyfish(load),
            }

        points |= systems.under_load(
            systems.cluster(variants, SLO_MS / 1e3, systems.IMAGE_WORKERS),
            systems_at,
            quick=quick,
            seed=seed,
            loads=(800, 2400) if quick else systems.LOADS,
        )
    return systems.rows_of(
        f"image, SLO {SLO_MS:g} ms, {systems.IMAGE_WORKERS} workers", points, "{:g}/s"
    )


plot = partial(plot_series, x_label="load (requests/s)")
