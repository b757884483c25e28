"""What the actors that plan have in common, and how workers and frontends speak to them.

Such an actor is named and detached, and belongs to one application. Nobody is called from there:
workers and frontends ask, by long polls, what they should do, and say what they have done. So it
may die at any time: they go on with its last answer, Ray restarts it (or they make it anew), and it
goes on from what they say. It leaves when its application is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import ray

from ray_slo.record.writer import PlanLog, open_plan_log
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.ray_private.actors import Releases, application_is_gone, find_actor

logger = logging.getLogger(__name__)

W = TypeVar("W")

_STEP_S = 0.2
_POLL_S = 2.0  # a long poll returns after this, so that the silent are noticed
_WATCH_S = 2.0
_ANSWER_S = 10.0  # more than a long poll takes
AGAIN_S = 0.3  # after it could not be reached


class AppActor:
    """Steps, news for long polls, and leaving."""

    def __init__(self, spec: AppSpec, app_key: str) -> None:
        self._app_key = app_key
        self._releases = Releases(spec)
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._planning: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._log: PlanLog | None = None
        self._reset(spec)

    def _reset(self, spec: AppSpec) -> None:
        """Begin anew, with a specification."""
        self._spec = spec
        self._planning = None

    def _go_on(self, spec: AppSpec) -> None:
        """Go on, with one that differs in nothing that replicas would have to know of."""
        self._spec = spec

    async def configure(self, spec: AppSpec) -> None:
        """Take over a newer specification (a redeployed application)."""
        if self._releases.is_news(spec, self._spec):
            if spec.fingerprint != self._spec.fingerprint:
                if self._planning is not None:
                    self._planning.cancel()
                self._reset(spec)
                self._tell()
            else:
                self._go_on(spec)
        self._start()

    def _open_log(self, spec: AppSpec, epoch: str) -> None:
        """Begin the log of what is decided, where the application wants one."""
        if self._log is not None:
            self._log.close()
        self._log = open_plan_log(spec, epoch)

    async def _hear_clock(self, scheduler: str) -> None:
        """Ask a scheduler what time it has, so that what is logged there and here can be put in
        one order."""
        if self._log is None:
            return
        try:
            loop = asyncio.get_running_loop()
            actor = await loop.run_in_executor(None, find_actor, scheduler)
            clock, reading = await in_time(actor.clock.remote())
            self._log.clocks.heard(clock, reading, time.monotonic())
        except Exception as error:  # it is starting, or restarting
            logger.info("clock of scheduler %s: %r", scheduler, error)

    async def _turn(self, now: float) -> None:
        """Whatever is to be done every `_STEP_S`."""
        raise NotImplementedError

    def _is_alone(self) -> bool:
        """Whether no worker and no frontend was heard of lately."""
        raise NotImplementedError

    def _start(self) -> None:
        # Not in __init__: there is no running event loop there.
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run())
            self._watcher = loop.create_task(self._watch())

    async def _run(self) -> None:
        while True:
            try:
                await self._turn(time.monotonic())
            except Exception:
                logger.exception("planner step failed; going on")
            await asyncio.sleep(_STEP_S)

    def _tell(self) -> None:
        """Wake all long polls."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self, until: float) -> None:
        """Wait for the next `_tell`, at most until then."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(until - time.monotonic(), 0.0))

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                if self._is_alone() and await loop.run_in_executor(
                    None, application_is_gone, self._app_key
                ):
                    logger.info("application %s is gone; leaving", self._app_key)
                    if self._log is not None:
                        self._log.close(1.0)
                    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            except Exception:
                logger.exception("watch failed; going on")


class AppActorLink:
    """A worker's or frontend's way to such an actor, found (or made) anew when it is gone.

    Args:
        make: `get_or_create` of the actor, bound.
        spec: which the actor is told of first.
    """

    def __init__(self, make: Callable[[], Any], spec: AppSpec) -> None:
        self._make = make
        self._spec = spec
        self._actor: Any = None

    @property
    def actor(self) -> Any:
        """The actor as it was last found.

        Raises:
            ConnectionError: it cannot be reached.
        """
        if self._actor is None:
            raise ConnectionError("the planner cannot be reached; the last plan holds")
        return self._actor

    async def ask(self, method: str, *args: Any) -> Any:
        """The answer of one of its methods.

        Raises:
            Exception: whatever kept it from answering; it is looked up anew next time.
        """
        try:
            if self._actor is None:
                loop = asyncio.get_running_loop()
                actor = await loop.run_in_executor(None, self._make)
                await in_time(actor.configure.remote(self._spec.without_code()))
                self._actor = actor
            return await in_time(getattr(self._actor, method).remote(*args))
        except Exception:
            self._actor = None
            raise


class Follower(Generic[W]):
    """A worker's side: asks what is wanted of it, and does that, one thing at a time."""

    def __init__(self, link: AppActorLink) -> None:
        self._link = link
        self._had: str | None = None  # names the last answer

    def _says(self) -> Any:
        """What the worker tells of itself."""
        raise NotImplementedError

    async def _first(self, wanted: W) -> bool:
        """Do it for the first time; what is raised here ends the worker.

        Returns whether the worker can begin to serve; else it does what is wanted next, first.
        """
        raise NotImplementedError

    async def _do(self, wanted: W) -> None:
        """Do it, or what is left to do of it."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Do what is wanted first; returns when the worker can serve.

        Raises:
            Exception: of `_first`.
        """
        wanted, ready = None, False
        while not ready:
            while wanted is None:
                wanted = await self._ask()
            first = asyncio.ensure_future(self._first(wanted))
            wanted = None
            while not first.done():
                asking = asyncio.ensure_future(self._ask())  # or we are taken for dead
                await asyncio.wait({first, asking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    wanted = asking.result() or wanted
                asking.cancel()
            ready = await first

    async def follow(self) -> None:
        """Do what is wanted, for ever."""
        doing: asyncio.Task[None] | None = None
        latest: W | None = None
        try:
            while True:
                asking = asyncio.ensure_future(self._ask())
                await asyncio.wait(
                    {asking} if doing is None else {asking, doing},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if asking.done():
                    latest = asking.result() or latest
                asking.cancel()
                if doing is not None and doing.done():
                    if (error := doing.exception()) is not None:
                        logger.error("could not take up what is wanted", exc_info=error)
                    doing = None
                elif doing is None and latest is not None:
                    doing, latest = asyncio.ensure_future(self._do(latest)), None
        finally:
            if doing is not None:
                doing.cancel()

    async def _ask(self) -> W | None:
        try:
            token, wanted = await self._link.ask("worker", self._says(), self._had)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.info("planner unreachable (%r); going on as before", error)
            await asyncio.sleep(AGAIN_S)
            return None
        self._had = token or self._had
        answer: W | None = wanted
        return answer


async def in_time(response: Any, timeout_s: float = _ANSWER_S) -> Any:
    """Await a Ray reference, but no longer than that.

    Raises:
        TimeoutError: no answer.
    """
    return await asyncio.wait_for(_result(response), timeout_s)


async def status_of(response: Any) -> dict[str, Any]:
    """A status, or why there is none."""
    try:
        status: dict[str, Any] = await asyncio.wait_for(response, 3.0)
    except Exception as error:
        return {"state": "unreachable", "error": f"{type(error).__name__}: {error}"}
    return status


async def _result(response: Any) -> Any:
    return await response
