"""A request whose worker ended itself may be why: it must not end the last one."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from ray_slo.errors import WorkerLost
from ray_slo.serve.frontend import frontend as frontend_module
from ray_slo.serve.messages import Capacity
from tests.serve.scheduler.test_scheduler import in_loop
from tests.serve.worker.test_preemption import Impatient, Steps, app, until  # noqa: F401


class Dying:
    """Stands before a worker: what "fatal" is in ends it; the scheduler says who else is up."""

    def __init__(self, front, worker, up, most, why="os._exit(1)"):
        frontend_module.ended_itself = lambda name: why
        self.calls, self.up, self._execute = 0, up, worker.execute
        front._most_workers["m"] = most
        front._channel.capacity = self.capacity
        worker.execute = self.execute

    async def capacity(self):
        return {"m": Capacity(100.0, frozenset(self.up))}

    async def execute(self, piece, worker):
        if any(name == "fatal" for name, _ in piece.items):
            self.calls += 1
            self.up.discard(worker)
            raise ray.exceptions.RayActorError
        return await self._execute(piece, worker)


async def asked(front, worker, item, slo_ms):
    """The answer of a request, while its worker goes on saying that it is there."""
    task = asyncio.create_task(front(item, latency_slo_ms=slo_ms))
    while not task.done():
        await asyncio.sleep(0.02)
        await front.slo_heartbeat(await worker.introduce())
    return task.result()


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(frontend_module, "ended_itself", frontend_module.ended_itself)


@in_loop
async def test_one_that_was_killed_is_nobodys_fault(app):  # noqa: F811
    async with app(policy="eager", retries=1) as (front, worker):
        dying = Dying(front, worker, up={"w0", "w1"}, most=2, why="")
        with pytest.raises(WorkerLost, match="and so were 1 before"):
            await asked(front, worker, ("fatal", 1), 30_000)
        assert dying.calls == 2


@in_loop
async def test_not_to_the_last_one(app):  # noqa: F811
    async with app(policy="eager", retries=5) as (front, worker):
        dying = Dying(front, worker, up={"w0", "w1"}, most=2)
        with pytest.raises(WorkerLost, match="tried again where 2 workers are up") as error:
            await asked(front, worker, ("fatal", 1), 3000)
        assert (error.value.model, error.value.worker, dying.calls) == ("m", "w0", 1)


@in_loop
async def test_to_another_where_a_third_is_up(app):  # noqa: F811
    async with app(policy="eager", retries=1) as (front, worker):
        dying = Dying(front, worker, up={"w0", "w1", "w2"}, most=3)
        with pytest.raises(WorkerLost, match="and so were 1 before"):
            await asked(front, worker, ("fatal", 1), 30_000)
        assert dying.calls == 2


@in_loop
async def test_it_waits_for_the_second_while_it_has_time(app):  # noqa: F811
    async with app(policy="eager") as (front, worker):
        dying = Dying(front, worker, up={"w0", "w1"}, most=2)
        task = asyncio.create_task(asked(front, worker, ("fatal", 1), 30_000))
        await until(lambda: dying.calls)
        await asyncio.sleep(5.0)
        assert dying.calls == 1 and not task.done()
        dying.up |= {"w0", "w2"}
        await until(lambda: dying.calls == 2)
        task.cancel()


@in_loop
async def test_where_there_is_only_one_it_goes_there_again(app):  # noqa: F811
    async with app(policy="eager", retries=1) as (front, worker):
        dying = Dying(front, worker, up={"w0"}, most=1)
        task = asyncio.create_task(asked(front, worker, ("fatal", 1), 30_000))
        await until(lambda: dying.calls)
        dying.up.add("w0")  # another, or the same that was hard to reach
        with pytest.raises(WorkerLost):
            await task
        assert dying.calls == 2


@in_loop
async def test_what_goes_wrong_while_it_is_sent_again_is_heard(app):  # noqa: F811
    async with app(policy="eager") as (front, worker):
        Dying(front, worker, up={"w0", "w1", "w2"}, most=2)
        calls = []

        def submit_again(share, why):
            calls.append(why)
            raise ValueError("a bug")

        front._submit_again = submit_again
        pending = SimpleNamespace(
            future=asyncio.get_running_loop().create_future(),
            model="m",
            asked=SimpleNamespace(deadline=front._clock() + 5.0),
        )
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(front._submit_when_safe([pending], "w0"), 3.0)
        assert calls == ["worker_lost"]
