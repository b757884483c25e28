"""Serves one request from its item to its answer, by one model or by a pipeline."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any

from ray_slo.core.requests import Upstream
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import RefusedEarly, SLOError, outcome_of
from ray_slo.serve.frontend.answer import Answer, joined_answer, path_accuracy
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import GRACE_S, Asked, Entry, Ledger
from ray_slo.serve.frontend.surroundings import Demand
from ray_slo.serve.frontend.tree import Outputs, Progress, TreeRunner, Visit, say_task
from ray_slo.serve.watch import tracing
from ray_slo.serve.watch.metrics import FrontendMetrics
from ray_slo.serve.watch.tracing import RequestTrace

_BAD = frozenset({"refused", "expired"})  # outcomes that more workers can prevent
_STUCK_S = 0.4  # a request that did not move for this time waits for the application's code
_JOINING_S = 0.1  # additional time for a whole pipeline, beyond its tasks


class Service:
    """Serves requests.

    Args:
        demand: object that gets the requests, for a planner. None if no planner needs them.
    """

    def __init__(
        self,
        spec: AppSpec,
        ledger: Ledger,
        hooks: Hooks,
        metrics: FrontendMetrics,
        demand: Demand | None,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._hooks = hooks
        self._metrics = metrics
        self._demand = demand
        self._ids = itertools.count()
        self._shared = spec.shared
        self._runners = {name: self._runner(spec.trees[name]) for name in spec.pipelines}
        variants = spec.variants()
        own = {key: ref.accuracy for key, ref in variants.items()}
        self._accuracies = {
            name: functools.cache(functools.partial(path_accuracy, spec.trees[name], own))
            for name in spec.pipelines
        }
        # Number of requests between arrival and answer, also those in pre- or postprocessing.
        self.num_owned = 0

    def _runner(self, tree: Tree) -> TreeRunner:
        def made(task: str, variant: str, counts: Mapping[str, int]) -> None:
            if self._demand is not None:
                self._demand.finished(tree[task].counted_as(variant), counts)

        after = {t.name: hook for t in tree.order if (hook := self._hooks.postprocess.get(t.model))}
        return TreeRunner(
            tree.parents,
            postprocess=after,
            join=self._hooks.joins,
            shared={task.name for task in tree.order if task.model in self._shared},
            made=made,
            max_outputs={
                name: task.max_outputs
                for name, task in self._spec.pipelines[tree.name].tasks.items()
            },
        )

    async def answer(self, asked: Asked, item: Any) -> Answer:
        """Serve an item.

        Raises:
            RefusedEarly, Expired, WorkerLost, BadInput: see `ray_slo.errors`.
            Exception: the error that the user's code raised.
        """
        self._arrived(asked.stream)
        trace = tracing.request(asked.model, asked.arrival, asked.slo_s, asked.traceparent)
        if self.num_owned >= self._spec.max_queued_requests:
            self._make_room(asked, trace)
        self._waits(asked.stream, 1)
        try:
            answer_one = self._answer_tree if asked.model in self._runners else self._answer_one
            with trace.inside(), self._ledger.in_time(asked):
                answer = await answer_one(asked, item, trace)
        except BaseException as error:
            self._unanswered(asked.stream, trace, error)
            if outcome_of(error)[0] in _BAD:
                self._bad(asked.stream)
            if isinstance(error, SLOError):
                error.model = error.model or asked.model
            raise
        finally:
            self._waits(asked.stream, -1)
        if asked.slo_class:
            answer = replace(answer, slo_class=asked.slo_class)
        trace.answered(answer)
        self._metrics.answered(answer)
        if not answer.deadline_met:
            self._bad(asked.stream)
        return answer

    def turned_away(self, stream: str, count: int) -> None:
        """Note that a door refused requests. They count as demand."""
        self._arrived(stream, count)
        self._bad(stream, count)

    def _arrived(self, stream: str, count: int = 1) -> None:
        if self._demand is not None:
            self._demand.arrived(stream, count)

    def _waits(self, stream: str, count: int) -> None:
        self.num_owned += count
        if self._demand is not None:
            self._demand.waits(stream, count)

    def _bad(self, stream: str, count: int = 1) -> None:
        if self._demand is not None:
            self._demand.bad(stream, count)

    def _make_room(self, asked: Asked, trace: RequestTrace) -> None:
        """Refuse this request, or one with a later deadline."""
        said = f"{self.num_owned} requests are waiting, which is the limit (max_queued_requests)"
        if self._ledger.give_way(asked.deadline, said):
            return
        error = RefusedEarly(
            said, reason="queue_full", model=asked.model, latency_slo_ms=asked.slo_s * 1e3
        )
        self._unanswered(asked.stream, trace, error)
        self._bad(asked.stream)
        raise error

    def _unanswered(self, stream: str, trace: RequestTrace, error: BaseException) -> None:
        outcome, reason = outcome_of(error)
        trace.unanswered(outcome, reason, error)
        self._metrics.unanswered(stream, outcome, reason)

    async def _answer_one(self, asked: Asked, item: Any, trace: RequestTrace) -> Answer:
        model, hooks = asked.model, self._hooks
        entry = Entry(next(self._ids), model, asked, item, asked.arrival, trace=trace)
        await self._prepare(entry)
        value, visit = await self._ledger.serve(entry)
        if isinstance(value, Outputs) and model in self._shared:
            value = value.result  # items for child tasks have no use without a pipeline
        if not isinstance(value, BaseException):
            value = await hooks.postprocessed(model, asked, value)
        return self._describe(entry, visit, value, time.monotonic() - asked.arrival)

    async def _prepare(self, entry: Entry) -> None:
        """Preprocess an item, get its size, and count it."""
        model, asked, is_own = entry.model, entry.asked, entry.upstream is None
        entry.item = await self._hooks.preprocessed(model, asked, entry.item, is_own=is_own)
        entry.size = await self._hooks.size(model, asked, entry.item, is_own=is_own)
        self._sized(entry)

    def _sized(self, entry: Entry) -> None:
        if self._demand is not None:
            self._demand.sized(entry.model, entry.size)

    def _describe(self, entry: Entry, visit: Visit, value: Any, latency_s: float) -> Answer:
        """Return the answer of the model or task that served a request."""
        variant = self._ledger.variant(entry.model, visit.variant)
        slo_s = entry.asked.slo_s - (entry.entered - entry.asked.arrival)  # exact for a client's
        return Answer(
            result=value,
            model=entry.task or entry.model,
            variant=variant.name,
            accuracy=variant.accuracy,
            batch_size=visit.batch_size,
            queue_ms=visit.queue_s * 1e3,
            exec_ms=visit.exec_s * 1e3,
            latency_ms=latency_s * 1e3,
            latency_slo_ms=slo_s * 1e3,
        )

    # -- a pipeline ------------------------------------------------------------------------

    async def _answer_tree(self, asked: Asked, item: Any, trace: RequestTrace) -> Answer:
        tree = self._spec.trees[asked.model]

        def serve(task: str, item: Any, upstream: Upstream | None) -> Awaitable[tuple[Any, Visit]]:
            return self._serve_task(asked, trace.task(task), tree[task], item, upstream)

        # Tasks end by themselves at their deadline. Longer times are those of `postprocess` or
        # `join`, or of this process.
        progress = Progress()
        visits = self._runners[asked.model].run(item, serve, progress)
        where = functools.partial(_where, progress, self._hooks)
        node = await self._hooks.in_time(asked, visits, GRACE_S + _JOINING_S, where)
        latency_ms = (time.monotonic() - asked.arrival) * 1e3
        accuracy = self._accuracies[asked.model]
        return joined_answer(asked.model, node, accuracy, latency_ms, asked.slo_s * 1e3)

    def _serve_task(
        self,
        asked: Asked,
        trace: RequestTrace,
        task: TreeTask,
        item: Any,
        upstream: Upstream | None,
    ) -> Awaitable[tuple[Any, Visit]]:
        entered = asked.arrival if upstream is None else time.monotonic()
        entry = Entry(next(self._ids), task.model, asked, item, entered, upstream, trace)
        entry.task = task.name
        if task.model in self._hooks.preprocess or task.model in self._hooks.sizes:
            return self._prepare_and_serve(entry)
        self._sized(entry)
        return self._serve_entry(entry)

    async def _prepare_and_serve(self, entry: Entry) -> tuple[Any, Visit]:
        try:
            await self._prepare(entry)
        except BaseException as error:
            self._task_failed(entry, error)
            raise
        return await self._serve_entry(entry)

    def _serve_entry(self, entry: Entry) -> asyncio.Future[tuple[Any, Visit]]:
        future = self._ledger.serve(entry)
        future.add_done_callback(functools.partial(self._task_ended, entry))
        return future

    def _task_ended(self, entry: Entry, future: asyncio.Future[tuple[Any, Visit]]) -> None:
        if future.cancelled():
            self._task_failed(entry, asyncio.CancelledError())
        elif (error := future.exception()) is not None:
            self._task_failed(entry, error)
        else:
            _, visit = future.result()
            stage = self._describe(entry, visit, None, visit.spent_s)
            entry.trace.answered(stage)
            self._metrics.answered(stage)

    def _task_failed(self, entry: Entry, error: BaseException) -> None:
        self._unanswered(entry.task, entry.trace, error)
        if isinstance(error, SLOError):
            error.model, error.task = entry.asked.model, entry.task
        elif isinstance(error, Exception):
            say_task(error, entry.task)


def _where(progress: Progress, hooks: Hooks) -> str:
    """Return what a pipeline's request waits for, for an error."""
    # A call may have ended without the busy frontend having noted it.
    is_stuck = hooks.is_in_long_call() or time.monotonic() - progress.moved_at > _STUCK_S
    said = f"{progress.served} of its {progress.begun} requests at tasks were answered"
    if progress.in_code and is_stuck:
        return f"{said}, and {progress.in_code} were in the application's postprocess or join"
    return f"{said}, and the frontend had not done the rest: it is too busy for so many"
