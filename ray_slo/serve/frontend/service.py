"""Serves one request from its item to its answer: at one model, or through a pipeline."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

from ray_slo.core.requests import Upstream
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.errors import RefusedEarly, SLOError, outcome_of
from ray_slo.serve.frontend.answer import Answer, answer_of, joined_answer
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import GRACE_S, Asked, Entry, Ledger
from ray_slo.serve.frontend.surroundings import Demand
from ray_slo.serve.frontend.tree import Tree, Visit, say_task
from ray_slo.serve.watch import tracing
from ray_slo.serve.watch.metrics import FrontendMetrics
from ray_slo.serve.watch.tracing import RequestTrace

_BAD = frozenset({"refused", "expired"})  # outcomes that more workers can mend
_JOINING_S = 0.1  # that a whole pipeline may take longer than its tasks


class Service:
    """Serves requests.

    Args:
        demand: told of requests; None where nobody plans by them.
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
        self._tree: Tree | None = None
        if (pipeline := spec.pipeline) is not None:
            self._accuracy = functools.cache(pipeline.accuracy)
            self._tree = Tree(
                pipeline.parents,
                postprocess=hooks.postprocess,
                join=hooks.joins,
                made=None if demand is None else demand.finished,
            )
        self.num_owned = 0  # requests from arrival to answer, pre- and postprocessing included

    async def answer(self, asked: Asked, item: Any) -> Answer:
        """Serve an item.

        Raises:
            RefusedEarly, Expired, WorkerLost, BadInput: see `ray_slo.errors`.
            Exception: whatever the user's code raised.
        """
        if asked.model not in self._hooks.sizes:
            self._arrived(asked.model)
        trace = tracing.request(asked.model, asked.arrival, asked.slo_s, asked.traceparent)
        if self.num_owned >= self._spec.max_queued_requests:
            self._make_room(asked, trace)
        self.num_owned += 1
        try:
            answer_one = self._answer_one if self._tree is None else self._answer_tree
            with trace.inside():
                answer = await answer_one(asked, item, trace)
        except BaseException as error:
            self._unanswered(asked.model, trace, error)
            if outcome_of(error)[0] in _BAD:
                self._bad(asked.model)
            if isinstance(error, SLOError):
                error.model = error.model or asked.model
            raise
        finally:
            self.num_owned -= 1
        trace.answered(answer)
        self._metrics.answered(answer)
        if not answer.deadline_met:
            self._bad(asked.model)
        return answer

    def turned_away(self, model: str, count: int) -> None:
        """Requests came no further than a door; they count as demand."""
        self._arrived(model, None if model in self._hooks.sizes else 1, count)
        self._bad(model, count)

    def _arrived(self, model: str, size: int | None = 1, count: int = 1) -> None:
        if self._demand is not None:
            self._demand.arrived(model, size, count)

    def _bad(self, model: str, count: int = 1) -> None:
        if self._demand is not None:
            self._demand.bad(model, count)

    def _make_room(self, asked: Asked, trace: RequestTrace) -> None:
        """Refuse this request, or one with a later deadline."""
        said = f"{self.num_owned} requests are waiting, which is the limit (max_queued_requests)"
        if self._ledger.give_way(asked.deadline, said):
            return
        error = RefusedEarly(
            said, reason="queue_full", model=asked.model, latency_slo_ms=asked.slo_s * 1e3
        )
        self._unanswered(asked.model, trace, error)
        self._bad(asked.model)
        raise error

    def _unanswered(self, model: str, trace: RequestTrace, error: BaseException) -> None:
        outcome, reason = outcome_of(error)
        trace.unanswered(outcome, reason, error)
        self._metrics.unanswered(model, outcome, reason)

    async def _answer_one(self, asked: Asked, item: Any, trace: RequestTrace) -> Answer:
        model, hooks = asked.model, self._hooks
        item = await hooks.preprocessed(model, asked, item, is_own=True)
        entry = Entry(next(self._ids), model, asked, item, asked.arrival, trace=trace)
        entry.size = await hooks.size(model, asked, item)
        if model in hooks.sizes:
            self._arrived(model, entry.size)
        value, visit = await self._ledger.serve(entry)
        value = await hooks.postprocessed(model, asked, value)
        return self._describe(entry, visit, value, time.monotonic() - asked.arrival)

    def _describe(self, entry: Entry, visit: Visit, value: Any, latency_s: float) -> Answer:
        """How a request went at the model, or task, that served it."""
        variant = self._ledger.variant(entry.model, visit.variant)
        slo_s = entry.asked.deadline - entry.entered
        return answer_of(value, variant, visit, latency_s, slo_s)

    # -- a pipeline ------------------------------------------------------------------------

    async def _answer_tree(self, asked: Asked, item: Any, trace: RequestTrace) -> Answer:
        assert self._tree is not None

        async def serve(task: str, item: Any, upstream: Upstream | None) -> tuple[Any, Visit]:
            return await self._serve_task(asked, trace.task(task), task, item, upstream)

        # Tasks give up by themselves; what takes longer is `postprocess` or `join`.
        visits = self._tree.run(item, serve)
        node = await self._hooks.in_time(asked, visits, GRACE_S + _JOINING_S)
        latency_ms = (time.monotonic() - asked.arrival) * 1e3
        return joined_answer(asked.model, node, self._accuracy, latency_ms, asked.slo_s * 1e3)

    async def _serve_task(
        self,
        asked: Asked,
        trace: RequestTrace,
        task: str,
        item: Any,
        upstream: Upstream | None,
    ) -> tuple[Any, Visit]:
        is_own = upstream is None
        entered = asked.arrival if is_own else time.monotonic()
        try:
            item = await self._hooks.preprocessed(task, asked, item, is_own=is_own)
            entry = Entry(next(self._ids), task, asked, item, entered, upstream, trace)
            entry.size = await self._hooks.size(task, asked, item)
            value, visit = await self._ledger.serve(entry)
        except BaseException as error:
            self._unanswered(task, trace, error)
            if isinstance(error, SLOError):
                error.model, error.task = asked.model, task
            elif isinstance(error, Exception):
                say_task(error, task)
            raise
        stage = self._describe(entry, visit, None, visit.spent_s)
        trace.answered(stage)
        self._metrics.answered(stage)
        return value, visit
