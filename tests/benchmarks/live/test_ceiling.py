"""The part of `live-ceiling` that needs no Ray: a client that plays frontend and workers."""

import asyncio

import pytest

from benchmarks.live import ceiling
from ray_slo.serve.messages import Grant, Refusal
from tests.serve import clock


class Link:
    def __init__(self):
        self.reports = []

    def report(self, report):
        self.reports.append((asyncio.get_running_loop().time(), report))


def granted(ids, piece=0):
    return Grant("b", "w0", "default", "m", "m", ids, piece, 2, 4, 0.0, 0.012, 0.1)


def test_grants_are_counted_and_their_batches_reported():
    async def run():
        client = ceiling.Client("deferred", "key", 0)
        client._link = link = Link()
        now = asyncio.get_running_loop().time()
        client._sent = {1: now - 0.1, 2: now - 0.189, 3: now - 0.05}
        client._on_messages([granted((1, 2)), Refusal((3,), "shed", 0.0), granted((), piece=1)])
        await asyncio.sleep(0.1)
        assert (client._good, client._batches) == (1, 1)  # the other ends after 201 ms
        assert client._waits_s == pytest.approx([0.1, 0.189])
        ((at, report),) = link.reports
        assert at - now == pytest.approx(0.012)
        assert (report.batch_id, report.batch_size, report.measured) == ("b", 4, [(4, 0.012)])

    clock.run(run())


def test_there_are_workers_for_twice_the_rate():
    for rate in ceiling.RATES:
        batches = ceiling.workers_for(rate) / (ceiling.BETA_S + ceiling.ALPHA_S * ceiling.MAX_BATCH)
        assert batches * ceiling.MAX_BATCH >= 2 * rate
