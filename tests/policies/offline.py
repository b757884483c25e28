"""The optimal offline schedule of SHEPHERD §5.1 on small instances, by `scipy.optimize.milp`.

The program (3) has a variable per batch, start and GPU. Two facts make it small and keep its
optimum: GPUs are alike, so that (b) is "at most N batches run at any time" and batches are put on
GPUs afterwards; and only how many requests a batch has matters, so that its members become
variables of their own: y(r, s) = 1 when request r is in the batch that starts as s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from ray_slo.core import LatencyProfile, Request


def offline_optimum(
    requests: Sequence[Request], profiles: Mapping[str, LatencyProfile], workers: int
) -> int:
    """The most requests that any schedule serves in time.

    Args:
        requests: arrivals, deadlines and execution times are whole seconds, so that some optimal
            schedule starts every batch at a whole second (push its batches to the left).
        workers: equal GPUs without delays.
    """
    # A start is a model, a batch size and a time; on several GPUs there may be `workers` of each.
    starts = [
        (model, size, t)
        for model, profile in profiles.items()
        for t in range(int(max(r.deadline for r in requests)))
        for size in range(1, profile.max_batch_size + 1)
        if size <= sum(_fits(r, model, t, profile(size)) for r in requests)
        for _ in range(workers)
    ]
    members = [
        (r, s)
        for r, request in enumerate(requests)
        for s, (model, size, t) in enumerate(starts)
        if _fits(request, model, t, profiles[model](size))
    ]
    n = len(starts)
    times = range(int(max(r.deadline for r in requests)))
    rows = lil_array((len(requests) + n + len(times), n + len(members)))
    for v, (r, s) in enumerate(members, n):
        rows[r, v] = 1  # (a) a request is in at most one batch
        rows[len(requests) + s, v] = 1  # a batch has as many requests as its time is for, at most
    for s, (model, size, t) in enumerate(starts):
        rows[len(requests) + s, s] = -size
        for busy in range(t, t + int(profiles[model](size))):
            rows[len(requests) + n + busy, s] = 1  # (b)
    upper = np.concatenate([np.ones(len(requests)), np.zeros(n), np.full(len(times), workers)])
    result = milp(
        np.concatenate([np.zeros(n), -np.ones(len(members))]),
        constraints=LinearConstraint(rows.tocsr(), -np.inf, upper),
        integrality=np.concatenate([np.ones(n), np.zeros(len(members))]),
        bounds=Bounds(0, 1),
    )
    assert result.status == 0, result.message
    return round(-result.fun)


def _fits(request: Request, model: str, start: float, latency_s: float) -> bool:
    """(c) and (d)."""
    return (
        request.model == model
        and request.arrival <= start
        and start + latency_s <= request.deadline
    )
