"""Answers: the result, how it was made, and both over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_slo.core.trees import Tree
from ray_slo.serve.config.spec import VariantRef
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


def answer_of(
    result: Any, task: str, variant: VariantRef, visit: Visit, latency_s: float, slo_s: float
) -> Answer:
    """Return the answer of a request at one task, or at a single model."""
    return Answer(
        result=result,
        model=task,
        variant=variant.name,
        accuracy=variant.accuracy,
        batch_size=visit.batch_size,
        queue_ms=visit.queue_s * 1e3,
        exec_ms=visit.exec_s * 1e3,
        latency_ms=latency_s * 1e3,
        latency_slo_ms=slo_s * 1e3,
    )


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


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
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
