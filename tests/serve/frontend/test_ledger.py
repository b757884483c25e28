"""The ledger of requests, with plain fakes for the scheduler, the workers and the time."""

import asyncio
import math
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import BatchStatus
from ray_slo.errors import Expired, RefusedEarly, WorkerLost
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.ledger import (
    CONSEQUENCES,
    GRACE_S,
    Asked,
    Entry,
    Ledger,
    Outcome,
    WorkerGone,
)
from ray_slo.serve.frontend.workers import Up
from ray_slo.serve.messages import BatchReport, Grant, PieceResult, Refusal, Stop
from tests.serve import clock
from tests.serve.loops import in_loop

EXEC_S = 0.1
APP = {
    "models": {"m": {"callable": "apps:M", "latency_slo_ms": 5000}},
    "name": "m",
    "response_margin_ms": 10,
}


class Scheduler:
    """Notes what it is told. What was submitted is `queued` until somebody takes it from there."""

    def __init__(self):
        self.submits, self.told, self.queued, self.unknown = [], [], {}, set()
        self.elsewhere = Counter()  # requests that are at a worker, or wait for two

    def submit(self, request):
        self.submits.append(request)
        self.queued[request.request_id] = request
        self.elsewhere.pop(request.request_id, None)

    def cancel(self, request_id):
        if self.queued.pop(request_id, None) is None and not self.elsewhere[request_id]:
            self.unknown.add(request_id)
        self.told.append(("cancel", request_id))

    def __getattr__(self, name):
        return lambda about: self.told.append((name, about))


def report(size, status=BatchStatus.FINISHED):
    return BatchReport("b", "w0", "v", status, size, EXEC_S, EXEC_S)


def done(share):
    return PieceResult([(True, ("did", entry.item)) for entry in share], report(len(share)))


def late(share):
    return PieceResult(None)


def preempted(share):
    return PieceResult(None, report(len(share), BatchStatus.PREEMPTED))


def lost(share):
    raise WorkerGone("RayActorError")


def not_there(share):
    raise WorkerLost("worker w0 is not among the running replicas")


def ended_itself(share):
    raise WorkerGone("RayActorError", "os._exit(1)")


def failed(share):
    raise TypeError("it failed")


class Workers:
    """Each call ends as `planned` for its batch, or as the next of `ends` says, or as `done`."""

    def __init__(self, scheduler, *ends):
        self.scheduler, self.planned = scheduler, {}
        self.ends, self.calls, self.stops = [*ends], [], []
        self.over = set()  # requests that must not run again: they ran, or their client left
        self.there, self.most, self.exec_s = {"w0", "w1"}, 2, EXEC_S

    async def execute(self, grant, share):
        ids = [entry.id for entry in share]
        self.calls.append((grant.worker, ids))
        assert not self.over.intersection(ids)
        self.scheduler.elsewhere.update(ids)
        end = self.planned.pop(grant.batch_id, None) or (self.ends.pop(0) if self.ends else done)
        await asyncio.sleep(self.exec_s)
        if end is not ended_itself:
            self.scheduler.elsewhere.subtract(ids)
        self.over.update(ids if end in (done, failed) else ())
        return end(share)

    async def preempt(self, stop):
        self.stops.append(stop)

    async def up(self, model):
        return Up(set(self.there), self.most)


class Metrics:
    def __init__(self):
        self.errors_ms = []

    def predicted(self, variant, expected_ms, took_ms):
        self.errors_ms.append((variant.name, took_ms - expected_ms))


class World:
    """A ledger and what is around it."""

    def __init__(self, *ends, retries=3, shortfall=None, start_s=None):
        self.scheduler, self.metrics = Scheduler(), Metrics()
        self.workers = Workers(self.scheduler, *ends)
        self.tasks, self.batches = [], 0
        self.ledger = Ledger(
            parse_spec({**APP, "retries": retries}),
            self.scheduler,
            self.workers,
            self.metrics,
            clock=time.monotonic,
            spawn=self.spawn,
            plan_says=lambda: (shortfall, start_s),
        )

    def spawn(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))

    def ask(self, id, slo_s=5.0, item="x", **about):
        now = time.monotonic()
        entry = Entry(id, "m", Asked("m", now, slo_s, **about), item, now)
        return asyncio.ensure_future(self._serve(entry))

    async def _serve(self, entry):
        with self.ledger.in_time(entry.asked):
            return await self.ledger.serve(entry)

    async def asks(self, *ids, **about):
        tasks = [self.ask(i, **about) for i in ids]
        await asyncio.sleep(0)
        return tasks

    def grant(self, *ids, worker="w0", piece=0, num_pieces=1):
        """Have the scheduler grant a batch of these."""
        for i in ids:
            self.scheduler.queued.pop(i, None)
        self.batches += 1
        about = (piece, num_pieces, len(ids), 0.0, EXEC_S, 1.0)
        batch = Grant(f"b{self.batches}", worker, "default", "m", "v", ids, *about)
        self.ledger.heard([batch])

    async def granted(self, *ids, **about):
        """The same, until its end."""
        self.grant(*ids, **about)
        await asyncio.sleep(EXEC_S + 0.01)


async def error_of(task, kind):
    with pytest.raises(kind) as caught:
        await task
    return caught.value


def test_every_outcome_has_its_consequence():
    assert set(CONSEQUENCES) == set(Outcome)


@in_loop
async def test_a_request_is_answered_once():
    world = World()
    (task,) = await world.asks(1)
    assert (len(world.ledger), [s.request_id for s in world.scheduler.submits]) == (1, [1])
    assert world.scheduler.submits[0].budget_s == pytest.approx(5.0 - 0.01)
    await world.granted(1)
    value, visit = await task
    assert value == ("did", "x")
    assert (visit.worker, visit.variant, visit.batch_size) == ("w0", "v", 1)
    assert (visit.exec_s, visit.spent_s) == (EXEC_S, pytest.approx(EXEC_S))
    assert len(world.ledger) == 0
    await world.granted(1)  # the scheduler is mistaken
    assert world.workers.calls == [("w0", [1])]
    assert ("batch_withdrawn", "b2") in world.scheduler.told


@in_loop
async def test_results_are_handed_out_in_order_and_errors_to_their_own():
    def mixed(share):
        results = [(True, 1), (False, ValueError("its own")), (True, 3)]
        return PieceResult(results, report(3))

    world = World(mixed)
    tasks = await world.asks(1, 2, 3)
    await world.granted(1, 2, 3)
    assert [(await tasks[i])[0] for i in (0, 2)] == [1, 3]
    assert str(await error_of(tasks[1], ValueError)) == "its own"


@in_loop
async def test_refused():
    world = World(shortfall="no money")
    tasks = await world.asks(1, 2, 3)
    world.ledger.heard([Refusal((1, 9), "would_miss", 7.0), Refusal((2,), "expired", 7.0)])
    refused = await error_of(tasks[0], RefusedEarly)
    assert "it would have finished too late; the plan falls short: no money" in str(refused)
    assert (refused.reason, refused.model, refused.latency_slo_ms) == ("would_miss", "m", 5000)
    assert refused.predicted_finish_ms == pytest.approx(7000)
    assert "waited until its deadline of 5000 ms" in str(await error_of(tasks[1], Expired))
    assert len(world.ledger) == 1


@in_loop
async def test_where_no_worker_is_up_clients_are_told_how_long_one_takes_to_start():
    for start_s, says in ((None, 1.0), (12.5, 12.5)):
        world = World(start_s=start_s)
        tasks = await world.asks(1, 2)
        world.ledger.heard([Refusal((1,), "no_worker", math.nan)])
        world.ledger.heard([Refusal((2,), "would_miss", 7.0)])
        assert (await error_of(tasks[0], RefusedEarly)).retry_after_s == says
        late_s = (await error_of(tasks[1], RefusedEarly)).retry_after_s
        assert late_s == pytest.approx(2.0, abs=0.1)


@in_loop
async def test_a_refusal_does_not_contradict_itself():
    world = World()
    tasks = await world.asks(1, 2)
    world.ledger.heard([Refusal((1,), "would_miss", 4.995)])  # of 5 s, 10 ms are kept
    refused = await error_of(tasks[0], RefusedEarly)
    says = "SLO 5000 ms, predicted finish 4995 ms after arrival, and 10 ms are kept as a margin"
    assert str(refused).endswith(says)
    assert refused.retry_after_s == pytest.approx(0.005)
    world.ledger.heard([Refusal((2,), "shed", 0.1)])
    assert (await error_of(tasks[1], RefusedEarly)).to_body()["retry_after_s"] > 0


@in_loop
async def test_while_a_batch_is_late_clients_are_told_to_wait_as_long():
    world = World()
    world.workers.exec_s = 4.0
    tasks = await world.asks(1, 2)
    world.grant(1)
    await asyncio.sleep(3.0)
    world.ledger.heard([Refusal((2,), "would_miss", 0.1)])
    again_s = (await error_of(tasks[1], RefusedEarly)).retry_after_s
    assert again_s == pytest.approx(3.0 - EXEC_S, abs=0.05)
    await tasks[0]
    (last,) = await world.asks(3)
    world.ledger.heard([Refusal((3,), "would_miss", 0.1)])  # nothing runs any more
    assert 0 < (await error_of(last, RefusedEarly)).to_body()["retry_after_s"] < 0.1


@in_loop
async def test_of_a_lost_worker_requests_are_sent_again_with_what_is_left():
    world = World(lost, retries=1)
    tasks = await world.asks(1, 2)
    tasks[0].cancel()
    await world.granted(1, 2)
    assert ("worker_lost", "w0") in world.scheduler.told
    *_, again = world.scheduler.submits
    assert (again.request_id, len(world.scheduler.submits)) == (2, 3)
    assert again.budget_s == pytest.approx(5.0 - 0.01 - EXEC_S)
    await world.granted(2, worker="w1")
    assert (await tasks[1])[1].worker == "w1"


@in_loop
async def test_one_worker_too_many_was_lost():
    world = World(lost, lost, retries=1)
    (task,) = await world.asks(1)
    await world.granted(1)
    await world.granted(1, worker="w1")
    said = await error_of(task, WorkerLost)
    assert "worker w1 was lost with the request, and so were 1 before" in str(said)
    assert (said.worker, len(world.scheduler.submits)) == ("w1", 2)


@in_loop
async def test_a_worker_that_is_not_there_costs_no_retry():
    world = World(*[not_there] * 5, retries=0)
    (task,) = await world.asks(1)
    for _ in range(6):
        await world.granted(1)
    assert (await task)[0] == ("did", "x")
    assert world.scheduler.told.count(("worker_lost", "w0")) == 5


@in_loop
async def test_a_piece_that_comes_too_late_is_submitted_again():
    world = World(late, retries=0)
    (task,) = await world.asks(1)
    await world.granted(1, num_pieces=2)
    assert [s.request_id for s in world.scheduler.submits] == [1, 1]
    assert not any(name == "worker_lost" for name, _ in world.scheduler.told)
    await world.granted(1)
    assert (await task)[0] == ("did", "x")


@in_loop
async def test_a_preempted_request_is_submitted_again_as_the_same():
    world = World(preempted, preempted, retries=0)
    tasks = await world.asks(1, 2)
    world.grant(1, 2)
    stop = Stop("b1", "w0", "default")
    world.ledger.heard([stop])
    await asyncio.sleep(EXEC_S + 0.01)
    assert world.workers.stops == [stop]
    assert [s.request_id for s in world.scheduler.submits] == [1, 2, 1, 2]
    await world.granted(2)
    for id, times in ((1, ""), (2, " 2 times")):
        world.ledger.heard([Refusal((id,), "would_miss", 7.0)])
        refused = await error_of(tasks[id - 1], RefusedEarly)
        assert f"; it was stopped{times} while it ran, for a larger batch" in str(refused)
        assert refused.reason == "preempted"


@in_loop
async def test_the_error_of_a_call_is_the_answer():
    world = World(failed)
    tasks = await world.asks(1, 2)
    await world.granted(1, 2)
    for task in tasks:
        assert str(await error_of(task, TypeError)) == "it failed"
    assert world.scheduler.told[-1] == ("batch_withdrawn", "b1")


@in_loop
async def test_an_empty_share_is_sent_as_others_wait_for_it():
    world = World()
    (task,) = await world.asks(1)
    task.cancel()
    await asyncio.sleep(0)
    await world.granted(1, piece=1, num_pieces=2)
    assert world.workers.calls == [("w0", [])]
    assert ("batch_withdrawn", "b1") not in world.scheduler.told


@in_loop
@pytest.mark.parametrize("is_granted", [False, True])
async def test_the_deadline_passes(is_granted):
    world = World()
    (task,) = await world.asks(1, slo_s=EXEC_S / 2)
    if is_granted:
        world.workers.exec_s = 9.0
        world.grant(1)
    began = time.monotonic()
    said = await error_of(task, Expired)
    assert ("on worker w0" if is_granted else "in the queue") in str(said)
    assert time.monotonic() - began == pytest.approx(EXEC_S / 2 + GRACE_S)
    assert ("cancel", 1) in world.scheduler.told
    assert len(world.ledger) == 0


@in_loop
async def test_no_time_is_left_for_the_work():
    world = World()
    (task,) = await world.asks(1, slo_s=0.009)
    said = await error_of(task, RefusedEarly)
    assert "of 9 ms, 0 ms are over, and 10 ms are kept for the way back" in str(said)
    assert (said.predicted_finish_ms, world.scheduler.submits) == (pytest.approx(10), [])


@in_loop
@pytest.mark.parametrize(("took_s", "overhead_s"), [(EXEC_S + 0.05, 0.05), (EXEC_S / 2, 0.0)])
async def test_half_of_the_time_of_a_call_beside_the_batch_is_kept_for_the_way_back(
    took_s, overhead_s
):
    """The worker says that it held the batch for `EXEC_S`."""
    world = World()
    assert world.ledger.overhead_s == 0.0
    world.workers.exec_s = took_s
    for i in range(30):
        (task,) = await world.asks(i)
        world.grant(i)
        await task
    assert world.ledger.overhead_s == pytest.approx(overhead_s)
    for slo_s, way_back_s in ((5.0, overhead_s / 2), (0.08, min(overhead_s / 2, 0.02))):
        await world.asks(100, slo_s=slo_s)
        assert world.scheduler.submits[-1].budget_s == pytest.approx(slo_s - 0.01 - way_back_s)
    # And all of the way through Serve's proxy.
    await world.asks(101, slo_s=5.0, way_s=0.2)
    kept_s = 0.01 + overhead_s / 2 + 0.2
    assert world.scheduler.submits[-1].budget_s == pytest.approx(5.0 - kept_s)


@in_loop
async def test_a_caller_that_leaves_is_withdrawn():
    world = World()
    (task,) = await world.asks(1)
    task.cancel()
    await asyncio.wait([task])
    assert (world.scheduler.told, len(world.ledger)) == ([("cancel", 1)], 0)
    world.ledger.heard([Refusal((1,), "shed", 1.0)])


@in_loop
async def test_a_new_scheduler_hears_of_what_waits():
    world = World()
    tasks = await world.asks(1, 2, 3)
    world.grant(1)
    await asyncio.sleep(0)
    world.ledger.resubmit()
    world.ledger.resubmit([1, 3, 9])
    assert [s.request_id for s in world.scheduler.submits] == [1, 2, 3, 2, 3, 3]
    await world.granted(2, 3)
    assert all(task.done() for task in tasks)


@in_loop
async def test_the_latest_deadline_gives_way():
    world = World()
    sooner, later = [*await world.asks(1), *await world.asks(2, slo_s=6.0)]
    now = time.monotonic()
    assert not world.ledger.give_way(now + 7.0, "full")
    assert world.ledger.give_way(now + 4.0, "full")
    said = await error_of(later, RefusedEarly)
    assert str(said) == "full, and this one has the latest deadline"
    assert (said.reason, world.scheduler.told) == ("queue_full", [("cancel", 2)])
    await world.granted(1)
    assert sooner.done()


@in_loop
async def test_predictions_are_compared_once_per_batch_whoever_reports_it():
    world = World(done, done, late)
    await world.asks(1, 2, 3)
    await world.granted(1)  # nothing rides on its result: the scheduler is an actor
    assert world.metrics.errors_ms == [("v", pytest.approx(0.0, abs=1e-6))]
    await world.granted(2, piece=1, num_pieces=2)  # another frontend says it
    await world.granted(3)  # did not run
    assert len(world.metrics.errors_ms) == 1


# -- workers that end themselves: a request may be why -------------------------------------------


@in_loop
async def test_not_to_the_last_worker():
    world = World(ended_itself)
    (task,) = await world.asks(1, slo_s=3.0)
    await world.granted(1)
    world.workers.there = {"w1"}
    said = await error_of(task, WorkerLost)
    assert "worker w0 ended itself" in str(said)
    assert "tried again where 2 workers are up" in str(said)
    assert (said.worker, len(world.scheduler.submits)) == ("w0", 1)


@in_loop
async def test_at_once_where_a_third_is_up():
    world = World(ended_itself)
    world.workers.there, world.workers.most = {"w0", "w1", "w2"}, 3
    await world.asks(1)
    await world.granted(1)
    assert len(world.scheduler.submits) == 2


@in_loop
async def test_the_lost_one_does_not_count_at_first():
    world = World(ended_itself)
    await world.asks(1, slo_s=30.0)
    await world.granted(1)
    assert len(world.scheduler.submits) == 1
    await asyncio.sleep(0.25)  # the scheduler still says so: it is there again
    assert len(world.scheduler.submits) == 2


@in_loop
async def test_it_waits_for_the_second_while_it_has_time():
    world = World(ended_itself)
    (task,) = await world.asks(1, slo_s=30.0)
    world.workers.there = {"w1"}
    await world.granted(1)
    await asyncio.sleep(5.0)
    assert (len(world.scheduler.submits), task.done()) == (1, False)
    world.workers.there = {"w1", "w2"}
    await asyncio.sleep(0.25)
    await world.granted(1)
    assert (await task)[0] == ("did", "x")


@in_loop
async def test_where_there_has_been_only_one_it_goes_there_again():
    world = World(ended_itself, retries=1)
    world.workers.there, world.workers.most = set(), 1
    (task,) = await world.asks(1, slo_s=30.0)
    await world.granted(1)
    await asyncio.sleep(1.0)
    world.workers.there = {"w0"}  # another, or the same that was hard to reach
    await asyncio.sleep(0.25)
    await world.granted(1)
    assert (await task)[0] == ("did", "x")


@in_loop
async def test_while_the_scheduler_does_not_answer_nobody_is_up():
    world = World(ended_itself)
    (task,) = await world.asks(1)

    async def up(model):
        raise TimeoutError

    world.workers.up = up
    await world.granted(1)
    await error_of(task, WorkerLost)
    assert len(world.scheduler.submits) == 1


@in_loop
async def test_what_goes_wrong_while_it_is_sent_again_is_heard():
    world = World(ended_itself)
    world.workers.there = {"w0", "w1", "w2"}
    (asked,) = await world.asks(1)

    def submit(request):
        raise ValueError("a bug")

    world.scheduler.submit = submit
    await world.granted(1)
    with pytest.raises(ValueError, match="a bug"):
        await asked


# -- any sequence --------------------------------------------------------------------------------

ENDS = [done, done, late, preempted, lost, not_there, ended_itself, failed]
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([0.02, 1.0, 5.0]), st.just(0)),
    st.tuples(st.just("grant"), st.integers(1, 4), st.sampled_from(ENDS)),
    st.tuples(st.just("ask for"), st.sampled_from([1.0, 5.0, 5.0]), st.sampled_from(ENDS)),
    st.tuples(st.just("ask for"), st.just(5.0), st.sampled_from(ENDS)),
    st.tuples(st.just("refuse"), st.sampled_from(["shed", "expired"]), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, EXEC_S / 2, 1.5]), st.just(0)),
    st.tuples(st.just("work takes"), st.sampled_from([EXEC_S, 2.0]), st.just(0)),
)


async def live_through(steps):
    world = World()
    scheduler, tasks, deadlines = world.scheduler, [], []
    for kind, one, other in steps:
        if kind.startswith("ask"):
            deadlines.append(time.monotonic() + one)
            tasks += await world.asks(len(tasks), slo_s=one)
        if kind in ("grant", "ask for"):
            world.workers.planned[f"b{world.batches + 1}"] = other
            world.grant(*[*scheduler.queued][: one if kind == "grant" else 1])
        elif kind == "refuse":
            for i in [*scheduler.queued][:1]:
                del scheduler.queued[i]
                world.ledger.heard([Refusal((i,), one, 1.0)])
        elif kind == "leave" and one < len(tasks):
            tasks[one].cancel()
            world.workers.over.add(one)
        elif kind == "reset":
            scheduler.queued.clear()
            world.ledger.resubmit()
        elif kind == "wait":
            await asyncio.sleep(one)
        elif kind == "work takes":
            world.workers.exec_s = one
        await asyncio.sleep(0)
    for _ in range(40):
        for i in [*scheduler.queued]:
            world.grant(i)
        await asyncio.sleep(0.2)
        now = time.monotonic()
        for task, deadline in zip(tasks, deadlines, strict=True):
            assert task.done() or now < deadline + GRACE_S + 0.01
    assert (len(world.ledger), scheduler.queued) == (0, {})
    allowed = RefusedEarly | Expired | WorkerLost | TypeError
    for i, task in enumerate(tasks):
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, allowed)
            # What nobody answered had not been forgotten.
            assert "after the deadline" not in str(error) or i not in scheduler.unknown
    for task in world.tasks:
        assert task.done() and task.exception() is None


@pytest.mark.slow
@given(st.lists(STEPS, min_size=8, max_size=25))
@settings(max_examples=50)
def test_nothing_is_lost_or_answered_twice(steps):
    clock.run(live_through(steps))
