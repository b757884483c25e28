"""What frontends, scheduler and workers say to each other. Metadata only, but for `Piece`.

Clocks are never compared: every time is a duration, measured where it is written down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core.cluster import Assigned
from ray_slo.core.policy import Expected
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchStatus, Upstream


class Submit(NamedTuple):
    """Frontend → scheduler: a request that has `budget_s` left until its result must be back.

    `trace`: context of the span in which it waits, if it is traced. `task`: of the tree that the
    client asked for; empty: named as the model.
    """

    request_id: int
    model: str
    budget_s: float
    size: int = 1
    upstream: Upstream | None = None
    trace: str = ""
    task: str = ""


class Cancel(NamedTuple):
    """Frontend → scheduler: nobody waits for the request any more; ignored if it was granted."""

    request_id: int


class Unreachable(NamedTuple):
    """Frontend → scheduler: the worker died, or a call cannot reach it.

    Its batches are over. Frontends submit again what they had sent there.
    """

    worker: str


class Withdrawn(NamedTuple):
    """Frontend → scheduler: the granted batch was never sent, or its results will not come."""

    batch_id: str


Event = Submit | Cancel | Unreachable | Withdrawn


class Capacity(NamedTuple):
    """Scheduler → frontend: what is there for a model.

    Attributes:
        rate: requests/s that its workers could do if there were no other model: in the largest
            batches within the SLO, of the quickest variant.
        workers: their ids.
        expected: of its requests, by the policy; None where that does not say.
    """

    rate: float
    workers: frozenset[str]
    expected: Expected | None = None


_WAIT_SHARE = 0.25
_LONGEST_WAIT_S = 1.0


class Grant(NamedTuple):
    """Scheduler → frontend: send these payloads to that worker, now, in one call.

    `piece` of `num_pieces`: a batch may hold requests of several frontends.
    """

    batch_id: str
    worker: str
    kind: str
    model: str
    variant: str
    request_ids: tuple[int, ...]
    piece: int
    num_pieces: int
    batch_size: int
    start_in_s: float
    finish_in_s: float
    slack_s: float

    @property
    def start_by_s(self) -> float:
        """When its worker starts without the pieces that are missing; their frontend may have
        died. A share of the slack: the rest is for what comes too late, which is submitted again.
        Not more than a second of it: requests may have a day, and the worker waits idle."""
        return self.start_in_s + min(_WAIT_SHARE * max(self.slack_s, 0.0), _LONGEST_WAIT_S)


class Refusal(NamedTuple):
    """Scheduler → frontend: these requests were given up."""

    request_ids: tuple[int, ...]
    reason: str
    finish_in_s: float


class Stop(NamedTuple):
    """Scheduler → every frontend with a piece of a granted batch: preempt it on its worker."""

    batch_id: str
    worker: str
    kind: str


Message = Grant | Refusal | Stop


@dataclass(slots=True)
class Piece:
    """Frontend → worker: one frontend's share of a batch, with payloads.

    `start_by_s` after receipt the batch starts without the pieces that are still missing. `traces`:
    contexts of those requests that are traced. `late_in_s` after receipt the first deadline of the
    batch is over; what could not be run until then, for want of memory, comes back.
    """

    batch_id: str
    variant: str
    items: list[Any]
    piece: int
    num_pieces: int
    start_by_s: float
    traces: tuple[str, ...] = ()
    late_in_s: float = math.inf


@dataclass(slots=True)
class BatchReport:
    """Worker → scheduler: a batch is over. A frontend passes it on if the scheduler lives there.

    Attributes:
        held_s: from the receipt of its first piece to the end.
        exec_s: of the user's method.
        measured: (batch size, seconds) of every run of the user's method; empty on failure.
    """

    batch_id: str
    worker: str
    variant: str
    status: BatchStatus
    batch_size: int
    held_s: float
    exec_s: float
    measured: list[tuple[int, float]] = field(default_factory=list)


AGAIN = (None, None)
"""In place of an item's result: the batch was too large for the worker's memory, and no time was
left to run it in parts. Its request should be submitted again."""


@dataclass(slots=True)
class PieceResult:
    """Worker → frontend: the results of one piece, in order of its items.

    Attributes:
        results: (True, value), (False, exception) or `AGAIN` per item; None where the batch was
            preempted, or the piece came too late to run: its requests should be submitted again.
        report: of the piece's batch; None where that ran without it.
        wait_s: from the receipt of the batch's first piece to the start.
        trace: context of the batch's span, if it has one.
    """

    results: list[tuple[bool | None, Any]] | None
    report: BatchReport | None = None
    wait_s: float = 0.0
    trace: str = ""

    @property
    def preempted(self) -> bool:
        return self.report is not None and self.report.status is BatchStatus.PREEMPTED


SERVING = "serving"  # the last thing that a worker does of its start


class Progress(NamedTuple):
    """Worker → frontends, while it starts.

    Attributes:
        doing: "building", "loading", "measuring", or `SERVING` once it has started.
        what: a model, or a variant of it.
        number, of: position of `what` among all that the worker loads, and their number.
        failed: the error of the last attempt; None if there was no attempt before.
    """

    worker: str
    kind: str
    doing: str = ""
    what: str = ""
    number: int = 0
    of: int = 0
    failed: str | None = None

    def __str__(self) -> str:
        if self.failed is not None:
            return f"failed: {self.failed}"
        if not self.what:
            return self.doing or "starting"
        return f"{self.doing} {self.what}, {self.number} of {self.of}"


class WorkerMemory(NamedTuple):
    """Memory of a worker's variants, for people.

    Attributes:
        device: what they share: "host" or "gpu".
        room_mb: what they may take together; None where nobody knows.
        variants: of each: MB of loading it, MB on top at its largest batch so far, and the size of
            that.
        largest: batch of those that ran out of memory with a larger one.
        left_out: why variants are not here that there was no room for.
    """

    device: str = "host"
    room_mb: float | None = None
    variants: Mapping[str, tuple[float, float, int]] = {}
    largest: Mapping[str, int] = {}
    left_out: Mapping[str, str] = {}

    def to_json(self) -> dict[str, Any]:
        """For `ray-slo status`."""
        return {
            "device": self.device,
            "room_mb": self.room_mb,
            "variants": {
                name: {"load_mb": load, "batch_mb": batch, "batch_size": size}
                for name, (load, batch, size) in self.variants.items()
            },
            "largest_batch": dict(self.largest),
            "left_out": dict(self.left_out),
        }


@dataclass(slots=True)
class Heartbeat:
    """Worker → scheduler: I am here, and this is what I can do.

    Attributes:
        profiles: current estimate per loaded variant.
        batches: ids of the batches that it holds, running or waiting.
        preempt_delay_s: from a preemption until it is free, as its preemption profiles say.
        assigned: what the planner has it serve, by keys of `profiles`; empty without a plan for it.
        node: Ray's id of the node that it is on.
        memory: what its variants take.
    """

    worker: str
    kind: str
    profiles: dict[str, LatencyProfile]
    batches: list[str]
    preempt_delay_s: float = 0.0
    assigned: tuple[Assigned, ...] = ()
    node: str = ""
    memory: WorkerMemory = field(default_factory=WorkerMemory)
