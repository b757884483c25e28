"""A rehearsal: a simulation of the last seconds of traffic with several settings.

A policy asks for it (`Rehearsal`). Its host has it simulated in another process
(`simulation.rehearsal`), and returns the answer (`Rehearsed`). Both are plain data, because the
problem goes to another process, and the answer into the decision log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.cluster import Cluster


class Setting(NamedTuple):
    """A policy by its name, and its arguments.

    Attributes:
        quickest: it sees only the fastest variant of each model.
        limited: pipelines admit no more at their roots than can be done by the deadline.
    """

    policy: str
    kwargs: Mapping[str, Any]
    quickest: bool = False
    limited: bool = True

    @property
    def label(self) -> str:
        """A unique text for people: "deferred gathering=prefix"."""
        words = [self.policy, *(f"{k}={v}" for k, v in self.kwargs.items())]
        words += ["on the quickest variants"] * self.quickest
        return " ".join(words + ["without a limit at the root"] * (not self.limited))


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests of clients, in order of arrival.

    Attributes:
        roots: (model, task) that clients asked for; `root` has an index into them per request.
        arrival, deadline: seconds in the host's clock.
        size: items per request; None if all have one.
        before: number of first requests that only warm up the settings and do not count.
    """

    roots: tuple[tuple[str, str], ...]
    root: NDArray[np.int64]
    arrival: NDArray[np.float64]
    deadline: NDArray[np.float64]
    size: NDArray[np.int64] | None = None
    before: int = 0

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The problem of a rehearsal.

    Attributes:
        number: of the rehearsal, from 1.
        cluster: the policy's view of the cluster.
        traffic: the requests to simulate.
        settings: the settings to try; the first one is the current one.
        trees: trees of the application, as JSON; models without a tree are trees of one task.
        composing: further arguments of `policies.composed.Composed`.
        planned: a planner assigns variants to workers.
        pace: measured over predicted time of a batch, by variant and hardware; 1 where missing.
        noise: standard deviation of the logarithm of a batch's time around that.
        factors: requests made per request, by (variant, child task), as measured.
        seed: of the noise and of what requests make.
        calm: no request was bad lately. If the current setting loses nothing in the first part of
            the traffic, the rest is not simulated.
    """

    number: int
    cluster: Cluster
    traffic: Traffic
    settings: Sequence[Setting]
    trees: Sequence[Mapping[str, Any]] = ()
    composing: Mapping[str, float] = field(default_factory=dict)
    planned: bool = False
    pace: Mapping[tuple[str, str], float] = field(default_factory=dict)
    noise: float = 0.0
    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    seed: int = 0
    calm: bool = False

    def __repr__(self) -> str:
        return (
            f"Rehearsal {self.number} of {len(self.settings)} settings on {len(self.traffic)} "
            "requests"
        )


@dataclass(frozen=True)
class Score:
    """The result of one setting.

    Attributes:
        value: by part of the traffic, the sum of the accuracies of answers in time (share; 1 if
            unknown). If parts are missing, the setting was stopped as hopeless.
        good: answers in time by root.
        accuracy: percent, mean of the answers in time by root; None if there is none.
        p50_s: median latency of the answers, seconds; None if the setting was stopped early.
        error: why the setting could not be tried.
        fall: share of the best sturdy setting's value that it would lose if the load rose by half;
            None if that was not tried.
    """

    value: tuple[float, ...] = ()
    good: tuple[int, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    p50_s: float | None = None
    error: str = ""
    fall: float | None = None


@dataclass(frozen=True)
class Rehearsed:
    """The answer to a `Rehearsal`.

    Attributes:
        number: of the rehearsal.
        at: when its traffic ended, seconds in the host's clock.
        rate: requests per second of the traffic.
        roots: tasks that clients asked for; arrived: requests for each.
        stretches: requests in each part of the traffic.
        scores: results by the setting's label.
    """

    number: int
    at: float
    rate: float
    roots: tuple[str, ...]
    arrived: tuple[int, ...]
    stretches: tuple[int, ...]
    scores: Mapping[str, Score]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the decision log."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Rehearsed:
        """The inverse of `to_json`, to the last bit."""
        scores = {
            label: Score(
                *(tuple(s["value"]), tuple(s["good"]), tuple(s["accuracy"])),
                *(s["p50_s"], s["error"], s.get("fall")),
            )
            for label, s in body["scores"].items()
        }
        return cls(
            *(body["number"], body["at"], body["rate"], tuple(body["roots"])),
            *(tuple(body["arrived"]), tuple(body["stretches"]), scores),
        )
