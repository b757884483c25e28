"""A model on an accelerator, as its host sees it: a batch of b takes α·b + β seconds, asleep."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray_slo import checkpoint


class Sleeper:
    """Answers with its items.

    Args:
        alpha_s, beta_s: of the latency of a batch.
        steps: parts of a batch, with a checkpoint after each.
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
    """The same for a profile without a formula.

    Args:
        seconds: of a batch of 1, 2, ….
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
    """A sleeper that is as slow as its worker: $SLEEPER_SLOWNESS times the seconds."""
    slowness = float(os.environ.get("SLEEPER_SLOWNESS", "1"))
    return Sleeper(slowness * alpha_s, slowness * beta_s, steps)


class Several:
    """Variants that sleep; answers with the items.

    Args:
        makes: requests that one makes, by task of the same pipeline.
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
