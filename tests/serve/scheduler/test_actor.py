"""The scheduler actor without Ray: its answers to clients, also to those that hang or come late.

Its periodic check does not run. The tests call it, except the test of its timing.
"""

import asyncio
import contextlib
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import BatchStatus, LatencyProfile
from ray_slo.serve.channels import candidate, channel
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import BatchReport, Grant, Heartbeat, Refusal, Submit
from ray_slo.serve.scheduler.actor import _SILENT_TICKS, _UNREAD_TICKS, SchedulerActor
from tests.serve import clock
from tests.serve.fakes import Fifo, beat, obeys
from tests.serve.loops import in_loop, settle

FOREVER_S = 1e6


SPEC = parse_spec(
    {
        "models": {"m": {"callable": Fifo, "latency_slo_ms": 1000}},
        "policy": Fifo,
        "scheduler": "actor",
    }
)
NEWER = SPEC.stamped("newer").model_copy(update={"version": SPEC.version + 1})


@contextlib.asynccontextmanager
async def running(workers=("w0",), watching=False):
    actor = SchedulerActor(SPEC, "app#m")
    await actor.configure(SPEC)
    if not watching:
        actor.close()
    await actor.lead("", 0)
    for worker in workers:
        await alive(actor, worker)
    try:
        yield actor
    finally:
        actor.close()
        actor._end_scheduler()


async def alive(actor, worker="w0"):
    profiles = {"m": LatencyProfile([0.01] * 8)}
    await obeys(actor, Heartbeat(worker, "default", profiles, []))


def report(grant):
    finished = BatchStatus.FINISHED
    return BatchReport(grant.batch_id, grant.worker, "m", finished, grant.batch_size, 0.02, 0.02)


class Client:
    """One that does by hand what a frontend's channel does."""

    def __init__(self, actor, name):
        self.actor, self.name = actor, name
        self.epoch, self.acked = None, 0

    async def poll(self):
        epoch, _, sequence, messages = await self.actor.poll(self.name, self.epoch, self.acked)
        self.acked = sequence if epoch == self.epoch else 0
        self.epoch = epoch
        return messages

    async def submit(self, *ids):
        events = [Submit(i, "m", FOREVER_S) for i in ids]
        await self.actor.events(self.name, self.epoch, events)
        await settle()


async def acquainted(actor, *names):
    clients = [Client(actor, name) for name in names]
    for client in clients:
        assert await client.poll() == []
    return clients


def tick(actor, times):
    for _ in range(times):
        actor._step(0.0)


@in_loop
async def test_what_a_dead_client_was_granted_holds_no_worker():
    async with running() as actor:
        dead, other = await acquainted(actor, "dead", "other")
        await dead.submit(1, 2, 3, 4)  # three are granted, one waits
        await other.submit(1)
        tick(actor, _UNREAD_TICKS - 1)
        await settle()
        assert actor._mailboxes["other"].messages == []
        tick(actor, 1)
        await settle()
        (grant,) = await other.poll()
        assert (grant.worker, grant.request_ids, grant.num_pieces) == ("w0", (1,), 1)
        await actor.report(report(grant))
        await dead.submit(5)  # of its former life
        status = await actor.status()
        assert (status["queued"], status["in_flight"]) == ({"m": 0}, 0)


@in_loop
async def test_a_dead_client_costs_a_moment_and_a_scheduler_that_stood_still_nothing():
    async with running(watching=True) as actor:
        dead, other = await acquainted(actor, "dead", "other")
        await dead.submit(1, 2, 3)
        asyncio.get_running_loop().now += 3.0  # it did not run, and its timers are late
        await settle()
        assert set(actor._mailboxes) == {"dead", "other"}
        since = time.monotonic()
        await other.submit(1)
        (grant,) = await other.poll()
        assert grant.request_ids == (1,)
        assert 0.15 <= time.monotonic() - since <= 0.4


@in_loop
async def test_a_client_that_was_only_slow_comes_back():
    async with running() as actor:
        (slow,) = await acquainted(actor, "slow")
        before = slow.epoch
        await slow.submit(1)
        tick(actor, _UNREAD_TICKS)
        assert await slow.poll() == []
        assert slow.epoch != before
        await slow.submit(1)
        (grant,) = await slow.poll()
        assert grant.request_ids == (1,)
        tick(actor, 2 * _UNREAD_TICKS - 1)  # it is known to be slow
        assert "slow" in actor._mailboxes
        tick(actor, 1)
        assert "slow" not in actor._mailboxes


@in_loop
async def test_a_client_that_waits_for_news_is_there():
    async with running() as actor:
        (client,) = await acquainted(actor, "client")
        waiting = asyncio.ensure_future(client.poll())
        await settle()
        tick(actor, _SILENT_TICKS - 1)  # longer than a poll may take
        actor._deliver("client", [Refusal((7,), "shed", 0.0)])
        tick(actor, _UNREAD_TICKS - 1)  # it counts anew, as there was nothing to read
        assert await waiting == [Refusal((7,), "shed", 0.0)]
        await client.submit(1)
        (grant,) = await client.poll()
        assert grant.request_ids == (1,)
        tick(actor, _UNREAD_TICKS - 1)
        waiting = asyncio.ensure_future(client.poll())  # says that it has read
        await settle()
        tick(actor, _UNREAD_TICKS)
        await actor.report(report(grant))
        await client.submit(2)
        (grant,) = await waiting
        assert grant.request_ids == (2,)


@in_loop
async def test_a_client_with_nothing_to_read_is_gone_after_15_s():
    async with running() as actor:
        await acquainted(actor, "client")
        tick(actor, _SILENT_TICKS - 1)
        assert "client" in actor._mailboxes
        tick(actor, 1)
        assert "client" not in actor._mailboxes


@in_loop
async def test_a_batch_of_two_clients_is_over_when_neither_has_heard_of_it():
    async with running() as actor:
        one, two = await acquainted(actor, "one", "two")
        events = [Submit(1, "m", FOREVER_S)]
        await actor.events("one", one.epoch, events)
        await actor.events("two", two.epoch, events)
        await settle()
        (grant,) = await two.poll()
        assert grant.num_pieces == 2
        polling = asyncio.ensure_future(two.poll())
        await settle()
        tick(actor, _UNREAD_TICKS)
        assert list(actor._mailboxes) == ["two"]
        assert (await actor.status())["in_flight"] == 1  # two's piece runs
        polling.cancel()
        await actor.report(report(grant))

        (one,) = await acquainted(actor, "one")
        await actor.events("one", one.epoch, events)
        await actor.events("two", two.epoch, events)
        await settle()
        tick(actor, 2 * _UNREAD_TICKS)  # one was slow before
        status = await actor.status()
        assert (status["queued"], status["in_flight"]) == ({"m": 0}, 0)


@in_loop
async def test_what_is_granted_in_the_moment_of_leaving_holds_no_worker():
    async with running() as actor:
        (client,) = await acquainted(actor, "client")
        await actor.events("client", client.epoch, [Submit(1, "m", FOREVER_S)])
        for _ in range(20):
            if not actor._scheduler.status()["in_flight"]:
                await asyncio.sleep(0)
        assert actor._scheduler._outbox  # granted, and not yet in the mailbox
        await actor.goodbye("client")
        assert (await actor.status())["in_flight"] == 0


@in_loop
async def test_a_newer_release_may_come_before_anybody_else():
    async with running(workers=()) as actor:
        await actor.configure(NEWER)
        (client,) = await acquainted(actor, "client")
        await obeys(actor, beat())
        await client.submit(1)
        assert [grant.request_ids for grant in await client.poll()] == [(1,)]


@in_loop
async def test_the_scheduler_of_an_older_release_grants_nothing_more():
    async with running() as actor:
        (client,) = await acquainted(actor, "client")
        before = client.epoch
        await actor.events("client", before, [Submit(1, "m", FOREVER_S)])
        await actor.configure(NEWER)
        assert await client.poll() == []
        assert client.epoch != before
        await obeys(actor, beat())
        await client.submit(1)
        assert [grant.request_ids for grant in await client.poll()] == [(1,)]


async def served(actor, client, times):
    """A batch for the client every 0.7 s."""
    for number in range(times):
        for _ in range(2):
            asyncio.get_running_loop().now += 0.35
            actor._step(time.monotonic())
        await alive(actor)
        await client.submit(100 + number)
        (grant,) = await client.poll()
        await actor.report(report(grant))
        await settle()


@pytest.mark.parametrize(
    ("times", "after_s", "terms"),
    [(9, 0.1, [6, 8]), (9, 0.6, [0]), (3, 0.1, [0])],  # it serves; not now; not for long
)
@in_loop
async def test_one_that_serves_leads_on_when_one_that_was_cut_off_comes_back(times, after_s, terms):
    async with running() as actor:
        (client,) = await acquainted(actor, "client")
        await served(actor, client, times)
        asyncio.get_running_loop().now += after_s
        epoch, heard = client.epoch, 5
        for term in terms:
            epoch, *_ = await actor.poll("client", epoch, client.acked, "", heard)
            assert (await actor.status())["term"] == term
            heard += 2
        if not actor._scheduler:
            # The frontends that were cut off with it do not make it lead at once.
            await actor.lead("other", heard)
            assert (await actor.status())["term"] == 0
            asyncio.get_running_loop().now += 2.1
            await actor.lead("other", heard)
            assert (await actor.status())["term"] > heard


@in_loop
async def test_two_that_serve_agree_on_one():
    """Each hears of the other, again and again."""
    async with running() as actor:
        (client,) = await acquainted(actor, "client")
        await served(actor, client, 9)
        stayed, epoch = 0, client.epoch
        for term in range(5, 50, 2):
            epoch, *_ = await actor.poll("client", epoch, client.acked, "", term)
            if not (await actor.status())["term"]:
                break
            stayed += 1
        assert stayed == 8


# -- frontends' own channels, stopped and let go at random ----------------------------------


class Remote:
    """What a handle to an actor is to a channel; a stopped client's calls and answers wait."""

    def __init__(self, actor, goes):
        self._actor, self._goes = actor, goes

    def __getattr__(self, name):
        method, goes = getattr(self._actor, name), self._goes

        class Call:
            @staticmethod
            def remote(*args):
                async def call():
                    await goes.wait()
                    answer = await method(*args)
                    await goes.wait()
                    return answer

                return asyncio.ensure_future(call())

        return Call


class Frontend:
    """Keeps requests until they are granted, sends them to workers, and counts how often."""

    def __init__(self, actor, name, workers):
        self.goes = asyncio.Event()
        self.goes.set()
        self.waiting, self.sent, self.workers = set(), Counter(), workers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidate, "this_node", lambda: "")
            patch.setattr(channel, "CANDIDATES", 1)  # the actor has no spare
            self.channel = channel.ActorChannel(SPEC, "app#m", name, self.heard, self.again)
        self.channel._candidates[0].actor = Remote(actor, self.goes)

    def submit(self, number):
        self.waiting.add(number)
        self.channel.submit(Submit(number, "m", FOREVER_S))

    def heard(self, messages):
        for grant in messages:
            assert isinstance(grant, Grant)
            share = self.waiting.intersection(grant.request_ids)
            self.waiting -= share
            self.sent.update(share)
            self.workers[grant.batch_id] = grant

    def again(self):
        for number in sorted(self.waiting):
            self.channel.submit(Submit(number, "m", FOREVER_S))


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["submit", "stop", "go"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["tick", "tick", "finish", "settle"]), st.just(0)),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(OPERATIONS, max_size=60))
def test_nothing_is_lost_or_run_twice_by_clients_that_stop_and_go_on(operations):
    clock.run(stop_and_go(operations))


async def stop_and_go(operations):
    async with running(["w0", "w1"]) as actor:
        sent_to = {}
        frontends = [Frontend(actor, name, sent_to) for name in "abc"]
        number = 0

        async def finish():
            for batch_id in list(sent_to):
                await actor.report(report(sent_to.pop(batch_id)))

        for operation, which in operations:
            frontend = frontends[which]
            if operation == "submit":
                number += 1
                frontend.submit(number)
            elif operation == "stop":
                frontend.goes.clear()
            elif operation == "go":
                frontend.goes.set()
            elif operation == "tick":
                actor._step(0.0)
            elif operation == "finish":
                await finish()
            else:
                await settle()
        for frontend in frontends:
            frontend.goes.set()
        # A busy machine needs more turns. After the last grant, there are some for one too much.
        rounds, left = 0, 20 + number
        while left and rounds < 1000:
            rounds, left = rounds + 1, left - (not any(f.waiting for f in frontends))
            await settle()
            await finish()
            actor._step(0.0)
        assert [f.waiting for f in frontends] == [set(), set(), set()]
        sent = Counter()
        for frontend in frontends:
            sent.update(frontend.sent)
            frontend.channel.close()
        assert sent == Counter(range(1, number + 1))
