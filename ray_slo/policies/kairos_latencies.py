"""Waiting requests and their latencies on workers: the columns and tables of `Kairos`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.cluster import Cluster, Kind
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchOutcome, Request

Floats = NDArray[np.float64]

_LINE_WEIGHT = 0.5
"""Weight of the straight line, in samples, beside those measured at a size."""


class LearnedLatency:
    """ℓ(size) of one kind of worker, learned from single measurements (§5.1, Remarks).

    It starts as the straight line through `prior`. After two measured sizes it is a least-squares
    line. At measured sizes it is their mean.

    Attributes:
        table: seconds by size 0 … max_size, shape (max_size + 1,); entry 0 is unused.
    """

    def __init__(self, prior: LatencyProfile) -> None:
        self._sizes = np.arange(prior.max_batch_size + 1, dtype=float)
        self._prior = prior
        alpha, beta = prior.fit_linear()
        self._floor = 0.01 * max(prior.latency(1), 1e-9)
        self._line = np.maximum(alpha * self._sizes + beta, self._floor)
        self._total = np.zeros(len(self._sizes))
        self._count = np.zeros(len(self._sizes))
        self._refit_at = 1
        self.samples = 0
        self.table: Floats = self._line.copy()

    def add(self, size: int, duration_s: float) -> bool:
        """Add a measurement. Whether all of `table` changed, and not only the entry of `size`."""
        self._total[size] += duration_s
        self._count[size] += 1
        self.samples += 1
        if self.samples < self._refit_at:
            self._fill(slice(size, size + 1))
            return False
        self._refit_at = max(self.samples + 1, int(1.5 * self.samples))
        self._fit()
        self._fill(slice(None))
        return True

    def _fit(self) -> None:
        measured = np.flatnonzero(self._count)
        weight, mean = self._count[measured], self._total[measured] / self._count[measured]
        if len(measured) == 1:  # the slope is unknown: the prior's, scaled
            self._line = self._line * (mean[0] / self._line[measured[0]])
            return
        centre = np.average(measured, weights=weight)
        level = np.average(mean, weights=weight)
        offset = measured - centre
        slope = float((weight * offset) @ (mean - level) / ((weight * offset) @ offset))
        self._line = np.maximum(level + max(slope, 0.0) * (self._sizes - centre), self._floor)

    def _fill(self, at: slice) -> None:
        count = self._count[at]
        self.table[at] = (self._total[at] + _LINE_WEIGHT * self._line[at]) / (count + _LINE_WEIGHT)


class Waiting:
    """Waiting requests in order of arrival: columns that grow, for vectorised matching."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.model = np.zeros(64, dtype=np.int64)
        self.size = np.zeros(64, dtype=np.int64)
        self.due = np.zeros(64)
        self.slo = np.zeros(64)

    def add(self, request: Request, model: int, row: int, due: float) -> None:
        i = len(self.requests)
        if i == len(self.due):
            self.model, self.size = np.resize(self.model, 2 * i), np.resize(self.size, 2 * i)
            self.due, self.slo = np.resize(self.due, 2 * i), np.resize(self.slo, 2 * i)
        self.model[i], self.size[i], self.due[i] = model, row, due
        self.slo[i] = request.deadline - request.arrival
        self.requests.append(request)

    def remove(self, gone: Sequence[int]) -> None:
        """Forget the requests at these positions."""
        if len(gone) == 1:
            i, n = gone[0], len(self.requests)
            del self.requests[i]
            for column in (self.model, self.size, self.due, self.slo):
                column[i : n - 1] = column[i + 1 : n]
            return
        kept = np.ones(len(self.requests), dtype=bool)
        kept[gone] = False
        positions = np.flatnonzero(kept)
        for column in (self.model, self.size, self.due, self.slo):
            column[: len(positions)] = column[positions]
        self.requests = [self.requests[i] for i in positions.tolist()]


class Latencies:
    """ℓ by (model, size, kind of worker), of the first variant that a kind runs.

    Args:
        xi: as in the policy.
        learn: learn from the batches that finish; otherwise the profiles are used unchanged.

    Attributes:
        models: index by name; the last index is for a model that is not served.
        max_size: a larger request is not served.
        variant: name, by model and kind.
        latency: seconds, `inf` if it is not served; shape (models, sizes, kinds).
        shortest: shortest latency of all kinds, seconds; shape (models, sizes).
        weight: heterogeneity coefficients (Definition 1), shape (models, kinds).
        scarce: whether only one kind of hardware, present now or before, is fast enough; shape
            (models, sizes).
    """

    def __init__(self, xi: float, learn: bool) -> None:
        self._xi = xi
        self._learned: dict[tuple[str, str], LearnedLatency] | None = {} if learn else None
        self._seen: set[str] = set()  # hardware of any worker so far

    def set(self, cluster: Cluster, kinds: Mapping[Kind, int]) -> None:
        """Take the profiles of a cluster.

        Args:
            kinds: of its workers, with their indices.
        """
        self.models = {m: i for i, m in enumerate(cluster.models)}
        self.variant: dict[tuple[int, int], str] = {}
        self._users: dict[tuple[str, str], list[tuple[int, int]]] = {}
        profiles: dict[tuple[int, int], LatencyProfile] = {}
        for model in cluster.models.values():
            for (hardware, loaded), k in kinds.items():
                for variant, profile in model.runnable(hardware, loaded):
                    at = self.models[model.name], k
                    self.variant[at] = variant.name
                    self._users.setdefault((variant.name, hardware), []).append(at)
                    profiles[at] = profile
                    break
        self.max_size = max((p.max_batch_size for p in profiles.values()), default=1)
        shape = len(self.models) + 1, self.max_size + 2, len(kinds)
        self.latency = np.full(shape, np.inf)  # the last model and the last size: not served
        # Whether only one kind of hardware, present now or before, is fast enough, by (model,
        # size).
        self._seen.update(hardware for hardware, _ in kinds)
        able = np.zeros(shape[:2], dtype=np.int64)
        for model in cluster.models.values():
            known = {h: p for v in reversed(model.variants) for h, p in v.profiles.items()}
            for profile in (known[h] for h in self._seen & known.keys()):
                reach = profile.max_batch_within(self._xi * model.latency_slo_s)
                able[self.models[model.name], : min(reach, self.max_size) + 1] += 1
        self.scarce = able == 1
        for (name, hardware), users in self._users.items():
            profile = profiles[users[0]]
            if self._learned is not None:
                learned = self._learned.get((name, hardware))
                if learned is None or len(learned.table) != profile.max_batch_size + 1:
                    learned = self._learned[name, hardware] = LearnedLatency(profile)
                table = learned.table[1:]
            else:
                table = np.array(profile.table)
            for m, k in users:
                self.latency[m, 1 : 1 + len(table), k] = table
        self._weigh()

    def _weigh(self) -> None:
        """Shortest latencies, and heterogeneity coefficients (Definition 1) by (model, kind)."""
        self.shortest = self.latency.min(axis=2, initial=np.inf)
        self.weight = np.ones((self.latency.shape[0], self.latency.shape[2]))
        for m in self.models.values():
            served = [k for k in range(self.latency.shape[2]) if (m, k) in self.variant]
            if served:
                sizes = np.isfinite(self.latency[m][:, served]).all(axis=1)
                largest = np.flatnonzero(sizes)[-1]  # that every kind can run
                times = self.latency[m, largest, served]
                self.weight[m, served] = times.min() / times

    def measured(self, variant: str, hardware: str, outcome: BatchOutcome) -> None:
        learned = (self._learned or {}).get((variant, hardware))
        size = sum(r.size for r in outcome.requests)
        duration = outcome.finished_at - outcome.started_at
        if learned is None or not 1 <= size < len(learned.table) or not duration > 0:
            return
        everything = learned.add(size, duration)
        at = slice(1, len(learned.table)) if everything else slice(size, size + 1)
        for m, k in self._users.get((variant, hardware), ()):
            self.latency[m, at, k] = learned.table[at]
        if everything:
            self._weigh()
        else:
            self.shortest[:, size] = self.latency[:, size].min(axis=1)
