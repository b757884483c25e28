"""Upper bounds on the throughput of many configurations at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_slo.papers.kairos.market import Configuration, Market

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MAX_CONFIGURATIONS = 20_000_000


class Tables:
    """The size distribution as weights, and the latencies of each type."""

    def __init__(self, market: Market) -> None:
        self.names = [t.name for t in market.types]
        self.prices = np.array([t.price_per_hour for t in market.types])
        values, counts = np.unique(np.asarray(market.sizes, dtype=np.int64), return_counts=True)
        self.sizes, self.share = values, counts / counts.sum()
        budget = market.xi * market.latency_slo_s
        self.latency = np.array(
            [[market.profiles[n].latency(int(s)) for s in values] for n in self.names]
        )
        # The largest size that each type serves in time (profiles are monotone), by index.
        self.reach = np.array([int(np.searchsorted(row, budget, "right")) for row in self.latency])
        self.whole = [k for k, r in enumerate(self.reach) if r == len(values)]
        self.base: int | None = None
        if market.base is not None:
            chosen = self.names.index(market.base)
            self.base = chosen if chosen in self.whole else None
        elif self.whole:
            cost = self.prices * (self.latency @ self.share)
            self.base = min(self.whole, key=lambda k: cost[k])

    def rate(self, kind: int, start: int, stop: int) -> float:
        """Return the requests per second of one instance that serves the sizes between two indices,
        as distributed."""
        share = self.share[start:stop]
        if share.sum() <= 0:
            return math.inf
        return float(share.sum() / (share @ self.latency[kind, start:stop]))


def configurations(
    prices: Sequence[float] | Floats, budget: float, most: int = _MAX_CONFIGURATIONS
) -> Ints:
    """Return all configurations that cost at most `budget`, shape (n, types).

    Raises:
        ValueError: there are more than `most`.
    """
    prices = np.asarray(prices, dtype=float)
    made: Ints = np.zeros((1, 0), dtype=np.int64)
    left = np.array([budget * (1 + 1e-12)])
    for price in prices:
        each = np.floor(left / price).astype(np.int64) + 1
        if each.sum() > most:
            raise ValueError(
                f"a budget of {budget:g} allows more than {most:,} configurations; "
                "plan for a part of it, or with fewer types"
            )
        row = np.repeat(np.arange(len(each)), each)
        count = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
        made = np.column_stack([made[row], count])
        left = left[row] - count * price
    return made


def paper_bounds(market: Market | Tables, counts: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Return Equation 15 for each row of `counts`: the bound on the throughput, and whether the
    base is the bottleneck. Both have the shape (n,).

    Without a base instance the bound is 0, because some sizes cannot be served.
    """
    t = market if isinstance(market, Tables) else Tables(market)
    if (base := t.base) is None:
        raise ValueError("no type meets the SLO at every size, so there is no base")
    others = [k for k in range(len(t.names)) if k != base]
    whole = len(t.sizes)
    q_mix = t.rate(base, 0, whole)
    u = counts[:, base].astype(float)
    # s' and f' are those of the rented auxiliary type with the largest reach.
    rented = counts[:, others] > 0
    reach = np.where(rented, t.reach[others], 0).max(axis=1, initial=0)
    bound, base_bound = np.zeros(len(counts)), np.ones(len(counts), dtype=bool)
    for r in np.unique(reach).tolist():
        at = reach == r
        f = float(t.share[:r].sum())
        if f <= 0:  # auxiliary instances have nothing to do
            bound[at] = u[at] * q_mix
            continue
        auxiliary = counts[at][:, others] @ np.array([t.rate(k, 0, r) for k in others])
        if 1 - f <= 1e-12:
            bound[at] = auxiliary / f + u[at] * q_mix
            base_bound[at] = False
            continue
        q_large = t.rate(base, r, whole)
        offloaded = auxiliary * (1 - f) / f
        slack = np.where(u[at] > 0, 1 - offloaded / np.maximum(u[at] * q_large, 1e-300), 0.0)
        limited = u[at] * q_large < offloaded
        mixed = auxiliary / f + slack * u[at] * q_mix
        bound[at] = np.where(limited, u[at] * q_large / (1 - f), mixed)
        base_bound[at] = limited
    base_bound[u == 0] = True
    bound[u == 0] = 0.0
    return bound, base_bound


def fluid_bounds(market: Market | Tables, counts: Ints | Floats, resolution: int = 8) -> Floats:
    """Return the least of many dual bounds for each row of `counts`, in requests per second, shape
    (n,).

    A grid of prices is tried, and then a finer grid around the prices with the least bounds.

    Args:
        counts: number of instances of each type, shape (n, types). A fraction is an instance that
            is present for a part of the time.
        resolution: number of steps per type in the first grid. Any value gives true upper bounds.
    """
    t = market if isinstance(market, Tables) else Tables(market)
    bounds = np.zeros(len(counts))
    # If no rented type serves some size in time, no rate is sustained.
    able = np.where(counts > 0, t.reach, 0).max(axis=1, initial=0) == len(t.sizes)
    if not able.any():
        return bounds
    duals = _Duals(t)
    rows = counts[able].astype(float)
    # A sample of configurations shows which prices matter. With fewer prices the bounds stay true.
    sample = rows[:: max(len(rows) // 256, 1)]
    first = np.geomspace(0.25, 4.0, resolution)
    # Price 0 for types that idle, a very high price for those that are not rented.
    prices = duals.grid([np.concatenate([[0.0], first, [1e6]])] * len(t.names))
    prices = _least(sample, prices)
    step = (first[1] / first[0]) ** (1 / 3) if resolution > 1 else 1.2
    around = duals.grid([np.array([1 / step, 1.0, step])] * len(t.names), relative=True)
    finer = (prices[:, None, :] * around[None, :, :]).reshape(-1, prices.shape[1])
    prices = _least(sample, np.concatenate([prices, duals.normalised(finer)]))
    bounds[able] = np.concatenate(
        [(rows[i : i + 4096] @ prices.T).min(axis=1) for i in range(0, len(rows), 4096)]
    )
    return bounds


def _least(sample: Floats, prices: Floats) -> Floats:
    """Return those `prices` that give the least bound for a row of `sample`."""
    return np.asarray(prices[np.unique((sample @ prices.T).argmin(axis=1))])


class _Duals:
    """Prices y of a second of each type, scaled to E[min_k y_k ℓ_k(S)] = 1. Then λ ≤ n·y."""

    def __init__(self, t: Tables) -> None:
        # Sizes are in about 256 classes. Each class has the latency of its smallest size, so that
        # bounds stay true. A class ends where a type's reach ends.
        whole = len(t.sizes)
        edges = np.searchsorted(np.cumsum(t.share), np.arange(256) / 256, "right")
        edges = np.union1d(edges[edges < whole], np.append(t.reach[t.reach < whole], 0))
        self.share = np.add.reduceat(t.share, edges)
        self.latency = t.latency[:, edges]
        self.reach = np.searchsorted(edges, t.reach)
        self.speed = np.array([t.rate(k, 0, int(r)) if r else 0.0 for k, r in enumerate(t.reach)])
        self.reference = int(t.reach.argmax())

    def grid(self, steps: list[Floats], relative: bool = False) -> Floats:
        """Return all combinations of `steps`, normalised. A step is a multiple of the requests that
        a second of the type serves; with `relative`, it is a factor for prices. The type with the
        largest reach costs 1."""
        axes = [
            np.ones(1)
            if k == self.reference
            else s * (1.0 if relative else self.speed[k] / self.speed[self.reference])
            for k, s in enumerate(steps)
        ]
        made = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        return made if relative else self.normalised(made)

    def normalised(self, prices: Floats) -> Floats:
        """Return the prices, scaled, without those under which the expectation is 0."""
        least = np.full((len(prices), len(self.share)), np.inf)
        for k, r in enumerate(self.reach.tolist()):
            part = least[:, :r]
            np.minimum(part, prices[:, k, None] * self.latency[k, :r], out=part)
        expected = least @ self.share
        fine = np.isfinite(expected) & (expected > 0)
        return np.asarray(prices[fine] / expected[fine, None])


def by_name(t: Tables, row: Ints) -> Configuration:
    """Return a row of counts, by name."""
    return {n: int(c) for n, c in zip(t.names, row, strict=True) if c}


def text_of(counts: Mapping[str, int]) -> str:
    """Return a configuration in words, without types that are not rented."""
    return " + ".join(f"{c} {n}" for n, c in counts.items() if c)
