"""A worker that owes a batch and does not answer counts as gone, before Ray says so.

Frontends, workers, scheduler and their channels are the product's own: see `processes`.
"""

import asyncio
import time
from collections import Counter

import pytest

from ray_slo.errors import WorkerLost
from ray_slo.serve.config.resolve import parse_spec
from tests.serve import processes

SLO_S, BATCH_S = 0.4, 0.024


class Model:
    """An item is (name, seconds). Its result is its name, and the worker's."""

    async def __call__(self, items):
        await asyncio.sleep(max(seconds for _, seconds in items))
        return [(name, processes.here().name) for name, _ in items]


class App:
    """An application, and who asks it."""

    def __init__(self, embedded, workers=2, retries=2):
        spec = parse_spec(
            {
                "name": "m",
                "models": {"m": {"callable": Model, "latency_slo_ms": 1e3 * SLO_S}},
                "policy": "eager",
                "scheduler": "embedded" if embedded else "actor",
                "num_frontends": 1 if embedded else 2,
                "retries": retries,
            }
        )
        self.world = processes.World(spec, 2, workers)
        self.answers, self.asked = {}, 0

    async def ask(self, seconds=BATCH_S, slo_s=SLO_S, place=None):
        """What a frontend answers: (seconds, worker or error)."""
        name, self.asked = self.asked, self.asked + 1
        frontends = self.world.frontends
        process = self.world.at(place or frontends[name % len(frontends)])
        return await process.spawn(self._asked(process, name, seconds, slo_s))

    async def _asked(self, process, name, seconds, slo_s):
        began = time.monotonic()
        try:
            found, said = await process.target((name, seconds), latency_slo_ms=1e3 * slo_s)
            assert found == name
        except Exception as error:
            said = error
        assert name not in self.answers
        self.answers[name] = time.monotonic() - began, said
        return self.answers[name]

    async def stream(self, seconds, rate=30, **about):
        """What is answered to a stream of requests."""
        asks = []
        for _ in range(round(seconds * rate)):
            asks.append(asyncio.ensure_future(self.ask(**about)))
            await asyncio.sleep(1 / rate)
        return await asyncio.gather(*asks)

    def worker(self, place="w0"):
        return self.world.at(place)


def served(answers):
    """Requests in time by worker; others as they ended."""
    return Counter(
        who if isinstance(who, Exception) or took_s <= SLO_S else "late" for took_s, who in answers
    )


def live(main, **about):
    async def run():
        app = App(**about)
        try:
            await app.world.start()
            await app.stream(2.0)  # the scheduler knows how long batches take
            await main(app)
        finally:
            await app.world.end()

    processes.run(run())


@pytest.fixture(scope="module", autouse=True)
def in_place_of_ray():
    with processes.in_place_of_ray():
        yield


EACH = pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "actor"])
GIVEN_UP = "is late and does not answer"


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("rate", [5, 60])
def test_what_a_silent_worker_owes_is_answered_elsewhere_in_time(embedded, rate, caplog):
    async def main(app):
        silent = app.worker("w0")
        silent.stop()
        assert set(served(await app.stream(4.0, rate))) == {"w1.1"}
        assert 0 < caplog.text.count(f"w0.1 {GIVEN_UP}") <= len(app.world.frontends)
        silent.go()
        await asyncio.sleep(1.5)
        assert set(served(await app.stream(2.0, 60))) == {"w0.1", "w1.1"}
        assert "w1.1 is" not in caplog.text

    live(main, embedded=embedded)


@EACH
def test_a_worker_that_returns_finishes_its_batch_for_nobody(embedded):
    async def main(app):
        asks = [asyncio.ensure_future(app.ask(0.1, slo_s=2.0)) for _ in range(2)]
        await asyncio.sleep(0.05)
        silent = app.worker("w0")
        silent.stop()
        for _, worker in await asyncio.gather(*asks):
            assert worker == "w1.1"
        silent.go()
        await asyncio.sleep(0.2)
        assert silent.target.batches.ids == []
        await asyncio.sleep(1.5)
        assert set(served(await app.stream(2.0, 60))) == {"w0.1", "w1.1"}
        assert (await app.world.scheduler_status())["in_flight"] == 0

    live(main, embedded=embedded)


@EACH
def test_a_slow_worker_that_answers_is_waited_for(embedded, caplog):
    async def main(app):
        for seconds in (5 * BATCH_S, 1.0, 3.0):
            took_s, worker = await app.ask(seconds, slo_s=5.0)
            assert (took_s, worker) == (pytest.approx(seconds, abs=0.05), "w0.1")
        assert GIVEN_UP not in caplog.text

    live(main, embedded=embedded)


@EACH
def test_a_worker_whose_code_holds_pythons_lock_may_be_silent_as_long_as_its_batch(
    embedded, caplog
):
    async def main(app):
        worker = app.worker()
        for _ in range(30):  # the scheduler learns that it takes half a second
            await app.ask(0.5, slo_s=5.0)
        asked = asyncio.ensure_future(app.ask(0.5, slo_s=5.0))
        await asyncio.sleep(0.1)
        worker.stop()
        await asyncio.sleep(0.9)
        worker.go()
        assert (await asked)[1] == "w0.1"
        assert GIVEN_UP not in caplog.text

    live(main, embedded=embedded)


@EACH
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.4])
def test_a_frontend_that_stands_still_gives_no_worker_up(embedded, after_s, caplog):
    async def main(app):
        frontend = app.world.at("f0")
        asked = asyncio.ensure_future(app.ask(0.5, slo_s=9.0, place="f0"))
        await asyncio.sleep(after_s)
        for _ in range(3):
            frontend.stop()
            await asyncio.sleep(0.8)
            frontend.go()
            await asyncio.sleep(0.01)
        assert (await asked)[1] == "w0.1"
        assert GIVEN_UP not in caplog.text

    live(main, embedded=embedded)


@EACH
def test_without_a_retry_a_request_learns_at_once_that_its_worker_is_lost(embedded):
    async def main(app):
        app.worker().stop()
        took_s, error = await app.ask(slo_s=5.0)
        assert isinstance(error, WorkerLost) and error.worker == "w0.1"
        assert took_s < SLO_S
        assert (await app.ask())[1] == "w1.1"

    live(main, embedded=embedded, retries=0)


@EACH
def test_the_last_worker_is_waited_for(embedded, caplog):
    async def main(app):
        worker = app.worker()
        worker.stop()
        asked = asyncio.ensure_future(app.ask(slo_s=5.0))
        await asyncio.sleep(2.0)
        worker.go()
        assert (await asked)[1] == "w0.1"
        assert GIVEN_UP not in caplog.text

    live(main, embedded=embedded, workers=1)
