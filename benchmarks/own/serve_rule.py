"""Ray Serve's own autoscaling as a planner's brain, to compare with.

This follows Serve's documentation of `AutoscalingConfig`. Here, a deployment is a model with one
variant. It wants as many replicas as its ongoing requests (queued and running), divided by
`target_ongoing_requests`. Ongoing requests are averaged over `look_back_s`. The number of replicas
grows at once when more were wanted for `upscale_delay_s`. It shrinks at once when fewer were wanted
for `downscale_delay_s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_slo.core.cluster import Assigned
from ray_slo.core.decisions import Decision, Drop
from ray_slo.core.policy import Policy, PolicyWrapper
from ray_slo.core.requests import BatchOutcome, Request
from ray_slo.planning import auto
from ray_slo.planning.brains.brain import Brain, Counts, Seen, Verdict, Wanted


class Ongoing(PolicyWrapper):
    """Counts the ongoing requests of each model, which wait or run."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.ongoing: dict[str, int] = {}

    def _count(self, requests: Sequence[Request], sign: int) -> None:
        for r in requests:
            self.ongoing[r.model] = self.ongoing.get(r.model, 0) + sign

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._count(requests, 1)
        super().requests_arrived(now, requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._count(requests, -1)
        super().requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: str, outcome: BatchOutcome) -> None:
        self._count(outcome.requests, -1)
        super().batch_finished(now, worker, outcome)

    def decide(self, now: float) -> Decision:
        decision = super().decide(now)
        for action in decision.actions:
            if isinstance(action, Drop):
                self._count(action.requests, -1)
        return decision


@dataclass(frozen=True)
class Rule:
    """The arguments of the rule, with Serve's defaults. Times are in seconds."""

    target_ongoing_requests: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0

    def faster(self, factor: float) -> Rule:
        """Return the rule for a day that passes `factor` times as fast."""
        return Rule(
            self.target_ongoing_requests,
            self.upscale_delay_s / factor,
            self.downscale_delay_s / factor,
            self.look_back_s / factor,
        )


class ServeRule(Brain):
    """Scales every model on its own. A worker serves one model.

    Args:
        problem: a problem with one kind of workers; only the first variant of a model is used.
        first: initial number of workers of each model.
        ongoing: counts the ongoing requests.
    """

    def __init__(
        self, problem: auto.Problem, rule: Rule, first: Mapping[str, int], ongoing: Ongoing
    ) -> None:
        (self._kind,) = problem.kinds
        self._variants = {m.name: m.variants[0] for m in problem.models}
        self._rule, self._ongoing = rule, ongoing
        self._target = dict(first)
        self._past: dict[str, deque[tuple[float, int]]] = {m: deque() for m in first}
        # For each model: the direction in which it wants to scale, and since when.
        self._since: dict[str, tuple[int, float]] = {}
        self._does: dict[str, str] = {}
        self._news = False

    @property
    def solve(self) -> Any:
        return dict

    def configure(self, setting: Any) -> None:
        raise NotImplementedError

    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        for model, past in self._past.items():
            # A policy composed with variants counts a model's requests under its variant's name.
            names = model, self._variants[model].name
            past.append((now, sum(self._ongoing.ongoing.get(name, 0) for name in names)))
            while past[0][0] < now - self._rule.look_back_s:
                past.popleft()
            mean = sum(n for _, n in past) / len(past)
            wants = max(math.ceil(mean / self._rule.target_ongoing_requests - 1e-9), 1)
            self._scale(model, wants, now)

    def _scale(self, model: str, wants: int, now: float) -> None:
        way = (wants > self._target[model]) - (wants < self._target[model])
        before, since = self._since.get(model, (0, now))
        if way != before:
            since = now
        self._since[model] = way, since
        delay_s = self._rule.upscale_delay_s if way > 0 else self._rule.downscale_delay_s
        if way and now - since >= delay_s - 1e-6:
            others = sum(n for m, n in self._target.items() if m != model)
            self._target[model] = min(wants, self._kind.max_workers - others)
            self._since[model] = 0, now
            self._news = True

    def due(self, now: float, seen: Seen) -> str:
        return "replicas" if self._news else ""

    def problem(self, now: float, seen: Seen) -> dict[str, int]:
        return self._target

    def adopt(self, problem: Any, answer: dict[str, int]) -> Verdict:
        self._news = False
        return Verdict("Serve's rule")

    def target(self, kind: str) -> int:
        return sum(self._target.values())

    def wanted(self, now: float, seen: Seen, hopeless: bool) -> dict[str, Wanted]:
        left = dict(self._target)
        does: dict[str, str] = {}
        for worker in seen.workers:
            if (model := self._does.get(worker)) is not None and left[model]:
                does[worker] = model
                left[model] -= 1
        free = [w for w in seen.workers if w not in does]
        for model, n in left.items():
            does |= dict.fromkeys(free[:n], model)
            free = free[n:]
        self._does = does
        answer = dict.fromkeys(free, Wanted((), ()))
        for worker, model in does.items():
            v = self._variants[model]
            largest = v.profiles[self._kind.name].max_batch_size
            answer[worker] = Wanted((Assigned(v.name, largest),), (v.name,))
        return answer

    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        return {"demand": float(sum(self._ongoing.ongoing.values()))}

    def outcome(self) -> dict[str, Any]:
        return {}
