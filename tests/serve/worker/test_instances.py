"""What Serve asks of a replica's class, asked of the user's class on a worker."""

import asyncio
import threading
from typing import ClassVar

import pytest

from ray_slo.errors import ConfigError
from ray_slo.models import profiling
from tests.serve.fakes import piece
from tests.serve.loops import in_loop, settle


class Model:
    def __call__(self, items):
        return items


class Awaited(Model):
    async def __init__(self, *args, **kwargs):
        await asyncio.sleep(0.01)
        self.given = args, kwargs
        self.loop = asyncio.get_running_loop()


class Network:
    async def __init__(self, name):
        await asyncio.sleep(0.01)
        self.name = name


async def load(name):
    await asyncio.sleep(0.01)
    return await new(name)


async def new(name):
    network = Network.__new__(Network)
    await network.__init__(name)
    return network


class Chooses:
    def __call__(self, network, items):
        return [network.name for _ in items]


@in_loop
async def test_an_async_constructor_is_awaited_on_the_event_loop(app):
    async with app(Awaited, model={"args": [1], "kwargs": {"b": 2}}) as (_, worker):
        built = worker.models.instances["m"]
        assert built.given == ((1,), {"b": 2})
        assert built.loop is asyncio.get_running_loop()
        assert (await worker.execute(piece("a", 7), "w0")).results == [(True, 7)]


@in_loop
@pytest.mark.parametrize("loader", [load, Network, lambda name: new(name)])
async def test_loaders_may_be_async_too(app, loader):
    variants = {v: {"accuracy": 1, "load": loader, "args": [v]} for v in ("small", "large")}
    async with app(Chooses, model={"variants": variants}) as (_, worker):
        for name in variants:
            (found,) = (await worker.execute(piece(name, 7, variant=name), "w0")).results
            assert found == (True, name)


class Ranked(Model):
    def __init__(self):
        self.told = []

    def reconfigure(self, config, rank):
        self.told.append((config, rank))


class Configured(Model):
    def __init__(self):
        self.told = []

    async def reconfigure(self, config):
        self.told.append(config)


@in_loop
async def test_reconfigure_is_called_as_serve_calls_it(app):
    async with app(Ranked) as (_, worker):
        told = worker.models.instances["m"].told
        assert told == [(None, 0)]  # who takes the rank is told without a user_config too
        await worker.reconfigure(None, 0)
        assert told == [(None, 0)]
        await worker.reconfigure(None, 2)
        await worker.reconfigure({"m": "c"}, 2)
        assert told[1:] == [(None, 2), ("c", 2)]
    async with app(Configured, model={"user_config": 1}) as (_, worker):
        await worker.reconfigure({"m": 1}, 3)
        await worker.reconfigure({"m": 2}, 3)
        assert worker.models.instances["m"].told == [1, 2]
        with pytest.raises(ConfigError, match="names model 'x'; the models are m"):
            await worker.reconfigure({"x": 1}, 3)


class Sick(Model):
    well = True

    def check_health(self):
        if not self.well:
            raise OSError("the disk is gone")


class SickLater(Sick):
    async def check_health(self):
        await asyncio.sleep(0.01)
        super().check_health()


@in_loop
@pytest.mark.parametrize("user_class", [Sick, SickLater])
async def test_a_model_that_says_so_makes_the_replica_unhealthy(app, user_class):
    async with app(user_class) as (_, worker):
        await worker.check_health()
        worker.models.instances["m"].well = False
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                await worker.check_health()
        worker.models.instances["m"].well = True
        await worker.check_health()


class Long(Sick):
    async def __init__(self):
        self.entered, self.end = asyncio.Event(), threading.Event()
        self.loop = asyncio.get_running_loop()

    def __call__(self, items):
        self.loop.call_soon_threadsafe(self.entered.set)
        self.end.wait(30)
        return items


def test_a_check_beside_a_long_batch_counts_when_it_is_over(app):
    """It must not wait for the batch, because Serve's time for it may be shorter."""
    # In real time: virtual time waits for threads.
    asyncio.run(check_beside_a_long_batch(app))


async def check_beside_a_long_batch(app):
    async with app(Long) as (_, worker):
        model = worker.models.instances["m"]
        await worker.check_health()
        running = asyncio.create_task(worker.execute(piece("a", 1), "w0"))
        await model.entered.wait()
        model.well = False
        await worker.check_health()  # the outcome before
        model.end.set()
        await running
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                await worker.check_health()


class Records(Model):
    def record_routing_stats(self):
        return {"depth": 1}

    async def record_autoscaling_stats(self):
        return {"load": 2}


class Meta(Model):
    def record_replica_metadata(self):
        return {"zone": "a"}


@in_loop
async def test_what_a_class_tells_serve_is_told_by_the_worker(app):
    async with app(Records) as (_, worker):
        assert await worker.record_routing_stats() == {"depth": 1}
        assert await worker.record_autoscaling_stats() == {"load": 2}
        assert not hasattr(worker, "record_replica_metadata")
    several = {
        name: {"callable": cls, "latency_slo_ms": 30_000}
        for name, cls in (("a", Records), ("b", Meta), ("c", Records))
    }
    async with app(models=several) as (_, worker):
        assert await worker.record_routing_stats() == {"a/depth": 1, "c/depth": 1}
        assert await worker.record_replica_metadata() == {"b/zone": "a"}


class Ends(Model):
    ended: ClassVar[list[str]] = []

    def __del__(self):
        Ends.ended.append(threading.current_thread().name)


class EndsLater(Model):
    ended: ClassVar[list[str]] = []

    async def __del__(self):
        await asyncio.sleep(0)
        EndsLater.ended.append("later")
        type(self).__del__ = lambda self: None  # Python's own call would not be awaited


@in_loop
@pytest.mark.parametrize(("cls", "where"), [(Ends, "ray-slo-worker_0"), (EndsLater, "later")])
async def test_the_end_of_the_replica_is_told_to_the_object(app, cls, where):
    cls.ended = []
    async with app(cls) as (_, worker):
        instance = worker.models.instances["m"]
        await worker.__del__()
        assert cls.ended == [where]
    await settle()
    del instance


class Fails(Model):
    def __init__(self):
        raise OSError("no weights")


class FailsLater(Model):
    async def __init__(self):
        raise OSError("no weights")


class FailsConfigured(Model):
    def reconfigure(self, config, rank):
        raise OSError("no weights")


class Wrong(Model):
    @staticmethod
    def example_input():
        return 1

    def __call__(self, items):
        return [item["pixels"] for item in items]


class NoExample(Model):
    @staticmethod
    def example_input():
        raise OSError("no picture")


@pytest.mark.slow
@in_loop
@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Fails, "models.m: Fails(…) failed: OSError: no weights"),
        (FailsLater, "models.m: FailsLater(…) failed: OSError: no weights"),
        (FailsConfigured, "models.m: FailsConfigured.reconfigure(…) failed: OSError: no weights"),
        (
            Wrong,
            "models.m: Wrong.__call__ failed on its example_input(): "
            "TypeError: 'int' object is not subscriptable",
        ),
        (NoExample, "models.m: NoExample.example_input() failed: OSError: no picture"),
    ],
)
async def test_a_failed_start_says_what_failed(app, cls, says):
    with pytest.raises(ConfigError) as failed:
        async with app(cls):
            pass
    assert str(failed.value) == says


def test_ray_slo_profile_makes_the_same_objects():
    for cls in (Awaited, Network, load, Model):
        made = profiling._made(cls, ("x",) if cls is not Model else (), {})
        assert isinstance(made, Network if cls is load else cls)
