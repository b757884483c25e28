"""Classes to be measured. The processes that measure them import this module, and need nothing of
what the tests import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_now = 0.0
_timers: list[Timer] = []


class Timer:
    """`threading.Timer`, in the toys' time."""

    def __init__(self, after_s: float, call: Callable[[], None]) -> None:
        self.at, self.call = _now + after_s, call

    def start(self) -> None:
        _timers.append(self)

    def cancel(self) -> None:
        if self in _timers:
            _timers.remove(self)

    def join(self) -> None:
        pass


def sleep(seconds: float) -> None:
    """Nothing else takes time."""
    global _now
    until = _now + seconds
    for timer in sorted((t for t in _timers if t.at <= until), key=lambda t: t.at):
        _now = max(_now, timer.at)
        timer.cancel()
        timer.call()
    _now = until


def measured_here() -> None:
    """From now on this process has a time of its own, so that a slow machine is not in it."""
    time.perf_counter, threading.Timer = lambda: _now, Timer


class Toy:
    """Sleeps (base + 1 · b) ms."""

    def __init__(self, variant: str = "small", base_ms: float = 5.0) -> None:
        measured_here()
        self.base_ms = base_ms * (2 if variant == "large" else 1)

    def __call__(self, items: list[int]) -> list[int]:
        sleep((self.base_ms + len(items)) / 1e3)
        return items

    @staticmethod
    def example_input() -> int:
        return 1


class FromEnvironment(Toy):
    """As slow as its environment says."""

    def __init__(self) -> None:
        super().__init__(base_ms=float(os.environ["TOY_BASE_MS"]))


class Weighty(Toy):
    """Takes memory, and says how it runs, as networks of `ray_slo.models` do."""

    runs = "bfloat16, graph: 1 ms at batch size 1"

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.weights = bytearray(b"1" * 64 * 2**20)


class Layers(Toy):
    """A torch module of 12 layers, 1 ms each."""

    def __init__(self) -> None:
        import torch

        class Layer(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                sleep(0.001)
                return x

        measured_here()
        self.network = torch.nn.Sequential(*(Layer() for _ in range(12)))
        self.input = torch.zeros(1)

    def __call__(self, items: list[int]) -> list[int]:
        self.network(self.input)
        return items


class Choosy:
    """Sleeps `factor` · (4 + b) ms."""

    def __init__(self) -> None:
        measured_here()

    def __call__(self, factor: float, items: list[int]) -> list[int]:
        sleep(factor * (4 + len(items)) / 1e3)
        return items

    @staticmethod
    def example_input() -> int:
        return 1


def network(factor: float) -> float:
    return factor


class NoExample:
    def __call__(self, items: list[bytes]) -> list[int]:
        return [len(item) for item in items]

    @staticmethod
    def preprocess(item: bytes) -> bytes:
        return item.strip()


class Broken:
    def __call__(self, items: list[int]) -> list[int]:
        raise RuntimeError("out of order")

    example_input = Toy.example_input
