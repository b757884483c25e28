"""Runs a request through a pipeline, a tree of tasks, and joins what comes back.

Pure asyncio, no ray: whoever serves one request at one task is a function (`Serve`). What a task's
batch method returned for a request is split into its result and the items that it made for child
tasks. All of them are served at the same time, and theirs likewise. When one fails, or the caller
leaves, the rest is cancelled; the first error is the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_slo.core.requests import Upstream


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the batch method of a task with children returns for one request.

    Args:
        result: of the request at this task.
        items: by child task, what it is to work on: an item is a request there. A child that is
            not named gets none.
    """

    result: Any
    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Visit:
    """How a request was served at a task. Times in seconds; `done_at` in the frontend's clock.

    Attributes:
        spent_s: from its arrival at the task to its result.
    """

    worker: str
    variant: str
    batch_size: int
    queue_s: float
    exec_s: float
    spent_s: float
    done_at: float


Serve = Callable[[str, Any, Upstream | None], Awaitable[tuple[Any, Visit]]]
Hook = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Node:
    """A request that is done, with those that it made."""

    task: str
    visit: Visit
    joined: Any
    below: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """It and all below."""
        yield self
        for node in self.below:
            yield from node.walk()

    def paths(self) -> Iterator[tuple[str, ...]]:
        """The variants from here to every request that made none."""
        if not self.below:
            yield (self.visit.variant,)
        for node in self.below:
            for path in node.paths():
                yield (self.visit.variant, *path)

    @property
    def done_at(self) -> float:
        """When the last of them was done."""
        return max((node.done_at for node in self.below), default=self.visit.done_at)

    def slowest(self) -> Iterator[Node]:
        """From here always on to the one that was done last: what the answer waited for."""
        yield self
        if self.below:
            yield from max(self.below, key=lambda node: node.done_at).slowest()

    def variants(self) -> dict[str, Counter[str]]:
        """How many requests each variant served, by task."""
        found: dict[str, Counter[str]] = {}
        for node in self.walk():
            found.setdefault(node.task, Counter())[node.visit.variant] += 1
        return found


class Tree:
    """A pipeline as a frontend sees it.

    Args:
        parents: parent by task, parents before their children; the root's is None.
        postprocess: by task, what its results go through.
        join: by task with children, what makes one of its result and theirs; default: a dictionary.
        made: told, when a request is done at a task, the variant, and how many items it made by
            child.
    """

    def __init__(
        self,
        parents: Mapping[str, str | None],
        *,
        postprocess: Mapping[str, Hook] | None = None,
        join: Mapping[str, Hook] | None = None,
        made: Callable[[str, Mapping[str, int]], None] | None = None,
    ) -> None:
        self.root = next(iter(parents))
        self._children = {t: [c for c, parent in parents.items() if parent == t] for t in parents}
        self._postprocess = postprocess or {}
        self._join = join or {}
        self._made = made

    async def run(self, item: Any, serve: Serve) -> Node:
        """Serve an item and all that comes of it.

        Raises:
            BatchResultError: a task made items for another than its children.
            Exception: the first that serving, `postprocess` or `join` raised.
        """
        return await self._visit(self.root, item, None, serve)

    async def _visit(self, task: str, item: Any, upstream: Upstream | None, serve: Serve) -> Node:
        value, visit = await serve(task, item, upstream)
        result, items = self.split(task, value)
        del value  # it holds the items, for as long as they are served
        children = self._children[task]
        if self._made is not None:
            self._made(visit.variant, {c: len(items[c]) for c in children})
        came = Upstream(visit.worker, visit.variant, visit.spent_s)
        below = await _together(
            [self._visit(c, one, came, serve) for c in children for one in items[c]]
        )
        try:
            if task in self._postprocess:
                result = await self._postprocess[task](result)
            if children:
                outputs: dict[str, list[Any]] = {child: [] for child in children}
                for node in below:
                    outputs[node.task].append(node.joined)
                join: Hook = self._join.get(task, _nested)
                result = await join(result, outputs)
        except Exception as error:
            say_task(error, task)
            raise
        return Node(task, visit, result, tuple(below))

    def split(self, task: str, value: Any) -> tuple[Any, dict[str, list[Any]]]:
        """Result and items by child of what a batch method returned for one request.

        Raises:
            BatchResultError: names the task, and what it must return.
        """
        children = self._children[task]
        if not isinstance(value, Outputs):
            return value, {child: [] for child in children}
        if not isinstance(value.items, Mapping):
            raise _wrong(task, children, f"items that are a {type(value.items).__name__}")
        if unknown := [child for child in value.items if child not in children]:
            raise _wrong(task, children, f"items for {unknown[0]!r}")
        items: dict[str, list[Any]] = {}
        for child in children:
            given = value.items.get(child, ())
            try:
                if isinstance(given, str | bytes | Mapping):
                    raise TypeError
                items[child] = list(given)
            except TypeError:
                kind = type(given).__name__
                raise _wrong(task, children, f"a {kind} as items for {child!r}") from None
        return value.result, items


async def _nested(result: Any, outputs: dict[str, list[Any]]) -> dict[str, Any]:
    return {"result": result, "outputs": outputs}


def say_task(error: Exception, task: str) -> None:
    """Note in an error where it happened. The requests of a batch share one."""
    note = f"in task {task!r}"
    notes = getattr(error, "__notes__", [])
    if note not in notes:  # `add_note` is new in Python 3.11
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def _wrong(task: str, children: Sequence[str], got: str) -> Exception:
    from ray_slo.serve.errors import BatchResultError  # `ray_slo.Outputs` is to be had without ray

    wanted = "a plain result: it has no children"
    if children:
        names = ", ".join(f"{child!r}: […]" for child in children)
        wanted = f"per request a result, or ray_slo.Outputs(result, {{{names}}})"
    return BatchResultError(f"the batch method returned {got}; it must return {wanted}", task=task)


async def _together(visits: list[Coroutine[Any, Any, Node]]) -> list[Node]:
    """All results, or the first error as soon as it is there, when the others have ended."""
    if len(visits) < 2:
        return [await visit for visit in visits]
    tasks = [asyncio.ensure_future(visit) for visit in visits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()
        return [task.result() for task in tasks]
    finally:
        if not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
