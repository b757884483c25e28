"""The fluid limit of model selection, and its prices: `solve(problem) -> Fluid`.

In the fluid limit, arrivals have no randomness and workers have no idle gaps. The problem is to
choose the share of each model's requests for each variant, batch size and kind of worker, such that
the mean accuracy is highest. Let x(m, v, b, w) ≥ 0 be the requests per second of model m in batches
of b of variant v on workers of kind w. The linear program is

    maximise  Σ accuracy(v)·x − violation_cost·Σ u(m)
    served    Σ x(m, ·) + u(m) = λ(m)                    for every model m
    workers   Σ x·ℓ(v, b, w)/b ≤ K(w)                    for every kind w

u(m) is the rate that cannot be served. With the same batches, no scheduler can do better. The duals
are prices: μ(w) of a worker-second of kind w, and π(m) of a request of model m. A batch is worth
its time if b·(accuracy − π) ≥ μ·ℓ(b).

Worked example: 2 workers, a quick variant (10 ms, accuracy 60) and a good one (40 ms, 80), batches
of one, 100 requests/s. A request may take 20 ms on average, so a third of them get the good
variant. One more worker-second would give 33 more requests the good variant, 20 points each:

    >>> from ray_slo.core import LatencyProfile, Model, Variant
    >>> variants = [Variant(n, {"cpu": LatencyProfile([t])}, a)
    ...             for n, t, a in (("quick", 0.01, 60.0), ("good", 0.04, 80.0))]
    >>> found = solve(Problem([Model("m", 0.1, tuple(variants))], {"m": 100.0}, {"cpu": 2}))
    >>> round(found.accuracy, 2), round(found.worker_price["cpu"], 1)
    (66.67, 666.7)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_slo.core.cluster import Model


@dataclass(frozen=True)
class Problem:
    """Models, their rates, and workers.

    Args:
        models: models. Their variants need an accuracy.
        rates: requests per second, by model.
        workers: number of workers by kind. Every worker has every variant loaded, unless `loaded`
            says otherwise.
        loaded: loaded variants by kind of worker. A missing kind has all variants loaded.
        hardware: hardware (key of the profiles) by kind of worker. The default is the kind's name.
        violation_cost: cost of a request that is not served, in points of accuracy.
    """

    models: Sequence[Model]
    rates: Mapping[str, float]
    workers: Mapping[str, float]
    loaded: Mapping[str, frozenset[str]] | None = None
    hardware: Mapping[str, str] | None = None
    violation_cost: float = 1000.0


@dataclass(frozen=True)
class Batches:
    """A part of the optimum: `rate` requests per second of `model` run in batches of this variant
    and size, on this kind of worker."""

    model: str
    variant: str
    size: int
    workers: str
    rate: float
    latency_s: float

    @property
    def busy(self) -> float:
        """Number of workers that these batches keep busy."""
        return self.rate * self.latency_s / self.size


@dataclass(frozen=True)
class Fluid:
    """The optimum.

    Attributes:
        accuracy: mean accuracy over the served requests, in percent. NaN if there are none.
        unserved: requests per second that cannot be served, by model.
        mix: the batches, those with the largest rate first.
        worker_price: μ, in points of accuracy per worker-second, by kind.
        request_price: π, in points of accuracy, by model.
    """

    accuracy: float
    unserved: Mapping[str, float]
    mix: Sequence[Batches]
    worker_price: Mapping[str, float]
    request_price: Mapping[str, float]

    @property
    def feasible(self) -> bool:
        """Whether all requests are served."""
        return sum(self.unserved.values()) <= 1e-6


def solve(problem: Problem) -> Fluid:
    """Return the optimum and the duals of the linear program, from HiGHS. Batches take at most the
    SLO of their model."""
    # The import takes 0.4 s, and every replica imports this module.
    from scipy.optimize import linprog

    kinds = list(problem.workers)
    columns: list[tuple[int, int, str, int, float, float]] = []
    for i, model in enumerate(problem.models):
        for j, kind in enumerate(kinds):
            loaded = None if problem.loaded is None else problem.loaded.get(kind)
            hardware = (problem.hardware or {}).get(kind, kind)
            for variant in model.variants:
                profile = variant.profiles.get(hardware)
                if profile is None or (loaded is not None and variant.name not in loaded):
                    continue
                assert variant.accuracy is not None
                # Only the batch size with the least work per request: no other can be better.
                sizes = range(1, profile.max_batch_within(model.latency_slo_s) + 1)
                works = [(profile(b) / b, b) for b in sizes]
                if works:
                    b = min(works)[1]
                    columns.append((i, j, variant.name, b, profile(b), variant.accuracy))
    models, count = len(problem.models), len(columns)
    rates = np.array([problem.rates[m.name] for m in problem.models], dtype=float)
    if not rates.sum():
        zero = {m.name: 0.0 for m in problem.models}
        return Fluid(math.nan, zero, [], dict.fromkeys(kinds, 0.0), dict(zero))
    # The last columns are u, the rates that are not served.
    value = np.array([c[5] for c in columns] + [-problem.violation_cost] * models)
    served = np.zeros((models, count + models))
    busy = np.zeros((len(kinds), count + models))
    for k, (i, j, _, b, latency_s, _) in enumerate(columns):
        served[i, k] = 1.0
        busy[j, k] = latency_s / b
    served[:, count:] = np.eye(models)
    found = linprog(
        -value,
        A_ub=busy,
        b_ub=np.array([problem.workers[k] for k in kinds], dtype=float),
        A_eq=served,
        b_eq=rates,
        method="highs",
    )
    x = found.x
    if found.status != 0 or x is None:
        raise RuntimeError(f"HiGHS: {found.message}")
    mix = [
        Batches(problem.models[i].name, variant, b, kinds[j], float(x[k]), latency_s)
        for k, (i, j, variant, b, latency_s, _) in enumerate(columns)
        if x[k] > 1e-9 * (1 + rates.max())
    ]
    total = float(x[:count].sum())
    return Fluid(
        accuracy=float(value[:count] @ x[:count]) / total if total > 0 else math.nan,
        unserved={m.name: float(x[count + i]) for i, m in enumerate(problem.models)},
        mix=sorted(mix, key=lambda part: -part.rate),
        worker_price={
            k: max(0.0, -float(v)) for k, v in zip(kinds, found.ineqlin.marginals, strict=True)
        },
        request_price={
            m.name: -float(v) for m, v in zip(problem.models, found.eqlin.marginals, strict=True)
        },
    )
