"""Model zoos of the papers, as in `load("symphony_a100")`. `README.md` names their sources."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ray_slo.core import LatencyProfile, Model, Variant

ZOOS = ("symphony_1080ti", "symphony_a100", "shepherd_v100")


@dataclass(frozen=True)
class ZooModel:
    """One line of a zoo: ℓ(b) = alpha_ms · b + beta_ms.

    Attributes:
        slo_ms: latency SLO, if the paper gives one per model.
        exit_points: number of places at which a running batch can be preempted, if known.
    """

    name: str
    alpha_ms: float
    beta_ms: float
    slo_ms: float | None = None
    exit_points: int | None = None

    @property
    def batching_effect(self) -> float:
        """β/α: how much a larger batch saves."""
        return self.beta_ms / self.alpha_ms

    def model(
        self,
        *,
        name: str | None = None,
        slo_ms: float | None = None,
        hardware: str = "default",
        max_batch_size: int = 128,
    ) -> Model:
        """Return a model with one variant, both named `name` (by default as in the zoo).

        Raises:
            ValueError: neither the zoo nor the caller gives an SLO.
        """
        name, slo_ms = name or self.name, slo_ms or self.slo_ms
        if slo_ms is None:
            raise ValueError(f"slo_ms is needed: the zoo has none for {self.name!r}")
        profile = LatencyProfile.linear(self.alpha_ms / 1e3, self.beta_ms / 1e3, max_batch_size)
        return Model(name, slo_ms / 1e3, (Variant(name, {hardware: profile}),))


def load(zoo: str) -> dict[str, ZooModel]:
    """Return the models of a zoo by name, in the paper's order.

    Raises:
        ValueError: there is no zoo of this name.
    """
    if zoo not in ZOOS:
        raise ValueError(f"zoo must be one of {', '.join(ZOOS)}, got {zoo!r}")
    with (Path(__file__).parent / f"{zoo}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["model"]: ZooModel(
            row["model"],
            float(row["alpha_ms"]),
            float(row["beta_ms"]),
            float(row["slo_ms"]) if "slo_ms" in row else None,
            int(row["exit_points"]) if "exit_points" in row else None,
        )
        for row in rows
    }
