"""Batches that workers owe, with plain fakes for the workers."""

import asyncio
import time

import pytest

from ray_slo.serve.channels.owed import Owed, Silent
from ray_slo.serve.messages import Grant
from tests.serve.loops import in_loop

EXEC_S = 0.02
NOTICED_S = EXEC_S + 0.05 + 0.2


class Workers:
    """Each question takes `answer_s`; before that, the loop stands still for `still_s`."""

    def __init__(self, answer_s=999.0, still_s=0.0, gone=True):
        self.answer_s, self.still_s, self.gone = answer_s, still_s, gone
        self.asked = []

    async def alive(self, kind, worker):
        self.asked.append(worker)
        time.sleep(self.still_s)  # noqa: ASYNC251
        await asyncio.sleep(self.answer_s)

    def may_be_gone(self, model, worker):
        return self.gone


class World:
    def __init__(self, overhead_s=0.0, **about):
        self.workers, self.tasks = Workers(**about), []
        self.owed = Owed(
            self.workers, clock=time.monotonic, spawn=self.spawn, overhead_s=lambda: overhead_s
        )

    def spawn(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))

    def call(self, batch="b", seconds=99.0, worker="w0", exec_s=EXEC_S, num_pieces=1):
        """A call of a worker that takes so long."""
        about = (0, num_pieces, 1, 0.0, exec_s, 2.0)
        grant = Grant(batch, worker, "default", "m", "v", (1,), *about)

        async def call():
            with self.owed.owes(grant):
                await asyncio.sleep(seconds)

        return asyncio.ensure_future(call())


async def silent_after(call):
    began = time.monotonic()
    with pytest.raises(Silent):
        await call
    return pytest.approx(time.monotonic() - began, abs=1e-6)


@in_loop
async def test_a_batch_in_time_costs_no_question():
    world = World()
    await world.call(seconds=EXEC_S + 0.04)
    await asyncio.sleep(1.0)
    assert (world.workers.asked, world.tasks) == ([], [])


@in_loop
@pytest.mark.parametrize(
    ("exec_s", "overhead_s", "noticed_s"),
    [
        (EXEC_S, 0.0, NOTICED_S),
        (EXEC_S, 0.5, NOTICED_S + 0.3),
        (1.0, 0.0, 1.25 + 1.0),
        (8.0, 0.0, 10.0 + 2.0),
    ],
)
async def test_silence_is_borne_as_long_as_a_batch_takes(exec_s, overhead_s, noticed_s):
    world = World(overhead_s)
    assert await silent_after(world.call(exec_s=exec_s)) == noticed_s


@in_loop
async def test_a_worker_is_asked_once_for_all_that_it_owes():
    world = World()
    first, second = world.call("b1"), world.call("b2", exec_s=EXEC_S + 0.1)
    third, elsewhere = world.call("b3", exec_s=0.2), world.call("b4", worker="w1", exec_s=9.0)
    assert await silent_after(first) == NOTICED_S
    for call in (second, third):
        assert await silent_after(call) == 0.0
    assert world.workers.asked == ["w0"]
    await asyncio.sleep(1.0)
    assert not elsewhere.done()
    elsewhere.cancel()


@in_loop
async def test_a_batch_that_ends_when_its_worker_would_be_asked_costs_no_error():
    world = World()
    call = world.call()
    world.owed._look = lambda debt: (call.cancel(), Owed._look(world.owed, debt))
    await asyncio.sleep(1.0)
    assert not any(task.done() and task.exception() for task in world.tasks)


@in_loop
async def test_who_answers_is_asked_again_and_may_be_silent_then():
    world = World(answer_s=0.1)
    call = world.call()
    await asyncio.sleep(3.0)
    assert len(world.workers.asked) == 5
    world.workers.answer_s = 99.0
    await silent_after(call)


@in_loop
async def test_who_must_not_be_given_up_is_asked_again():
    world = World(gone=False)
    call = world.call()
    await asyncio.sleep(3.0)
    assert not call.done()
    world.workers.gone = True
    await silent_after(call)


@in_loop
async def test_results_that_come_while_a_worker_is_asked_count():
    world = World()
    await world.call(seconds=NOTICED_S - 0.01)
    assert world.workers.asked == ["w0"]
    await asyncio.sleep(0.3)
    assert all(task.done() for task in world.tasks)
    assert await silent_after(world.call("b2")) == NOTICED_S


@in_loop
async def test_a_loop_that_stands_still_says_nothing_about_a_worker():
    world = World(answer_s=0.15, still_s=5.0)
    await world.call(seconds=9.0)
    assert len(world.workers.asked) > 1


@in_loop
async def test_other_frontends_pieces_are_waited_for():
    assert await silent_after(World().call(num_pieces=2)) == NOTICED_S + 0.5


@in_loop
async def test_a_question_that_does_not_reach_it_says_nothing():
    world = World()

    async def alive(kind, worker):
        raise LookupError(worker)

    world.workers.alive = alive
    await world.call(seconds=5.0)


@in_loop
@pytest.mark.parametrize("at_s", [0.0, 0.1, NOTICED_S])
async def test_who_cancels_the_call_is_obeyed(at_s):
    call = World().call()
    await asyncio.sleep(at_s)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@in_loop
async def test_how_late_batches_are():
    world = World(gone=False)
    assert world.owed.late_s("m", time.monotonic()) == 0.0
    call = world.call()
    await asyncio.sleep(1.0)
    for model in ("m", "another"):
        assert world.owed.late_s(model, time.monotonic()) == pytest.approx(1.0 - EXEC_S)
    call.cancel()
