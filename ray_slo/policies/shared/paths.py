"""Deadlines of tasks: the end-to-end deadline minus the time for the rest of the path.

A plan has the time `WAITING_FACTOR` · ℓ(batch) for a task: a wait as long as an execution (Loki
§4.1). When a request reaches a task, the remaining time is divided in the plan's proportions. Three
quarters of the part of the tasks below are reserved for them, because not every request waits that
long at every task. So a late request leaves less time for all later tasks. If the SLO is longer
than the plan needs, every task gets some of the rest. The reserved time is never less than a single
request takes below.

Worked example: two tasks, planned with 20 ms and 60 ms, SLO 160 ms. Their parts are a quarter and
three quarters, 40 and 120 ms. 0.75 · 120 = 90 ms are reserved for the second task, so the first one
has up to 70 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import WAITING_FACTOR, Tree

_KEPT = 0.75  # share of their part that is reserved for the tasks below


class Part(NamedTuple):
    """A task's part of the time that is left when a request reaches it.

    Attributes:
        below: share of that time that is reserved for the tasks below; 0 at a last task.
        least_s: time of a single request after this task, with the fastest variants, seconds.
        slos_s: the task's shares of the end-to-end SLOs, the shortest first, seconds.
    """

    below: float
    least_s: float
    slos_s: tuple[float, ...]

    def deadline(self, now: float, deadline: float) -> float:
        """The task's deadline for a request that reaches it now."""
        return deadline - max(self.below * (deadline - now), self.least_s)


def parts_of(
    trees: Iterable[Tree],
    planned_s: Mapping[str, float],
    alone_s: Mapping[str, float],
    communication_s: float,
) -> dict[str, Part]:
    """The part of each task, by task.

    Args:
        planned_s: planned time of each task, with its wait, seconds; 0 for a missing task.
        alone_s: least time of a single request at each task, seconds.
        communication_s: time on the way to a task that is not the root, seconds.
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
        left_s = {tree.root: sorted(tree.slos_s.values())}
        for task in tree.order:
            whole_s = planned_s.get(task.name, 0.0) + below[task.name]
            share = _KEPT * below[task.name] / whole_s if whole_s > 0 else 0.0
            left = left_s[task.name]
            rest_s = [max(share * of_class, least[task.name]) for of_class in left]
            mine = tuple(max(a - b, 1e-6) for a, b in zip(left, rest_s, strict=True))
            found[task.name] = Part(share, least[task.name], mine)
            for child in tree.children(task.name):
                left_s[child] = [max(rest - communication_s, 0.0) for rest in rest_s]
    return found


def planned_batches(
    tree: Tree,
    profiles: Mapping[str, LatencyProfile],
    communication_s: float,
) -> dict[str, int]:
    """For every task, the batch size with the least work per request for which the SLO has time.

    It begins with batches of one. Each step enlarges the batch that saves most work per time that
    it adds to the longest path, as long as every path fits into the SLO.

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
            sum(WAITING_FACTOR * profiles[t].latency(sizes[t]) for t in path)
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
