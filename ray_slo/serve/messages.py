"""Messages between frontends, scheduler and workers. Only `Piece` has more than metadata.

Clocks are never compared: every time is a duration, measured by the sender.
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
    """Frontend → scheduler: a request whose result must be back in `budget_s` seconds.

    `trace` is the context of the span in which it waits, if it is traced. `task` is the task of the
    tree that the client asked for. If it is empty, the task has the model's name.
    """

    request_id: int
    model: str
    budget_s: float
    size: int = 1
    upstream: Upstream | None = None
    trace: str = ""
    task: str = ""


class Cancel(NamedTuple):
    """Frontend → scheduler: the client no longer waits for the request. This is ignored if the
    request was granted."""

    request_id: int


class Unreachable(NamedTuple):
    """Frontend → scheduler: the worker died, or a call cannot reach it.

    Its batches are over. Frontends submit again the requests that they had sent there.
    """

    worker: str


class Withdrawn(NamedTuple):
    """Frontend → scheduler: the granted batch was never sent, or its results will not come."""

    batch_id: str


Event = Submit | Cancel | Unreachable | Withdrawn


class Capacity(NamedTuple):
    """Scheduler → frontend: the capacity for a model.

    Attributes:
        rate: requests per second that the model's workers could serve if there were no other model.
            This is with the fastest variant that was measured, in the largest batches within the
            SLO, which take their typical times. Workers that were not measured do not count; the
            rate is infinite if none was.
        workers: ids of the model's workers.
        expected: the policy's prediction for the model's requests. None if it makes none.
    """

    rate: float
    workers: frozenset[str]
    expected: Expected | None = None


_WAIT_SHARE = 0.25
_LONGEST_WAIT_S = 1.0


class Grant(NamedTuple):
    """Scheduler → frontend: send these payloads to that worker now, in one call.

    A batch may have requests of several frontends. This is piece number `piece` of `num_pieces`.
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
        """Time after which the worker starts without the missing pieces, in seconds. Their frontend
        may have died. It is a share of the slack; the rest is for late pieces, which are submitted
        again. It is at most one second, because the worker is idle meanwhile, and the slack may be
        a day."""
        return self.start_in_s + min(_WAIT_SHARE * max(self.slack_s, 0.0), _LONGEST_WAIT_S)


class Refusal(NamedTuple):
    """Scheduler → frontend: these requests were dropped."""

    request_ids: tuple[int, ...]
    reason: str
    finish_in_s: float


class Stop(NamedTuple):
    """Scheduler → every frontend with a piece of a granted batch: preempt it on its worker."""

    batch_id: str
    worker: str
    kind: str


Message = Grant | Refusal | Stop


class Lead(NamedTuple):
    """Scheduler → worker: the scheduler leads, with this term (see `scheduler.lease`).

    Attributes:
        term: 0 if it does not lead.
        epoch: id of the scheduler, which begins the ids of its batches.
    """

    term: int = 0
    epoch: str = ""


def epoch_of(batch_id: str) -> str:
    """Return the id of the scheduler that granted a batch."""
    return batch_id.partition("-")[0]


@dataclass(slots=True)
class Piece:
    """Frontend → worker: one frontend's share of a batch, with payloads.

    The batch starts at most `start_by_s` seconds after receipt, without pieces still missing then.
    `traces` are contexts of the traced requests. The first deadline of the batch is `late_in_s`
    seconds after receipt. Requests that could not run until then for lack of memory are returned.
    `sizes` are those of the items; empty if each is 1.
    """

    batch_id: str
    variant: str
    items: list[Any]
    piece: int
    num_pieces: int
    start_by_s: float
    traces: tuple[str, ...] = ()
    late_in_s: float = math.inf
    sizes: tuple[int, ...] = ()


@dataclass(slots=True)
class BatchReport:
    """Worker → scheduler: a batch is over. A frontend passes it on if the scheduler runs there.

    Attributes:
        held_s: time from the receipt of the batch's first piece to its end, in seconds.
        exec_s: time of the user's method, in seconds.
        measured: batch size and seconds of every run of the user's method. Empty after a failure.
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
"""Replaces an item's result: the batch was too large for the worker's memory, and there was no time
to run it in parts. Its request should be submitted again."""


@dataclass(slots=True)
class PieceResult:
    """Worker → frontend: the results of one piece, in order of its items.

    Attributes:
        results: (True, value), (False, exception) or `AGAIN` per item; None if the batch was
            preempted, or the piece came too late to run: its requests should be
            submitted again.
        report: report of the piece's batch; None if the batch ran without the piece.
        wait_s: time from the receipt of the batch's first piece to the start, seconds.
        trace: context of the batch's span, if it has one.
    """

    results: list[tuple[bool | None, Any]] | None
    report: BatchReport | None = None
    wait_s: float = 0.0
    trace: str = ""

    @property
    def preempted(self) -> bool:
        return self.report is not None and self.report.status is BatchStatus.PREEMPTED


SERVING = "serving"  # the last step of a worker's start


class Progress(NamedTuple):
    """Worker → frontends, while it starts.

    Attributes:
        doing: "building", "loading", "measuring", or `SERVING` once it has started.
        what: a model or variant.
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
        device: the memory that the variants share: "host" or "gpu".
        room_mb: memory that they may use together, in MB. None if it is unknown.
        variants: figures of each variant: MB after loading it, additional MB at its largest batch
            so far, and the size of that batch.
        largest: largest possible batch of each variant that ran out of memory with a larger one.
        left_out: reasons why variants were not loaded for lack of memory.
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
    """Worker → scheduler: the worker is alive; this is what it can do.

    Attributes:
        profiles: current profile of each loaded variant.
        batches: ids of the batches that the worker has, running or waiting.
        preempt_delay_s: time from a preemption until the worker is free, in seconds, from its
            preemption profiles.
        assigned: the planner's assignments, by keys of `profiles`. Empty without a plan.
        node: Ray's ID of the worker's node.
        memory: memory of the worker's variants.
        leader: the scheduler that the worker obeys, if that is an actor. Only that one may use it.
        highest: the highest term that the worker knows.
    """

    worker: str
    kind: str
    profiles: dict[str, LatencyProfile]
    batches: list[str]
    preempt_delay_s: float = 0.0
    assigned: tuple[Assigned, ...] = ()
    node: str = ""
    memory: WorkerMemory = field(default_factory=WorkerMemory)
    leader: Lead = field(default_factory=Lead)
    highest: int = 0
