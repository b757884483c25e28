"""Batches on a worker: the running one, then one sent ahead."""

from __future__ import annotations

from typing import NamedTuple

from ray_slo.core.policy import InFlight


class Sent(NamedTuple):
    """A batch that was sent and is not yet reported; times as predicted, seconds."""

    batch_id: int
    variant: str
    start_at: float
    end_at: float


def sent_before(batch: InFlight) -> Sent:
    """Batches that another policy sent."""
    d = batch.dispatch
    return Sent(d.batch_id, d.variant, batch.end_at - batch.latency_s, batch.end_at)


def take(flights: list[Sent], batch_id: int, now: float) -> Sent | None:
    """Remove a batch that is over; the batch that was sent ahead of its end runs now.

    None: there is no such batch.
    """
    for i, done in enumerate(flights):
        if done.batch_id == batch_id:
            del flights[i]
            if flights and i == 0:
                ahead = flights[0]
                start_at = max(now, ahead.start_at)
                end_at = start_at + ahead.end_at - ahead.start_at
                flights[0] = ahead._replace(start_at=start_at, end_at=end_at)
            return done
    return None
