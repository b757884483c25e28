"""Applications that combine features, for `composition` and `autoscale-day`.

An application with one model has `vision`. The latency of a network is linear in the batch size,
ℓ(b) = α · b + β:

| task | α ms | β ms | SLO ms | accuracy of its variants |
|---|---|---|---|---|
| vision | 10 | 30 | 300 | 90, 84, 76 % |
| speech | 25 | 100 | 900 | 92, 86, 78 % |
| photo: detect, then who (2 per photo) | 15 and 8 | 50 and 25 | 900 | 88, 80, 70 %; 94, 88, 80 % |

The second variant takes 0.6 of the time of the first, the third 0.35. The slow kind of workers
takes 2.5 times as long as the fast kind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.simulation import LogNormal, Times, Trace, Workload

SEVERAL, VARIANTS, PIPELINE, UNLIKE = "several models", "variants", "pipeline", "unlike kinds"
BUDGET, GROUPS, PREEMPTION = "budget", "groups", "preemption"
AUTOSCALING, SIZES, CLASSES = "autoscaling", "sizes", "SLO classes"
FEATURES = (
    *(SEVERAL, VARIANTS, PIPELINE, UNLIKE, BUDGET),
    *(GROUPS, PREEMPTION, AUTOSCALING, SIZES, CLASSES),
)
WORKERS = 8
LARGEST, LARGEST_ITEMS = 32, 128
SPEEDS = (1.0, 0.6, 0.35)
PERIOD_S = 40.0
"""Period of the swings of demand."""
SLOWER, PRICES = 2.5, {"fast": 3.0, "slow": 1.0}
ITEMS = LogNormal(median=3, sigma=0.6, max_size=12)


def networks(
    name: str,
    alpha_ms: float,
    beta_ms: float,
    accuracies: Collection[float],
    kinds: Mapping[str, float],
    largest: int = LARGEST,
) -> auto.Model:
    """Return a model with one variant per accuracy. `kinds` has each kind's factor on latencies."""
    variants = []
    for i, (accuracy, speed) in enumerate(zip(accuracies, SPEEDS, strict=False)):
        profiles = {
            kind: LatencyProfile(
                [speed * slower * (alpha_ms * b + beta_ms) / 1e3 for b in range(1, largest + 1)]
            )
            for kind, slower in kinds.items()
        }
        variants.append(auto.Variant(f"{name}-{'lms'[i]}", accuracy, profiles))
    return auto.Model(name, tuple(variants))


@dataclass(frozen=True)
class Application:
    """An application with its load.

    Attributes:
        name: its features, in words.
        features: its features, a subset of `FEATURES`.
        problem: the problem for the planner `auto`.
        workloads: workloads by stream, with explicit arrival times.
        duration_s: duration of the workloads.
        roots: names of its models and pipelines that clients call.
    """

    name: str
    features: frozenset[str]
    problem: auto.Problem
    workloads: Mapping[str, Workload]
    duration_s: float
    roots: tuple[str, ...] = field(default=())

    def part(self, roots: Collection[str], workers: Mapping[str, int]) -> Application:
        """Return the application of some trees alone, with this number of workers of each kind."""
        trees = tuple(tree for tree in self.problem.trees if tree.name in roots)
        used = {task.model for tree in trees for task in tree.tasks}
        kinds = tuple(
            replace(kind, min_workers=0, max_workers=workers.get(kind.name, 0), group=None)
            for kind in self.problem.kinds
        )
        streams = {stream for tree in trees for stream, _ in tree.streams()}
        return replace(
            self,
            problem=replace(
                self.problem,
                models=tuple(m for m in self.problem.models if m.name in used),
                trees=trees,
                demand={s: d for s, d in self.problem.demand.items() if s in streams},
                kinds=kinds,
                budget_per_hour=None,
                group_of={},
            ),
            workloads={s: w for s, w in self.workloads.items() if s in streams},
        )


def application(features: Collection[str], duration_s: float, seed: int) -> Application:
    """Return the application with these features."""
    has = frozenset(features)
    fast, slow = {"fast": 1.0}, {"fast": 1.0, "slow": SLOWER}
    kinds = slow if UNLIKE in has else fast
    if GROUPS in has:
        kinds = {f"{kind}-{group}": s for kind, s in kinds.items() for group in "ab"}
    count = 3 if VARIANTS in has else 1
    largest = LARGEST_ITEMS if SIZES in has else LARGEST
    roots = []
    models, trees = [], []
    if PIPELINE not in has or has & {SEVERAL, GROUPS}:
        roots.append("vision")
        models.append(networks("vision", 10, 30, (90, 84, 76)[:count], kinds, largest))
    if SEVERAL in has or (GROUPS in has and PIPELINE not in has):
        roots.append("speech")
        models.append(networks("speech", 25, 100, (92, 86, 78)[:count], kinds, largest))
    for name, slo_s in (("vision", 0.3), ("speech", 0.9)):
        if name in roots:
            trees.append(Tree.of_model(name, _classes(slo_s, has)))
    if PIPELINE in has:
        roots.append("photo")
        models.append(networks("detect", 15, 50, (88, 80, 70)[:count], kinds, largest))
        models.append(networks("who", 8, 25, (94, 88, 80)[:count], kinds, largest))
        made = {v.name: {"who": 2.0} for v in models[-2].variants}
        tasks = (TreeTask("detect", "detect", None, made), TreeTask("who", "who", "detect"))
        trees.append(Tree("photo", tasks, _classes(0.9, has)))
    if SIZES in has:
        mean = float(np.mean(ITEMS.draw(20_000, np.random.default_rng(0))))
        sized = {tree.tasks[0].model for tree in trees}
        models = [replace(m, items=mean) if m.name in sized else m for m in models]
    problem = auto.Problem(tuple(models), tuple(trees), {}, _kinds(kinds, has))
    if GROUPS in has:
        of_tree = {tree.name: "ab"[i % 2] for i, tree in enumerate(trees)}
        group_of = {task.model: of_tree[tree.name] for tree in trees for task in tree.tasks}
        problem = replace(problem, group_of=group_of)
    if BUDGET in has:
        problem = replace(problem, budget_per_hour=_budget(has))
    workloads = _workloads(problem, has, duration_s, seed)
    name = " × ".join(f for f in FEATURES if f in has)
    return Application(name, has, problem, workloads, duration_s, tuple(roots))


def _classes(slo_s: float, has: Collection[str]) -> dict[str, float]:
    return {"": slo_s, "gold": 0.6 * slo_s} if CLASSES in has else {"": slo_s}


def _kinds(kinds: Mapping[str, float], has: Collection[str]) -> tuple[auto.Kind, ...]:
    """Return the kinds of workers: 8 fast workers, or 4 fast and 8 slow.

    With a budget or autoscaling, there are at most twice as many of each. The budget pays for about
    half of them. Groups get half of each kind.
    """
    made = []
    for kind in kinds:
        base, _, group = kind.partition("-")
        most = WORKERS if UNLIKE not in has else {"fast": 4, "slow": 8}[base]
        if BUDGET in has or AUTOSCALING in has:
            most = 2 * most
        if group:
            most = most // 2
        least = 0 if AUTOSCALING in has or BUDGET in has else most
        price = PRICES[base] if UNLIKE in has else 1.0
        made.append(auto.Kind(kind, least, most, price, group=group or None))
    return tuple(made)


def _budget(has: Collection[str]) -> float:
    return 4 * PRICES["fast"] + 8 * PRICES["slow"] if UNLIKE in has else float(WORKERS)


def capacity(problem: auto.Problem, tree: Tree, kind: str, variant: int = 0) -> float:
    """Return the requests per second that one worker can serve of a tree, and of nothing else.

    Each task gets a part of the SLO in proportion to ℓ(1), and batches that fill this part.
    """
    whole = sum(
        problem.model[t.model].variants[variant].profiles[kind].latency(1) for t in tree.tasks
    )
    seconds, rates = 0.0, {tree.root: 1.0}
    for task in tree.order:
        model = problem.model[task.model]
        chosen = model.variants[min(variant, len(model.variants) - 1)]
        profile = chosen.profiles[kind]
        for child in tree.children(task.name):
            rates[child] = rates[task.name] * task.factor(chosen.name, child)
        share = min(tree.slos_s.values()) * profile.latency(1) / whole
        batch = max(profile.max_batch_within(share), 1)
        seconds += rates[task.name] * model.items * profile.latency(batch) / batch
    return 1 / seconds


def _workloads(
    problem: auto.Problem, has: frozenset[str], duration_s: float, seed: int
) -> dict[str, Workload]:
    """Return the workload of each stream.

    Each tree takes an equal part of the pool's time on average. The load is 0.95 of the pool's
    capacity, or 0.85 with bursts. With variants it is 1.6 times that, too much for the most
    accurate ones.

    Real demand is uneven. With several trees, their demands swing against each other by a factor of
    4. With autoscaling, all demands rise and fall almost together by a factor of 7, as in a day.
    With preemption, groups or classes, arrivals come in bursts (Gamma gaps of shape 0.3).
    """
    bursts = bool(has & {PREEMPTION, GROUPS, CLASSES})
    load = (0.85 if bursts else 0.95) * (1.6 if VARIANTS in has else 1.0)
    shape = 0.3 if bursts else 1.0
    swing = 0.75 if AUTOSCALING in has else 0.6 if len(problem.trees) > 1 else 0.0
    rng = np.random.default_rng(seed)
    workloads: dict[str, Workload] = {}
    for i, tree in enumerate(problem.trees):
        workers = {kind.name: _usual(kind, has) for kind in problem.kinds}
        pool = sum(n * capacity(problem, tree, kind) for kind, n in workers.items())
        rate = load * pool / len(problem.trees)
        steps = np.arange(math.ceil(duration_s))
        phase = 0.1 * i if AUTOSCALING in has else i / len(problem.trees)
        wave = 1 + swing * np.sin(2 * np.pi * (steps / PERIOD_S + phase))
        sizes = ITEMS if SIZES in has else None
        for stream, _ in tree.streams():
            share = 1.0 if len(tree.slos_s) == 1 else 0.3 if "@" in stream else 0.7
            process = Trace(rates=(rate * share * wave).tolist(), shape=shape)
            times = process.times(duration_s, rng).tolist()
            workloads[stream] = Workload(arrivals=Times(times_s=times), sizes=sizes)
    return workloads


def _usual(kind: auto.Kind, has: frozenset[str]) -> float:
    """Return the number of workers of a kind for which the load is computed."""
    return kind.max_workers / 2 if has & {BUDGET, AUTOSCALING} else kind.max_workers


def one_variant(problem: auto.Problem, variant: int) -> auto.Problem:
    """Return the problem with one variant per model: that of this index, or else the last."""
    models = tuple(
        replace(m, variants=m.variants[variant : variant + 1] or m.variants[-1:])
        for m in problem.models
    )
    left = {v.name for m in models for v in m.variants}
    trees = []
    for tree in problem.trees:
        tasks = []
        for task in tree.tasks:
            factors = {v: f for v, f in task.factors.items() if v in left}
            tasks.append(replace(task, factors=factors))
        trees.append(replace(tree, tasks=tuple(tasks)))
    return replace(problem, models=models, trees=tuple(trees))
