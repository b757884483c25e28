"""Kairos' query distribution as it is printed (§5.1): `kairos`, `exact`.

All waiting requests are matched to all workers at the least Σ C_j · L_ij (Equation 2), where L_ij
of a pair that would end after ξ times the SLO is 10 SLOs (Equations 5 and 8), and that, too, is
weighted by C_j. A request that is matched to an idle worker runs there, in time or not, because the
paper drops nothing (Equation 7: a worker that could run a request has one). The additions of
`Kairos` are not here. It refuses requests that no worker can serve in time, and does not match
them. It does not weight the cost of late pairs, prefers urgent requests to cheap ones, and lets a
request that is alone use all of its SLO.

The paper leaves two points open. Here pairs with a busy worker are only plans, which are made again
at the next event. A request that no worker can run waits until its deadline.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from scipy.optimize import linear_sum_assignment

from ray_slo.core.arguments import Share, checked
from ray_slo.core.decisions import Action
from ray_slo.policies.kairos import Kairos

_CANNOT = 1e12
"""Cost of a worker that cannot run a request at all, in seconds."""


class ExactKairos(Kairos):
    """Equations 2 to 8 (Kairos §5.1).

    Args:
        xi: ξ: a request is planned to be answered within this share of its SLO.
        learn: learn latencies from the batches that finish, as the paper does; otherwise the
            profiles are taken at their word.
        penalty: cost of a pair that would be late, in SLOs, before it is weighted.

    Raises:
        ValueError: an argument out of its range.
    """

    beyond: ClassVar[dict[str, str]] = {
        "late": "it drops nothing",
        "pick": "the matching alone decides which requests go, by their cost",
        "batch": "a request is a batch",
    }
    """Arguments of the improved policy that contradict the paper's, and why."""

    @checked
    def __init__(
        self,
        *,
        xi: Share = 0.98,
        learn: bool = False,
        penalty: Annotated[float, Field(gt=1)] = 10.0,
    ) -> None:
        super().__init__(xi=xi, learn=learn, penalty=penalty, late="serve", pick="cheapest")

    def _is_idle(self) -> bool:
        return False  # ξ also holds for a request that is alone

    def _match(self, now: float, actions: list[Action]) -> None:
        ready = (self._ready_from <= now) & ((self._free_at >= now) | (self._free_at == -np.inf))
        if not ready.any():
            self._wake_at = self._next_ready(now)
            return
        w, n, t = self._waiting, len(self._waiting.requests), self._tables
        wait = np.maximum(self._free_at - now, self._delay_s)  # the rest of a running batch
        total = t.latency[w.model[:n], w.size[:n]][:, self._kind] + wait  # L
        in_time = total <= (w.due[:n] - now)[:, None]
        weight = t.weight[w.model[:n]][:, self._kind]  # C
        cost = weight * np.where(in_time, total, self._penalty * w.slo[:n, None])
        cost[np.isinf(total)] = _CANNOT
        chosen, columns = linear_sum_assignment(cost)
        sent = [
            (i, j)
            for i, j in zip(chosen.tolist(), columns.tolist(), strict=True)
            if ready[j] and np.isfinite(total[i, j])
        ]
        for i, j in sent:
            self._send(now, [i], j, float(wait[j]), actions)
        if sent:
            w.remove([i for i, _ in sent])
        if w.requests:
            self._wake_at = self._next_ready(now)
