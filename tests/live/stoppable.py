"""User classes of the preemption tests. Replicas import this module by name."""

import time
from pathlib import Path

import ray_slo

STEP_S = 0.005
HELD_STEPS = 6000  # 30 s


class Quick:
    def __call__(self, items):
        time.sleep(0.02 + 0.001 * len(items))
        return items


class Slow:
    """Work for the item's seconds, in steps. An item may name a file: if it does not exist, it is
    created, and the work goes on until it is stopped."""

    def __init__(self, seconds):
        self.steps = round(seconds / STEP_S)

    def __call__(self, items):
        held = [item for item in items if isinstance(item, str) and not Path(item).exists()]
        for mark in held:
            Path(mark).touch()
        for _ in range(HELD_STEPS if held else self.steps):
            self.step()
        return items

    def step(self):
        time.sleep(STEP_S)
        ray_slo.checkpoint()


class Network(Slow):
    """Layers of a torch module that itself has no code for preemption."""

    def __init__(self, seconds):
        import torch

        class Layer(torch.nn.Module):
            def forward(self, x):
                time.sleep(STEP_S)
                return x

        super().__init__(seconds)
        self.network = torch.nn.Sequential(*(Layer() for _ in range(self.steps)))
        self.input = torch.zeros(1)

    def step(self):
        self.network(self.input)
