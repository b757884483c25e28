"""A pipeline from the client's item to its answer in one process and without Ray: a real frontend
with its scheduler, real workers with their threads, and a wire between them that may break. Time
is of its own: see `clock`."""

import asyncio
import json
import random
import time

import pytest
from fastapi import HTTPException

from ray_slo import Outputs
from ray_slo.errors import (
    BadInput,
    BatchResultError,
    Expired,
    RefusedEarly,
    UnknownModel,
    WorkerLost,
)
from ray_slo.policies.timeout import Eager
from ray_slo.serve.config.resolve import parse_spec
from tests.serve.fakes import GrpcCall, Silent, ask
from tests.serve.loops import in_loop, until
from tests.serve.pipelines import STEP_S, Find, Spell, spec


def outcomes(handle):
    """(model, outcome, reason) of what was not answered, and the models that were."""
    seen = handle.metrics.seen
    unanswered = [said[1:] for said in seen if said[0] == "unanswered"]
    return unanswered, [said[1].model for said in seen if said[0] == "answered"]


async def nothing_is_left(front):
    status = await front.slo_status()
    assert (status["pending"], status["process"]["owned"]) == (0, 0)
    assert not any(status["queued"].values())


@in_loop
async def test_items_come_back_joined(running):
    async with running(spec()) as (front, handle):
        answer = await front("to be or not", response_metadata=True)
        assert answer.result == {"f": ["to", "be", "or", "not"]}
        assert (answer.model, answer.variant, answer.latency_slo_ms) == ("p", "f/s", 5000)
        assert answer.accuracy == pytest.approx(72)
        assert [(s.task, s.requests, s.variants) for s in answer.stages] == [
            ("find", 1, {"f": 1}),
            ("spell", 4, {"s": 4}),
        ]
        assert answer.stages[1].batch_size > 1
        assert answer.exec_ms == pytest.approx(2e3 * STEP_S)
        assert answer.latency_ms == pytest.approx(answer.exec_ms + answer.queue_ms)
        assert outcomes(handle) == ([], ["find", *["spell"] * 4, "p"])
        assert await front("", model="p") == {"f": []}
        bare = await front("", response_metadata=True)
        assert (bare.variant, bare.accuracy) == ("f", pytest.approx(90))


@in_loop
async def test_requests_tell_the_scheduler_where_they_come_from(running):
    came = []

    class Noting(Eager):
        def requests_arrived(self, now, requests):
            came.extend(requests)
            super().requests_arrived(now, requests)

    async with running(spec(policy=Noting)) as (front, _):
        await front("a b")
        root, *items = came
        assert (root.model, root.upstream) == ("find", None)
        assert [item.model for item in items] == ["spell", "spell"]
        for item in items:
            assert item.upstream.worker in ("w0", "w1")
            assert item.upstream.variant == "f"
            assert item.upstream.spent_s == pytest.approx(STEP_S)
            assert item.deadline == pytest.approx(root.deadline)
            assert item.arrival == pytest.approx(root.arrival + item.upstream.spent_s)


@in_loop
async def test_only_the_pipeline_is_asked_for(running):
    async with running(spec()) as (front, _):
        with pytest.raises(UnknownModel, match="model 'spell' is unknown; choose one of p"):
            await front("a", model="spell")
        described = json.loads((await front.Describe(None, GrpcCall())).json)
        assert described["pipelines"]["p"]["parents"] == {"find": None, "spell": "find"}
        assert set(described["models"]) == {"find", "spell"}


@in_loop
async def test_an_error_of_a_branch_is_the_answer_and_the_others_end(running):
    async with running(spec()) as (front, handle):
        with pytest.raises(ValueError, match="poison") as error:
            await front("poison" + " held" * 7)
        assert error.value.__notes__ == ["in task 'spell'"]
        await nothing_is_left(front)
        unanswered, _ = outcomes(handle)
        assert ("p", "failed", "user_error") in unanswered
        assert ("spell", "failed", "user_error") in unanswered
        assert ("spell", "cancelled", "cancelled") in unanswered
        Spell.gate.set()
        assert await front("a") == {"f": ["a"]}  # and it goes on


@in_loop
async def test_an_error_of_the_root(running):
    async with running(spec()) as (front, _):
        with pytest.raises(KeyError):
            await front("fail")
        with pytest.raises(BatchResultError, match="items for 'spel'; it must return") as error:
            await front("typo")
        assert (error.value.task, error.value.model) == ("find", "p")
        with pytest.raises(BadInput, match="preprocess refused the item: no text") as error:
            await front(3)
        assert (error.value.task, error.value.model) == ("find", "p")


@in_loop
async def test_who_leaves_withdraws_all(running):
    async with running(spec()) as (front, handle):
        asked = asyncio.create_task(front("held " * 12))
        await until(lambda: all(w.batches.is_running for w in handle.workers.values()))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await nothing_is_left(front)
        Spell.gate.set()
        assert await front("x") == {"f": ["x"]}
        assert Spell.ran == [*["held"] * 8, "x"]  # a batch of each worker's, and no more


@in_loop
async def test_the_deadline_is_end_to_end(running):
    async with running(spec(slo_ms=600)) as (front, handle):
        for _ in range(3):  # how long it takes is learned, and sure
            await front("slow", latency_slo_ms=5000)
        ran = len(Spell.ran)
        with pytest.raises(RefusedEarly) as error:
            await front("slow")
        assert error.value.task == "spell"
        assert error.value.model == "p"
        assert error.value.latency_slo_ms == 600
        assert error.value.predicted_finish_ms > 600
        assert "(in task 'spell')" in str(error.value)
        assert len(Spell.ran) == ran
        unanswered, _ = outcomes(handle)
        assert [said[:2] for said in unanswered] == [("spell", "refused"), ("p", "refused")]


@in_loop
async def test_no_time_left_for_the_next_task_is_said(running):
    async with running(spec(slo_ms=9000)) as (front, _):
        await front("a")
        with pytest.raises(RefusedEarly) as error:
            await front("a", latency_slo_ms=1e3 * STEP_S + spec().response_margin_ms)
        assert error.value.latency_slo_ms < 50


@in_loop
@pytest.mark.parametrize("stage", ["f", "s"])
async def test_a_worker_that_dies_at_any_stage_costs_nobody_an_answer(running, stage):
    async with running(spec()) as (front, handle):
        handle.dying.append(stage)
        assert await front("to be or not to be") == {"f": ["to", "be", "or", "not", "to", "be"]}
        assert not handle.dying


@in_loop
async def test_too_many_deaths_are_said_with_the_task(running):
    async with running(spec(retries=0)) as (front, handle):
        handle.dying.append("s")
        with pytest.raises(WorkerLost, match=r"lost with the request \(in task 'spell'\)"):
            await front("a")


@in_loop
async def test_what_was_made_is_counted_for_the_planner(running):
    demand = Silent()
    async with running(spec(), demand=demand) as (front, _):
        await front("a b")
        await front("")
    said = [seen for seen in demand.seen if seen[0] == "finished"]
    finished = [("f", {"spell": 2}), ("s", {}), ("s", {}), ("f", {"spell": 0})]
    assert said == [("finished", *one) for one in finished]
    rest = [seen for seen in demand.seen if seen not in said]
    came = [("arrived", "p", 1), ("waits", "p", 1), ("sized", "find", 1)]
    word, answered = ("sized", "spell", 1), ("waits", "p", -1)
    assert rest == [*came, word, word, answered, *came, answered]


@in_loop
async def test_whatever_happens_everybody_hears_once_and_nothing_is_left(running):
    dice = random.Random(7)
    async with running(spec(retries=3)) as (front, handle):

        async def client():
            words = dice.choices(["to", "be", "or", "not"], k=dice.randrange(6))
            if dice.random() < 0.1:
                words.append("poison")
            text = "fail" if dice.random() < 0.05 else " ".join(words)
            slo_ms = dice.choice([9, 300, 9000])
            asking = asyncio.ensure_future(front(text, latency_slo_ms=slo_ms))
            if dice.random() < 0.2:
                await asyncio.sleep(dice.random() * 0.2)
                asking.cancel()
            try:
                return words, await asking
            except asyncio.CancelledError:
                return words, "cancelled"
            except (KeyError, ValueError, RefusedEarly, Expired) as error:
                return words, error

        clients = []
        for _ in range(200):
            clients.append(asyncio.ensure_future(client()))
            await asyncio.sleep(0.004)
            if dice.random() < 0.02:
                handle.dying.append(dice.choice("fs"))
        for words, got in await asyncio.gather(*clients):
            if isinstance(got, dict):
                assert got == {"f": words}
            elif not isinstance(got, RefusedEarly | Expired) and got != "cancelled":
                assert str(got).strip("'") in ("poison", "fail")
        await nothing_is_left(front)
        unanswered, answered = outcomes(handle)
        ended = [said for said in unanswered if said[0] == "p"] + [m for m in answered if m == "p"]
        assert len(ended) == 200
        kinds = {outcome for model, outcome, *_ in unanswered if model == "p"}
        assert kinds >= {"cancelled", "failed", "refused"}
        assert "p" in answered
        handle.dying.clear()
        assert await front("so it goes") == {"f": ["so", "it", "goes"]}


class Judge:
    """The root: "join", "leaf" and "list" say where an error comes from."""

    @staticmethod
    def join(word, outputs):
        if word == "join":
            raise HTTPException(status_code=403, detail="not yours")
        return [str(one) for one in outputs["leaf"]]

    def __call__(self, words):
        return [
            HTTPException(status_code=404, detail="none")
            if word == "result"
            else Outputs(word, {"leaf": [word]})
            for word in words
        ]


class Leaf:
    def __call__(self, words):
        return [HTTPException(status_code=410) if word == "leaf" else word for word in words]


@in_loop
@pytest.mark.parametrize(
    ("word", "status", "detail"),
    [("join", 403, "not yours"), ("leaf", 410, "Gone"), ("result", 404, "none"), ("a", 200, None)],
)
async def test_an_http_exception_of_a_task_has_its_own_status(running, word, status, detail):
    tasks = {"root": {"callable": Judge}, "leaf": {"callable": Leaf, "parent": "root"}}
    pipeline = {"tasks": tasks, "latency_slo_ms": 5000}
    made = parse_spec({"pipeline": pipeline, "policy": "eager", "planner": None, "name": "p"})
    async with running(made) as (front, handle):
        answer = await ask(front, item=word)
        assert answer.status_code == status
        unanswered, _ = outcomes(handle)
        if status == 200:
            assert (json.loads(answer.body), unanswered) == (["a"], [])
            return
        assert json.loads(answer.body)["detail"] == detail
        assert {said[1:] for said in unanswered} == {("invalid", f"http_{status}")}
        await nothing_is_left(front)
    assert status != 410 or ("leaf", "invalid", "http_410") in unanswered


def limited(most, **options):
    """The pipeline with `max_outputs`."""
    made = spec(**options)
    made.pipelines["p"].tasks["find"].max_outputs = most
    return made


@in_loop
async def test_a_request_that_makes_too_many_is_refused_at_once(running):
    async with running(limited(3)) as (front, _):
        assert await front("to be or") == {"f": ["to", "be", "or"]}
        before = len(Spell.ran)
        with pytest.raises(BatchResultError) as error:
            await front("held " * 4)
        assert str(error.value) == (
            "4 items were made for one request of a client; at most 3 are served. Make fewer, or "
            "write max_outputs: 4 at the task (in task 'find')"
        )
        assert (error.value.task, error.value.model) == ("find", "p")
        assert len(Spell.ran) == before
        await nothing_is_left(front)


@in_loop
async def test_who_was_slow_is_said_the_frontend(running):
    async with running(spec(slo_ms=600)) as (front, handle):
        await front("to be")
        handle.metrics.answered = lambda answer: time.sleep(0.3)  # on its event loop
        with pytest.raises(Expired, match=r"of its 9 requests .* it is too busy for so many"):
            await front("to be or not " * 2)


async def hangs(by, outputs):
    await asyncio.sleep(9)


@in_loop
@pytest.mark.parametrize("join", [hangs, lambda by, outputs: time.sleep(9)])
async def test_who_was_slow_is_said_the_application(running, monkeypatch, join):
    monkeypatch.setattr(Find, "join", staticmethod(join))
    async with running(spec(slo_ms=600)) as (front, _):
        with pytest.raises(Expired, match=r"3 of its 3 .* 1 were in the application's postpro"):
            await front("to be")


@in_loop
async def test_who_was_slow_is_said_the_application_that_moves(running, monkeypatch):
    monkeypatch.setattr(Spell, "postprocess", staticmethod(lambda word: time.sleep(0.3)))
    async with running(spec(slo_ms=600)) as (front, _):
        with pytest.raises(Expired, match=r"in the application's postprocess"):
            await front("to be or not " * 75)
