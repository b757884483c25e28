"""Answers: the result, how it was made, and both over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from typing import Any, cast
from uuid import UUID

import numpy as np
import orjson
from starlette.responses import Response

from ray_slo.core.trees import Tree
from ray_slo.serve.frontend.tree import Node, Visit


@dataclass(frozen=True, slots=True)
class Stage:
    """A task's part in the answer of a pipeline.

    Attributes:
        requests: number of requests that the task served for this answer.
        variants: number of requests by variant.
        batch_size, queue_ms, exec_ms: values of the request that ended last.
    """

    task: str
    requests: int
    variants: Mapping[str, int]
    batch_size: int
    queue_ms: float
    exec_ms: float

    def __str__(self) -> str:
        variants = " ".join(f"{name}*{count}" for name, count in self.variants.items())
        return (
            f'{self.task};requests={self.requests};variants="{variants}";batch-size='
            f"{self.batch_size};queue-ms={self.queue_ms:.3f};exec-ms={self.exec_ms:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A result and how it was made: `handle.remote(x, response_metadata=True)` returns it.

    Attributes:
        result: what the user's method (and `postprocess`) returned.
        variant, accuracy: the network that answered; accuracy in percent, None if unknown.
        batch_size: number of requests in its batch.
        queue_ms: time from arrival at the frontend to the start of execution.
        exec_ms: time of the batch's execution.
        latency_ms: time from arrival at the frontend to the answer.
        deadline_met: whether that was within the request's SLO.
        stages: stages of a pipeline, by task in order. For a pipeline, `variant` joins the most
            used variant of each task by "/", and `accuracy` is end to end, the mean of all
            branches. `queue_ms` and `exec_ms` are sums along the branch that ended last, and
            `batch_size` is the root's.
        slo_class: SLO class that the client named; empty without one.
    """

    result: Any
    model: str
    variant: str
    accuracy: float | None
    batch_size: int
    queue_ms: float
    exec_ms: float
    latency_ms: float
    latency_slo_ms: float
    stages: tuple[Stage, ...] = ()
    slo_class: str = ""

    @property
    def deadline_met(self) -> bool:
        return self.latency_ms <= self.latency_slo_ms

    def headers(self) -> dict[str, str]:
        """The `x-slo-*` headers."""
        headers = {
            "x-slo-model": self.model,
            "x-slo-variant": self.variant,
            "x-slo-batch-size": str(self.batch_size),
            "x-slo-queue-ms": f"{self.queue_ms:.3f}",
            "x-slo-exec-ms": f"{self.exec_ms:.3f}",
            "x-slo-latency-ms": f"{self.latency_ms:.3f}",
            "x-slo-latency-slo-ms": f"{self.latency_slo_ms:.3f}",
            "x-slo-deadline-met": str(self.deadline_met).lower(),
        }
        if self.accuracy is not None:
            headers["x-slo-accuracy"] = f"{self.accuracy:.2f}"
        if self.slo_class:
            headers["x-slo-class"] = self.slo_class
        if self.stages:
            headers["x-slo-stages"] = ", ".join(map(str, self.stages))
        return headers


def path_accuracy(
    tree: Tree, own: Mapping[str, float | None], path: tuple[str, ...]
) -> float | None:
    """Return the end-to-end accuracy of a path of variants, in percent. The path is from the root
    to the last task that a request reached. None if the path was not measured and a variant's own
    accuracy is unknown.

    Args:
        own: accuracies of variants, in percent.
    """
    if (measured := tree.path_accuracies.get(path)) is not None:
        return measured
    known = [accuracy for variant in path if (accuracy := own.get(variant)) is not None]
    return 100 * math.prod(a / 100 for a in known) if len(known) == len(path) else None


def joined_answer(
    model: str,
    root: Node,
    accuracy: Callable[[tuple[str, ...]], float | None],
    latency_ms: float,
    latency_slo_ms: float,
) -> Answer:
    """Return the answer of a pipeline.

    Args:
        model: name of the pipeline.
        accuracy: function that returns the accuracy of a path of variants from the root, in
            percent, if it is known.
    """
    last: dict[str, Visit] = {}  # by task
    for node in root.walk():
        if node.task not in last or node.visit.done_at > last[node.task].done_at:
            last[node.task] = node.visit
    stages = tuple(
        Stage(
            task,
            requests=served.total(),
            variants=dict(served.most_common()),
            batch_size=last[task].batch_size,
            queue_ms=last[task].queue_s * 1e3,
            exec_ms=last[task].exec_s * 1e3,
        )
        for task, served in root.variants().items()
    )
    accuracies = [accuracy(path) for path in root.paths()]
    known = [a for a in accuracies if a is not None]
    waited_for = [node.visit for node in root.slowest()]
    return Answer(
        result=root.joined,
        model=model,
        variant="/".join(next(iter(stage.variants)) for stage in stages),
        accuracy=sum(known) / len(known) if len(known) == len(accuracies) else None,
        batch_size=root.visit.batch_size,
        queue_ms=sum(visit.queue_s for visit in waited_for) * 1e3,
        exec_ms=sum(visit.exec_s for visit in waited_for) * 1e3,
        latency_ms=latency_ms,
        latency_slo_ms=latency_slo_ms,
        stages=stages,
    )


# A value with more parts than this is encoded in pieces of so many parts.
_PIECE = 2048
_CHARACTERS = 128  # characters of a text that count as one part
_TURN_S = 0.001  # seconds for pieces, until the event loop does other work
_DEPTH = 100  # deeper values are encoded in one piece
_WRITTEN = 262_144  # bytes that are written at a time
_ATOMS = frozenset({bool, int, float, type(None)})
_QUICK = (
    orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(
        f"a result of type {type(value).__name__} is not JSON; convert it in postprocess"
    )


_STRICT = json.JSONEncoder(default=_plain, allow_nan=False)


def to_json(value: Any) -> bytes:
    """Return a value as JSON. NumPy arrays and scalars become lists and numbers. NaN and infinities
    become null, because JSON does not have them.

    Raises:
        TypeError: the result contains a value of another type.
        ValueError: the result contains itself.
    """
    try:
        text = _STRICT.encode(value)
    except ValueError:
        text = json.dumps(value, default=_plain)  # raises if the result holds itself
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text.encode()


async def encoded(value: Any, lock: asyncio.Lock) -> bytes:
    """Return a value as JSON. One call of an encoder holds Python's lock, in any thread. So a large
    value is encoded in pieces, and the event loop does other work between them.

    Args:
        lock: one of the large values is encoded at a time.

    Raises:
        TypeError, ValueError: see `to_json`.
    """
    if _count(value) <= _PIECE:
        return to_json(value)
    async with lock:
        pieces, began = [], time.monotonic()
        for piece in _pieces(value):
            pieces.append(piece)
            if time.monotonic() - began > _TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        return b"".join(pieces)


def _count(value: Any) -> int:
    """Return the number of parts of a value, or any larger number than `_PIECE`."""
    count, todo = 0, [value]
    while todo and count <= _PIECE:
        one = todo.pop()
        if isinstance(one, str):
            count += 1 + len(one) // _CHARACTERS
        elif isinstance(one, np.ndarray):
            count += 1 + one.size
        elif isinstance(one, list | tuple | dict):
            count += 1 + len(one)
            if count <= _PIECE:
                parts = one.values() if isinstance(one, dict) else one
                todo += [part for part in parts if type(part) not in _ATOMS]
        else:
            count += 1
    return count


def _pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces."""
    if depth == _DEPTH or _count(value) <= _PIECE:
        yield _quick(value)
    elif isinstance(value, str):
        yield b'"'
        for first in range(0, len(value), size := _PIECE * _CHARACTERS):
            yield _quick(value[first : first + size])[1:-1]
        yield b'"'
    else:
        is_dict, comma = isinstance(value, dict), b""
        yield b"{" if is_dict else b"["
        for group in _groups(_parts(value)):
            yield comma
            comma = b","
            if len(group) > 1 or _count(group[0]) <= _PIECE:
                yield _quick(dict(group) if is_dict else group)[1:-1]
                continue
            (part,) = group
            if is_dict:
                key, part = part
                yield _quick({key: 0})[1:-2].rstrip()
            yield from _pieces(part, depth + 1)
        yield b"}" if is_dict else b"]"


def _parts(value: Any) -> Iterable[Any]:
    """Return the elements of a list or an array, or the items of a dictionary."""
    if isinstance(value, dict):
        return value.items()
    if not isinstance(value, np.ndarray) or (size := math.prod(value.shape[1:])) > _PIECE:
        return cast(Iterable[Any], value)
    rows = _PIECE // size
    firsts = range(0, len(value), rows)
    return chain.from_iterable(value[first : first + rows].tolist() for first in firsts)


def _groups(parts: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield elements in order: groups that are a piece, and alone those that are too large."""
    rest = iter(parts)
    while some := list(islice(rest, _PIECE)):
        if _ATOMS.issuperset(map(type, some)):
            yield some
            continue
        group: list[Any] = []
        left = _PIECE
        for part in some:
            count = _count(part)
            if group and count > left:
                yield group
                group, left = [], _PIECE
            group.append(part)
            left -= count
        yield group


def _quick(value: Any) -> bytes:
    """Return a value as JSON. What `orjson` does not know, Python's encoder knows or refuses."""
    try:
        return orjson.dumps(value, option=_QUICK)
    except TypeError:
        return to_json(value)


class InParts(Response):
    """A large answer. It is written in parts, and only as fast as the client reads."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for first in range(0, len(self.body), _WRITTEN):
            part = bytes(self.body[first : first + _WRITTEN])
            is_last = first + _WRITTEN >= len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": not is_last})


def in_parts(body: bytes, media_type: str) -> Response:
    """Return the answer with this body. It is written in parts if it is large."""
    kind = InParts if len(body) > _WRITTEN else Response
    return kind(body, media_type=media_type)
