"""Named, detached actors of an application: makes, finds, updates and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_slo.core.processes import come_forward
from ray_slo.serve.config.spec import AppSpec

logger = logging.getLogger(__name__)

NAMESPACE = "ray_slo"
_WATCH_S = 2.0
_SETTLED_S = 10.0  # after this time, all clients of an actor's earlier life have found it again


def this_node() -> str:
    """Ray's id of the node of this process; "" if Ray does not run."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def application_is_gone(app_key: str) -> bool:
    """Whether Serve no longer runs an application. Blocks.

    Args:
        app_key: "application#frontend", or "application#frontend#group" of a serving group.
    """
    app, frontend, *_ = app_key.split("#")
    state = serve.status().applications.get(app)
    return state is None or frontend not in state.deployments


def usable_nodes() -> list[str]:
    """Return the ids of the nodes that may run something of an application: this one first, the
    head last. A node without CPUs is not for actors. Empty if Ray does not run. Blocks."""
    if not ray.is_initialized():
        return []
    here = this_node()
    nodes = [
        (info["NodeID"] != here, "node:__internal_head__" in info["Resources"], info["NodeID"])
        for info in ray.nodes()
        if info["Alive"] and info["Resources"].get("CPU", 0) > 0
    ]
    return [node for _, _, node in sorted(nodes)]


def get_or_create(
    actor_class: type[Any], name: str, spec: AppSpec, app_key: str, *args: Any, node: str = ""
) -> Any:
    """Return the detached actor of that name, and make it if there is none. Blocks.

    Args:
        args: further arguments of its class.
        node: id of the node where it runs. Default: its maker's. Otherwise an actor that needs no
            CPU could be placed on a head node that should run nothing of the application. When the
            node is lost, the actor ends, and the next call makes another one. (With `soft=True`,
            Ray 2.60 often chooses another node though this one is alive.)
    """
    actor: Any = ray.remote(actor_class)
    return actor.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=10_000,
        num_cpus=0,
        # As in Serve's own actors: a record of every call would soon fill Ray's control store.
        enable_task_events=os.environ.get("RAY_SERVE_ENABLE_TASK_EVENTS") == "1",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node or this_node(), soft=False),
    ).remote(spec.without_code(), app_key, *args)


def find_actor(name: str) -> Any:
    """The actor of that name. Blocks.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


def bring_forward() -> None:
    """Let this process, and Serve's proxy on this node, have CPU time before no other and after no
    other program (`come_forward`). Nothing happens without Ray, as in tests."""
    if node := this_node():
        come_forward()
        with contextlib.suppress(ValueError):  # a node without a proxy
            proxy = ray.get_actor(f"SERVE_PROXY_ACTOR-{node}", namespace="serve")
            proxy.__ray_call__.remote(_come_forward)


def _come_forward(_: Any) -> int:
    return come_forward()


async def in_time(response: Awaitable[Any], timeout_s: float) -> Any:
    """Await a Ray reference, or a response of Serve.

    Raises:
        TimeoutError: no answer.
    """

    async def answered() -> Any:
        return await response

    return await asyncio.wait_for(answered(), timeout_s)


async def in_task(function: Callable[[Any], Any], argument: Any) -> Any:
    """Run `function(argument)` in a Ray task, anywhere in the cluster. If it is cancelled, so is
    the task."""
    running = _as_task(function).remote(argument)
    try:
        return await running
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # Ray may be gone, too
            ray.cancel(running, force=True)
        raise


@functools.cache
def _as_task(function: Callable[[Any], Any]) -> Any:
    return ray.remote(num_cpus=0)(function)


class OtherProcess:
    """Runs functions of one argument, one after the other, in a process of its own, anywhere in the
    cluster.

    The process has the lowest priority of the machine. The first call starts it. It then stays,
    because a start takes seconds of CPU time. It ends with this process, or when a call is
    cancelled. After that, the next call starts another one. If no call ever ended, it starts as
    Ray starts it: the command that lowers the priority may be why the first one failed.
    """

    def __init__(self) -> None:
        self._actor: Any = None
        self._is_low = True  # whether it starts at low priority
        self._has_run = False  # whether such a start is known to work

    async def __call__(self, function: Callable[[Any], Any], argument: Any) -> Any:
        if self._actor is None:
            runtime_env = _low_priority() if self._is_low else {}
            self._actor = ray.remote(num_cpus=0, runtime_env=runtime_env)(_Runner).remote()
        actor = self._actor
        try:
            answer = await actor.run.remote(function, argument)
            self._has_run = True
            return answer
        except (
            asyncio.CancelledError,
            ray.exceptions.RayActorError,
            ray.exceptions.RuntimeEnvSetupError,
        ):
            if self._actor is actor:
                self.close()
                self._is_low = self._has_run
            raise

    def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # Ray may be gone, too
                ray.kill(actor)


def _low_priority() -> dict[str, str]:
    """Return the environment of a process whose Python starts at low priority, on any node. It is
    empty if the application says itself how Python is started."""
    if {"py_executable", "image_uri", "container"} & set(ray.get_runtime_context().runtime_env):
        return {}
    found = "$(command -v {} || command -v python || command -v python3)"
    return {"py_executable": f"nice -n 19 {found.format(shlex.quote(sys.executable))}"}


class _Runner:
    def __init__(self) -> None:
        os.nice(19)
        if hasattr(os, "SCHED_IDLE"):  # any other process that wakes up runs at once
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def run(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return function(argument)


class Releases:
    """Distinguishes a new specification from that of an older release, which replicas still have.

    An application has a time stamp from the clock of its builder. The next release may be built by
    a machine whose clock is behind. So an unknown version counts as newer, whatever its stamp. Only
    an actor that has just started, perhaps again between two releases, uses the stamps.
    """

    def __init__(self, first: AppSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._known = {first.version}

    def is_news(self, spec: AppSpec, current: AppSpec) -> bool:
        """Whether `spec` should replace `current`."""
        unheard = spec.version not in self._known
        self._known.add(spec.version)
        if self._clock() - self._started < _SETTLED_S:
            return spec.version > current.version
        return unheard


class AppActor:
    """An actor of one application: it takes over newer specifications, does something at every
    step, and ends when its application is gone.

    Args:
        app_key: see `application_is_gone`.
        step_s: seconds between steps.
    """

    def __init__(self, spec: AppSpec, app_key: str, step_s: float) -> None:
        self._spec = spec
        self._app_key = app_key
        self._releases = Releases(spec)
        self._step_s = step_s
        self._stepping: asyncio.Task[None] | None = None

    async def configure(self, spec: AppSpec) -> None:
        """Take over a newer specification (a redeployed application)."""
        if self._releases.is_news(spec, self._spec):
            before, self._spec = self._spec, spec
            if spec.fingerprint != before.fingerprint:
                self._begin_anew()
            else:
                self._go_on()
        self._start()

    def close(self) -> None:
        """Stop the steps; for tests, because otherwise Ray kills the actor."""
        if self._stepping is not None:
            self._stepping.cancel()

    def _begin_anew(self) -> None:
        """Called when the specification has changed."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Called when the specification has changed only in ways that do not matter to replicas."""

    def _step(self, now: float) -> None:
        raise NotImplementedError

    def _is_alone(self) -> bool:
        """Whether there were no reports of workers or frontends lately."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Called before Ray kills the actor. May block for a second."""

    def _start(self) -> None:
        # Not in __init__: there is no running event loop there.
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        for step in itertools.count(1):
            await asyncio.sleep(self._step_s)
            try:
                self._step(time.monotonic())
            except Exception:
                logger.exception("a step of %s failed; going on", type(self).__name__)
            if step % round(_WATCH_S / self._step_s) == 0 and self._is_alone():
                await self._leave_if_gone()

    async def _leave_if_gone(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(None, application_is_gone, self._app_key):
                logger.info("application %s is gone; leaving", self._app_key)
                self._leave()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            logger.exception("cannot tell whether the application is gone; going on")
