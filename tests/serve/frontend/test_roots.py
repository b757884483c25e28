"""Several models and pipelines behind one frontend, with shared models and SLO classes. Without
Ray; time is of its own: see `clock`."""

import asyncio
import json

import pytest

from ray_slo import Outputs
from ray_slo.errors import BadInput, UnknownModel
from ray_slo.policies.timeout import Eager
from ray_slo.serve.config.resolve import parse_spec
from tests.serve.fakes import GrpcCall, Silent
from tests.serve.loops import in_loop
from tests.serve.pipelines import Find, Spell, variant


class Words(Find):
    """A text's words are requests downstream."""

    @staticmethod
    def join(by, outputs):
        return {by: outputs["word"]}

    def __call__(self, net, texts):
        return [Outputs(net, {"word": text.split()}) for text in texts]


class Letters:
    """A word in capitals; its letters are for a task that only one tree has."""

    def __call__(self, words):
        return [Outputs(word.upper(), {"letter": list(word)}) for word in words]


class Plain:
    def __call__(self, items):
        return items


FIND = {"callable": Words, "variants": {"f": variant("f", 90)}, "max_batch_size": 1}
SPELL = {"callable": Spell, "variants": {"s": variant("s", 80)}, "max_batch_size": 8}


class Noting(Eager):
    """Notes the requests that it gets."""

    came = []  # noqa: RUF012

    def requests_arrived(self, now, requests):
        Noting.came.extend(requests)
        super().requests_arrived(now, requests)


def spec(**changes):
    """Spelling alone, and in two pipelines."""
    Noting.came = []
    word = {"model": "spell", "parent": "find"}
    return parse_spec(
        {
            "models": {
                "spell": {
                    **SPELL,
                    "latency_slo_ms": 3000,
                    "slo_classes": {"gold": 1000, "bulk": 9000},
                }
            },
            "pipelines": {
                "text": {
                    "tasks": {"find": FIND, "word": word},
                    "latency_slo_ms": 5000,
                    "slo_classes": {"gold": 2000},
                    "path_accuracies": {"f/s": 65},
                },
                "title": {
                    "tasks": {"head": {"callable": Spell, "variants": {"h": variant("h", 50)}}},
                    "latency_slo_ms": 5000,
                },
            },
            "policy": Noting,
            "planner": None,
            "name": "p",
            **changes,
        }
    )


@in_loop
async def test_each_is_asked_for_by_its_name(running):
    async with running(spec()) as (front, handle):
        text, word, title = await asyncio.gather(
            front("to be", model="text", response_metadata=True),
            front("or", model="spell", response_metadata=True),
            front("Not", model="title", response_metadata=True),
        )
        assert (text.result, text.variant, text.accuracy) == ({"f": ["to", "be"]}, "f/s", 65)
        assert {s.task: s.variants for s in text.stages} == {"find": {"f": 1}, "word": {"s": 2}}
        assert (word.result, word.model, word.latency_slo_ms) == ("or", "spell", 3000)
        assert (title.result, title.accuracy) == ("not", 50)
        for wrong in ("word", "find", None):
            with pytest.raises(UnknownModel, match="one of spell, text, title"):
                await front("a", model=wrong)
        answered = [said[1].model for said in handle.metrics.seen if said[0] == "answered"]
        assert sorted(answered) == ["find", "head", "spell", "text", "title", "word", "word"]


@in_loop
async def test_tasks_share_a_model_and_its_batches(running):
    async with running(spec()) as (front, _):
        await asyncio.gather(front("a b", model="text"), *(front(w, model="spell") for w in "cd"))
        came = {(r.model, r.task) for r in Noting.came}
        assert came == {("find", "find"), ("spell", "word"), ("spell", "spell")}
        assert sorted(Spell.ran) == ["a", "b", "c", "d"]


@in_loop
async def test_an_slo_class_is_the_deadline_unless_the_call_has_its_own(running):
    async with running(spec()) as (front, _):
        for asked, slo_ms in (
            ({"model": "text"}, 5000),
            ({"model": "text", "slo_class": "gold"}, 2000),
            ({"model": "spell", "slo_class": "bulk"}, 9000),
            ({"model": "spell", "slo_class": "gold", "latency_slo_ms": 700}, 700),
        ):
            answer = await front("a", response_metadata=True, **asked)
            assert answer.latency_slo_ms == pytest.approx(slo_ms)
            assert answer.slo_class == asked.get("slo_class", "")
            assert answer.headers().get("x-slo-class", "") == answer.slo_class
        with pytest.raises(BadInput, match="'text' has no SLO class 'bulk'; its classes are gold"):
            await front("a", model="text", slo_class="bulk")
        with pytest.raises(BadInput, match="'title' has no SLO class 'gold'; its classes are none"):
            await front("a", model="title", slo_class="gold")
        described = json.loads((await front.Describe(None, GrpcCall())).json)
        assert described["models"]["spell"]["slo_classes"] == {"gold": 1000, "bulk": 9000}
        assert described["pipelines"]["text"] == {
            "latency_slo_ms": 5000,
            "slo_classes": {"gold": 2000},
            "parents": {"find": None, "word": "find"},
            "shared": {"word": "spell"},
        }


@in_loop
async def test_demand_is_counted_by_stream_and_what_tasks_made_by_task(running):
    demand = Silent()
    async with running(spec(), demand=demand) as (front, _):
        await front("a b", model="text", slo_class="gold")
        await front("c", model="spell")
        await front("d", model="spell", slo_class="bulk")
        with pytest.raises(BadInput):
            await front(7, model="text")
    said = {kind: [tuple(a) for k, *a in demand.seen if k == kind] for kind, *_ in demand.seen}
    assert said["arrived"] == [("text@gold", 1), ("spell", 1), ("spell@bulk", 1), ("text", 1)]
    assert said["finished"] == [("f", {"word": 2}), ("word:s", {}), ("word:s", {})]
    assert said["sized"] == [("find", 1), *[("spell", 1)] * 4]
    assert "bad" not in said


@in_loop
async def test_what_is_refused_is_bad_in_its_stream(running):
    demand = Silent()
    async with running(spec(), demand=demand) as (front, _):
        for asked in ({"latency_slo_ms": 1}, {"latency_slo_ms": 1, "slo_class": "gold"}):
            with pytest.raises(Exception, match="no time is left"):
                await front("a", model="text", **asked)
    bad = [seen[1:] for seen in demand.seen if seen[0] == "bad"]
    assert bad == [("text", 1), ("text@gold", 1)]


@in_loop
async def test_an_error_names_the_pipeline_and_the_task(running):
    async with running(spec()) as (front, _):
        with pytest.raises(ValueError, match="poison") as error:
            await front("a poison", model="text")
        assert error.value.__notes__ == ["in task 'word'"]


@in_loop
async def test_items_of_a_shared_model_are_for_the_trees_that_have_such_a_task(running):
    tasks = {
        "root": {"model": "upper"},
        "letter": {"callable": Plain, "parent": "root"},
    }
    shape = {
        "models": {"upper": {"callable": Letters, "latency_slo_ms": 3000}},
        "pipelines": {"spelled": {"tasks": tasks, "latency_slo_ms": 3000}},
    }
    async with running(spec(**shape)) as (front, _):
        assert await front("ab", model="upper") == "AB"
        letters = {"result": "AB", "outputs": {"letter": ["a", "b"]}}
        assert await front("ab", model="spelled") == letters


class Weighed(Plain):
    """A word's size is its length."""

    @staticmethod
    def size(word):
        return len(word)

    @staticmethod
    def example_input(size=1):
        return "x" * size


class Split(Plain):
    def __call__(self, texts):
        return [Outputs(text, {"weighed": text.split()}) for text in texts]


@in_loop
async def test_items_of_a_task_have_sizes_and_are_batched_by_them(running):
    weighed = {"callable": Weighed, "parent": "split", "max_batch_size": 6}
    shape = {
        "models": {},
        "pipelines": {
            "sized": {
                "tasks": {"split": {"callable": Split}, "weighed": weighed},
                "latency_slo_ms": 3000,
            }
        },
    }
    demand = Silent()
    async with running(spec(**shape, profile_seconds=0), demand=demand) as (front, _):
        answer = await front("a four", response_metadata=True)
        assert answer.result == {"result": "a four", "outputs": {"weighed": ["a", "four"]}}
        sizes = {(r.task, r.size) for r in Noting.came}
        assert sizes == {("split", 1), ("weighed", 1), ("weighed", 4)}
        # Who made it that large was not the client.
        with pytest.raises(ValueError, match="the item's size is 7; 1 to 6 can be served") as error:
            await front("a seven78")
        assert error.value.__notes__ == ["in task 'weighed'"]
    counted = [seen[1:] for seen in demand.seen if seen[0] == "sized"]
    assert sorted(counted)[:2] == [("split", 1), ("split", 1)]
    assert ("weighed", 4) in counted and ("weighed", 7) not in counted
