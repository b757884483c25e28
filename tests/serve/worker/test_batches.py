"""A worker with batches that it cannot run, and with the batch that was sent ahead."""

import asyncio
import time

import pytest

from tests.serve.fakes import piece
from tests.serve.loops import in_loop, until


@pytest.mark.slow
@in_loop
async def test_a_batch_of_a_variant_that_was_unloaded_frees_its_worker_at_once(app):
    """The scheduler in the frontend hears of it with the piece's result: no heartbeat comes."""
    async with app(policy="eager", wire={"execute": 0.01}) as (front, worker):
        since = time.monotonic()
        asked = asyncio.create_task(front(("item", 1)))
        await asyncio.sleep(0.005)  # granted, and under way
        await worker.unload(["m"])
        await asyncio.sleep(0.02)
        await worker.load(["m"])
        assert await asked == "item"
        assert time.monotonic() - since < 0.5


class Staging:
    """Notes what it is given, and whether a batch ran while another was staged."""

    def __init__(self):
        self.given, self.staged, self.is_running, self.beside = [], [], False, []

    def stage(self, items):
        self.beside.append(self.is_running)
        if "bad" in items:
            raise ValueError("bad")
        self.staged.append(items)
        return tuple(items)

    def __call__(self, items):
        self.is_running = True
        time.sleep(0.01)
        self.is_running = False
        self.given.append(items)
        return [str(item) for item in items]


@in_loop
async def test_the_batch_sent_ahead_is_staged_while_another_runs(app):
    async with app(Staging, policy="eager") as (_, worker):
        model = worker.models.instances["m"]
        first = asyncio.create_task(worker.execute(piece("a", 1), "w0"))
        await until(lambda: model.is_running)
        ahead = [
            asyncio.create_task(worker.execute(piece(name, *items), "w0"))
            for name, items in (("b", (2, 3)), ("c", (4,)))
        ]
        assert [(await done).results for done in (first, *ahead)] == [
            *([(True, "1")], [(True, "2"), (True, "3")], [(True, "4")])
        ]
        assert model.staged == [[2, 3], [4]] and model.beside == [True, True]
        assert model.given == [[1], (2, 3), (4,)]  # an idle worker's batch is not staged


@in_loop
async def test_a_batch_whose_staging_fails_fails(app):
    async with app(Staging, policy="eager") as (_, worker):
        model = worker.models.instances["m"]
        first = asyncio.create_task(worker.execute(piece("a", 1), "w0"))
        await until(lambda: model.is_running)
        (failed,) = (await worker.execute(piece("b", "bad"), "w0")).results
        assert failed[0] is False and str(failed[1]) == "bad"
        assert (await first).results == [(True, "1")] and model.given == [[1]]


class Network:
    def __init__(self, stages_ahead):
        self.stages_ahead = stages_ahead


class OfVariants(Staging):
    def stage(self, network, items):
        return super().stage(items)

    def __call__(self, network, items):
        return super().__call__(items)


@in_loop
@pytest.mark.parametrize("ahead", [True, False])
async def test_a_network_may_say_that_staging_ahead_gains_nothing(app, ahead):
    variants = {"v": {"accuracy": 1, "load": Network, "args": (ahead,)}}
    async with app(OfVariants, policy="eager", model={"variants": variants}) as (_, worker):
        model, (variant,) = worker.models.instances["m"], worker.models.loaded
        first = asyncio.create_task(worker.execute(piece("a", 1, variant=variant), "w0"))
        await until(lambda: model.is_running)
        await worker.execute(piece("b", 2, variant=variant), "w0")
        await first
        assert model.given == [[1], (2,) if ahead else [2]]
