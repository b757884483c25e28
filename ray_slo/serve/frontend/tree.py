"""Runs a request through a pipeline, a tree of tasks, and joins the results.

Pure asyncio, no Ray: a function (`Serve`) serves one request at one task. What a task's batch
method returns for a request is split into its result and its items for child tasks. All these items
are served at the same time. When one fails, or the caller leaves, the others are cancelled; the
first error is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core.requests import Upstream


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the batch method of a task with children returns for one request.

    Args:
        result: result of the request at this task.
        items: items by child task. Each item is a request there. A missing child gets none.
    """

    result: Any
    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Visit(NamedTuple):
    """How a request was served at a task. Times in seconds; `done_at` on the frontend's clock.

    Attributes:
        spent_s: time from the request's arrival at the task to its result.
    """

    worker: str
    variant: str
    batch_size: int
    queue_s: float
    exec_s: float
    spent_s: float
    done_at: float


@dataclass(slots=True)
class Progress:
    """What has become of a client's request so far.

    Attributes:
        begun, served: its requests at all tasks: those that began, and those with a result.
        in_code: calls of `postprocess` and `join` whose end is not noted yet.
        moved_at: time of the last change, `time.monotonic()` seconds.
        made: items that the requests of each task made.
    """

    begun: int = 0
    served: int = 0
    in_code: int = 0
    moved_at: float = 0.0
    made: Counter[str] = field(default_factory=Counter)


Serve = Callable[[str, Any, Upstream | None], Awaitable[tuple[Any, Visit]]]
Hook = Callable[..., Awaitable[Any]]


class Node(NamedTuple):
    """A request that is done, and the requests that it made."""

    task: str
    visit: Visit
    joined: Any
    below: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below."""
        yield self
        for node in self.below:
            yield from node.walk()

    def paths(self) -> Iterator[tuple[str, ...]]:
        """Yield the variants on the path from this node to each leaf below."""
        if not self.below:
            yield (self.visit.variant,)
        for node in self.below:
            for path in node.paths():
                yield (self.visit.variant, *path)

    @property
    def done_at(self) -> float:
        """Time when the last request of this subtree ended."""
        return max((node.done_at for node in self.below), default=self.visit.done_at)

    def slowest(self) -> Iterator[Node]:
        """Yield the branch from this node to the leaf that ended last. The answer waited for it."""
        yield self
        if self.below:
            yield from max(self.below, key=lambda node: node.done_at).slowest()

    def variants(self) -> dict[str, Counter[str]]:
        """Return the number of requests by task and variant."""
        found: dict[str, Counter[str]] = {}
        for node in self.walk():
            found.setdefault(node.task, Counter())[node.visit.variant] += 1
        return found


class TreeRunner:
    """Serves requests through the tasks of a tree.

    Args:
        parents: parent of each task. Parents come before their children; the root's parent is None.
        postprocess: function for the results of each task.
        join: function that joins the result of a task with those of its children, by task. The
            default makes a dictionary.
        shared: tasks whose code also serves other trees. Items for those trees are left out.
        made: called when a request ends at a task, with the task, the variant and the number of
            items that it made for each child.
        max_outputs: by task, the largest number of items that its requests may make for one request
            of a client. Tasks without an entry have no limit.
    """

    def __init__(
        self,
        parents: Mapping[str, str | None],
        *,
        max_outputs: Mapping[str, int] | None = None,
        postprocess: Mapping[str, Hook] | None = None,
        join: Mapping[str, Hook] | None = None,
        shared: Collection[str] = (),
        made: Callable[[str, str, Mapping[str, int]], None] | None = None,
    ) -> None:
        self.root = next(iter(parents))
        self._children = {t: [c for c, parent in parents.items() if parent == t] for t in parents}
        self._postprocess = postprocess or {}
        self._join = join or {}
        self._shared = frozenset(shared)
        self._made = made
        self._max_outputs = max_outputs or {}

    async def run(self, item: Any, serve: Serve, progress: Progress | None = None) -> Node:
        """Serve an item at the root, and the items made from it at the other tasks.

        Args:
            progress: kept up to date meanwhile.

        Raises:
            BatchResultError: a task made items for a task that is not its child, or too many.
            Exception: the first error that serving, `postprocess` or `join` raised.
        """
        return await self._visit(self.root, item, None, serve, progress or Progress())

    async def _visit(
        self, task: str, item: Any, upstream: Upstream | None, serve: Serve, progress: Progress
    ) -> Node:
        progress.begun += 1
        value, visit = await serve(task, item, upstream)
        result, items = self._served(task, value, visit, progress)
        del value  # otherwise it would keep the items in memory while they are served
        below: list[Node] = []
        if items:
            self._check_number(task, items, progress)
            came = Upstream(visit.worker, visit.variant, visit.spent_s)
            below = await self._together(items, came, serve, progress)
        if items or task in self._postprocess:
            progress.in_code += 1
            try:
                result = await self._after(task, result, below)
            except Exception as error:
                say_task(error, task)
                raise
            finally:
                progress.in_code -= 1
                progress.moved_at = time.monotonic()
        return Node(task, visit, result, tuple(below))

    def _served(
        self, task: str, value: Any, visit: Visit, progress: Progress
    ) -> tuple[Any, dict[str, list[Any]]]:
        """Note that a request was served at a task, and return what `split` does."""
        progress.served += 1
        progress.moved_at = time.monotonic()
        result, items = self.split(task, value)
        if self._made is not None:
            self._made(task, visit.variant, {c: len(its) for c, its in items.items()})
        return result, items

    async def _together(
        self, items: Mapping[str, Sequence[Any]], came: Upstream, serve: Serve, progress: Progress
    ) -> list[Node]:
        """Serve items at their tasks, all at the same time. At the first error, cancel the others,
        and raise the error when they have ended."""
        all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running: list[asyncio.Future[Any]] = []
        nodes: dict[int, Node] = {}

        def ended(place: int, task: str, future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                all_ended.cancel()
            elif all_ended.done():
                future.exception()  # asyncio logs errors that are never read
            elif (error := future.exception()) is not None:
                all_ended.set_exception(error)
            else:
                try:
                    nodes[place] = self._node(task, future.result(), progress)
                except Exception as wrong:
                    all_ended.set_exception(wrong)
                if len(nodes) == len(running) and not all_ended.done():
                    all_ended.set_result(None)

        try:
            for task, its in items.items():
                for item in its:
                    future = self._begin(task, item, came, serve, progress)
                    future.add_done_callback(functools.partial(ended, len(running), task))
                    running.append(future)
            if running:
                await all_ended
        finally:
            if left := [future for future in running if not future.done()]:
                for future in left:
                    future.cancel()
                await asyncio.wait(left)
        return [nodes[place] for place in range(len(running))]

    def _begin(
        self, task: str, item: Any, came: Upstream, serve: Serve, progress: Progress
    ) -> asyncio.Future[Any]:
        """Begin to serve an item. A leaf without `postprocess` gets no task of asyncio, which would
        cost more than the rest."""
        if self._children[task] or task in self._postprocess:
            return asyncio.ensure_future(self._visit(task, item, came, serve, progress))
        progress.begun += 1
        return asyncio.ensure_future(serve(task, item, came))

    def _node(self, task: str, came: Node | tuple[Any, Visit], progress: Progress) -> Node:
        """Return the node of a request that was begun."""
        if isinstance(came, Node):
            return came
        value, visit = came
        result, _ = self._served(task, value, visit, progress)
        return Node(task, visit, result, ())

    def _check_number(
        self, task: str, items: Mapping[str, Sequence[Any]], progress: Progress
    ) -> None:
        progress.made[task] += sum(map(len, items.values()))
        made, most = progress.made[task], self._max_outputs.get(task, math.inf)
        if made > most:
            raise _error(
                f"{made} items were made for one request of a client; at most {most} are served. "
                f"Make fewer, or write max_outputs: {made} at the task",
                task,
            )

    async def _after(self, task: str, result: Any, below: Sequence[Node]) -> Any:
        """Return what the user's code, or else the default, makes of the results."""
        if task in self._postprocess:
            result = await self._postprocess[task](result)
        if children := self._children[task]:
            outputs: dict[str, list[Any]] = {child: [] for child in children}
            for node in below:
                outputs[node.task].append(node.joined)
            join: Hook = self._join.get(task, _nested)
            result = await join(result, outputs)
        return result

    def split(self, task: str, value: Any) -> tuple[Any, dict[str, list[Any]]]:
        """Split what a batch method returned for one request into the result and items by child.

        Raises:
            BatchResultError: names the task, and what it must return.
        """
        children = self._children[task]
        if not isinstance(value, Outputs):
            return value, {child: [] for child in children}
        if not isinstance(value.items, Mapping):
            raise _wrong(task, children, f"items that are a {type(value.items).__name__}")
        unknown = [child for child in value.items if child not in children]
        if unknown and task not in self._shared:
            raise _wrong(task, children, f"items for {unknown[0]!r}")
        items: dict[str, list[Any]] = {}
        for child in children:
            given = value.items.get(child, ())
            try:
                if isinstance(given, str | bytes | Mapping) or hasattr(given, "columns"):
                    raise TypeError
                items[child] = list(given)
            except TypeError:
                kind = type(given).__name__
                raise _wrong(task, children, f"a {kind} as items for {child!r}") from None
        return value.result, items


async def _nested(result: Any, outputs: dict[str, list[Any]]) -> dict[str, Any]:
    return {"result": result, "outputs": outputs}


def say_task(error: Exception, task: str) -> None:
    """Add to an error the task where it happened. The requests of a batch share one error."""
    note = f"in task {task!r}"
    notes = getattr(error, "__notes__", [])
    if note not in notes:  # `add_note` is new in Python 3.11
        with contextlib.suppress(Exception):  # a frozen class: its own message matters more
            error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def _error(said: str, task: str) -> Exception:
    from ray_slo.serve.errors import BatchResultError  # `ray_slo.Outputs` must work without ray

    return BatchResultError(said, task=task)


def _wrong(task: str, children: Sequence[str], got: str) -> Exception:
    wanted = "a plain result: it has no children"
    if children:
        names = ", ".join(f"{child!r}: […]" for child in children)
        wanted = f"per request a result, or ray_slo.Outputs(result, {{{names}}})"
    return _error(f"the batch method returned {got}; it must return {wanted}", task)
