"""A rehearsal: settings of a policy, tried aside on the traffic of the last seconds.

A policy says what it wants rehearsed (`Rehearsal`), its host has that played through the simulator
aside (`simulation.rehearsal`), and brings the answer (`Rehearsed`). All of it is plain data: the
problem goes to another process, the answer into the decision log.
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
        quickest: it knows the quickest variant of each model alone.
    """

    policy: str
    kwargs: Mapping[str, Any]
    quickest: bool = False

    @property
    def label(self) -> str:
        """For people, and to tell settings apart: "deferred gathering=prefix"."""
        words = [self.policy, *(f"{k}={v}" for k, v in self.kwargs.items())]
        return " ".join(words + ["on the quickest variants"] * self.quickest)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests of clients, in order of arrival.

    Attributes:
        roots: (model, task) of what was asked for; `root` has an index into them per request.
        arrival, deadline: seconds in the host's clock.
        size: items per request; None where all have one.
    """

    roots: tuple[tuple[str, str], ...]
    root: NDArray[np.int64]
    arrival: NDArray[np.float64]
    deadline: NDArray[np.float64]
    size: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What is to be tried.

    Attributes:
        number: of the rehearsal, from 1.
        cluster: as the policy knows it.
        traffic: to try it on.
        settings: what to try; the first is in force.
        trees: of the application, as JSON; models without a tree are trees of one task.
        composing: further arguments of `policies.composed.Composed`.
        planned: a planner assigns variants to workers.
        pace: measured over predicted time of a batch, by variant and hardware; 1 where missing.
        noise: standard deviation of the logarithm of a batch's time around that.
        factors: requests made per request, by (variant, child task), as measured.
        seed: of the noise and of what requests make.
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

    def __repr__(self) -> str:
        return (
            f"Rehearsal {self.number} of {len(self.settings)} settings on {len(self.traffic)} "
            "requests"
        )


@dataclass(frozen=True)
class Score:
    """What came of one setting.

    Attributes:
        value: by stretch of the traffic, the sum over answers in time of their accuracy (share; 1
            where it is not known). Fewer stretches than there are: given up as hopeless.
        good: answers in time by root.
        accuracy: percent, mean of the answers in time by root; None where there is none.
        p50_s: median latency of the answers; None where it was given up.
        error: why the setting could not be tried.
    """

    value: tuple[float, ...] = ()
    good: tuple[int, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    p50_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Rehearsed:
    """The answer to a `Rehearsal`.

    Attributes:
        number: of the rehearsal.
        at: when its traffic ended, seconds in the host's clock.
        rate: requests per second of the traffic.
        roots: tasks that clients asked for; arrived: requests for each.
        stretches: requests in each stretch of the traffic.
        scores: by the setting's label.
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
                tuple(s["value"]), tuple(s["good"]), tuple(s["accuracy"]), s["p50_s"], s["error"]
            )
            for label, s in body["scores"].items()
        }
        return cls(
            *(body["number"], body["at"], body["rate"], tuple(body["roots"])),
            *(tuple(body["arrived"]), tuple(body["stretches"]), scores),
        )
