"""Counts of a run for a planner's brain: arrivals, answers and sizes since its last report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ray_slo.planning.brains.brain import Counts
from ray_slo.simulation.frames import EPSILON_S, Array
from ray_slo.simulation.workloads import Requests


class Tally:
    """Counts since the brain's last report.

    Args:
        clients: requests of clients. Each of its `models` is a stream.
        models: model that serves each root.

    Attributes:
        open: number of frames in the whole run that were not yet answered or dropped.
    """

    def __init__(self, clients: Requests, models: Sequence[str]) -> None:
        self._clients, self._models = clients, models
        self.open = len(clients)
        self._waiting = np.zeros(len(clients.models), dtype=np.int64)  # by stream
        self._begin(0.0, 0)

    def _begin(self, at: float, clients: int) -> None:
        self._at, self._begun = at, clients
        self._closed: list[int] = []
        self._finished: dict[str, int] = {}
        self._made: dict[str, dict[str, int]] = {}

    def close(self, frame: int) -> None:
        """Count a frame that was answered or dropped."""
        self.open -= 1
        self._closed.append(frame)

    def made(self, variant: str, count: int, made: Mapping[str, int]) -> None:
        """Count requests that `variant` answered, and those for child tasks that they made."""
        self._finished[variant] = self._finished.get(variant, 0) + count
        counted = self._made.setdefault(variant, {})
        for child, n in made.items():
            counted[child] = counted.get(child, 0) + n

    def take(self, now: float, ended: Array, dead: bytearray) -> tuple[float, Counts]:
        """Return the time since the last call in seconds, and the counts in it.

        Args:
            ended: time when each frame was answered or dropped, shape (frames,).
            dead: whether each frame was dropped, shape (frames,).
        """
        over_s = now - self._at
        end = int(np.searchsorted(self._clients.arrival, now, side="right"))
        arrived = self._clients.model[self._begun : end]
        self._waiting += self._numbers(arrived)
        self._waiting -= self._numbers(self._clients.model[np.array(self._closed, dtype=np.int64)])
        sizes, bad = self._sizes(self._begun, end), self._bad(ended, dead)
        waiting = dict(zip(self._clients.models, self._waiting.tolist(), strict=True))
        counts = Counts(self._by_stream(arrived), self._finished, self._made, sizes, bad, waiting)
        self._begin(now, end)
        return over_s, counts

    def _sizes(self, begin: int, end: int) -> dict[str, dict[int, int]]:
        if self._clients.size is None:
            return {}
        found: dict[str, dict[int, int]] = {}
        streams, sizes = self._clients.model[begin:end], self._clients.size[begin:end]
        for i, model in enumerate(self._models):
            values, counts = np.unique(sizes[streams == i], return_counts=True)
            of_model = found.setdefault(model, {})
            for size, count in zip(values.tolist(), counts.tolist(), strict=True):
                of_model[size] = of_model.get(size, 0) + count
        return found

    def _bad(self, ended: Array, dead: bytearray) -> dict[str, int]:
        """Return the number of frames that were dropped or late, by stream."""
        closed = np.array(self._closed, dtype=np.int64)
        late = ended[closed] > self._clients.deadline[closed] + EPSILON_S
        dropped = np.array([dead[frame] for frame in self._closed], dtype=bool)
        return self._by_stream(self._clients.model[closed[late | dropped]])

    def _by_stream(self, streams: Array) -> dict[str, int]:
        return dict(zip(self._clients.models, self._numbers(streams).tolist(), strict=True))

    def _numbers(self, streams: Array) -> Array:
        return np.bincount(streams, minlength=len(self._clients.models))
