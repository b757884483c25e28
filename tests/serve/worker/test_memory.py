"""Variants and batches that there is not enough memory for, on a real worker with a pretended
device; the frontend and its scheduler are real, too."""

import asyncio
import pickle
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from ray_slo.errors import ConfigError, OutOfMemory
from ray_slo.models.memory import Meter
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.worker import models as worker_models
from ray_slo.serve.worker import profiles as worker_profiles
from ray_slo.serve.worker.models import Models
from tests.models.pretended import NOTHING, Pretended
from tests.serve.loops import in_loop, until


class Large:
    """Has memory for so many items at a time."""

    fits = 4
    sizes: ClassVar[list[int]] = []

    def __init__(self):
        Large.sizes = []

    def __call__(self, items):
        Large.sizes.append(len(items))
        time.sleep(0.001)
        if len(items) > self.fits or "huge" in items:
            raise MemoryError(f"{len(items)} items")
        return list(items)


class Swept(Large):
    @staticmethod
    def example_input():
        return "x"


async def ask(front, *items):
    return await asyncio.gather(*map(front, items), return_exceptions=True)


async def workers_memory(front):
    (worker,) = (await front.slo_status())["workers"].values()
    return worker["memory"]


@pytest.mark.slow
@in_loop
async def test_a_batch_is_split_and_its_size_not_chosen_again(app):
    async with app(Large, policy="eager", model={"max_batch_size": 16}) as (front, worker):
        held = asyncio.create_task(front("first"))
        await until(lambda: Large.sizes)
        items = [f"i{i}" for i in range(15)]
        assert await ask(front, *items) == items  # in order, none lost
        await held
        assert max(Large.sizes) > 4
        await worker.registration.tell()
        await front._channel.heartbeat(worker._heartbeat())
        assert (await workers_memory(front))["largest_batch"] == {"m": 4}
        split = [seen for seen in worker.batches._metrics.seen if seen[0] == "out_of_memory"]
        assert split
        Large.sizes = []
        assert await ask(front, *items) == items
        assert max(Large.sizes) <= 4


@pytest.mark.slow
@in_loop
async def test_an_item_that_does_not_fit_alone_gets_the_error_and_nobody_else(app):
    async with app(Large, policy="eager", model={"max_batch_size": 4}) as (front, worker):
        held = asyncio.create_task(front("first"))
        await until(lambda: Large.sizes)
        answers = await ask(front, "a", "huge", "b", "c")
        await held
        error = answers.pop(1)
        assert answers == ["a", "b", "c"]
        assert isinstance(error, OutOfMemory)
        assert (error.reason, error.model, error.http_status) == ("out_of_memory", "m", 500)
        assert "MemoryError" in str(error)
        assert not worker.models.profiles.cuts  # it was for the item


@pytest.mark.slow
@in_loop
async def test_what_there_is_no_time_for_comes_back(app):
    from ray_slo.serve.messages import AGAIN, Piece

    async with app(Large, policy="eager", model={"max_batch_size": 16}) as (_, worker):
        result = await worker.execute(Piece("b", "m", list("abcdefgh"), 0, 1, 0.0, (), 0.0), "w0")
        assert result.results == [AGAIN] * 8
        assert worker.models.profiles.cuts == {"m": 4}  # half of what failed
        result = await worker.execute(Piece("c", "m", list("abcdefgh"), 0, 1, 0.0), "w0")
        assert result.results == [(True, item) for item in "abcdefgh"]


@pytest.mark.slow
@in_loop
async def test_what_comes_back_is_submitted_again(app):
    async with app(Large, policy="eager", model={"max_batch_size": 16}) as (front, worker):
        late = []
        execute = worker.batches.execute

        async def without_time(piece):
            if len(piece.items) > 4 and not late:
                late.append(len(piece.items))
                piece.late_in_s = 0.0
            return await execute(piece)

        worker.batches.execute = without_time
        held = asyncio.create_task(front("first"))
        await until(lambda: Large.sizes)
        items = [f"i{i}" for i in range(15)]
        assert await ask(front, *items) == items
        await held
        assert late


@pytest.mark.slow
@in_loop
async def test_the_warm_up_ends_at_the_last_size_that_worked(app):
    async with app(Swept, policy="eager", model={"max_batch_size": 16}) as (front, worker):
        assert worker.models.loaded["m"].profile.profile.max_batch_size == 4
        assert sorted(set(Large.sizes)) == [1, 2, 4, 8, 16]
        assert Large.sizes.count(16) == Large.sizes.count(8) == 1
        assert (await workers_memory(front))["largest_batch"] == {"m": 4}
        Large.sizes = []
        items = [f"i{i}" for i in range(15)]
        assert await ask(front, *items) == items
        assert max(Large.sizes) <= 4


@in_loop
async def test_a_cut_is_tried_again_later(app, monkeypatch):
    async with app(Large, policy="eager", model={"max_batch_size": 16}) as (_, worker):
        profiles = worker.models.profiles
        profiles.cut("m", 4)
        profiles.cut("m", 8)
        assert (profiles.cuts, profiles.current["m"].max_batch_size) == ({"m": 4}, 4)
        now = time.monotonic() + 601.0
        monkeypatch.setattr(worker_profiles, "time", SimpleNamespace(monotonic=lambda: now))
        assert (profiles.cuts, profiles.current["m"].max_batch_size) == ({}, 16)


# -- loading --------------------------------------------------------------------------------


HOST = Pretended(100.0, 1000.0)


class Network:
    mb = 0.0

    def __init__(self, mb, per_item_mb=0.0, fits=True):
        if not fits:
            raise MemoryError("no room for its weights")
        self.host = HOST
        HOST.take(mb)
        self.mb, self.per_item_mb = mb, per_item_mb

    def __del__(self):
        if self.mb:
            self.host.take(-self.mb)


class Runs:
    def __call__(self, network, items):
        HOST.take_for_a_moment(network.per_item_mb * len(items))
        time.sleep(0.001)
        return list(items)

    @staticmethod
    def example_input():
        return "x"


@pytest.fixture
def metered(monkeypatch):
    global HOST
    HOST = host = Pretended(100.0, 1000.0)
    monkeypatch.setattr(
        worker_models, "_meter", lambda worker: Meter(host, NOTHING, release=lambda: None)
    )


def network(*args):
    return {"load": Network, "args": list(args), "accuracy": 90}


def models_of(**variants):
    spec = parse_spec(
        {
            "models": {
                "m": {
                    "callable": Runs,
                    "latency_slo_ms": 1000,
                    "max_batch_size": 16,
                    "variants": variants,
                }
            },
            "policy": "price",
            "profile_seconds": 0.2,
        }
    )
    return Models(spec, "default", lambda *_: None)


@pytest.mark.slow
@in_loop
async def test_memory_of_variants_and_it_is_given_back(metered):
    models = models_of(small=network(50, 1), large=network(300, 10))
    await models.load(["small", "large"], {})
    found = models.meter.variants
    assert {k: (f.load_mb, f.batch_mb, f.batch_size) for k, f in found.items()} == {
        "small": (50, 16, 16),
        "large": (300, 160, 16),
    }
    assert models.meter.room_mb == 900
    models.forget(["large"])
    assert HOST.used_mb == 150
    assert list(models.meter.variants) == ["small"]
    models.close()


@pytest.mark.slow
@in_loop
async def test_a_batch_that_takes_more_than_there_is_room_for_is_too_large(metered):
    models = models_of(large=network(300, 100))
    await models.load(["large"], {})
    assert models.loaded["large"].profile.profile.max_batch_size == 4  # 8 took 1100 of 900
    assert models.meter.variants["large"].mb == 700
    models.close()


@pytest.mark.slow
@in_loop
@pytest.mark.parametrize(
    "large, why",
    [
        (network(950), "MemoryError: with large, the variants of this worker take 950 MB"),
        (network(50, 0, False), "no room for its weights"),
        (network(50, 900), "with a batch of 1 of large"),
    ],
)
async def test_a_variant_without_room_is_left_out_and_the_others_serve(metered, large, why):
    models = models_of(large=large, small=network(50, 1))
    left_out = await models.load(["large", "small"], {}, leave_out=True)
    assert list(left_out) == ["large"] and why in left_out["large"]
    assert models.offered == set(models.loaded) == {"small"}
    assert HOST.used_mb == 150  # what it took is free again
    with pytest.raises(Exception, match=r"room|batch"):
        await models.load(["large"], {})
    assert models.offered == {"small"}
    models.close()


@pytest.mark.slow
@in_loop
async def test_a_worker_without_room_for_any_variant_fails(metered):
    models = models_of(large=network(950), larger=network(990))
    with pytest.raises(MemoryError, match="larger"):
        await models.load(["large", "larger"], {}, leave_out=True)
    assert not models.loaded and HOST.used_mb == 100
    models.close()


@pytest.mark.slow
@in_loop
async def test_another_error_of_a_loader_leaves_nothing_out(metered):
    models = models_of(bad=network("x"), small=network(50))
    with pytest.raises(ConfigError, match="bad: load failed"):
        await models.load(["bad", "small"], {}, leave_out=True)
    assert not models.loaded
    models.close()


def test_what_a_worker_may_have_is_what_the_config_says():
    options = {"memory": 4e9, "num_gpus": 0.5}
    spec = parse_spec(
        {
            "models": {"m": {"callable": Runs, "latency_slo_ms": 1000}},
            "workers": {"gpu": {"ray_actor_options": options, "memory_mb": 300}, "cpu": {}},
        }
    )
    assert worker_models._meter(spec.workers["gpu"]).room_mb == 300
    free = worker_models._meter(spec.workers["gpu"].model_copy(update={"memory_mb": None}))
    assert free.room_mb == pytest.approx(4e9 / 2**20)
    assert worker_models._meter(spec.workers["cpu"]).room_mb > 300  # the machine's


def test_the_error_can_be_sent():
    error = pickle.loads(pickle.dumps(OutOfMemory("x", model="m")))
    assert error.to_body() == {
        "error": "OutOfMemory",
        "reason": "out_of_memory",
        "message": "x",
        "model": "m",
    }
