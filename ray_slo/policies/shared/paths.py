"""Deadlines of tasks: the end-to-end deadline less what the rest of the path needs.

A plan has waiting_factor · ℓ(batch) for a task: a wait as long as an execution (Loki §4.1). When a
request reaches a task with the time s left, the tasks below have their part of s by that plan kept
for them, less a quarter, as not every request waits as long everywhere. So work that is late leaves
less for all that follows, and where the SLO has more room than the plan needs, every task has some
of it. What is kept is never less than one request alone takes below.

Worked example: two tasks, planned with 20 ms and 60 ms, SLO 160 ms. Their parts are a quarter and
three quarters. 0.75 · 120 ms are kept for the second one, and the first one has up to 70 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree

_KEPT = 0.75  # of their part, for the tasks below


class Part(NamedTuple):
    """What a task has of the time that is left when a request reaches it.

    Attributes:
        below: share of that time that is kept for the tasks below; 0 at a last task.
        least_s: that a request needs after this task, alone, by the quickest variants.
        slo_s: the task's share of the end-to-end SLO, of the tightest class.
    """

    below: float
    least_s: float
    slo_s: float

    def deadline(self, now: float, deadline: float) -> float:
        """Of the task, for a request that reaches it now."""
        return deadline - max(self.below * (deadline - now), self.least_s)


def parts_of(
    trees: Iterable[Tree],
    planned_s: Mapping[str, float],
    alone_s: Mapping[str, float],
    communication_s: float,
) -> dict[str, Part]:
    """By task.

    Args:
        planned_s: for a task, waiting included; 0 for one that is missing.
        alone_s: one request takes at a task, at the least.
        communication_s: on the way to a task that is not the root.
    """
    found: dict[str, Part] = {}
    for tree in trees:
        below: dict[str, float] = {}
        least: dict[str, float] = {}
        for task in reversed(tree.order):
            children = tree.children(task.name)
            below[task.name] = max(
                (communication_s + planned_s.get(c, 0.0) + below[c] for c in children), default=0.0
            )
            least[task.name] = max(
                (communication_s + alone_s.get(c, 0.0) + least[c] for c in children), default=0.0
            )
        left_s = {tree.root: min(tree.slos_s.values())}
        for task in tree.order:
            whole_s = planned_s.get(task.name, 0.0) + below[task.name]
            share = _KEPT * below[task.name] / whole_s if whole_s > 0 else 0.0
            rest_s = max(share * left_s[task.name], least[task.name])
            found[task.name] = Part(share, least[task.name], max(left_s[task.name] - rest_s, 1e-6))
            for child in tree.children(task.name):
                left_s[child] = max(rest_s - communication_s, 0.0)
    return found


def planned_batches(
    tree: Tree,
    profiles: Mapping[str, LatencyProfile],
    waiting_factor: float,
    communication_s: float,
) -> dict[str, int]:
    """The batch of every task that the SLO has time for, for the least work a request.

    From batches of one on, the batch is enlarged that saves most work for the time it adds to the
    longest path, as long as every path fits.

    Args:
        profiles: by task; a task without one is left out.
    """
    tasks = [task.name for task in tree.order if task.name in profiles]
    sizes = dict.fromkeys(tasks, 1)
    slo_s = min(tree.slos_s.values())
    rates = {tree.root: 1.0}
    for task in tree.order:
        for child in tree.children(task.name):
            factors = [made.get(child, 1.0) for made in task.factors.values()] or [1.0]
            rates[child] = rates[task.name] * sum(factors) / len(factors)
    paths = [
        [t for t in tree.path(task.name) if t in profiles]
        for task in tree.order
        if not tree.children(task.name)
    ]

    def fits() -> bool:
        return all(
            sum(waiting_factor * profiles[t].latency(sizes[t]) for t in path)
            + communication_s * (len(path) - 1)
            <= slo_s
            for path in paths
        )

    def gain(task: str) -> float:
        profile, size = profiles[task], sizes[task]
        now_s, then_s = profile.latency(size), profile.latency(size + 1)
        saved = rates[task] * (now_s / size - then_s / (size + 1))
        return saved / max(then_s - now_s, 1e-9)

    growing = list(tasks)
    while growing:
        growing = [t for t in growing if sizes[t] < profiles[t].max_batch_size]
        if not growing:
            break
        best = max(growing, key=gain)
        sizes[best] += 1
        if not fits():
            sizes[best] -= 1
            growing.remove(best)
    return sizes
