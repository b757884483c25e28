"""A progress bar with the remaining time, for steps whose length is roughly known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn


class Steps:
    """The progress of a sequence of steps, and the expected remaining time.

    Args:
        expected_s: expected length of each step, in seconds, in order.
        now: function that returns the time in seconds.
    """

    def __init__(
        self, expected_s: Mapping[str, float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected_s = dict(expected_s)
        self._now = now
        self._done: set[str] = set()
        self._current: str | None = None
        self._began = now()

    def begin(self, step: str) -> None:
        """Begin a step. All steps before it are done."""
        names = list(self._expected_s)
        self._done = set(names[: names.index(step)])
        self._current, self._began = step, self._now()

    def end(self) -> None:
        """Note that all steps are done."""
        self._done, self._current = set(self._expected_s), None

    @property
    def total_s(self) -> float:
        return sum(self._expected_s.values())

    @property
    def done_s(self) -> float:
        """Expected time of all that is done, in seconds. If a step takes longer than expected, this
        waits at the step's end."""
        done = sum(s for name, s in self._expected_s.items() if name in self._done)
        if self._current is not None:
            done += min(self._now() - self._began, self._expected_s[self._current])
        return done

    @property
    def left(self) -> str:
        """The remaining time, in words."""
        left_s = self.total_s - self.done_s
        if left_s < 1:
            return "nearly done"
        if left_s < 60:
            return f"about {5 * max(round(left_s / 5), 1)} s left"
        return f"about {left_s / 60:.1f} min left"


class _Bar(Progress):
    """A bar that moves with the clock, not only when a step ends."""

    def __init__(self, steps: Steps, console: Console) -> None:
        self._steps = steps
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            refresh_per_second=2,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = self._steps.done_s
            task.fields["left"] = self._steps.left
        yield self.make_tasks_table(self.tasks)


class Shown:
    """The progress bar on a console. Text is printed above it."""

    def __init__(self, steps: Steps, bar: _Bar, task: Any) -> None:
        self._steps, self._bar, self._task = steps, bar, task

    def step(self, name: str, text: str = "") -> None:
        """Begin a step. Where there is no bar, its text is printed."""
        self._steps.begin(name)
        if not self._bar.console.is_terminal:
            self.print(text or name, highlight=False)
        self._bar.update(self._task, description=text or name)

    def print(self, *what: Any, **options: Any) -> None:
        """Print above the bar."""
        self._bar.console.print(*what, **options)


@contextmanager
def shown(console: Console, expected_s: Mapping[str, float]) -> Iterator[Shown]:
    """Show a progress bar on the console. If the console is not a terminal, show only the texts of
    the steps, and the printed text."""
    steps = Steps(expected_s)
    bar = _Bar(steps, console)
    task = bar.add_task("", total=steps.total_s, left="")
    with bar:
        yield Shown(steps, bar, task)
        steps.end()
