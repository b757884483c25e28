"""Classes to be measured. The processes that measure them import this module, and need nothing of
what the tests import."""

from __future__ import annotations

import time


class Toy:
    """Sleeps (base + 1 · b) ms."""

    def __init__(self, variant: str = "small", base_ms: float = 5.0) -> None:
        self.base_ms = base_ms * (2 if variant == "large" else 1)

    def __call__(self, items: list[int]) -> list[int]:
        time.sleep((self.base_ms + len(items)) / 1e3)
        return items

    @staticmethod
    def example_input() -> int:
        return 1


class Layers(Toy):
    """A torch module of 12 layers, 1 ms each."""

    def __init__(self) -> None:
        import torch

        class Layer(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                time.sleep(0.001)
                return x

        self.network = torch.nn.Sequential(*(Layer() for _ in range(12)))
        self.input = torch.zeros(1)

    def __call__(self, items: list[int]) -> list[int]:
        self.network(self.input)
        return items


class Choosy:
    """Sleeps `factor` · (4 + b) ms."""

    def __call__(self, factor: float, items: list[int]) -> list[int]:
        time.sleep(factor * (4 + len(items)) / 1e3)
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
