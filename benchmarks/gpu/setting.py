"""The setting of the parts: a GPU with full-size networks; with `--tiny` a CPU with tiny ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.data import Missing
from benchmarks.shepherd.networks import resnet
from ray_slo.models.running import How, Runner, Staged
from ray_slo.models.ways import Choice, choose, ways_of


@dataclass(frozen=True)
class Network:
    """A network with random weights, and batches for it.

    Attributes:
        build: makes the network, in evaluation mode.
        items: makes inputs of a number of items, on the host.
        call: calls the network on inputs; returns a tensor with a row per item.
        max_batch: largest batch that is measured.
    """

    name: str
    build: Callable[[], nn.Module]
    items: Callable[[int], Any]
    call: Callable[[Any, Any], torch.Tensor]
    max_batch: int

    def runner(self, device: torch.device, how: How = How()) -> Runner:
        return Runner(self.build(), device, how, self.call)

    def stage(self, runner: Runner, size: int) -> Staged:
        items = self.items(size)
        if isinstance(items, dict):
            return runner.stage(lambda lane: {name: lane.put(t) for name, t in items.items()})
        return runner.stage(lambda lane: lane.put(items))


@dataclass(frozen=True)
class Setting:
    """The arguments of every part.

    Attributes:
        seconds: approximate time that the part may take.
    """

    tiny: bool
    seed: int
    seconds: float

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def name(self) -> str:
        return "this CPU, tiny networks" if self.tiny else torch.cuda.get_device_name()

    def check(self) -> None:
        """Raise Missing if networks need a GPU and there is none."""
        if not self.tiny and not torch.cuda.is_available():
            raise Missing(
                f"torch {torch.__version__} finds no CUDA device; --tiny runs it on the CPU"
            )

    def resnet(self, depth: int) -> Network:
        side = 8 if self.tiny else 224
        build = partial(_tiny, 1 + depth // 50) if self.tiny else partial(resnet, depth)
        return _of_pictures(f"ResNet{depth}", build, side, 8 if self.tiny else 128)

    def efficientnet(self) -> Network:
        """Return EfficientNet B0. Raises Missing without torchvision."""
        try:
            from torchvision.models import get_model
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
            raise Missing(f"EfficientNet needs torchvision ({error})") from error
        build = partial(get_model, "efficientnet_b0", weights=None)
        side, largest = (32, 4) if self.tiny else (224, 128)
        return _of_pictures("EfficientNet B0", lambda: build().eval(), side, largest)

    def bert(self) -> Network:
        """Return BERT. Raises Missing without transformers."""
        size, length, largest = ("bert-tiny", 16, 4) if self.tiny else ("bert-base", 128, 64)
        from ray_slo.models import text

        def build() -> nn.Module:
            try:
                network: nn.Module = text.load(size, weights="none", device="cpu").network
            except ImportError as error:
                raise Missing(str(error)) from error
            return network

        def items(count: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(5, 1000, (count, length), generator=_generator(count))
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

        return Network(
            size.replace("bert", "BERT"),
            build,
            items,
            lambda network, tokens: network(**tokens).logits,
            largest,
        )

    def chosen(self, network: Network) -> Choice:
        """Find the best way to run a network here, by the measurement of the loaders."""
        module = network.build()

        def make(how: How) -> Runner:
            return Runner(module, self.device, how, network.call)

        ways = ways_of(module, self.device, fixed_shape=True)
        ways["engine"] = ["eager", "graph"]  # on a CPU, a stand-in with the same results
        sizes = (1, min(8, network.max_batch))
        budget_s = 0.1 if self.tiny else 3.0
        return choose(make, network.stage, ways, sizes=sizes, budget_s=budget_s)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start Ray with Serve, and yield its URL. Raises Missing without Ray."""
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise Missing(f"Ray is not installed ({error})") from error
        from ray_slo.demo import systems

        with systems.local_serve() as url:
            yield url

    @property
    def actor(self) -> dict[str, float]:
        """Ray's resources of a worker."""
        return {"num_cpus": 1} if self.tiny else {"num_cpus": 1, "num_gpus": 1}


class Stopwatch:
    """Times a runner: between CUDA events on its stream, or on a CPU by the clock."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._on_gpu = runner.device.type == "cuda"

    def __call__(self, staged: Staged) -> tuple[float, float]:
        """Run a batch; return the seconds on the device, and as the caller sees them."""
        begin = self._mark()
        start = time.perf_counter()
        self._runner(staged)
        seconds = time.perf_counter() - start
        if not self._on_gpu:
            return seconds, seconds
        end = self._mark()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        with self._runner.lane.computing():
            event.record()
        return event


def _of_pictures(name: str, build: Callable[[], nn.Module], side: int, max_batch: int) -> Network:
    def items(count: int) -> torch.Tensor:
        return torch.randn(count, 3, side, side, generator=_generator(count))

    return Network(name, build, items, lambda network, pictures: network(pictures), max_batch)


def _tiny(blocks: int) -> nn.Module:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(2 * blocks):
            layers += [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
