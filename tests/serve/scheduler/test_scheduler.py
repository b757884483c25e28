"""The scheduler without Ray: requests in, grants and refusals out."""

import asyncio
import dataclasses
import math
import time

import pytest

from ray_slo.core import (
    Assigned,
    BatchStatus,
    LatencyProfile,
)
from ray_slo.core.names import import_attr
from ray_slo.core.requests import Upstream
from ray_slo.serve.messages import (
    Cancel,
    Grant,
    Refusal,
    Submit,
    Unreachable,
    Withdrawn,
    WorkerMemory,
)
from ray_slo.serve.scheduler import scheduler as scheduler_module
from ray_slo.serve.scheduler.watch import Watch
from tests.serve.fakes import Fifo, beat
from tests.serve.loops import in_loop, settle, until
from tests.serve.scheduler.hosted import report, running, submits

VARIANTS = {
    "quick": {"load": "builtins:dict", "accuracy": 70},
    "deep": {"load": "builtins:dict", "accuracy": 90},
}


@in_loop
async def test_a_worker_does_not_wait_for_a_missing_piece_for_as_long_as_requests_may():
    """A frontend that died would keep it for hours, had the others a day of time."""
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        for client in ("a", "b"):
            scheduler.hear(client, (Submit(1, "m", 86_400.0),))
        await settle()
        (grant,) = box.take("a")
    assert (grant.num_pieces, grant.slack_s > 80_000) == (2, True)
    assert grant.start_by_s == pytest.approx(grant.start_in_s + 1.0)
    assert grant._replace(slack_s=0.2).start_by_s == pytest.approx(grant.start_in_s + 0.05)
    assert grant._replace(slack_s=-1.0).start_by_s == grant.start_in_s


@in_loop
async def test_requests_of_two_clients_form_one_batch_in_two_pieces():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(1, 2))
        scheduler.hear("b", submits(1))
        await settle()
        (a,), (b,) = box.take("a"), box.take("b")
        assert (a.request_ids, b.request_ids) == ((1, 2), (1,))
        assert a.batch_id == b.batch_id
        assert {a.piece, b.piece} == {0, 1}
        assert (a.num_pieces, a.batch_size, a.worker, a.kind) == (2, 3, "w0", "default")
        assert a.finish_in_s == pytest.approx(0.1, abs=0.02)
        assert 0.5 < a.slack_s < 1


@in_loop
async def test_report_frees_the_worker_and_teaches_the_profile():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(1, 2, 3, 4, 5))
        await settle()
        (first,) = box.take()
        assert first.request_ids == (1, 2, 3, 4)
        scheduler.report(report(first, measured=[(4, 0.02)]))
        scheduler.report(report(first))  # twice does no harm
        await settle()
        (second,) = box.take()
        assert second.request_ids == (5,)
        assert second.batch_id != first.batch_id
        seen = scheduler.status()
        assert seen["profiles"]["m@default"]["samples"] == 1
        assert seen["workers"]["w0"]["batches_in_flight"] == 1
        assert seen["counts"]["granted"] == 5
        assert seen["counts"]["batches"] == 2


@in_loop
async def test_the_status_says_what_runs_for_how_long_and_how_long_it_should_take():
    async with running() as (scheduler, _):
        scheduler.heartbeat(beat())
        scheduler.heartbeat(beat("w1"))
        scheduler.hear("a", submits(1, 2))
        await asyncio.sleep(0.03)
        busy, idle = (scheduler.status()["workers"][w]["running"] for w in ("w0", "w1"))
        (batch,) = busy
        assert (batch["variant"], batch["batch_size"], idle) == ("m", 2, [])
        assert batch["for_ms"] == pytest.approx(30)
        assert batch["expected_ms"] == pytest.approx(100)


@in_loop
async def test_refusal_says_reason_and_predicted_finish():
    async with running() as (scheduler, box):
        scheduler.hear("a", submits(1, 2, size=9))
        await settle()
        (refusal,) = box.take()
        assert isinstance(refusal, Refusal)
        assert (refusal.request_ids, refusal.reason) == ((1, 2), "shed")
        assert refusal.finish_in_s == pytest.approx(5, abs=0.1)
        assert scheduler.status()["queued"] == {"m": 0}


@in_loop
async def test_request_for_a_model_of_another_release_is_refused():
    async with running() as (scheduler, box):
        old = [Submit(1, "old", 1.0), Submit(3, "m", 1.0, task="read")]
        scheduler.hear("a", [*old, Submit(2, "m", 1.0)])
        scheduler.heartbeat(beat(variants=("m", "old")))
        await settle()
        refusal, other, grant = box.take()
        assert (refusal.request_ids, refusal.reason) == ((1,), "no_worker")
        assert (other.request_ids, other.reason) == ((3,), "no_worker")
        assert math.isnan(refusal.finish_in_s)
        assert grant.request_ids == (2,)
        assert scheduler.status()["workers"]["w0"]["variants"] == ["m"]


@in_loop
async def test_cancelled_and_gone_clients_are_withdrawn():
    async with running() as (scheduler, box):
        scheduler.hear("a", submits(1, 2))
        scheduler.hear("b", submits(1))
        scheduler.hear("a", [Cancel(1), Cancel(99)])
        scheduler.client_gone("b")
        await settle()
        scheduler.heartbeat(beat())
        await settle()
        (grant,) = box.take()
        assert grant.request_ids == (2,)
        assert not box.take("b")
        assert scheduler.status()["counts"]["cancelled"] == 2


@in_loop
async def test_submitted_twice_is_queued_once():
    async with running() as (scheduler, box):
        scheduler.hear("a", submits(1))
        scheduler.hear("a", submits(1, 2))
        scheduler.heartbeat(beat())
        await settle()
        (grant,) = box.take()
        assert grant.request_ids == (1, 2)


@in_loop
async def test_lost_worker_is_left_alone_for_a_while(monkeypatch):
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(1))
        await settle()
        (grant,) = box.take()
        scheduler.hear("a", [Unreachable("w0")])
        scheduler.heartbeat(beat())  # it is still draining
        scheduler.hear("a", submits(1, 2))  # again, by its frontend
        await settle()
        assert not box.take()
        assert not scheduler.status()["workers"]
        scheduler.report(report(grant))  # too late to matter
        scheduler.heartbeat(beat("w1"))
        await settle()
        (grant,) = box.take()
        assert (grant.worker, grant.request_ids) == ("w1", (1, 2))
        monkeypatch.setattr(scheduler, "_clock", lambda clock=scheduler._clock: clock() + 6)
        scheduler.heartbeat(beat())
        assert set(scheduler.status()["workers"]) == {"w0", "w1"}


@in_loop
async def test_silent_worker_is_taken_for_dead():
    async with running(heartbeat_timeout_s=0.2) as (scheduler, _):
        scheduler.heartbeat(beat())
        assert scheduler.status()["workers"]
        await asyncio.sleep(1)
        assert not scheduler.status()["workers"]


async def beats(scheduler, seconds, *batches):
    """A worker is heard twice a second."""
    for _ in range(round(2 * seconds)):
        scheduler.heartbeat(beat(batches=batches))
        await asyncio.sleep(0.5)


async def granted(scheduler, box, *ids):
    scheduler.hear("a", submits(*ids))
    await settle()
    return box.take()


@in_loop
async def test_a_batch_that_its_worker_does_not_know_is_over(caplog):
    freed = []

    class Kept(Watch):
        def unclaimed(self):
            freed.append(1)

    async with running(watch=Kept()) as (scheduler, box):
        scheduler.heartbeat(beat())
        await granted(scheduler, box, 1)
        assert not await granted(scheduler, box, 2)
        await beats(scheduler, 3)  # on its way, perhaps
        assert not box.take()
        await beats(scheduler, 1)
        (grant,) = box.take()
        assert grant.request_ids == (2,)
        assert scheduler._host.policy.ended == [("w0", BatchStatus.LOST)]
        assert (freed, scheduler.status()["counts"]["unclaimed"]) == ([1], 1)
        (said,) = [r.getMessage() for r in caplog.records if "free again" in r.getMessage()]
        assert said.startswith("worker w0 is free again: batch ")
        assert said.endswith(" s ago to a, is not there, and no report of it came")


@in_loop
async def test_a_batch_that_is_over_without_a_report_holds_no_worker(caplog):
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        (grant,) = await granted(scheduler, box, 1)
        await beats(scheduler, 5, grant.batch_id)
        await beats(scheduler, 3)  # the report is on its way, perhaps
        assert not await granted(scheduler, box, 2)
        await beats(scheduler, 1)
        assert [g.request_ids for g in box.take()] == [(2,)]
        assert "is over there, and its report was lost" in caplog.text
        scheduler.report(report(grant))  # so late does no harm
        await settle()
        assert scheduler.status()["in_flight"] == 1


@in_loop
async def test_a_worker_that_runs_its_batch_is_not_freed_though_its_client_is_gone():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        (grant,) = await granted(scheduler, box, 1)
        scheduler.client_gone("a")
        await beats(scheduler, 20, grant.batch_id)
        assert (await granted(scheduler, box, 2), scheduler.status()["in_flight"]) == ([], 1)
        assert scheduler.status()["counts"]["unclaimed"] == 0
        scheduler.report(report(grant))
        await settle()
        assert [g.request_ids for g in box.take()] == [(2,)]


@in_loop
async def test_a_worker_is_not_freed_by_a_heartbeat_that_waited_for_the_scheduler():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        (grant,) = await granted(scheduler, box, 1)
        asyncio.get_running_loop().now += 5.0  # it stood still
        scheduler.heartbeat(beat())  # from before the batch came
        await asyncio.sleep(0.9)
        await beats(scheduler, 5, grant.batch_id)
        assert scheduler.status()["in_flight"] == 1


@in_loop
async def test_a_silent_worker_is_not_freed():
    """It may well compute, and hold Python's lock."""
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        await granted(scheduler, box, 1)
        await asyncio.sleep(9)
        status = scheduler.status()
        assert (status["in_flight"], status["counts"]["unclaimed"]) == (1, 0)
        await asyncio.sleep(2)
        assert (scheduler.status()["workers"], scheduler.status()["in_flight"]) == ({}, 0)


@in_loop
async def test_a_worker_that_leaves_and_is_back_at_once_is_free():
    """As after a scheduler stood still: all are silent, and all are heard in the same turn."""
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        await granted(scheduler, box, 1)
        scheduler.heartbeat(beat(variants=()))
        scheduler.heartbeat(beat())
        assert [g.request_ids for g in await granted(scheduler, box, 2)] == [(2,)]


@in_loop
async def test_withdrawn_batch_frees_its_worker():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(1))
        await settle()
        (grant,) = box.take()
        scheduler.hear("a", [Withdrawn(grant.batch_id), Withdrawn("unknown")])
        scheduler.hear("a", submits(2))
        await settle()
        assert [g.request_ids for g in box.take()] == [(2,)]


@in_loop
async def test_unknown_batch_and_worker_in_a_report_are_ignored():
    async with running() as (scheduler, box):
        grant = Grant("x", "w9", "default", "m", "m", (1,), 0, 1, 1, 0.0, 0.1, 0.0)
        scheduler.report(report(grant, measured=[(1, 0.5)], worker="w9"))
        scheduler.heartbeat(beat())
        scheduler.report(report(grant, measured=[(1, 0.5)]))
        scheduler.hear("a", submits(1))
        await settle()
        assert len(box.take()) == 1


@in_loop
async def test_policy_that_raises_is_restarted_with_its_queue(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_RESTART_S", 0.05)
    # A ready-made object, which must come back as it was made.
    async with running(policy=Fifo()) as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(1))
        await settle()
        (before,) = box.take()
        scheduler.hear("a", [Submit(2, "m", 1.0, 13), *submits(3)])
        await asyncio.sleep(0.2)
        assert not box.take()
        scheduler.hear("a", [Cancel(2)])  # its caller gives up, and the poison is gone
        await asyncio.sleep(0.2)
        (after,) = box.take()
        assert after.request_ids == (3,)
        assert after.batch_id != before.batch_id
        scheduler.report(report(before))  # of the policy's former life
        scheduler.report(report(after))
        scheduler.hear("a", submits(4))
        await settle()
        assert [g.request_ids for g in box.take()] == [(4,)]


@in_loop
async def test_a_policy_that_raised_is_not_restarted_in_a_scheduler_that_is_closed():
    async with running() as (scheduler, box):
        scheduler.heartbeat(beat())
        await granted(scheduler, box, 1)
        scheduler.hear("a", [*submits(2), *submits(3, size=13)])
        await settle()
        scheduler.hear("a", [Cancel(3)])
    await asyncio.sleep(1)
    assert not box.take()


@in_loop
async def test_every_scheduler_has_its_own_epoch():
    async with running() as (one, _), running() as (other, _):
        assert one.epoch != other.epoch


TIMEOUT = {"name": "timeout", "kwargs": {"timeout_ms": 20}}


@pytest.mark.parametrize("policy", ["deferred", "eager", TIMEOUT])
@in_loop
async def test_real_policies_answer_everything(policy):
    async with running(policy=policy) as (scheduler, box):
        scheduler.heartbeat(beat("w0"))
        scheduler.heartbeat(beat("w1"))
        scheduler.hear("a", submits(*range(20)))
        answered = set()
        while len(answered) < 20:
            await asyncio.sleep(0.005)
            for message in box.take():
                answered |= set(message.request_ids)
                if isinstance(message, Grant):
                    scheduler.report(report(message, worker=message.worker))
        assert scheduler.status()["queued"] == {"m": 0}


@in_loop
async def test_deferred_request_survives_a_loop_that_wakes_late():
    policy = {"name": "deferred", "kwargs": {"objective": "consolidate"}}
    async with running(policy=policy) as (scheduler, box):
        scheduler.heartbeat(beat())
        scheduler.hear("a", [Submit(1, "m", 0.4)])
        turns, messages = 0, box.take()
        while not messages:
            time.sleep(0.005)  # noqa: ASYNC251 (something holds the loop)
            await asyncio.sleep(0)
            turns, messages = turns + 1, box.take()
        assert turns > 10 and isinstance(messages[0], Grant)


def later(scheduler, monkeypatch, seconds):
    monkeypatch.setattr(scheduler, "_clock", lambda clock=scheduler._clock: clock() + seconds)


@in_loop
async def test_policy_sees_the_variants_of_a_model_and_learns_them_one_by_one():
    async with running("price", VARIANTS) as (scheduler, box):
        scheduler.heartbeat(beat(variants=("quick", "deep", "of-an-older-release")))
        scheduler.hear("a", submits(1))
        grants = await until(box.take)
        assert (grants[0].model, grants[0].variant) == ("m", "deep")  # there is time for the best
        scheduler.report(report(grants[0], measured=[(1, 0.05)]))
        (model,) = scheduler._learned.cluster().models.values()
        assert [(v.name, v.accuracy) for v in model.variants] == [("quick", 70), ("deep", 90)]
        quick, deep = (v.profiles["default"] for v in model.variants)
        assert (quick.latency(1), deep.latency(1)) == (0.011, 0.05)
        (worker,) = scheduler.status()["workers"].values()
        assert worker["variants"] == ["deep", "quick"]


@in_loop
async def test_what_was_seen_of_an_avoided_variant_is_forgotten(monkeypatch):
    async with running("price", VARIANTS) as (scheduler, _):
        scheduler.heartbeat(beat(variants=("quick", "deep")))

        def ran(variant, seconds):
            grant = Grant("x", "w0", "default", "m", variant, (1,), 0, 1, 1, 0.0, 0.1, 0.0)
            scheduler.report(report(grant, measured=[(1, seconds)]))

        def latency_ms(variant):
            scheduler._learned.take_news(scheduler._clock())
            return scheduler.status()["profiles"][f"{variant}@default"]["latency_1_ms"]

        ran("deep", 0.5)  # a disturbance
        later(scheduler, monkeypatch, 30)
        ran("quick", 0.02)
        assert latency_ms("deep") == pytest.approx(500)
        later(scheduler, monkeypatch, 31)
        assert latency_ms("deep") == pytest.approx(500)  # nothing ran since: nothing to doubt
        ran("quick", 0.02)
        assert latency_ms("deep") == pytest.approx(11)
        assert latency_ms("quick") == pytest.approx(20)


@in_loop
async def test_only_the_quickest_variant_is_tried_when_all_look_too_slow():
    async with running("price", VARIANTS) as (scheduler, box):
        slow = beat(variants=("quick", "deep"))
        slow.profiles = {"quick": LatencyProfile([1.5] * 8), "deep": LatencyProfile([3.0] * 8)}
        scheduler.heartbeat(slow)
        scheduler.hear("a", submits(1))
        await asyncio.sleep(1.0)
        (grant,) = box.take()
        assert grant.variant == "quick"
        assert scheduler.status()["counts"]["tried"] == 1
        profiles = scheduler.status()["profiles"]
        assert profiles["quick@default"]["latency_1_ms"] == pytest.approx(500, rel=0.01)
        assert profiles["deep@default"]["latency_1_ms"] == pytest.approx(3000)


@in_loop
async def test_small_changes_are_no_news_to_the_policy():
    async with running(Fifo) as (scheduler, _):
        scheduler.heartbeat(beat())
        await settle()
        policy = scheduler._host.policy
        told = policy.cluster
        grant = Grant("x", "w0", "default", "m", "m", (1,), 0, 1, 1, 0.0, 0.1, 0.0)
        scheduler.report(report(grant, measured=[(1, 0.0111)]))
        await asyncio.sleep(0.4)
        assert policy.cluster is told
        scheduler.report(report(grant, measured=[(1, 0.022)] * 9))
        await asyncio.sleep(0.4)
        assert policy.cluster is not told


@in_loop
async def test_what_only_people_look_at_is_no_news_to_the_policy():
    async with running(Fifo) as (scheduler, _):
        scheduler.heartbeat(beat())
        await settle()
        policy = scheduler._host.policy
        told = policy.cluster
        memory = WorkerMemory("gpu", 900.0, {"m": (100.0, 20.0, 4)})
        scheduler.heartbeat(dataclasses.replace(beat(), memory=memory))
        await asyncio.sleep(0.4)
        assert policy.cluster is told
        assert scheduler.status()["workers"]["w0"]["memory"] == memory.to_json()


class Wants(Fifo):
    """Wants two tables, one of which cannot be had."""

    def __init__(self):
        super().__init__()
        self.missing, self.tables = ["impossible", "table"], []

    def wanted(self):
        return self.missing

    def solved(self, now, tables):
        self.tables += tables
        self.missing = [m for m in self.missing if m not in tables]


@in_loop
async def test_tables_that_a_policy_wants_are_solved_aside_once_each():
    asked = []

    async def aside(function, problem):
        if function is import_attr:  # it loads the solver
            return None
        asked.append(problem)
        if problem == "impossible":
            raise ValueError("no table for that")
        return problem

    async with running(Wants, aside=aside) as (scheduler, _):
        await until(lambda: scheduler._host.policy.tables)
        await asyncio.sleep(0.6)
        assert scheduler._host.policy.tables == ["table"]
        assert asked == ["impossible", "table"]


@pytest.mark.parametrize(
    "arrivals", ["measured", "poisson", {"kind": "gamma", "shape": 0.5}], ids=str
)
@in_loop
async def test_ramsis_has_its_solved_in_the_background(arrivals):
    policy = {"name": "ramsis", "kwargs": {"arrivals": arrivals}}
    async with running(policy, VARIANTS) as (scheduler, box):
        both = beat(variants=("quick", "deep"))
        both.profiles = {
            "quick": LatencyProfile([0.01] * 8),
            "deep": LatencyProfile.linear(0.08, 0.0, 8),
        }
        scheduler.heartbeat(both)
        seen, sent = set(), 0
        while "deep" not in seen:  # the fastest until there is a table, then what the table says
            scheduler.hear("a", submits(sent := sent + 1))
            await asyncio.sleep(0.2)
            for grant in box.take():
                seen.add(grant.variant)
                scheduler.report(report(grant))
        assert seen == {"quick", "deep"}
        (table,) = scheduler.status()["tables"]
        kind = "gamma 0.5" if isinstance(arrivals, dict) else "poisson"
        assert (table["model"], table["workers"], table["arrivals"]) == ("m", 1, kind)
        assert table["expected_accuracy"] > 0
        assert 0 <= table["violation_rate"] < 1
        assert scheduler.status()["tables_failed"] == 0


@in_loop
async def test_ramsis_solves_tables_for_every_class():
    policy = {"name": "ramsis", "kwargs": {"load_rps": 5}}
    async with running(policy, VARIANTS, {"gold": 600}) as (scheduler, box):
        both = beat(variants=("quick", "deep"))
        both.profiles = {name: LatencyProfile([0.01] * 8) for name in ("quick", "deep")}
        scheduler.heartbeat(both)
        sent, slos_ms = 0, []
        while len(slos_ms) < 2:
            budget_s = (0.59, 0.98)[sent % 2]
            scheduler.hear("a", [Submit(sent := sent + 1, "m", budget_s)])
            await asyncio.sleep(0.2)
            for grant in box.take():
                scheduler.report(report(grant))
            slos_ms = [table["slo_ms"] for table in scheduler.status()["tables"]]
        assert slos_ms == pytest.approx([600, 1000])


QUICK, DEEP = Assigned("quick", 2), Assigned("deep", 8, 10.0)


@in_loop
async def test_policy_is_told_where_requests_come_from_and_what_workers_are_for():
    async with running(variants=VARIANTS) as (scheduler, _):
        upstream = Upstream("w9", "quick", 0.25)
        scheduler.hear("a", [Submit(1, "m", 1.0, upstream=upstream), Submit(2, "m", 1.0)])
        await settle()
        policy = scheduler._host.policy
        assert [r.upstream for r in policy.queue] == [upstream, None]
        said = beat(variants=("quick", "deep"))
        for assigned, kept in (
            ((), ()),
            ((Assigned("deep", 4, 10.0),), (Assigned("deep", 4, 10.0),)),
            ((QUICK, DEEP), (QUICK, DEEP)),
            ((Assigned("of another release", 1), DEEP), (DEEP,)),
        ):
            scheduler.heartbeat(dataclasses.replace(said, assigned=assigned))
            await settle()
            assert policy.cluster.workers["w0"].assigned == kept
            shown = scheduler.status()["workers"]["w0"]["assigned"]
            assert shown == [dataclasses.asdict(a) for a in kept]


@in_loop
async def test_of_equal_free_workers_the_one_beside_the_payloads():
    async with running() as (scheduler, box):
        for name, node in (("w0", "here"), ("w1", "there"), ("w2", "there")):
            scheduler.heartbeat(dataclasses.replace(beat(name), node=node))
        scheduler.client_is_on("a", "there")
        for i in (1, 2, 3):
            scheduler.hear("a", submits(i))
            await settle()
        workers = [grant.worker for grant in box.take("a")]
        assert sorted(workers[:2]) == ["w1", "w2"]
        assert workers[2] == "w0"  # no other is free
        assert scheduler.status()["counts"]["on_node"] == 2
        assert scheduler.status()["workers"]["w1"]["node"] == "there"
