"""Serve replaces a worker that cannot work any more, and calls the user's methods that it knows."""

import asyncio
import os

import pytest
from ray import serve
from ray.exceptions import RayTaskError
from waiting import eventually

import ray_slo


@ray_slo.deployment(
    latency_slo_ms=10_000, ray_actor_options={"num_cpus": 0.1}, health_check_period_s=1
)
class Fragile:
    async def __init__(self, start):
        await asyncio.sleep(0.01)
        self.start, self.rank, self.is_well, self.is_broken = start, None, True, False

    def reconfigure(self, config, rank):
        self.rank = rank.rank

    def check_health(self):
        if not self.is_well:
            raise OSError("not well")

    def __call__(self, items):
        self.is_well &= "sick" not in items
        self.is_broken |= "break" in items
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return [(os.getpid(), self.start + self.rank)] * len(items)


@pytest.mark.timeout(180)
def test_a_worker_that_is_sick_or_fails_for_ever_is_replaced(ray_cluster):
    handle = serve.run(Fragile.bind(7), name="fragile", route_prefix="/fragile")

    def is_another(pid):
        try:
            return handle.remote("x").result(timeout_s=60)[0] != pid
        except (RayTaskError, RuntimeError):
            return False

    try:
        for last in ("sick", "break"):
            # A worker that starts before another has ended gets its own rank later.
            assert eventually(lambda: handle.remote("x").result(timeout_s=60)[1] == 7)
            pid, _ = handle.remote("x").result(timeout_s=60)
            try:
                handle.remote(last).result(timeout_s=60)
            except (RayTaskError, RuntimeError):
                assert last == "break"
            assert eventually(lambda pid=pid: is_another(pid))
    finally:
        serve.delete("fragile", _blocking=False)
