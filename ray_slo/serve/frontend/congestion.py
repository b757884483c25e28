"""How many requests may be on their way to a busy frontend at a time.

A frontend is one process. If more requests come than it has CPU time for, each of them waits again
at every turn of the event loop, and none is in time. So a frontend tells the door before it
(HAProxy, or Serve's proxy), where a refusal costs little, how many requests may be on their way.
By Little's law, their latency is their number divided by the answers per second.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque

from ray_slo.core.processes import NICENESS_ENV

logger = logging.getLogger(__name__)

# A turn of the event loop is slow if it takes longer than the larger of these (seconds, share of
# the SLO). A request waits for about eight turns on its way.
_TURN_S, _TURN_OF_SLO = 0.005, 1 / 32
# Mean latency that the limit aims at, as a share of the SLO: most, least, and its changes per
# window with slow turns, or without.
_MOST, _LEAST, _FALL, _RISE = 0.65, 0.3, 0.1, 0.05
_WINDOW_S, _WINDOWS = 0.25, 8  # answers are counted in so many windows of this length
_SLOW_WINDOWS = 3  # slow windows in a row before there is a limit: a burst is shorter
_CALM_S = 2.0  # after this time without a slow turn, there is no limit


class Congestion:
    """The limit of requests for one model that are on their way to a frontend.

    Attributes:
        limit: number of requests. Infinite while the event loop keeps up.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self._slow_at = -math.inf
        self._began: float | None = None
        self._count = 0
        self._slow_windows = 0  # in a row
        self._share = _MOST
        self._rates: deque[float] = deque(maxlen=_WINDOWS)  # answers per second, by window

    def answered(self, now: float, turn_s: float, slo_s: float) -> None:
        """Take an answer that a request got.

        Args:
            now: time in seconds.
            turn_s: recent length of a turn of the event loop, in seconds.
            slo_s: SLO of the model, in seconds.
        """
        if self._began is None:
            self._began = now
        self._count += 1
        if is_slow := turn_s > max(_TURN_S, _TURN_OF_SLO * slo_s):
            self._slow_at = now
        if (length_s := now - self._began) >= _WINDOW_S:
            self._rates.append(self._count / length_s)
            self._began, self._count = now, 0
            is_next = is_slow and length_s < 2 * (_WINDOW_S + turn_s)  # no idle time between
            self._slow_windows = self._slow_windows + 1 if is_next else int(is_slow)
            change = -_FALL if is_slow else _RISE
            self._share = min(max(self._share + change, _LEAST), _MOST)
        if now - self._slow_at > _CALM_S:
            self.limit = math.inf
            return
        if self.limit == math.inf:
            if self._slow_windows < _SLOW_WINDOWS:
                return
            self._share = _MOST
            logger.warning(
                "the frontend has too little CPU time: its event loop takes %.0f ms per turn, so "
                "it takes fewer requests for now. More frontends (num_frontends) would help, or "
                "quicker preprocess and postprocess%s",
                1e3 * turn_s,
                _others_come_first(os.getpriority(os.PRIO_PROCESS, 0)),
            )
        # The largest of the windows, because in a stall there are few answers.
        self.limit = self._share * slo_s * max(self._rates)


def _others_come_first(niceness: int) -> str:
    """Return what to do if other programs of the machine get CPU time before this process."""
    if niceness <= 0:
        return ""
    return (
        f". Ray runs it at niceness {niceness}, so other programs of this machine come first: "
        f"set {NICENESS_ENV}=0 where Ray starts"
    )
