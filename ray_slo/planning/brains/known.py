"""What the brain of the planner `auto` knows about an application. It learns the numbers of child
requests per request (factors), the mean request sizes, and the time that workers take to start.
Latencies and memory come from the workers' reports. Pure: no clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.core.demand import Factors
from ray_slo.core.trees import Tree
from ray_slo.planning.auto import Hosted, Kind, Model, Problem, Size, Variant
from ray_slo.planning.auto.sizes import classes_of, ends_of
from ray_slo.planning.brains.brain import Counts, Key, Seen, WorkerSays
from ray_slo.planning.brains.sizes import Sizes

_LEAST_FACTOR = 0.05  # a task that had no requests for hours still needs a worker
_ENOUGH = 20  # number of requests before their sizes are used in a plan
_STARTS = 5  # number of workers in the median start time


class Known:
    """Learns about an application, and adds to a problem what it has learned.

    Args:
        problem: the configured part of the problem.
        profiles: profiles of variants from files, by (variant, kind).

    Attributes:
        problem, profiles: as the arguments. They may be replaced by others of the same application.
        model_of: model by variant.
        group_of: group by model, if workers are in groups. A model that is missing here has no
            group yet, and may be in any.
    """

    def __init__(self, problem: Problem, profiles: Mapping[Key, LatencyProfile]) -> None:
        self.problem, self.profiles = problem, profiles
        self.group_of: Mapping[str, str] = problem.group_of
        self.model_of = {v.name: model.name for model in problem.models for v in model.variants}
        self._learnt = _learnt(problem)  # child tasks by variant and task
        prior: dict[Hashable, Mapping[str, float]] = {}
        for (task, variant), children in self._learnt.items():
            tree = next(tree for tree in problem.trees if task in tree)
            prior[variant] = {child: tree[task].factor(variant, child) for child in children}
        self._factors = Factors(prior)
        self._sizes = {model.name: Sizes() for model in problem.models}
        self._starts: dict[str, deque[float]] = {}  # seconds, by kind
        self._started: set[str] = set()

    # -- reports ---------------------------------------------------------------------

    def counted(self, counts: Counts) -> None:
        """Learn from a frontend's counts."""
        for _, variant in self._learnt:
            if variant in counts.finished:
                made = counts.made.get(variant, {})
                self._factors.observe(variant, counts.finished[variant], made)
        for model in self.problem.models:
            self._sizes[model.name].counted(counts.sizes.get(model.name, {}))

    def look(self, seen: Seen) -> None:
        """Note which workers became ready, and how long they took to start."""
        for worker, says in seen.workers.items():
            if says.ready and worker not in self._started:
                self._started.add(worker)
                if says.ready_s is not None:
                    starts = self._starts.setdefault(says.kind, deque(maxlen=_STARTS))
                    starts.append(says.ready_s)
        self._started &= seen.workers.keys()

    @property
    def starts_s(self) -> dict[str, float]:
        """Time from a worker's start until it can serve, in seconds, by kind. It is the median of
        the last workers."""
        return {kind: sorted(starts)[len(starts) // 2] for kind, starts in self._starts.items()}

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """Learned number of child requests per request, by variant and child task."""
        return {variant: self._factors.of(variant) for _, variant in self._learnt}

    @property
    def sized(self) -> set[str]:
        """Models whose sizes are known, from requests or from the configuration."""
        return {m.name for m in self.problem.models if m.sizes or self.sizes(m.name) is not None}

    def sizes(self, model: str) -> Sizes | None:
        """Return the sizes of a model's requests. None before enough requests have come."""
        return its if len(its := self._sizes[model]) >= _ENOUGH else None

    def sizes_seen(self) -> dict[str, dict[str, float]]:
        """Return the number of sizes in a plan, and the median and the 95th percentile of them, by
        model. Models whose requests have no sizes are left out."""
        found = {}
        for model in self._sizes:
            if (sizes := self.sizes(model)) and (values := sizes.values()).max() > 1:
                p50, p95 = np.quantile(values, (0.5, 0.95)).tolist()
                seen = {"seen": len(values), "changes": sizes.changes, "p50": p50, "p95": p95}
                found[model] = seen
        return found

    def sizes_differ(self) -> bool:
        """Return whether the sizes of a model's requests have changed since the plan."""
        return any(sizes.differ() for sizes in self._sizes.values())

    def planned(self) -> None:
        """Note that the plan in force is for the present sizes."""
        for model in self._sizes:
            if sizes := self.sizes(model):
                sizes.planned()

    # -- knowledge ---------------------------------------------------------------------

    def model_on(self, kind: str) -> dict[str, str]:
        """Return the model of each variant that workers of a kind serve. These are the variants of
        their group's models, and of models without a group yet."""
        group, may_be_on = self.problem.kind[kind].group, self.may_be_on(kind)
        return {v: m for v, m in may_be_on.items() if self.group_of.get(m, group) == group}

    def may_be_on(self, kind: str) -> dict[str, str]:
        """Return the model of each variant that workers of a kind may serve now or later."""
        group, problem = self.problem.kind[kind].group, self.problem
        allowed = problem.allowed_groups
        return {
            variant: model
            for variant, model in self.model_of.items()
            if group is None
            or (
                problem.group_of.get(model, group) == group
                and group in allowed.get(model, (group,))
            )
        }

    def measured(self, seen: Seen) -> dict[Key, LatencyProfile]:
        """Return the profiles of usable variants, without batch sizes that never ran."""
        return {key: profile.measured for key, profile in self.usable(seen).items()}

    def usable(self, seen: Seen) -> dict[Key, LatencyProfile]:
        """Return the profiles of usable variants."""
        known = {**self.profiles, **seen.profiles}
        keys = [(v, kind.name) for kind in self.problem.kinds for v in self.may_be_on(kind.name)]
        return {key: known[key] for key in keys if key in known.keys() - seen.avoided}

    def unknown(self, seen: Seen, kind: str) -> list[str]:
        """Return the variants that must still be measured on a kind of worker."""
        known = {*self.profiles, *seen.profiles, *seen.avoided}
        return [v for v in self.may_be_on(kind) if (v, kind) not in known]

    def knows(self, seen: Seen, kind: str) -> bool:
        """Return whether the latency of a variant is known on a kind of worker, or that none can
        be loaded there."""
        may = self.may_be_on(kind)
        return not may or len(self.unknown(seen, kind)) < len(may)

    def room_mb(self, seen: Seen, kind: str) -> float:
        """Return the memory for variants on a worker of a kind, in MB."""
        return min(self.problem.kind[kind].memory_mb, seen.room_mb.get(kind, math.inf))

    def needs_mb(self, seen: Seen, variant: str, kind: str) -> float:
        """Return the memory of a variant on a kind, in MB: as measured, otherwise as configured. It
        is 0 if neither is known."""
        told = self.problem.variant[variant].memory_mb.get(kind, 0.0)
        return seen.memory_mb.get((variant, kind), told)

    def fit(self, seen: Seen, variants: frozenset[str], kind: str) -> bool:
        """Return whether these variants fit together in the memory of a worker, as far as is
        known."""
        return sum(self.needs_mb(seen, v, kind) for v in variants) <= self.room_mb(seen, kind)

    def all_fit(self, seen: Seen, kind: str) -> bool:
        """Return whether all loadable variants of a kind fit together in a worker's memory."""
        loaded = frozenset(v for v in self.model_on(kind) if (v, kind) not in seen.avoided)
        return self.fit(seen, loaded, kind)

    # -- the problem ------------------------------------------------------------

    def asked(
        self,
        seen: Seen,
        limits: Mapping[str, int],
        has: Callable[[WorkerSays], frozenset[str]],
    ) -> Problem:
        """Return the problem with all measurements except the demand.

        Args:
            limits: largest number of workers, by kind.
            has: function that returns the variants that plans assigned to a worker. The worker
                unloads its other variants when their memory is needed.

        Raises:
            ValueError: a model has no variant that can be used.
        """
        profiles = self.measured(seen)
        models = [self._measured(model, profiles, seen) for model in self.problem.models]
        if lost := [model.name for model in models if not any(v.profiles for v in model.variants)]:
            raise ValueError(f"no variant of {', '.join(lost)} can be loaded; the last plan holds")
        known = {v.name for model in models for v in model.variants}
        return replace(
            self.problem,
            models=tuple(models),
            trees=tuple(self._learned(tree, known) for tree in self.problem.trees),
            kinds=tuple(self._bounded(kind, limits, seen) for kind in self.problem.kinds),
            current=tuple(
                Hosted(worker, says.kind, has(says) & says.loaded & self.model_of.keys())
                for worker, says in seen.workers.items()
                if says.kind in self.problem.kind
            ),
        )

    def _measured(self, model: Model, profiles: Mapping[Key, LatencyProfile], seen: Seen) -> Model:
        variants = []
        for v in model.variants:
            known = {k: profiles[v.name, k] for k in self.problem.kind if (v.name, k) in profiles}
            if known:
                memory = {kind: self.needs_mb(seen, v.name, kind) for kind in known}
                variants.append(Variant(v.name, v.accuracy, known, memory))
        sizes = self._sizes[model.name].values()
        mean = max(float(sizes.mean()), 1.0) if len(sizes) else model.items
        found = replace(model, variants=tuple(variants) or model.variants, items=mean)
        return replace(found, sizes=self._classes(found)) if len(sizes) >= _ENOUGH else found

    def _classes(self, model: Model) -> tuple[Size, ...]:
        """Return size classes of a model's requests, if there is more than one kind of worker.
        Sizes that no worker answers in time are left out, because any plan refuses them."""
        problem, seen = self.problem, Counter(self._sizes[model.name].values().tolist())
        ends = ends_of(problem, model) if len(problem.kinds) > 1 else set()
        possible = {size: n for size, n in seen.items() if size <= max(ends, default=0)}
        return classes_of(possible, ends) if len(possible) > 1 else ()

    def _learned(self, tree: Tree, known: set[str]) -> Tree:
        """Return the tree with its known variants, and with the factors that were learned for
        them."""
        tasks = []
        for task in tree.tasks:
            factors = {v: made for v, made in task.factors.items() if v in known}
            for name, variant in self._learnt:
                if name == task.name and variant in known:
                    made = self._factors.of(variant)
                    factors[variant] = {c: max(f, _LEAST_FACTOR) for c, f in made.items()}
            tasks.append(replace(task, factors=factors))
        return replace(tree, tasks=tuple(tasks))

    def _bounded(self, kind: Kind, limits: Mapping[str, int], seen: Seen) -> Kind:
        most = min(kind.max_workers, limits.get(kind.name, kind.max_workers))
        least, room_mb = min(kind.min_workers, most), self.room_mb(seen, kind.name)
        measured_s = self.starts_s.get(kind.name, kind.replacement_s)
        bounded = replace(kind, min_workers=least, max_workers=most, memory_mb=room_mb)
        return replace(bounded, replacement_s=measured_s)


def _learnt(problem: Problem) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the child tasks of each (task, variant) whose factors can be learned. If tasks share a
    model, they cannot: the counts do not say which task a variant served."""
    users = [task.model for tree in problem.trees for task in tree.tasks]
    return {
        (task.name, variant.name): tree.children(task.name)
        for tree in problem.trees
        for task in tree.tasks
        if users.count(task.model) == 1 and tree.children(task.name)
        for variant in problem.variants_of(task)
    }
