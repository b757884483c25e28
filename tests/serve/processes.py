"""An application's processes in one event loop. Between any two callbacks, a process can stop,
continue, die or be replaced; calls between processes can be late or lost. The frontends, workers,
scheduler actor and channels are the real ones. This module has fakes for Ray and Serve.

Time is virtual: see `clock`.
"""

import asyncio
import contextlib
import contextvars
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import ray

from ray_slo.serve.channels import candidate, worker_link
from ray_slo.serve.errors import WorkerLost
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.serve.frontend.surroundings import Surroundings
from ray_slo.serve.ray_private import actors
from ray_slo.serve.scheduler import actor as scheduler_actor
from ray_slo.serve.scheduler.actor import SchedulerActor
from ray_slo.serve.scheduler.lease import candidate_name
from ray_slo.serve.watch.lately import Seen
from ray_slo.serve.worker import batches
from ray_slo.serve.worker import worker as worker_module
from ray_slo.serve.worker.worker import Worker
from tests.serve import clock

WAY_S = 0.0005  # of a call, and of its answer
SCHEDULERS = ["s0", "s1"]
NOTICED_S = 0.05  # until a caller hears that its call is lost
UNLISTED_S = 0.3  # until Serve tells routers that a replica is gone
REPLACED_S = 1.0  # until a dead process has a successor

_here = contextvars.ContextVar("process that runs")


def here():
    """The process that runs."""
    return _here.get()


class Process:
    """A process of its own: SIGSTOP, SIGCONT, SIGKILL.

    Attributes:
        is_still: stopped or dead: none of its callbacks runs.
        calls: those that it has not answered.
    """

    def __init__(self, name, place):
        self.name, self.place = name, place
        self.is_still = self.is_dead = self.is_listed = self.was_still = False
        self.backlog, self.calls = [], set()
        self.target = None

    def __repr__(self):
        return self.name

    @property
    def context(self):
        context = contextvars.Context()
        context.run(_here.set, self)
        return context

    def spawn(self, coroutine):
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def start():
            task = loop.create_task(coroutine)
            task.add_done_callback(lambda task: done.done() or _pass_on(task, done))

        loop.call_soon(start, context=self.context)
        return done

    def stop(self):
        if not self.is_dead:
            self.is_still = self.was_still = True

    def go(self):
        if self.is_still and not self.is_dead:
            self._release()

    def _release(self):
        self.is_still = False
        backlog, self.backlog = self.backlog, []
        for callback in backlog:
            callback.again()


def _pass_on(task, done):
    if task.cancelled():
        done.cancel()
    elif error := task.exception():
        done.set_exception(error)
        done.exception()
    else:
        done.set_result(task.result())


class _Owned:
    """A callback of a process."""

    __slots__ = ("args", "callback", "context", "handle", "loop", "owner")

    def __init__(self, loop, owner, callback, args, context):
        self.loop, self.owner, self.callback, self.args = loop, owner, callback, args
        self.context = context

    def __call__(self):
        if self.owner.is_still:
            self.owner.backlog.append(self)
            return
        _here.set(self.owner)
        self.callback(*self.args)

    def again(self):
        if not self.handle.cancelled():
            self.handle = clock.Loop.call_soon(self.loop, self, context=self.context)


class Loop(clock.Loop):
    def _owned(self, callback, args, context):
        context = contextvars.copy_context() if context is None else context
        return _Owned(self, context.get(_here) or _here.get(None), callback, args, context)

    def call_soon(self, callback, *args, context=None):
        owned = self._owned(callback, args, context)
        if owned.owner is None:
            return super().call_soon(callback, *args, context=context)
        owned.handle = super().call_soon(owned, context=owned.context)
        return owned.handle

    def call_at(self, when, callback, *args, context=None):
        owned = self._owned(callback, args, context)
        if owned.owner is None:
            return super().call_at(when, callback, *args, context=context)
        owned.handle = super().call_at(when, owned, context=owned.context)
        return owned.handle

    def run_in_executor(self, executor, function, *args):
        """At once: nothing here blocks."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Handle:
    """To a process, or to whatever lives at a place now; `handle.method.remote(…)`."""

    deployment_name = "m-worker"

    def __init__(self, world, find):
        self._world, self._find = world, find

    def __getattr__(self, method):
        def remote(*args, **kwargs):
            return self._world.call(self._find, method, args, kwargs)

        return SimpleNamespace(remote=remote)


class World:
    """One application.

    Args:
        spec: with its scheduler embedded in the only frontend, or in an actor of its own.
        frontends, workers: how many there are.
    """

    current = None

    def __init__(self, spec, frontends, workers):
        self.spec, self.is_open = spec, True
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda loop, context: None)  # of what died
        self.outside = Process("outside", None)
        _here.set(self.outside)
        self.places, self.all, self.workers = {}, [], {}
        self.traps, self.delayed = {}, 0
        self._births = Counter()
        self.frontends = [f"f{i}" for i in range(1 if spec.embedded else frontends)]
        self.worker_places = [f"w{i}" for i in range(workers)]
        World.current = self

    async def start(self):
        if not self.spec.embedded:
            for place in SCHEDULERS:
                self._birth(place)
        for place in (*self.worker_places, *self.frontends):
            self._birth(place)
            await asyncio.sleep(0.01)  # the first worker is the first that the scheduler knows
        while not all(f.is_ready for f in map(self.at, self.frontends)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def at(self, place):
        return self.places[place]

    def living_workers(self):
        return [p for p in map(self.at, self.worker_places) if not p.is_still]

    def leader(self):
        """The process that schedules, or None."""
        places = self.frontends[:1] if self.spec.embedded else SCHEDULERS
        ready = [p for p in map(self.at, places) if p.is_ready and not p.is_still]
        if self.spec.embedded:
            return ready[0] if ready else None
        return max((p for p in ready if p.target._lease.term), key=_term, default=None)

    async def scheduler_status(self):
        """What the scheduler in charge says of itself, or None."""
        process = self.leader()
        if process is None:
            return None
        return await (process.target.slo_status if self.spec.embedded else process.target.status)()

    # -- births and deaths -------------------------------------------------------------------

    def _birth(self, place):
        self._births[place] += 1
        process = Process(f"{place}.{self._births[place]}", place)
        process.is_ready = False
        self.places[place] = process
        self.all.append(process)
        process.spawn(self._live(process))

    async def _live(self, process):
        if process.place in SCHEDULERS:
            number = SCHEDULERS.index(process.place)
            process.target = SchedulerActor(self.spec, "app#m", number)
        elif process.place in self.frontends:
            target = Frontend.__new__(Frontend)
            workers = {"default": Handle(self, self._any_worker)}
            around = Surroundings(
                "app", "m", process.name, _Silent(), states=lambda *_: {}, details=dict
            )
            await target.__init__(self.spec, workers, around)
            process.target = target
        else:
            self.workers[process.name] = process
            process.target = Worker.__new__(Worker)
            process.is_listed = True
            await process.target.__init__(self.spec, "default", "m")
        process.is_ready = True

    def kill(self, process):
        if process.is_dead or process is self.outside:
            return
        process.is_still = process.is_dead = True
        for call in process.calls:
            if not call.done():
                call.set_exception(ray.exceptions.RayActorError())
                call.exception()
        process.calls.clear()
        context = self.outside.context
        self.loop.call_later(UNLISTED_S, setattr, process, "is_listed", False, context=context)
        self.loop.call_later(REPLACED_S, self._replace, process, context=context)

    def _replace(self, process):
        if self.is_open and self.at(process.place) is process:
            self._birth(process.place)

    async def end(self):
        """Let everything end that asyncio would wait for."""
        self.is_open, World.current = False, None
        me = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not me:
                task.cancel()
        for process in self.all:
            process._release()
        for _ in range(3):
            await asyncio.sleep(0)

    # -- calls ---------------------------------------------------------------------------------

    def _any_worker(self, worker=None):
        if worker is not None:
            found = self.workers.get(worker)
            if found is None or not found.is_listed:
                raise WorkerLost(f"worker {worker} is not among the running replicas")
            return found
        listed = [p for p in map(self.at, self.worker_places) if p.is_listed and not p.is_dead]
        return listed[0] if listed else self.at(self.worker_places[0])

    def call(self, find, method, args, kwargs):
        """What `remote` returns: a future of the caller's."""
        caller = _here.get(None)
        answer = self.loop.create_future()
        if self.is_open and not caller.is_dead:
            carried = self._carry(caller, find, method, args, kwargs, answer)
            self.loop.call_soon(self.loop.create_task, carried, context=self.outside.context)
        return answer

    async def _carry(self, caller, find, method, args, kwargs, answer):
        try:
            result = await self._called(caller, find, method, args, kwargs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()
        else:
            if not answer.done() and not caller.is_dead:
                answer.set_result(result)

    async def _called(self, caller, find, method, args, kwargs):
        await self._pass("leaves", method, caller)
        if caller.is_dead:
            raise ray.exceptions.RayActorError
        process = find(kwargs["worker"]) if "worker" in kwargs else find()
        await asyncio.sleep(WAY_S)
        await self._pass("arrives", method, process)
        if process.is_dead or process.target is None:
            await asyncio.sleep(NOTICED_S)
            raise ray.exceptions.ActorUnavailableError("not there", None)
        done = process.spawn(getattr(process.target, method)(*args, **kwargs))
        process.calls.add(done)
        try:
            result = await done
        finally:
            process.calls.discard(done)
        await self._pass("answers", method, process)
        if process.is_dead:
            raise ray.exceptions.RayActorError
        await asyncio.sleep(WAY_S)
        await self._pass("returns", method, caller)
        return result

    async def _pass(self, step, method, process):
        """A step of a call, in a process where somebody may have set a trap."""
        traps = self.traps.get((method, step))
        if not traps:
            return
        action, seconds = traps.pop()
        if action == "kill":
            self.kill(process)
        elif action == "stop":
            process.stop()
            self.loop.call_later(seconds, process.go, context=self.outside.context)
        elif action == "late":
            self.delayed += 1
            await asyncio.sleep(seconds)
            self.delayed -= 1
        else:
            await asyncio.sleep(NOTICED_S)
            raise ray.exceptions.ActorUnavailableError("lost on the way", None)


class _Serve:
    """What frontends, workers and channels ask of Serve."""

    def get_replica_context(self):
        process = _here.get()
        is_frontend = process.place in World.current.frontends
        return SimpleNamespace(
            app_name="app",
            deployment="m" if is_frontend else "m-worker",
            replica_tag=process.name,
            rank=0,
        )

    def get_deployment_handle(self, frontend, app):
        world = World.current
        return Handle(world, lambda: world.at(world.frontends[0]))


class _Silent:
    """Stands in for metrics."""

    def __getattr__(self, name):
        return lambda *args: {}

    def seen_lately(self, pending):
        return Seen(pending)


class _NoSocket:
    """Stands in for a socket: processes here die without closing theirs."""

    address = ""

    def __init__(self, answer):
        pass

    async def begin(self):
        pass

    def close(self):
        pass


def _term(process):
    return process.target._lease.term


def _find_scheduler(name):
    world, place = World.current, SCHEDULERS["~spare" in name]
    return Handle(world, lambda: world.at(place))


def _get_or_create_scheduler(spec, app_key, number, apart_from):
    return _find_scheduler(candidate_name(app_key, number))


@contextlib.contextmanager
def in_place_of_ray():
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (worker_module, "serve", _Serve()),
            (batches, "WorkerMetrics", _Silent),
            (worker_link, "serve", _Serve()),
            (scheduler_actor, "Listener", _NoSocket),
            (candidate, "get_or_create_scheduler", _get_or_create_scheduler),
            (candidate, "find_actor", _find_scheduler),
            (worker_link, "find_actor", _find_scheduler),
            (actors, "application_is_gone", lambda *_: False),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def run(main):
    with mock.patch.object(asyncio.events, "new_event_loop", Loop):
        return asyncio.run(main)
