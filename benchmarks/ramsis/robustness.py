"""Price and RAMSIS where latencies vary, profiles err or arrivals come in bursts.

Image task, 60 workers, SLO 150 ms. Policies have the published profiles. The workers differ:

* *exact*: they have the same profiles, as in the paper's own simulation.
* *varies by 5 %* and *by 10 %*: every batch takes its profile times a log-normal factor with this
  standard deviation and median 1. So half of them take longer.
* *10 % slower* and *10 % quicker*: every batch does.
* *bursty*: they have the same profiles, but arrivals are Gamma with shape 0.3. RAMSIS keeps its
  Poisson tables.

`price` has one setting for all of these. It multiplies its predictions by the 99th percentile of
the measured ratio of actual to predicted times. RAMSIS has only a constant `margin_ms`, which is
subtracted from the slack when its tables are solved and looked up. It is 0, or 15 ms; with 15 ms,
at 10 % variation, at most 0.3 % are late (`price`: 0.4 %). RAMSIS is told the load. It drops
requests that would be late, as `price` does. `price` learns in the first second or so, which also
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row, series
from benchmarks.ramsis import systems
from ray_slo.core import Cluster, Variant

SOURCE = "ray-slo, RAMSIS §7.2"
LOADS = (800, 1600, 2800)
MARGIN_MS = 15.0


def run(quick: bool, seed: int) -> list[Row]:
    variants = systems.image_task()
    here = systems.cluster(variants, 0.15, systems.IMAGE_WORKERS)
    worlds: dict[str, tuple[float, dict[str, Any]]] = {
        "exact": (1.0, {}),
        "varies by 5 %": (1.0, {"latency_noise": 0.05}),
        "varies by 10 %": (1.0, {"latency_noise": 0.1}),
        "10 % slower": (1.0, {"truth": _scaled(variants, 1.1)}),
        "10 % quicker": (1.0, {"truth": _scaled(variants, 0.9)}),
        "bursty": (0.3, {}),
    }
    loads = (1600,) if quick else LOADS
    if quick:
        worlds = {name: worlds[name] for name in ("exact", "varies by 10 %", "bursty")}
    rows: list[Row] = []
    for world, (shape, options) in worlds.items():
        points = systems.under_load(
            *(here, _systems),
            quick=quick,
            seed=seed,
            loads=loads,
            shape=shape,
            seconds=10.0,
            **options,
        )
        for what, key, factor in (("accuracy", "accuracy", 1), ("late", "violation_rate", 100)):
            found = {n: {x: factor * p[key] for x, p in of_x.items()} for n, of_x in points.items()}
            rows += series(world, found, f"{what} at {{}}/s", "%")
    return rows


def _systems(load: float) -> dict[str, systems.System]:
    known = {"load_rps": load, "arrivals": "poisson"}
    return {
        "price": ("price", {}),
        "ramsis": ("ramsis", known),
        f"ramsis, margin {MARGIN_MS:g} ms": ("ramsis", {**known, "margin_ms": MARGIN_MS}),
    }


def _scaled(variants: Sequence[Variant], factor: float) -> Cluster:
    slower = [
        Variant(v.name, {systems.HARDWARE: v.profiles[systems.HARDWARE].scaled(factor)}, v.accuracy)
        for v in variants
    ]
    return systems.cluster(slower, 0.15, systems.IMAGE_WORKERS)


plot = partial(plot_series, x_label="load (requests/s)")
