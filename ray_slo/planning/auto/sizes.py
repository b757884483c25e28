"""Plans for requests of different sizes.

A request with many items may be in time only on fast workers. The mean size does not tell how many
fast workers are needed (Kairos §5.2). So requests are divided into size classes (`Size`). In each
SLO class, each size class of a root's model is a separate stream: `rank@≤100`, `rank@gold≤100`. A
batch of b requests takes ℓ(b·items) of a worker's time. Its latency is that of a batch that
contains the largest request of the class. A worker's variant serves all classes.

    >>> for size in classes_of({1: 60, 3: 30, 100: 10}, [50]):
    ...     print(size)
    Size(largest=3, items=1.6666666666666667, share=0.9)
    Size(largest=100, items=100.0, share=0.1)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ray_slo.core.trees import root_and_class, stream_of
from ray_slo.planning.auto.plan import Plan
from ray_slo.planning.auto.problem import Demand, Model, Problem, Size
from ray_slo.planning.result import Infeasible

_MARK = "≤"

MOST = 4
"""Number of size classes, without those that `ends` adds."""


def classes_of(
    counts: Mapping[int, float], ends: Collection[int] = (), most: int = MOST
) -> tuple[Size, ...]:
    """Divide the observed sizes into classes with about the same total number of items.

    Args:
        counts: number of requests, by size.
        ends: sizes at which a class must end, for example the largest that a worker can do in time.
        most: number of classes, without those that `ends` adds.
    """
    seen = {size: n for size, n in sorted(counts.items()) if n > 0}
    requests, items = sum(seen.values()), sum(size * n for size, n in seen.items())
    found: list[list[int]] = []
    before, last = 0.0, -1
    for size, n in seen.items():
        part = int(most * before / items * (1 - 1e-9))
        crosses = any(found and found[-1][-1] <= end < size for end in ends)
        if not found or part != last or crosses:
            found.append([])
        found[-1].append(size)
        last, before = part, before + size * n
    return tuple(
        Size(
            of_class[-1],
            min(
                sum(size * seen[size] for size in of_class) / sum(seen[size] for size in of_class),
                float(of_class[-1]),
            ),
            min(sum(seen[size] for size in of_class) / requests, 1.0),
        )
        for of_class in found
    )


def ends_of(problem: Problem, model: Model) -> set[int]:
    """Return the largest size that a worker can do in time, in a batch of one, for each variant,
    kind of worker and SLO. The SLOs are those of the trees whose root the model serves."""
    slos_s = {
        slo_s
        for tree in problem.trees
        if tree[tree.root].model == model.name
        for slo_s in tree.slos_s.values()
    }
    return {
        profile.max_batch_within((slo_s - problem.communication_s) / problem.waiting_factor)
        for slo_s in slos_s
        for variant in model.variants
        for profile in variant.profiles.values()
    }


def by_size(problem: Problem) -> Problem:
    """Return the problem in which every size class of a root's model is a stream."""
    if not any(model.sizes for model in problem.models):
        return problem
    trees, demand = [], dict(problem.demand)
    for tree in problem.trees:
        slos_s = dict(tree.slos_s)
        for slo_class, slo_s in tree.slos_s.items():
            whole = demand.get(stream_of(tree.name, slo_class))
            for size in problem.model[tree[tree.root].model].sizes:
                name = f"{slo_class}{_MARK}{size.largest}"
                slos_s[name] = slo_s
                if whole is not None:
                    rate = whole.rate * size.share
                    demand[stream_of(tree.name, name)] = Demand(rate, whole.dispersion)
            if whole is not None and len(slos_s) > len(tree.slos_s):
                demand[stream_of(tree.name, slo_class)] = replace(whole, rate=0.0)
        trees.append(replace(tree, slos_s=slos_s))
    return replace(problem, trees=tuple(trees), demand=demand)


def size_of(problem: Problem, stream: str) -> Size | None:
    """Return the size class of a stream, or None if the stream has all sizes."""
    _, _, largest = stream.partition(_MARK)
    if not largest:
        return None
    tree = problem.tree_of(stream)
    sizes = problem.model[tree[tree.root].model].sizes
    return next(size for size in sizes if size.largest == int(largest))


def together(made: Plan | Infeasible[Plan], problem: Problem) -> Plan | Infeasible[Plan]:
    """Turn a plan for `by_size(problem)` into one for `problem`, whose streams have no sizes."""
    if isinstance(made, Infeasible):
        best = together(made.best_effort, problem)
        assert isinstance(best, Plan)
        return replace(made, best_effort=best)
    if not any(_MARK in stream for stream in made.served):
        return made
    served = dict.fromkeys(problem.streams, 0.0)
    for stream, share in made.served.items():
        root, name = root_and_class(stream)
        slo_class, _, largest = name.partition(_MARK)
        whole = stream_of(root, slo_class)
        size = next((s for s in _sizes(problem, whole) if str(s.largest) == largest), None)
        if size is not None:
            served[whole] += share * size.share
        elif not _sizes(problem, whole):
            served[whole] = share
    served = {s: 1.0 if share > 1 - 2e-6 else share for s, share in served.items()}
    return replace(made, served=served)


def _sizes(problem: Problem, stream: str) -> tuple[Size, ...]:
    root, _ = root_and_class(stream)
    tree = next(tree for tree in problem.trees if tree.name == root)
    return problem.model[tree[tree.root].model].sizes
