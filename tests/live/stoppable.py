"""User classes of the preemption tests. Replicas import this module by name."""

import time
from pathlib import Path

import ray_slo

STEP_S = 0.005


class Quick:
    def __call__(self, items):
        time.sleep(0.02 + 0.001 * len(items))
        return items


class Slow:
    """Works for so many seconds, in steps; touches the file that an item names."""

    def __init__(self, seconds):
        self.steps = round(seconds / STEP_S)

    def __call__(self, items):
        for item in items:
            if isinstance(item, str):
                Path(item).touch()
        for _ in range(self.steps):
            self.step()
        return items

    def step(self):
        time.sleep(STEP_S)
        ray_slo.checkpoint()


class Deaf(Slow):
    def step(self):
        time.sleep(STEP_S)


class Network(Slow):
    """The steps are layers of a torch module, which knows nothing of preemption."""

    def __init__(self, seconds):
        import torch

        class Layer(torch.nn.Module):
            def forward(self, x):
                time.sleep(4 * STEP_S)
                return x

        super().__init__(0)
        layers = round(seconds / STEP_S / 4)
        self.network = torch.nn.Sequential(*(Layer() for _ in range(layers)))
        self.input = torch.zeros(1)

    def __call__(self, items):
        super().__call__(items)
        self.network(self.input)
        return items
