"""Which of an application's specifications is the newest, for actors that outlive a release."""

from __future__ import annotations

import time
from collections.abc import Callable

from ray_slo.serve.config.spec import AppSpec

_SETTLED_S = 10.0  # by then whoever knew an actor's earlier life has found it again


class Releases:
    """Tells a new specification from one that replicas of an older release still hold.

    Whoever builds an application stamps it with its clock, and the next release may be built by a
    machine whose clock is behind. So what was never heard of before is news, whatever its stamp.
    Only an actor that has just started, perhaps again and between two releases, goes by the stamps.
    """

    def __init__(self, first: AppSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._known = {first.version}

    def is_news(self, spec: AppSpec, current: AppSpec) -> bool:
        """Whether `spec` is to replace `current`."""
        unheard = spec.version not in self._known
        self._known.add(spec.version)
        if self._clock() - self._started < _SETTLED_S:
            return spec.version > current.version
        return unheard
