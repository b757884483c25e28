"""Preemption from the policy to the user's method and back, in one process and without Ray: a real
frontend with its scheduler, a real worker with its thread, and a wire between them that may delay
messages and let one overtake the other. Time is of its own: see `clock`."""

import asyncio
import logging
import random
import time

import pytest

import ray_slo
from ray_slo.core import (
    BatchStatus,
    LatencyProfile,
)
from ray_slo.core.profiles import save_profiles
from ray_slo.errors import RefusedEarly
from ray_slo.models.checkpoint import PreemptionFlag, preemption_scope
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.errors import ConfigError
from ray_slo.serve.messages import BatchReport, Grant, Heartbeat, Stop, Submit, Unreachable
from ray_slo.serve.scheduler.scheduler import Scheduler
from tests.serve.fakes import STEP_S, Box, Deaf, Impatient, Steps, finished
from tests.serve.loops import in_loop, settle, until


class Loop(Steps):
    async def __call__(self, items):
        for _ in range(max(steps for _, steps in items)):
            await asyncio.sleep(STEP_S)
            ray_slo.checkpoint()
        finished.update(name for name, _ in items)
        return [name for name, _ in items]


class Fussy(Steps):
    """Fails for "poison", the sooner the better, and leaks the Preempted of a scope of its own."""

    def __call__(self, items):
        if any(name == "leak" for name, _ in items):
            flag = PreemptionFlag()
            with preemption_scope(flag):
                flag.set()
                ray_slo.checkpoint()
        if any(name == "poison" for name, _ in items):
            raise ValueError("poison")
        return super().__call__(items)


def the_policy():
    """The one that a scheduler has."""
    return Impatient.newest


async def counts(frontend):
    return (await frontend.slo_status())["counts"]


@in_loop
@pytest.mark.parametrize("user_class", [Steps, Loop])
async def test_a_batch_is_stopped_and_its_requests_come_back(app, user_class):
    async with app(user_class) as (front, worker):
        long = asyncio.create_task(front(("long", 100), response_metadata=True))
        await until(lambda: worker.batches.is_running)
        short = await front(("short", 1), response_metadata=True)
        assert (short.result, short.deadline_met) == ("short", True)
        assert finished == {"short": 1}  # while "long" was not yet at its end
        answer = await long
        assert (answer.result, answer.deadline_met) == ("long", True)
        assert finished == {"short": 1, "long": 1}
        status = await front.slo_status()
        (record,) = status["preemptions"]
        assert (record["victim"], record["victim_size"], record["by"]) == ("m", 1, "m")
        assert (record["gain"], record["outcome"], record["worker"]) == (1, "preempted", "w0")
        assert 0 < record["delay_ms"] == pytest.approx(status["preempt_delay_ms"])
        assert status["counts"]["preempted"] == 1
        ((_, ref, outcome, delay_s),) = [
            m for m in worker.batches._metrics.seen if m[0] == "preemption"
        ]
        assert (ref.name, outcome) == ("m", "preempted")
        assert delay_s == pytest.approx(STEP_S / 2)  # it was asked for in the middle of a step


@in_loop
async def test_what_can_no_longer_be_served_is_refused_and_why(app):
    async with app() as (front, worker):
        long = asyncio.create_task(front(("long", 40), latency_slo_ms=60))
        await until(lambda: worker.batches.is_running)
        await asyncio.sleep(0.05)  # of its 60 ms
        assert await front(("short", 5)) == "short"
        with pytest.raises(RefusedEarly, match="it was stopped while it ran") as refused:
            await long
        assert refused.value.reason == "preempted"
        assert finished == {"short": 1}


@in_loop
async def test_a_preemption_that_overtakes_its_batch_stops_it_before_it_starts(app):
    async with app(wire={"execute": 0.03}) as (front, worker):
        first = asyncio.create_task(front(("first", 1), response_metadata=True))
        await until(lambda: the_policy().running)
        second = asyncio.create_task(front(("second", 1)))
        await until(lambda: worker.batches._stops)  # no payload has arrived yet
        assert await second == "second"
        assert (await first).result == "first"
        assert finished == {"first": 1, "second": 1}
        assert (await counts(front))["preempted"] == 1
        assert not worker.batches._stops


@in_loop
async def test_a_preemption_that_comes_too_late_changes_nothing(app):
    async with app(wire={"preempt": 0.05}) as (front, worker):
        first = asyncio.create_task(front(("first", 5)))
        await until(lambda: worker.batches.is_running)
        assert await front(("second", 1)) == "second"
        assert await first == "first"
        await asyncio.sleep(0.06)
        assert finished == {"first": 1, "second": 1}
        assert not worker.batches._stops
        (record,) = (await front.slo_status())["preemptions"]
        assert record["outcome"] == "finished"
        assert (await counts(front))["preempted"] == 0


@in_loop
async def test_a_batch_that_ignores_the_flag_is_waited_for_and_said_once(app, caplog):
    async with app(Deaf) as (front, worker):
        policy = the_policy()
        for i in range(2):
            Deaf.end.clear()
            long = asyncio.create_task(front((f"long{i}", 1)))
            await until(lambda: worker.batches.is_running)
            short = asyncio.create_task(front((f"short{i}", 1)))
            await until(lambda n=i + 1: len(policy.failed) == n)
            assert not finished[f"long{i}"]
            Deaf.end.set()
            assert await long == f"long{i}"
            assert await short == f"short{i}"  # behind it
        assert finished == {"long0": 1, "short0": 1, "long1": 1, "short1": 1}
        records = (await front.slo_status())["preemptions"]
        assert [r["outcome"] for r in records] == ["finished", "finished"]
    said = [r for r in caplog.records if "continues to run" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.WARNING]


@in_loop
@pytest.mark.parametrize("seed", range(4))
async def test_preemptions_at_random_lose_and_duplicate_nothing(app, seed):
    rng = random.Random(seed)
    policy = {"name": Impatient, "kwargs": {"size": 3, "at_random": seed}}
    wire = {"execute": lambda: 0.004 * rng.random(), "preempt": lambda: 0.008 * rng.random()}
    async with app(policy=policy, wire=wire, model={"latency_slo_ms": 20_000}) as (front, worker):

        async def one(i):
            await asyncio.sleep(0.3 * rng.random())
            return await front((i, rng.randrange(1, 8)))

        answers = await asyncio.gather(*(one(i) for i in range(60)))
        assert answers == list(range(60))
        assert finished == dict.fromkeys(range(60), 1)
        outcomes = {p["outcome"] for p in (await front.slo_status())["preemptions"]}
        assert outcomes == {"preempted", "finished"}
        assert (await front.slo_status())["pending"] == 0
        assert not worker.batches.ids
        now = await counts(front)
        assert now["submitted"] == now["granted"] > 60


@in_loop
@pytest.mark.parametrize("policy", ["flex", "deferred_flex"])
async def test_a_burst_that_cannot_wait_preempts(app, policy, tmp_path):
    def model(alpha_s, beta_s, slo_ms, **options):
        file = tmp_path / f"{slo_ms}.json"
        save_profiles(file, {"x": LatencyProfile.linear(alpha_s, beta_s, 16)})
        return {"callable": Steps, "latency_slo_ms": slo_ms, "profile": str(file), **options}

    steps = 450  # 0.9 s and more
    models = {
        "slow": model(0.0, 1.5, 20_000, max_batch_size=1),
        "quick": model(0.002, 0.03, 700, max_batch_size=16),
    }
    async with app(policy=policy, models=models) as (front, worker):
        long = asyncio.create_task(front(("long", steps), model="slow"))
        await until(lambda: worker.batches.is_running)
        await asyncio.sleep(0.05)
        burst = [front((i, 5), model="quick") for i in range(10)]
        assert await asyncio.gather(*burst) == list(range(10))
        assert finished["long"] == 0
        assert await long == "long"
        (record,) = (await front.slo_status())["preemptions"]
        assert (record["victim"], record["by"], record["outcome"]) == ("slow", "quick", "preempted")
        assert 5 <= record["gain"] <= 10  # of the first eight, which came in one turn


@in_loop
async def test_a_caller_that_left_is_not_brought_back(app):
    async with app() as (front, worker):
        long = asyncio.create_task(front(("long", 100)))
        await until(lambda: worker.batches.is_running)
        long.cancel()
        assert await front(("short", 1)) == "short"
        await asyncio.sleep(0.02)
        assert finished == {"short": 1}
        assert (await counts(front))["submitted"] == 2


@in_loop
async def test_preempted_while_the_items_are_run_one_by_one(app):
    async with app(Fussy, isolate_errors=True) as (front, worker):
        both = [asyncio.create_task(front(item)) for item in (("poison", 1), ("good", 50))]
        await until(lambda: worker.batches.is_running)
        await asyncio.sleep(0.01)  # it has failed as a whole
        assert await front(("short", 1)) == "short"
        with pytest.raises(ValueError, match="poison"):
            await both[0]
        assert await both[1] == "good"
        assert finished == {"short": 1, "good": 1}
        with pytest.raises(RuntimeError, match="came out of a scope of the batch method"):
            await front(("leak", 1))
        assert await front(("well", 1)) == "well"


# With torch


@pytest.mark.parametrize("how", ["exit_points", "profile"])
def test_exit_points_are_put_into_the_only_network(app, how, tmp_path):
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):
        def forward(self, x):
            time.sleep(STEP_S)
            return x + 1

    class Classifier:
        def __init__(self):
            self.network = torch.nn.Sequential(*(Layer() for _ in range(40)))

        @staticmethod
        def example_input():
            return 1.0

        def __call__(self, items):
            finished.update(items)
            return self.network(torch.tensor(items)).tolist()

    model = {"exit_points": 20, "latency_slo_ms": 2000}
    if how == "profile":
        point = {"exit_points": 3, "placed": 3, "batch_size": 1, "batch_s": 0.1, "slowdown": 0.0}
        point |= {"delay_p50_s": 0.01, "delay_p95_s": 0.025, "pairs": 3, "preemptions": 3}
        names = ["9", "19", "29"]
        saved = {"points": [point], "chosen": 3, "exit_points": names, "reason": ""}
        file = tmp_path / "profile.json"
        profile = LatencyProfile.linear(0.001, 0.1, 8)
        save_profiles(file, {"x": profile}, preemption={"x": saved})
        model = {"profile": str(file), "latency_slo_ms": 2000}

    @in_loop
    async def run():
        async with app(Classifier, model=model, profile_seconds=0.5) as (front, worker):
            if how == "profile":
                status = await front.slo_status()
                prior_ms = 2 * status["dispatch_delay_ms"] + 25
                assert status["preempt_delay_ms"] == pytest.approx(prior_ms)
            finished.clear()
            long = asyncio.create_task(front(7.0))
            await until(lambda: worker.batches.is_running)
            await asyncio.sleep(0.01)
            assert await front(1.0) == 41.0
            assert await long == 47.0
            assert finished == {7.0: 2, 1.0: 1}  # begun twice
            assert (await counts(front))["preempted"] == 1

    run()


@pytest.mark.slow
def test_exit_points_without_a_network_are_refused(app):
    pytest.importorskip("torch")

    @in_loop
    async def run():
        with pytest.raises(ConfigError, match=r"models\.m\.exit_points: Steps must have exactly"):
            async with app(model={"exit_points": 4}):
                pass
        # Where nothing preempts there is nothing to stop.
        async with app(policy="eager", model={"exit_points": 4}) as (front, _):
            assert await front(("item", 1)) == "item"

    run()


@in_loop
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("auto", "'auto' of this application stops no batch; write `policy: {name: auto, kwargs: "),
        ("eager", "'eager' of this application stops no batch; choose flex, deferred_flex, or "),
        (Impatient, ""),
    ],
)
async def test_a_checkpoint_that_stops_nothing_is_told_once(app, caplog, policy, said):
    async with app(policy=policy) as (front, _):
        await front(("one", 2))
        await front(("two", 2))
    lines = [r.message for r in caplog.records if "checkpoint() stops nothing" in r.message]
    assert [said in line for line in lines] == [True] * bool(said)


# The scheduler alone


@in_loop
async def test_every_frontend_of_a_batch_hears_of_its_preemption_once():
    model = {"callable": Steps, "latency_slo_ms": 1000}
    policy = {"name": Impatient, "kwargs": {"size": 2}}
    spec = parse_spec({"models": {"m": model}, "policy": policy})
    box = Box()
    scheduler = Scheduler(spec, box)
    try:
        scheduler.heartbeat(Heartbeat("w0", "gpu", {"m": LatencyProfile([0.1] * 8)}, []))
        scheduler.hear("a", [Submit(1, "m", 1.0)])
        scheduler.hear("b", [Submit(1, "m", 1.0)])
        await settle()
        (grant,), (other,) = box.take("a"), box.take("b")
        assert isinstance(grant, Grant)
        for i in (2, 3):  # the second is asked for while the first is under way
            scheduler.hear("a", [Submit(i, "m", float(i))])
            await settle()
        stop = Stop(grant.batch_id, "w0", "gpu")
        assert (box.take("a"), box.take("b")) == ([stop], [stop])
        assert other.batch_id == grant.batch_id
        scheduler.report(BatchReport(grant.batch_id, "w0", "m", BatchStatus.PREEMPTED, 2, 0, 0))
        await settle()
        (again,) = box.take("a")
        assert again.request_ids == (2, 3)
        scheduler.hear("a", [Submit(4, "m", 4.0)])
        await settle()
        scheduler.hear("a", [Unreachable("w0")])
        outcomes = [p["outcome"] for p in scheduler.status()["preemptions"]]
        assert outcomes == ["preempted", "lost"]
    finally:
        scheduler.close()
