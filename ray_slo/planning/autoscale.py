"""Autoscaling by signals: the number of workers to add or to remove, from the bad rate and the idle
time (Symphony §3.5).

Let the goodput stay at its peak p at any load above p (a "flat top"). Then at a load o > p the bad
rate is r = (o − p)/o, and N·r/(1 − r) more workers would serve everything. At o < p the idle
fraction is f = (p − o)/p, and N·f workers could be removed.

Worked example: 8 workers with 20 % bad requests have the load of 10 workers. Of 8 workers that are
idle for 30 % of the time, 5.6 are busy on average.

    >>> limits = Limits(min_workers=1, max_workers=16, periods_down=1)
    >>> plan(Problem(Signals(workers=8, bad_rate=0.2, idle_fraction=0.0), limits)).workers
    10
    >>> plan(Problem(Signals(workers=8, bad_rate=0.0, idle_fraction=0.3), limits)).workers
    6

Additions are rounded up, removals down. Three rules prevent oscillation. A bad rate up to
`bad_rate_above` and an idle fraction up to `idle_above` change nothing. A direction must be wanted
for `periods_up` or `periods_down` periods in a row. The number of removed workers is the least that
any of these periods could spare. `plan` keeps no state: the state between periods is an argument
and part of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ray_slo.core.arguments import Count, check_fields
from ray_slo.planning.result import Infeasible

_EPS = 1e-9

Part = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Signals:
    """Measurements of a period.

    Args:
        workers: N, number of running workers.
        bad_rate: r, share of the requests that were late or dropped.
        idle_fraction: f, share of the workers' time in which they ran nothing.
    """

    workers: Annotated[int, Field(ge=0)]
    bad_rate: Part
    idle_fraction: Part

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Limits:
    """Limits for reactions to the signals.

    Args:
        min_workers, max_workers: the range of the number of workers.
        bad_rate_above: bad rates up to this are allowed by the SLO.
        idle_above: idle fractions up to this change nothing. 0 is the published rule. It removes
            the last idle worker, and so the reserve that Poisson arrivals need.
        keep_idle: idle fraction that is left when workers are removed. At most `idle_above`.
        periods_up, periods_down: number of periods in a row that must want more, or fewer, workers.
    """

    min_workers: int
    max_workers: int
    bad_rate_above: Annotated[float, Field(ge=0, lt=1)] = 0.01
    idle_above: Annotated[float, Field(ge=0, lt=1)] = 0.1
    keep_idle: float = 0.0
    periods_up: Count = 1
    periods_down: Count = 3

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"min_workers must lie between 0 and max_workers, got {self.min_workers} and "
                f"{self.max_workers}"
            )
        check_fields(self)
        if not 0 <= self.keep_idle <= self.idle_above:
            raise ValueError(
                f"keep_idle must lie between 0 and idle_above ({self.idle_above}), "
                f"got {self.keep_idle}"
            )


@dataclass(frozen=True)
class State:
    """State between periods: the number of periods in a row that wanted more (positive) or fewer
    (negative) workers, and the most workers that any of these periods wanted."""

    streak: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class Problem:
    signals: Signals
    limits: Limits
    state: State = State()


@dataclass(frozen=True)
class Plan:
    """The wanted number of workers, and the state for the next problem."""

    workers: int
    state: State
    explanation: str


def plan(problem: Problem) -> Plan | Infeasible[Plan]:
    """Return the wanted number of workers, or `Infeasible` if the load needs more than
    `max_workers`."""
    now, limits, before = problem.signals, problem.limits, problem.state
    n = now.workers
    if now.bad_rate > limits.bad_rate_above:
        direction, periods = 1, limits.periods_up
        if now.bad_rate < 1:
            wanted = n + max(1, math.ceil(n * now.bad_rate / (1 - now.bad_rate) - _EPS))
            said = f"{now.bad_rate:.1%} bad with {n} workers: the load is that of {wanted}"
        else:
            wanted = limits.max_workers
            said = f"nothing was served by {n} workers, so the load may be anything: all there are"
        if now.idle_fraction > max(limits.idle_above, 0.1):
            said += f", though {now.idle_fraction:.0%} of their time is idle (SLO or sharing?)"
    elif now.idle_fraction > limits.idle_above:
        direction, periods = -1, limits.periods_down
        busy = n * (1 - now.idle_fraction)
        wanted = min(n, math.ceil(busy / (1 - limits.keep_idle) - _EPS))
        said = f"{now.idle_fraction:.0%} idle with {n} workers: {busy:.3g} are busy"
        if limits.keep_idle:
            said += f", {wanted} leave {limits.keep_idle:.0%} idle"
        if wanted == n:
            direction = 0
    else:
        direction, periods, wanted = 0, 1, n
        said = f"{now.bad_rate:.1%} bad and {now.idle_fraction:.0%} idle are within the limits"

    same = direction != 0 and before.streak * direction > 0
    streak = (before.streak if same else 0) + direction
    if direction < 0:
        # Remove the workers that none of these periods needed.
        wanted = min(n, max(wanted, before.wanted)) if same else wanted
    state = State(streak, wanted if direction else 0)
    target = n
    if direction and abs(streak) >= periods:
        target, state = wanted, State()
    elif direction:
        said += f" (period {abs(streak)} of {periods} before acting)"

    workers = min(max(target, limits.min_workers), limits.max_workers)
    if workers > target:
        said += f"; min_workers is {limits.min_workers}"
    elif workers < target:
        said += f"; max_workers is {limits.max_workers}"
    chosen = Plan(workers, state, f"{said}; {_change(workers - n)}.")
    if target > limits.max_workers and direction > 0:
        return Infeasible(
            f"the load needs {target} workers, max_workers is {limits.max_workers}", chosen
        )
    return chosen


def _change(by: int) -> str:
    return f"{abs(by)} {'more' if by > 0 else 'fewer'}" if by else "no change"
