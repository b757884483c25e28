"""A scheduler that refuses every request notices when workers have become fast enough."""

import asyncio

from ray_slo.core import BatchStatus, LatencyProfile
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import BatchReport, Grant, Heartbeat, Refusal, Submit
from ray_slo.serve.scheduler.scheduler import Scheduler
from tests.serve import clock


class Client:
    """Submits one request after the other."""

    def __init__(self):
        spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 500}}})
        self.said, self.sent = asyncio.Queue(), 0
        self.scheduler = Scheduler(spec, self.hear)

    def hear(self, _client, messages):
        for message in messages:
            self.said.put_nowait(message)

    async def ask(self):
        self.sent += 1
        profiles = {"m": LatencyProfile([0.01, 0.012])}
        self.scheduler.heartbeat(Heartbeat("w0", "default", profiles, []))
        self.scheduler.hear("a", [Submit(self.sent, "m", 0.5)])
        return await asyncio.wait_for(self.said.get(), 10.0)

    async def ran(self, grant, way_s):
        """It ran for 10 ms, and took so long to get there and back."""
        await asyncio.sleep(0.01 + way_s)
        done = BatchStatus.FINISHED
        self.scheduler.report(
            BatchReport(grant.batch_id, "w0", "m", done, 1, 0.01, 0.01, [(1, 0.01)])
        )

    async def ask_until(self, kind, way_s, times=100):
        for _ in range(times):
            message = await self.ask()
            if isinstance(message, kind):
                return message
            if isinstance(message, Grant):
                await self.ran(message, way_s)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"no {kind.__name__} in {times} requests")


def test_a_way_that_was_slow_for_a_while_is_tried_again():
    """Payloads hardly got through (a full object store) until nothing was within reach any more. No
    batch, no news: it takes a probe to find out that this is over."""

    async def main():
        client = Client()
        try:
            refusal = await client.ask_until(Refusal, way_s=4.0)
            assert refusal.reason == "would_miss"
            grant = await client.ask_until(Grant, way_s=0.001)
            await client.ran(grant, way_s=0.001)
            assert isinstance(await client.ask(), Grant)
        finally:
            client.scheduler.close()

    clock.run(main())


def test_a_task_that_looks_too_slow_to_let_any_frame_in_is_tried():
    """The child was slow once. Nobody would measure it if frames were refused at the root."""
    tasks = {"detect": {"callable": dict}, "name": {"callable": dict, "parent": "detect"}}
    spec = parse_spec({"pipeline": {"latency_slo_ms": 1000, "tasks": tasks}})

    async def main():
        said = asyncio.Queue()
        scheduler = Scheduler(spec, lambda client, messages: [said.put_nowait(m) for m in messages])
        try:
            profiles = {"detect": LatencyProfile([0.1]), "name": LatencyProfile([5.0])}
            scheduler.heartbeat(Heartbeat("w0", "default", profiles, []))
            scheduler.hear("a", [Submit(1, "detect", 0.9)])
            assert isinstance(await said.get(), Grant)
            seen = scheduler.status()["profiles"]
            believed_ms = sum(p["latency_1_ms"] for p in seen.values())
            assert believed_ms < 900
        finally:
            scheduler.close()

    clock.run(main())
