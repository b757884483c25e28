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

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from ray_slo.core.documents import Frozen, ProfileSpec, SloMs
from ray_slo.core.explain import Misplaced, placed
from ray_slo.papers.ramsis.arrivals import ArrivalsSpec, PoissonSpec
from ray_slo.papers.ramsis.problem import (
    Balancing,
    Batching,
    Discretization,
    Late,
    Objective,
    Problem,
)


class VariantSpec(Frozen):
    """A variant.

    Attributes:
        accuracy: percent.
        profile: its latency profile.
    """

    accuracy: Annotated[float, Field(ge=0, le=100)]
    profile: ProfileSpec


class LoadsSpec(Frozen):
    """Loads of the whole pool: those named, or from low to high in steps of accuracy.

    Attributes:
        rates: requests per second of each table.
        low: the lowest load, requests per second.
        high: the highest load, requests per second.
        step_accuracy: largest difference in expected accuracy between two neighbouring tables,
            percentage points.
    """

    rates: list[PositiveFloat] = Field(default_factory=list)
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    step_accuracy: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _from_low_to_high(self) -> LoadsSpec:
        if (self.low is None) != (self.high is None):
            here, lost = ("low", "high") if self.high is None else ("high", "low")
            raise Misplaced(lost, f"required beside {here}, which is {getattr(self, here):g}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise Misplaced("low", f"must be below high, which is {self.high:g}, got {self.low:g}")
        return self


class SolveSpec(Frozen):
    """A problem without its rate, and the loads to solve it for.

    Attributes:
        latency_slo_ms: time from arrival to answer, milliseconds.
        num_workers: number of equal workers.
        variants: variants by name. Every worker has all of them loaded.
        loads: the loads that get a table.
        arrivals: distribution of arrivals.
        balancing: how requests get to workers: to each in turn, or to the shortest queue.
        discretization: slack in steps of equal length ("fld"), or by the latencies that occur.
        num_slacks: number of steps of slack, with "fld".
        max_queue: the longest queue that decisions distinguish. Default: about twice the largest
            batch that fits the SLO.
        batching: "maximal" takes all queued requests, "variable" any part of them.
        objective: maximises the accuracy of requests ("per_query"), or of batches as the published
            code.
        late: what happens to requests that no variant can answer in time.
        late_penalty: cost of a request that is not answered in time, in percentage points, beside
            the missing accuracy.
        pareto: leave out variants that another one beats in accuracy and in latency.
    """

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

    def problem(self, base: str | Path = ".") -> Problem:
        """Return the problem at one request per second. Files are relative to `base`."""
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
            rate=1.0,
            arrivals=arrivals,
            **options,
        )
