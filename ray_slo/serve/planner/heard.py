"""The latest reports of workers and frontends to a planner. The caller passes the time."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import median_profile
from ray_slo.planning.brains.brain import Counts, FrontendSays, Key, Seen, WorkerSays

logger = logging.getLogger(__name__)

_REPORTS_S = 2.0  # a frontend reports more often than this


@dataclass
class _Worker:
    says: WorkerSays
    seen_at: float
    born: float

    @property
    def order(self) -> tuple[bool, float]:
        """Key for sorting. Serve first stops workers that are not ready, and then those that became
        ready last."""
        return not self.says.ready, self.born + (self.says.ready_s or 0.0)


@dataclass
class Frontend:
    """The last report of a frontend, and the time when it last got profiles."""

    says: FrontendSays
    seen_at: float
    told_at: float = -math.inf


class Heard:
    """The last reports of workers and frontends, the profiles, and the variants that cannot be
    loaded.

    Args:
        now: time when the planner started, in seconds.
        gone_s: workers and frontends count as dead after this time without a report, in seconds.
        avoid_s: time for which a variant that could not be loaded is avoided, in seconds.
    """

    def __init__(self, now: float, gone_s: float, avoid_s: float) -> None:
        self._gone_s, self._avoid_s = gone_s, avoid_s
        self._workers: dict[str, _Worker] = {}
        self._avoided: dict[Key, tuple[str, float]] = {}  # reason, and end of this time
        self.frontends: dict[str, Frontend] = {}
        self.profiles: dict[Key, LatencyProfile] = {}
        self._memory_mb: dict[Key, float] = {}
        self._room_mb: dict[str, float] = {}
        self.listens_since = now
        self.successor = False  # a worker was ready before this planner had a plan

    @property
    def is_alone(self) -> bool:
        """Whether there were no reports lately."""
        return not self._workers and not self.frontends

    @property
    def load_errors(self) -> dict[Key, str]:
        """The reasons why variants cannot be loaded, by variant and kind."""
        too_large = {
            key: f"it takes {self._memory_mb[key]:.0f} MB, and a worker has room for "
            f"{self._room_mb[key[1]]:.0f} MB"
            for key in self._too_large()
        }
        return {**too_large, **{key: why for key, (why, _) in self._avoided.items()}}

    def _too_large(self) -> set[Key]:
        """Return the variants that do not fit on a worker of a kind, even alone."""
        room_mb = self._room_mb
        return {k for k, mb in self._memory_mb.items() if mb > room_mb.get(k[1], math.inf)}

    def worker(self, says: WorkerSays, now: float, *, planned: bool) -> bool:
        """Take a worker's report. Return whether it has news other than profiles of known variants.

        Args:
            planned: whether there is a plan.
        """
        before = self._workers.get(says.worker)
        if before is None and says.ready and not planned:
            self.successor = True
        for variant, (why, number) in says.errors.items():
            known = before.says.errors.get(variant) if before is not None else None
            if known is None or known[1] != number:
                logger.warning("%s could not load %s: %s", says.worker, variant, why)
                self._avoided[variant, says.kind] = why, now + self._avoid_s
        born = before.born if before is not None else now - says.age_s
        self._workers[says.worker] = _Worker(says, now, born)
        unknown = [v for v in says.profiles if (v, says.kind) not in self.profiles]
        for variant in unknown:
            self.profiles[variant, says.kind] = says.profiles[variant]
        return before is None or bool(unknown) or _plain(before.says) != _plain(says)

    def left(self, worker: str) -> bool:
        """Forget a worker that is leaving. Return whether it was known."""
        return self._workers.pop(worker, None) is not None

    def frontend(self, says: FrontendSays, now: float) -> tuple[float, Counts] | None:
        """Take a frontend's report.

        Returns:
            Its counts since its last report, and its share of that time in seconds. None for the
            first report, because the time of these counts is not known.
        """
        if not self.frontends:
            self.listens_since = now
        before = self.frontends.get(says.client)
        for key, profile in says.profiles.items():
            self.profiles.setdefault(key, profile)
        if before is None:
            self.frontends[says.client] = Frontend(says, now)
            return None
        # One that is gone has left its requests to the others.
        others = [f for f in self.frontends.values() if f is not before]
        there = 1 + sum(now - other.seen_at < _REPORTS_S for other in others)
        over_s = max(says.at - before.says.at, 1e-3) / there
        counts = says.counts.since(before.says.counts)
        before.says, before.seen_at = says, now
        return over_s, counts

    def forget(self, now: float) -> None:
        """Forget silent workers and frontends, and old errors."""
        for client, frontend in list(self.frontends.items()):
            if now - frontend.seen_at > self._gone_s:
                del self.frontends[client]
        for name, worker in list(self._workers.items()):
            if now - worker.seen_at > self._gone_s:
                logger.warning("worker %s stopped reporting, and counts as dead", name)
                del self._workers[name]
        self._avoided = {k: v for k, v in self._avoided.items() if now <= v[1]}

    def learn(self) -> None:
        """Take over the measurements of workers: profiles and memory."""
        measured: dict[Key, list[LatencyProfile]] = {}
        memory_mb: dict[Key, list[float]] = {}
        room_mb: dict[str, float] = {}
        for worker in self._workers.values():
            says = worker.says
            for variant in says.loaded & says.profiles.keys():
                measured.setdefault((variant, says.kind), []).append(says.profiles[variant])
            for variant, mb in says.memory_mb.items():
                memory_mb.setdefault((variant, says.kind), []).append(mb)
            if says.room_mb is not None:
                room_mb[says.kind] = min(room_mb.get(says.kind, math.inf), says.room_mb)
        for key, profiles in measured.items():
            self.profiles[key] = median_profile(profiles)
        self._memory_mb |= {key: statistics.median(mbs) for key, mbs in memory_mb.items()}
        self._room_mb |= room_mb

    def seen(self) -> Seen:
        """Return the input of a brain."""
        in_order = sorted(self._workers.items(), key=lambda item: item[1].order)
        return Seen(
            {name: worker.says for name, worker in in_order},
            self.profiles,
            frozenset(self._avoided.keys() | self._too_large()),
            {client: frontend.says for client, frontend in self.frontends.items()},
            self.successor,
            dict(self._memory_mb),
            dict(self._room_mb),
        )

    def running(self, kinds: Iterable[str]) -> dict[str, int]:
        """Return the number of running workers, by kind."""
        there = [worker.says.kind for worker in self._workers.values()]
        return {kind: there.count(kind) for kind in kinds}

    def known(self, kind: str, variants: Iterable[str]) -> dict[str, Any]:
        """Return the known profiles and memory of variants on a kind of worker, as fields of
        `Wanted`."""
        keys = [(variant, kind) for variant in variants]
        return {
            "profiles": {key[0]: self.profiles[key] for key in keys if key in self.profiles},
            "memory_mb": {key[0]: self._memory_mb[key] for key in keys if key in self._memory_mb},
        }


def _plain(says: WorkerSays) -> WorkerSays:
    return says._replace(profiles={}, age_s=0.0, memory_mb={}, room_mb=None)
