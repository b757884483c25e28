"""Requests, and the outcome of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

MAX_LATENCY_MS = 86_400_000.0  # a day
"""The longest SLO, latency or delay in a config, a document or a request, milliseconds."""

RequestId = int
WorkerId = str


class Upstream(NamedTuple):
    """The origin of a request of a pipeline's inner task.

    Attributes:
        worker, variant: worker and variant that ran the request which made it.
        spent_s: time of that request at its task, from its arrival there to its result, seconds.
    """

    worker: WorkerId
    variant: str
    spent_s: float


class Request:
    """One unit of work that a client waits for.

    Attributes:
        id: unique within one host (scheduler actor, simulator run).
        model: name of the model that serves it.
        arrival: seconds in the host's clock.
        deadline: absolute, seconds in the host's clock.
        size: items in the request (Kairos' query size); 1 for a plain request.
        task: node of the tree that the client asked for (`core.trees`); several tasks may share a
            model. Default: the model's name.
        upstream: the request that made it, below the root of a tree; None at the root. `deadline`
            is then the end-to-end one.
    """

    # A plain class with slots: a simulation makes millions, and a dataclass costs more.
    __slots__ = ("arrival", "deadline", "id", "model", "size", "task", "upstream")

    def __init__(
        self,
        id: RequestId,
        model: str,
        arrival: float,
        deadline: float,
        size: int = 1,
        task: str | None = None,
        upstream: Upstream | None = None,
    ) -> None:
        self.id = id
        self.model = model
        self.arrival = arrival
        self.deadline = deadline
        self.size = size
        self.task = task or model
        self.upstream = upstream

    def __repr__(self) -> str:
        task = f", task={self.task!r}" * (self.task != self.model)
        return (
            f"Request(id={self.id}, model={self.model!r}, arrival={self.arrival:.6g}, "
            f"deadline={self.deadline:.6g}, size={self.size}{task})"
        )


class BatchStatus(str, Enum):
    """How a dispatched batch ended."""

    FINISHED = "finished"
    FAILED = "failed"  # the user's method raised
    PREEMPTED = "preempted"
    LOST = "lost"  # the worker died or never received it


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What a host reports when a dispatched batch is over.

    Attributes:
        batch_id: the `Dispatch.batch_id` it answers.
        requests: the requests that ran, in dispatch order.
        started_at, finished_at: seconds in the host's clock (its best estimate, live).
        status: how the batch ended. Requests of a batch that did not finish come back through
            `Policy.requests_arrived` if their owner tries them again.
    """

    batch_id: int
    requests: Sequence[Request]
    started_at: float
    finished_at: float
    status: BatchStatus = BatchStatus.FINISHED
