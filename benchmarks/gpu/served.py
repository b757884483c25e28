"""Deployments that run a network of a `Setting`, in the same way on plain Serve and ray-slo."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from ray import serve
from starlette.requests import Request

from benchmarks.gpu.setting import Network, Setting
from ray_slo.models.running import How, OnRunner, Staged


class Pictures(OnRunner):
    """A ResNet. An item is the number of a picture that this class keeps on the host.

    A batch is copied to the device, and runs `passes` times.
    """

    def __init__(self, setting: Setting, depth: int, how: How, passes: int) -> None:
        network = setting.resnet(depth)
        self._pictures = network.items(network.max_batch)
        self.runner = network.runner(setting.device, how)
        self.runner.prepare(lambda size: network.stage(self.runner, size))
        self._passes = passes

    def stage(self, items: list[int]) -> Staged:
        chosen = [item % len(self._pictures) for item in items]
        return self.runner.stage(lambda lane: lane.put(self._pictures[chosen]))

    def __call__(self, items: list[int] | Staged) -> list[int]:
        staged = items if isinstance(items, Staged) else self.stage(items)
        for _ in range(self._passes - 1):
            self.runner(staged)
        classes: list[int] = self.runner(staged, lambda scores: scores.argmax(1)).tolist()
        return classes


class Ours(Pictures):
    """The class for `@ray_slo.deployment`."""

    @staticmethod
    def example_input() -> int:
        return 0


class Plain(Pictures):
    """The class for plain Serve: `@serve.batch` with a fixed wait; the network runs in a thread."""

    def __init__(self, setting: Setting, depth: int, how: How, passes: int, largest: int) -> None:
        super().__init__(setting, depth, how, passes)
        self.predict.set_max_batch_size(largest)
        for size in range(1, largest + 1):  # the first use of a batch size chooses its kernels
            super().__call__([0] * size)

    def reconfigure(self, config: dict[str, float]) -> None:
        self.predict.set_batch_wait_timeout_s(config["wait_s"])

    @serve.batch
    async def predict(self, items: list[int]) -> list[int]:
        return await asyncio.to_thread(Pictures.__call__, self, items)

    async def __call__(self, request: Request) -> int:  # type: ignore[override]
        return int(await self.predict(await request.json()))


class Variants:
    """Passes a batch to the variant that the policy chose."""

    @staticmethod
    def example_input() -> int:
        return 0

    def stage(self, network: Pictures, items: list[int]) -> Staged:
        return network.stage(items)

    def __call__(self, network: Pictures, items: list[int] | Staged) -> list[int]:
        return network(items)


class Hungry:
    """A model whose batches need memory per item, so that only some items fit.

    The allocator itself raises the error, however much memory this device has.

    Args:
        fits: number of items that fit into memory at once.
    """

    def __init__(self, setting: Setting, fits: int) -> None:
        self._device = setting.device
        self._fits = fits
        if self._device.type == "cuda":
            torch.cuda.init()
            self._each = int(0.9 * torch.cuda.mem_get_info()[0] / (fits + 0.5))

    def __call__(self, items: list[Any]) -> list[Any]:
        if self._device.type == "cuda":
            taken = torch.empty(self._each * len(items), dtype=torch.uint8, device=self._device)
        else:  # more than an address space can hold, on any machine
            most = 2**10 if len(items) <= self._fits else 2**62
            taken = torch.empty(most, dtype=torch.uint8)
        del taken
        return items


def largest_batch(network: Network) -> int:
    """Return the largest batch that is served: half of the largest that is measured."""
    return max(network.max_batch // 2, 1)
