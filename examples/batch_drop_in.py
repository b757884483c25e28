"""The same model behind `@serve.batch` and behind `@ray_slo.batch`, under the same load.

Only the decorator differs. The program sends 50 requests/s for two seconds to each, from a cold
start. It prints how many were answered within the SLO.

Run: python examples/batch_drop_in.py
"""

from __future__ import annotations

import asyncio
import time

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_slo
from ray_slo.errors import RefusedEarly

SLO_MS = 500
RATE, SECONDS = 50, 2


async def network(inputs: list[int]) -> list[int]:
    await asyncio.sleep(0.1 + 0.001 * len(inputs))  # stands for a network
    return [2 * x for x in inputs]


class Timed:
    """The milliseconds that `predict` took; None if it was refused."""

    async def __call__(self, x: int) -> float | None:
        start = time.perf_counter()
        try:
            assert await self.predict(x) == 2 * x
        except RefusedEarly:
            return None
        return 1e3 * (time.perf_counter() - start)


@serve.deployment(max_ongoing_requests=1000)
class Before(Timed):
    @serve.batch(max_batch_size=64)
    async def predict(self, inputs: list[int]) -> list[int]:
        return await network(inputs)


@serve.deployment(max_ongoing_requests=1000)
class After(Timed):
    @ray_slo.batch(latency_slo_ms=SLO_MS)
    async def predict(self, inputs: list[int]) -> list[int]:
        return await network(inputs)


def load(handle: DeploymentHandle) -> list[float | None]:
    start = time.perf_counter()
    responses = []
    for i in range(RATE * SECONDS):
        time.sleep(max(0.0, start + i / RATE - time.perf_counter()))
        responses.append(handle.remote(i))
    return [response.result() for response in responses]


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")  # handles are enough here
        before = serve.run(Before.bind(), name="before", route_prefix=None)
        after = serve.run(After.bind(), name="after", route_prefix=None)
        for name, handle in (("@serve.batch", before), ("@ray_slo.batch", after)):
            times = load(handle)
            answered = sorted(t for t in times if t is not None)
            good = sum(t <= SLO_MS for t in answered)
            print(
                f"{name:15} {good / len(times):4.0%} within {SLO_MS} ms, "
                f"{len(times) - len(answered)} refused, "
                f"p50 {answered[len(answered) // 2]:5.0f} ms, slowest {answered[-1]:5.0f} ms"
            )
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
