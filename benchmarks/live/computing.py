"""Three models that compute, as a newcomer would write them; each answer says what its batch took.

Weights and data are made up. What counts is how they use a machine: brute-force neighbours
(scikit-learn, one long call without the GIL), a wide network (torch, bound by memory, so batches
save much), and a tokenizer with a small transformer (many short calls and Python in between).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

WORDS = "a person who asks the same question twice gets two answers and only one of them counts"
CHECKED = 32  # largest batch


class Computes(ABC):
    """Answers every item with the size of its batch and the batch's milliseconds, as text."""

    @abstractmethod
    def run(self, items: list[Any]) -> Any: ...

    @staticmethod
    @abstractmethod
    def example_input() -> Any: ...

    def __call__(self, items: list[Any]) -> list[dict[str, str]]:
        start = time.perf_counter()
        self.run(items)
        took_ms = 1e3 * (time.perf_counter() - start)
        return [{"label": f"{len(items)}:{took_ms:.3f}"}] * len(items)


class Neighbours(Computes):
    """Nearest neighbours by brute force, about 100 ms for one and 300 ms for 23."""

    def __init__(self) -> None:
        import numpy as np
        from sklearn.neighbors import KNeighborsClassifier

        rng, count = np.random.default_rng(0), 1_600_000
        points = rng.standard_normal((count, 64), dtype=np.float32)
        self.model = KNeighborsClassifier(5, algorithm="brute").fit(
            points, rng.integers(0, 10, count)
        )

    def run(self, items: list[Any]) -> Any:
        import numpy as np

        return self.model.predict(np.asarray(items, dtype=np.float32)).tolist()

    @staticmethod
    def example_input() -> list[float]:
        return [0.1] * 64


class Network(Computes):
    """A wide network of torch."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        layers = [torch.nn.Linear(4096, 4096), torch.nn.ReLU()] * 12
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 4096), *layers).eval()

    def run(self, items: list[Any]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor(items)).argmax(1).tolist()

    @staticmethod
    def example_input() -> list[float]:
        return [0.1] * 16


class Text(Computes):
    """A tokenizer and a small transformer."""

    def __init__(self) -> None:
        import torch
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        torch.manual_seed(0)
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["-"], show_progress=False)
        self.tokenizer.train_from_iterator([WORDS] * 10, trainer)
        self.tokenizer.enable_padding()
        self.embedding = torch.nn.Embedding(200, 512)
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).eval()

    def run(self, items: list[Any]) -> Any:
        import torch

        ids = torch.tensor([e.ids for e in self.tokenizer.encode_batch(items)])
        with torch.inference_mode():
            return self.model(self.embedding(ids)).mean((1, 2)).tolist()

    @staticmethod
    def example_input() -> str:
        return f"{WORDS} {WORDS}"


@dataclass(frozen=True)
class Model:
    """A model, and its SLO as a multiple of what a batch of one takes on this machine alone."""

    made: type[Computes]
    slo: float


MODELS = {"neighbours": Model(Neighbours, 4), "network": Model(Network, 12), "text": Model(Text, 6)}


def typical_s(model: Computes, size: int, seconds: float = 0.5) -> float:
    """Return the median time of a batch in this process, in seconds."""
    items, times = [model.example_input()] * size, []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        start = time.perf_counter()
        model(items)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def slo_s_of(name: str) -> float:
    """Return the SLO of a model on this machine, in seconds."""
    model = MODELS[name].made()
    model([model.example_input()])
    return round(MODELS[name].slo * typical_s(model, 1, 2.0), 2)


def full_rate(name: str, slo_s: float) -> tuple[float, float]:
    """Return the items per second of this process in full batches, and the seconds of a batch of
    one. A batch is full if it takes half of the SLO."""
    model = MODELS[name].made()
    model([model.example_input()])
    one_s = typical_s(model, 1)
    rate, size = 1 / one_s, 1
    while size < CHECKED:
        size *= 2
        if (took_s := typical_s(model, size)) > slo_s / 2:
            break
        rate = max(rate, size / took_s)
    return rate, one_s
