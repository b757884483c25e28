"""The document (YAML) that `ray-slo solve` reads: a problem and its loads.

latency_slo_ms: 150
num_workers: 60
variants:
  small: {accuracy: 69.8, profile: {alpha_ms: 8, beta_ms: 12, max_batch_size: 32}}
  large: {accuracy: 80.9, profile: {file: profiles.json}}      # of `ray-slo profile`
loads: {low: 400, high: 3600, step_accuracy: 1}                 # or {rates: [400, 800]}
arrivals: {kind: poisson}                      # or {kind: gamma, shape: 0.3}
late: serve                                    # and the other fields of `Problem`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ray_slo.core.documents import Frozen, ProfileSpec, SloMs
from ray_slo.core.explain import Misplaced, placed
from ray_slo.planning.ramsis.arrivals import ArrivalsSpec, PoissonSpec
from ray_slo.planning.ramsis.problem import (
    Balancing,
    Batching,
    Discretization,
    Late,
    Objective,
    Problem,
)


class VariantSpec(Frozen):
    """A variant: accuracy in percent, and its latency profile."""

    accuracy: Annotated[float, Field(ge=0, le=100)]
    profile: ProfileSpec


class LoadsSpec(Frozen):
    """Requests per second, whole pool: those named, or from low to high in steps of accuracy."""

    rates: list[PositiveFloat] = Field(default_factory=list)
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    step_accuracy: PositiveFloat = 1.0


class SolveSpec(Frozen):
    """A problem without its rate, and the loads to solve it for; fields as in `Problem`."""

    latency_slo_ms: SloMs
    num_workers: PositiveInt
    variants: dict[str, VariantSpec] = Field(min_length=1)
    loads: LoadsSpec = LoadsSpec()
    arrivals: ArrivalsSpec = PoissonSpec()
    balancing: Balancing = "round_robin"
    discretization: Discretization = "fld"
    num_slacks: PositiveInt = 100
    max_queue: PositiveInt | None = None
    batching: Batching = "maximal"
    objective: Objective = "per_query"
    late: Late = "serve"
    late_penalty: NonNegativeFloat = 100.0
    pareto: bool = True

    def problem(self, base: str | Path = ".", rate: float = 1.0) -> Problem:
        """Return the problem at a rate. Files are relative to `base`."""
        own = {"latency_slo_ms", "variants", "loads", "arrivals"}
        options: dict[str, Any] = {
            name: getattr(self, name) for name in type(self).model_fields if name not in own
        }
        variants = []
        for name, v in self.variants.items():
            with placed(f"variants.{name}.profile"):
                variants.append((name, v.accuracy, v.profile.build(name, Path(base))))
        fastest_s = min(profile.latency(1) for _, _, profile in variants)
        if 1e3 * fastest_s > self.latency_slo_ms:
            raise Misplaced(
                "latency_slo_ms",
                f"no variant answers in time; the fastest takes {1e3 * fastest_s:.6g} ms, got "
                f"{self.latency_slo_ms:g}",
            )
        with placed("arrivals"):
            arrivals = self.arrivals.build(Path(base))
        return Problem(
            variants=tuple(variants),
            slo_s=self.latency_slo_ms / 1e3,
            rate=rate,
            arrivals=arrivals,
            **options,
        )

    def load_arguments(self) -> dict[str, Any]:
        """Return the arguments of `solve_set` other than the problem."""
        return self.loads.model_dump()
