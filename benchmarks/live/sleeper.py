"""A stand-in for a model on an accelerator: it sleeps α·b + β seconds for a batch of b."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray_slo import checkpoint


class Sleeper:
    """Sleeps for each batch, and returns the items.

    Args:
        alpha_s, beta_s: a batch of b takes alpha_s · b + beta_s seconds.
        steps: number of parts of a batch, with a checkpoint (for preemption) after each.
    """

    def __init__(self, alpha_s: float, beta_s: float, steps: int = 1) -> None:
        self._alpha_s, self._beta_s, self._steps = alpha_s, beta_s, steps

    @staticmethod
    def example_input() -> Any:
        return 0

    def run(self, batch_size: int) -> None:
        start, takes_s = time.perf_counter(), self._beta_s + self._alpha_s * batch_size
        for i in range(1, self._steps + 1):
            time.sleep(max(0.0, start + takes_s * i / self._steps - time.perf_counter()))
            checkpoint()

    def __call__(self, items: list[Any]) -> list[Any]:
        self.run(len(items))
        return items


class TableSleeper:
    """Sleeps as long as a table says, and returns the items.

    Args:
        seconds: how long a batch of 1, 2, … takes.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds

    @staticmethod
    def example_input() -> Any:
        return 0

    def __call__(self, items: list[Any]) -> list[Any]:
        time.sleep(self._seconds[len(items) - 1])
        return items


def slowed(alpha_s: float, beta_s: float, steps: int = 1) -> Sleeper:
    """Return a sleeper whose times are multiplied by the environment's `SLEEPER_SLOWNESS`."""
    slowness = float(os.environ.get("SLEEPER_SLOWNESS", "1"))
    return Sleeper(slowness * alpha_s, slowness * beta_s, steps)


class Several:
    """Sleeps as the chosen variant says, and returns the items.

    Args:
        makes: how many requests of each later task of the pipeline one request makes.
    """

    def __init__(self, makes: Mapping[str, int] | None = None) -> None:
        self._makes = makes or {}

    @staticmethod
    def example_input() -> Any:
        return 0

    def __call__(self, sleeper: Sleeper, items: list[Any]) -> list[Any]:
        sleeper.run(len(items))
        if not self._makes:
            return items
        from ray_slo import Outputs

        made = self._makes.items()
        return [Outputs(item, {task: [item] * n for task, n in made}) for item in items]
