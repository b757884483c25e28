"""How many requests may be on their way to a busy frontend at a time.

A frontend is one process. If more requests come than it has CPU time for, each of them waits again
at every turn of the event loop, and none is in time. So a frontend tells the door before it
(HAProxy, or Serve's proxy), where a refusal costs little, how many requests may be on their way.
The limit falls by a fifth while the event loop is slow, and then rises with the answers, as in
TCP's congestion control (RFC 5681).
"""

from __future__ import annotations

import logging
import math

logger = logging.getLogger(__name__)

# A turn of the event loop is slow if it takes longer than the larger of these (seconds, share of
# the SLO). A request waits for about eight turns on its way.
_TURN_S, _TURN_OF_SLO = 0.005, 1 / 32
_FEWER, _MORE, _LEAST = 0.8, 0.5, 16.0  # factor of a decrease; increase per answer; least limit
_CALM_S = 10.0  # after this time without a slow turn, there is no limit


class Congestion:
    """The limit of requests on their way to a frontend.

    Attributes:
        limit: number of requests. Infinite while the event loop keeps up.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self._cut_at = -math.inf

    def answered(self, now: float, inside: int, turn_s: float, slo_s: float) -> None:
        """Take an answer that a request got.

        Args:
            now: time in seconds.
            inside: number of requests on their way.
            turn_s: recent length of a turn of the event loop, in seconds.
            slo_s: SLO of the request, in seconds.
        """
        since_s = now - self._cut_at
        if turn_s > max(_TURN_S, _TURN_OF_SLO * slo_s):
            if since_s > 0.5 * slo_s:  # requests from before the last decrease say nothing new
                if self.limit == math.inf:
                    logger.warning(
                        "the frontend has too little CPU time: its event loop takes %.0f ms per "
                        "turn with %d requests on their way, so it takes fewer for now. More "
                        "frontends (num_frontends) would help, or quicker preprocess and "
                        "postprocess",
                        *(1e3 * turn_s, inside),
                    )
                self.limit = max(_FEWER * min(self.limit, inside), _LEAST)
                self._cut_at = now
        elif since_s > _CALM_S:
            self.limit = math.inf
        elif inside >= 0.5 * self.limit:
            self.limit += _MORE
