"""The frontend: a Serve replica that owns every request from its arrival to its answer.

It reads the deadline, runs `preprocess`, sends metadata to the scheduler, holds the payload, sends
its share of a granted batch to the worker in one call, and answers once: with the result, with a
typed error, or after trying again because a worker died.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import cloudpickle, serve
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ray_slo.serve.answers import Answer, to_json
from ray_slo.serve.channel import ActorChannel, Channel, EmbeddedChannel
from ray_slo.serve.errors import (
    BadInput,
    ConfigError,
    Expired,
    RefusedEarly,
    SLOError,
    UnknownModel,
    WorkerLost,
    http_response,
)
from ray_slo.serve.group_channel import GroupedChannel
from ray_slo.serve.messages import (
    Grant,
    Heartbeat,
    Message,
    Piece,
    PieceResult,
    Refusal,
    Stop,
    Submit,
)
from ray_slo.serve.metrics import FrontendMetrics
from ray_slo.serve.request_context import LATENCY_HEADER, PROXIED_HEADER, TIMEOUT_HEADER
from ray_slo.serve.scheduler import Quantile
from ray_slo.serve.spec import AppSpec, VariantRef, worker_deployment

logger = logging.getLogger(__name__)

_GRACE_S = 1.0  # a caller hears something by its deadline plus this, whatever happens
_MEET_S = 5.0  # for workers to introduce themselves again
_INLINE_S = 0.002  # pre- and postprocessing slower than this leaves the event loop for a thread
# What a call to a worker raises when the worker is gone, or its node with the result.
_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)


class _Pending:
    """A request that is not answered yet."""

    __slots__ = (
        "arrival",
        "deadline",
        "future",
        "grant",
        "id",
        "item",
        "model",
        "preemptions",
        "result",
        "retries",
        "sent_at",
        "slo_ms",
    )

    def __init__(self, id: int, model: str, arrival: float, slo_s: float, item: Any) -> None:
        self.id = id
        self.model = model
        self.arrival = arrival
        self.deadline = arrival + slo_s
        self.slo_ms = slo_s * 1e3
        self.item = item
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.grant: Grant | None = None
        self.result: PieceResult | None = None
        self.retries = 0
        self.preemptions = 0
        self.sent_at = math.nan


class _Hook:
    """A user's pre- or postprocessing: on the event loop while it is quick, else in a thread."""

    def __init__(self, function: Callable[[Any], Any], threads: ThreadPoolExecutor) -> None:
        self._function = function
        self._threads = threads
        self._is_async = inspect.iscoroutinefunction(function)
        self._mean_s = 0.0

    async def __call__(self, value: Any) -> Any:
        if self._is_async:
            return await self._function(value)
        if self._mean_s > _INLINE_S:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._in_thread, value)
        start = time.perf_counter()
        result = self._function(value)
        self._mean_s += 0.1 * (time.perf_counter() - start - self._mean_s)
        return result

    def _in_thread(self, value: Any) -> Any:
        try:
            return self._function(value)
        except StopIteration as error:  # a future cannot carry it
            raise RuntimeError("StopIteration") from error


class Frontend:
    """Ingress of an application: HTTP requests and handle calls come in here."""

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, workers: dict[str, Any]
    ) -> None:
        self._spec = spec
        self._variants = spec.variants()
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._clock = time.monotonic  # uvloop's loop.time() has milliseconds only
        context = serve.get_replica_context()
        app_key = f"{context.app_name}#{context.deployment}"
        self._check_names(context.deployment, workers)
        threads = ThreadPoolExecutor(4, thread_name_prefix="ray-slo-frontend")
        self._preprocess: dict[str, _Hook] = {}
        self._postprocess: dict[str, _Hook] = {}
        for name, model in spec.models.items():
            cls = model.load()
            if hasattr(cls, "preprocess"):
                self._preprocess[name] = _Hook(cls.preprocess, threads)
            if hasattr(cls, "postprocess"):
                self._postprocess[name] = _Hook(cls.postprocess, threads)
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._num_owned = 0  # from arrival to answer, pre- and postprocessing included
        self._overhead = Quantile(0.95)
        self._metrics = FrontendMetrics()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: Channel
        client = context.replica_id.unique_id
        if spec.grouped:
            self._channel = GroupedChannel(spec, app_key, client, self._on_messages, self._resubmit)
        elif spec.embedded:
            self._channel = EmbeddedChannel(spec, self._on_messages)
        else:
            self._channel = ActorChannel(
                spec, app_key, client, self._on_messages, self._resubmit_all
            )
        # Not ready before there is somebody to do the work: Serve then routes nothing here.
        await self._meet_workers()
        self._spawn(self._refresh_metrics())

    def _check_names(self, deployment: str, workers: dict[str, Any]) -> None:
        # When an application holds several deployments of one name, Serve numbers them. A worker
        # finds its frontend by that number, so the two must have got the same.
        name = self._spec.deployment_name
        suffix = deployment.removeprefix(name)
        for kind, handle in workers.items():
            if handle.deployment_name != worker_deployment(name, kind) + suffix:
                raise ConfigError(
                    f"name: frontend {deployment!r} and its workers {handle.deployment_name!r} do "
                    f"not match, because another deployment of the application is named {name!r}, "
                    "too; give one of them another name"
                )

    # -- ways in ---------------------------------------------------------------------------

    async def __call__(
        self,
        item: Any,
        *,
        model: str | None = None,
        latency_slo_ms: float | None = None,
        response_metadata: bool = False,
    ) -> Any:
        """Answer one item.

        Args:
            item: what the model's `preprocess` takes (or its batch method, item by item); an HTTP
                request when called by Serve's proxy.
            model: needed when the application serves several.
            latency_slo_ms: this call's own SLO, milliseconds from now.
            response_metadata: return an `Answer` instead of the bare result.

        Raises:
            RefusedEarly, Expired, WorkerLost, UnknownModel, BadInput: see `ray_slo.errors`.
            Exception: whatever the user's method raised for this request's batch.
        """
        arrival = self._clock()
        if isinstance(item, HttpRequest):
            return await self._http(item, arrival)
        name = self._model_name(model)
        answer = await self._answer(name, item, self._slo_s(name, latency_slo_ms), arrival)
        return answer if response_metadata else answer.result

    async def _http(self, request: HttpRequest, arrival: float) -> Response:
        try:
            name = self._model_name(self._path(request) or None)
            if request.method in ("GET", "HEAD"):
                return JSONResponse(self._describe())
            if request.method != "POST":
                return JSONResponse(
                    {"error": "MethodNotAllowed", "message": "POST an item, or GET a description"},
                    status_code=405,
                    headers={"allow": "GET, POST"},
                )
            slo_s = self._slo_s(name, self._requested_slo_ms(request, name))
            body = await request.body()
            if len(body) > self._spec.max_body_bytes:
                return JSONResponse(
                    {
                        "error": "BodyTooLarge",
                        "message": f"body has {len(body)} bytes; at most "
                        f"{self._spec.max_body_bytes} are read",
                    },
                    status_code=413,
                )
            item = self._parse(request, body, name)
            answer = await self._answer(name, item, slo_s, arrival)
            if isinstance(answer.result, Response):
                answer.result.headers.update(answer.headers())
                return answer.result
            if isinstance(answer.result, bytes):
                return Response(
                    answer.result,
                    media_type="application/octet-stream",
                    headers=answer.headers(),
                )
            content = to_json(answer.result)
            return Response(content, media_type="application/json", headers=answer.headers())
        except SLOError as error:
            return http_response(error)
        except Exception as error:
            logger.exception("request failed")
            return JSONResponse(
                {"error": type(error).__name__, "reason": "failed", "message": str(error)},
                status_code=500,
            )

    async def slo_heartbeat(self, beat: Heartbeat) -> None:
        """From workers, when the scheduler lives here."""
        await self._channel.heartbeat(beat)

    async def slo_move(self, model: str, group: str) -> None:
        """Serve a model in another group from now on, without a failed request.

        Returns when that is decided; `slo_status()["plan"]["state"]` is "settled" when it is done.

        Raises:
            ConfigError, UnknownModel: no groups, no such group, no such model.
        """
        if not isinstance(self._channel, GroupedChannel):
            raise ConfigError("the application has no serving groups; name some under `groups`")
        await self._channel.move(model, group)

    async def slo_replan(self) -> None:
        """Have the groups planned now; returns when that is done.

        Raises:
            ConfigError: there is no planner.
        """
        if not isinstance(self._channel, GroupedChannel):
            raise ConfigError("the application has no serving groups; name some under `groups`")
        await self._channel.replan()

    async def slo_status(self) -> dict[str, Any]:
        """What `ray-slo status` shows."""
        return {
            **self._describe(),
            "pending": len(self._pending),
            "goodput": self._metrics.goodput(),
            "accuracy": self._metrics.accuracy(),
            "overhead_ms": 1e3 * self._overhead.value(default=0.0),
            **await self._channel.status(),
        }

    # -- reading a request -----------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        return {
            "models": {
                name: {"latency_slo_ms": m.latency_slo_ms}
                | (
                    {"variants": {v: {"accuracy": s.accuracy} for v, s in m.variants.items()}}
                    if m.variants
                    else {"accuracy": m.accuracy}
                )
                for name, m in self._spec.models.items()
            }
        }

    def _path(self, request: HttpRequest) -> str:
        path: str = request.scope.get("path", "")
        root: str = request.scope.get("root_path", "")
        return path.removeprefix(root).strip("/")

    def _model_name(self, name: str | None) -> str:
        models = self._spec.models
        if name is None:
            if len(models) == 1:
                return next(iter(models))
            self._metrics.unanswered("", "invalid", "unknown_model")
            raise UnknownModel(
                f"say which model; choose one of {', '.join(sorted(models))}", valid=models
            )
        if name not in models:
            self._metrics.unanswered("", "invalid", "unknown_model")
            raise UnknownModel(model=name, valid=models)
        return name

    def _slo_s(self, model: str, latency_slo_ms: float | None) -> float:
        if latency_slo_ms is None:
            return self._spec.models[model].latency_slo_ms / 1e3
        try:
            slo_ms = float(latency_slo_ms)
        except (TypeError, ValueError):
            slo_ms = math.nan
        if not (slo_ms > 0 and math.isfinite(slo_ms)):
            raise BadInput(
                f"latency_slo_ms must be a positive number of milliseconds, got {latency_slo_ms!r}",
                field="latency_slo_ms",
                model=model,
            )
        return slo_ms / 1e3

    def _requested_slo_ms(self, request: HttpRequest, model: str) -> float | None:
        """`x-slo-latency-ms` replaces the model's SLO; a timeout can only tighten it."""
        own_ms = self._header(request, LATENCY_HEADER)
        if own_ms is not None:
            return own_ms
        timeout_ms = self._header(request, PROXIED_HEADER)
        if timeout_ms is None:
            timeout_s = self._header(request, TIMEOUT_HEADER, zero_is_none=True)
            timeout_ms = None if timeout_s is None else timeout_s * 1e3
        if timeout_ms is None:
            return None
        return min(timeout_ms, self._spec.models[model].latency_slo_ms)

    @staticmethod
    def _header(request: HttpRequest, name: str, *, zero_is_none: bool = False) -> float | None:
        text = request.headers.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if zero_is_none and value <= 0:
            return None  # Serve's way of saying "no timeout"
        if not (value > 0 and math.isfinite(value)):
            raise BadInput(f"header {name} must be a positive number, got {text!r}", field=name)
        return value

    def _parse(self, request: HttpRequest, body: bytes, model: str) -> Any:
        """JSON by content type; raw bytes for anything else, if the model has a `preprocess`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = kind == "application/json" or kind.endswith("+json")
        if not is_json and model in self._preprocess and kind:
            return body
        try:
            return json.loads(body)
        except (ValueError, UnicodeDecodeError) as error:
            if not is_json and model in self._preprocess:
                return body
            raise BadInput(
                f"body is not JSON: {error}" + ("" if is_json else f" (content-type {kind!r})"),
                field="body",
                model=model,
            ) from None

    # -- one request -----------------------------------------------------------------------

    async def _answer(self, model: str, item: Any, slo_s: float, arrival: float) -> Answer:
        if self._num_owned >= self._spec.max_queued_requests:
            self._metrics.unanswered(model, "refused", "queue_full")
            raise RefusedEarly(
                f"{self._num_owned} requests are waiting, which is the limit (max_queued_requests)",
                reason="queue_full",
                model=model,
                latency_slo_ms=slo_s * 1e3,
            )
        self._num_owned += 1
        try:
            return await self._answer_admitted(model, item, slo_s, arrival)
        except asyncio.CancelledError:
            self._metrics.unanswered(model, "cancelled", "cancelled")
            raise
        except Expired as error:
            self._metrics.unanswered(model, "expired", error.reason)
            raise
        except RefusedEarly as error:
            self._metrics.unanswered(model, "refused", error.reason)
            raise
        except BadInput as error:
            self._metrics.unanswered(model, "invalid", error.reason)
            raise
        except Exception:
            self._metrics.unanswered(model, "failed", "user_error")
            raise
        finally:
            self._num_owned -= 1

    async def _answer_admitted(self, model: str, item: Any, slo_s: float, arrival: float) -> Answer:
        if model in self._preprocess:
            try:
                item = await self._preprocess[model](item)
            except SLOError:
                raise
            except (ValueError, TypeError, LookupError) as error:
                raise BadInput(
                    f"preprocess refused the item: {error}", field="item", model=model
                ) from error
        pending = _Pending(next(self._ids), model, arrival, slo_s, item)
        self._pending[pending.id] = pending
        guard = self._loop.call_later(
            pending.deadline + _GRACE_S - self._clock(), self._give_up, pending
        )
        try:
            self._submit(pending)
            value = await pending.future
        except asyncio.CancelledError:
            self._channel.cancel(pending.id)
            raise
        finally:
            guard.cancel()
            del self._pending[pending.id]
        if model in self._postprocess:
            value = await self._postprocess[model](value)
        return self._finish(pending, value)

    def _finish(self, pending: _Pending, value: Any) -> Answer:
        assert pending.grant is not None and pending.result is not None
        result = pending.result
        latency_s = self._clock() - pending.arrival
        queue_s = max(pending.sent_at - pending.arrival + result.wait_s, 0.0)
        variant = self._variant(pending.grant)
        answer = Answer(
            result=value,
            model=pending.model,
            variant=variant.name,
            accuracy=variant.accuracy,
            batch_size=result.batch_size,
            queue_ms=queue_s * 1e3,
            exec_ms=result.exec_s * 1e3,
            latency_ms=latency_s * 1e3,
            latency_slo_ms=pending.slo_ms,
        )
        self._metrics.answered(answer)
        return answer

    def _variant(self, grant: Grant) -> VariantRef:
        # A scheduler of a newer release may name one that we, still draining, do not know.
        unknown = VariantRef(grant.model, grant.variant, None)
        return self._variants.get(grant.variant, unknown)

    def _submit(self, pending: _Pending) -> None:
        """(Again) to the scheduler, with what is left of the budget less the way back."""
        margin_s = self._spec.response_margin_ms / 1e3 + 0.5 * self._overhead.value(default=0.0)
        budget_s = pending.deadline - margin_s - self._clock()
        if budget_s <= 0:
            slo_ms = pending.slo_ms
            gone_s = self._clock() - pending.arrival
            self._fail(
                pending,
                RefusedEarly(
                    f"no time is left for the work: of {slo_ms:.4g} ms, {gone_s * 1e3:.4g} ms are "
                    f"over, and {margin_s * 1e3:.4g} ms are kept for the way back"
                    f"{_preempted(pending)}",
                    reason="preempted" if pending.preemptions else None,
                    model=pending.model,
                    latency_slo_ms=slo_ms,
                    predicted_finish_ms=(self._clock() + margin_s - pending.arrival) * 1e3,
                ),
            )
            return
        pending.grant = None
        self._channel.submit(Submit(pending.id, pending.model, budget_s))

    def _fail(self, pending: _Pending, error: BaseException) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)

    def _give_up(self, pending: _Pending) -> None:
        self._channel.cancel(pending.id)
        where = f"on worker {pending.grant.worker}" if pending.grant else "in the queue"
        self._fail(
            pending,
            Expired(
                f"no answer {_GRACE_S:g} s after the deadline; the request was {where}",
                model=pending.model,
                latency_slo_ms=pending.slo_ms,
            ),
        )

    def _resubmit_all(self) -> None:
        """The scheduler is new: tell it of everything that waits."""
        self._resubmit(list(self._pending))

    def _resubmit(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            pending = self._pending.get(request_id)
            if pending is not None and pending.grant is None and not pending.future.done():
                self._submit(pending)

    # -- what the scheduler says -----------------------------------------------------------

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Grant):
                self._spawn(self._send(message))
            elif isinstance(message, Stop):
                self._spawn(self._stop(message))
            else:
                self._refuse(message)

    def _refuse(self, refusal: Refusal) -> None:
        now = self._clock()
        for request_id in refusal.request_ids:
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            slo_ms = pending.slo_ms
            finish_ms = (now + refusal.finish_in_s - pending.arrival) * 1e3
            if refusal.reason == "expired":
                self._fail(
                    pending,
                    Expired(
                        f"waited until its deadline of {slo_ms:.4g} ms was out of reach",
                        model=pending.model,
                        latency_slo_ms=slo_ms,
                    ),
                )
                continue
            why = {
                "would_miss": "it would have finished too late",
                "shed": "the system is overloaded, and serving it would have delayed others",
                "no_worker": "no worker has its model loaded",
            }.get(refusal.reason, refusal.reason)
            self._fail(
                pending,
                RefusedEarly(
                    f"refused early: {why}{_preempted(pending)}",
                    reason="preempted" if pending.preemptions else refusal.reason,
                    model=pending.model,
                    latency_slo_ms=slo_ms,
                    predicted_finish_ms=finish_ms,
                ),
            )

    async def _stop(self, stop: Stop) -> None:
        """Pass a preemption on. What becomes of the batch is said by its results."""
        try:
            await self._workers[stop.kind].preempt.remote(stop.batch_id, worker=stop.worker)
        except Exception as error:
            logger.info("batch %s could not be preempted: %r", stop.batch_id, error)

    async def _send(self, grant: Grant) -> None:
        """Send our share of a batch and hand its results out."""
        share = [
            p
            for i in grant.request_ids
            if (p := self._pending.get(i)) is not None and not p.future.done()
        ]
        if not share and grant.num_pieces == 1:
            self._channel.batch_withdrawn(grant.batch_id)
            return
        # An empty share is sent, too: the other frontends' pieces wait for it.
        sent_at = self._clock()
        for pending in share:
            pending.grant, pending.sent_at = grant, sent_at
        piece = Piece(
            batch_id=grant.batch_id,
            variant=grant.variant,
            items=[p.item for p in share],
            piece=grant.piece,
            num_pieces=grant.num_pieces,
            start_by_s=grant.start_in_s + max(grant.slack_s, 0.0),
        )
        try:
            result: PieceResult = await self._workers[grant.kind].execute.remote(
                piece, worker=grant.worker
            )
        except asyncio.CancelledError:
            raise
        except WorkerLost as error:  # from the router: it was not even sent
            logger.warning("%s", error)
            self._channel.worker_lost(grant.worker)
            self._submit_again(share)
            return
        except _GONE as error:
            logger.warning("worker %s is lost: %s", grant.worker, type(error).__name__)
            self._channel.worker_lost(grant.worker)
            self._submit_again(self._with_retries_left(share, grant))
            return
        except Exception as error:
            if self._refuse_unpicklable(share):
                await self._send(grant)  # what is left of it
                return
            # A result that cannot be pickled, most likely.
            self._channel.batch_withdrawn(grant.batch_id)
            for pending in share:
                self._fail(pending, error)
            return
        self._overhead.add(max(self._clock() - sent_at - result.held_s, 0.0))
        if result.report is not None and not result.preempted:
            predicted_s = grant.finish_in_s - (self._clock() - sent_at)
            self._metrics.predicted(self._variant(grant), -predicted_s * 1e3)
        self._channel.report(result.report)
        if result.results is None:  # preempted, or the batch had to start without it
            for pending in share:
                pending.preemptions += result.preempted
            self._submit_again(share)
            return
        for pending, (ok, value) in zip(share, result.results, strict=True):
            pending.result = result
            if pending.future.done():
                continue
            if ok:
                pending.future.set_result(value)
            else:
                pending.future.set_exception(value)

    def _submit_again(self, share: list[_Pending]) -> None:
        for pending in share:
            if not pending.future.done():
                self._submit(pending)

    def _with_retries_left(self, share: list[_Pending], grant: Grant) -> list[_Pending]:
        """Count one more worker that died with them, and fail those for which it was the last."""
        for pending in share:
            pending.retries += 1
            if pending.retries > self._spec.retries:
                before = f", and so were {pending.retries - 1} before" * (pending.retries > 1)
                self._fail(
                    pending,
                    WorkerLost(
                        f"worker {grant.worker} was lost with the request{before}",
                        worker=grant.worker,
                        model=pending.model,
                        latency_slo_ms=pending.slo_ms,
                    ),
                )
        return share

    def _refuse_unpicklable(self, share: list[_Pending]) -> bool:
        """Refuse what cannot be sent to a worker; whether there was any."""
        poison = [p for p in share if not _picklable(p.item)]
        for pending in poison:
            self._fail(
                pending,
                BadInput(
                    f"an item of type {type(pending.item).__name__} cannot be sent to a worker: "
                    "it cannot be pickled",
                    field="item",
                    model=pending.model,
                ),
            )
        return bool(poison)

    # -- life ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet_workers(self) -> None:
        for handle in self._workers.values():
            await self._channel.join(await handle.introduce.remote())

    async def _refresh_metrics(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._metrics.refresh(len(self._pending))
            # While Serve replaces us, workers beat to our successor, and it replaces them, too.
            if self._pending and self._channel.is_deserted():
                try:
                    await asyncio.wait_for(self._meet_workers(), _MEET_S)
                except Exception as error:
                    logger.info("no worker to be met: %r", error)

    def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_channel"):
            self._channel.close()


def _preempted(pending: _Pending) -> str:
    count = pending.preemptions
    times = "" if count == 1 else f" {count} times"
    return f"; it was stopped{times} while it ran, for a larger batch" if count else ""


def _picklable(item: Any) -> bool:
    try:
        cloudpickle.dumps(item)
    except Exception:
        return False
    return True
