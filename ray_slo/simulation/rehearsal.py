"""Settings of a policy, tried on the traffic of the last seconds: `rehearse(rehearsal)`.

Every setting plays the same requests, in a simulated system with the workers, profiles and scatter
that were measured. Before what counts, the last part of the traffic is played once, so that the
settings have measured the load when it begins. They advance together, and one that is worse than
the best by more than chance explains is given up on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.policy import Policy
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.rehearsal import Rehearsal, Rehearsed, Score, Setting, Traffic
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import ramsis
from ray_slo.policies.auto_settings import make
from ray_slo.simulation.application_run import ApplicationRun, Shape
from ray_slo.simulation.arrivals import Floats, Ints
from ray_slo.simulation.engine import Run, noise_factors
from ray_slo.simulation.fleet import Timing
from ray_slo.simulation.frames import EPSILON_S
from ray_slo.simulation.samplers import samplers
from ray_slo.simulation.workloads import Requests

_STRETCHES = 12
_LOOKS = {4: 0.15, 8: 0.08}
"""Stretches after which a setting is given up that is behind by more than this part of the best
value, and by 3 standard errors. What is behind by less may be ahead in a burst that follows."""
_WARM_S, _WARM_SLOS, _MOST_WARM = 0.3, 5.0, 4.0  # played before what counts; times the traffic
_ENOUGH, _MOST_TIMES = 3000, 3  # requests; how often less is played at most


def solve(problem: Any) -> Any:
    """What a policy wants solved aside: a rehearsal, or a table of `ramsis`."""
    return rehearse(problem) if isinstance(problem, Rehearsal) else ramsis.solve(problem)


def rehearse(problem: Rehearsal) -> Rehearsed:
    """Try all settings. One that cannot serve this traffic gets a score with the `error`."""
    played = _played(problem)
    requests, warm = played.requests, played.warm
    counted = len(requests) - warm
    edges = warm + np.linspace(0, counted, min(_STRETCHES, counted) + 1).astype(np.int64)
    runs: dict[str, _Trial] = {}
    errors: dict[str, Score] = {}
    for setting in problem.settings:
        try:
            runs[setting.label] = _Trial(problem, setting, played, edges)
        except Exception as error:  # of a policy that may be anybody's
            errors[setting.label] = _failed(error)
    racing = dict(runs)
    last = len(edges) - 1
    for look in (*(look for look in _LOOKS if look < last), last):
        until = math.inf if look == last else float(requests.deadline[: edges[look]].max())
        for label, trial in list(racing.items()):
            try:
                trial.advance(until, look)
            except Exception as error:
                errors[label] = _failed(error)
                del racing[label], runs[label]
        if look in _LOOKS:
            _give_up(racing, np.diff(edges)[:look], problem.settings[0].label, _LOOKS[look])
    at = problem.traffic.arrival
    over_s = max(float(at[-1] - at[0]), 1e-9)
    roots = problem.traffic.roots
    return Rehearsed(
        problem.number,
        float(at[-1]),
        len(at) / over_s,
        tuple(task for _, task in roots),
        tuple(np.bincount(played.root[warm:], minlength=len(roots)).tolist()),
        tuple(np.diff(edges).tolist()),
        {label: trial.score() for label, trial in runs.items()} | errors,
    )


def _failed(error: Exception) -> Score:
    return Score(error=f"{type(error).__name__}: {error}")


def _give_up(racing: dict[str, _Trial], counts: Ints, current: str, far: float) -> None:
    """Leave out the hopeless; the setting in force stays."""
    if len(racing) < 2:
        return
    best = max(racing.values(), key=lambda trial: trial.value.sum())
    best_value = float(best.value.sum() / counts.sum())
    for label, trial in list(racing.items()):
        behind = (best.value - trial.value) / counts
        mean = float(np.average(behind, weights=counts))
        error = float(behind.std()) / math.sqrt(len(counts))
        if label != current and mean > 3 * error and mean > far * best_value:
            del racing[label]


class _Played(NamedTuple):
    """Requests from time 0 on: a warm-up, then what counts. Where the traffic is shorter than the
    warm-up, it is repeated: an overload takes some SLOs until queues are as long as they will be.

    Attributes:
        root: of every request, index into the traffic's roots.
        warm: how many belong to the warm-up.
    """

    requests: Requests
    root: Ints
    warm: int


def _played(problem: Rehearsal) -> _Played:
    """Little traffic is played several times, with arrivals that differ by a gap or so: what comes
    of one sequence is chance, to a part."""
    t = problem.traffic
    n = len(t)
    slo_s = float((t.deadline - t.arrival).max())
    begin, end = float(t.arrival[0]), float(t.arrival[-1])
    gap_s = (end - begin) / max(n - 1, 1)
    span_s = end - begin + gap_s
    warm_s = min(max(_WARM_S, _WARM_SLOS * slo_s), _MOST_WARM * span_s)
    before = int(warm_s / span_s)  # times that all of it is played as a warm-up
    part = np.flatnonzero(t.arrival > end - (warm_s - before * span_s))
    times = min(max(round(_ENOUGH / n), 1), _MOST_TIMES)
    rng = np.random.default_rng([problem.seed, 1])
    index, arrival = [part], [t.arrival[part] - (before + 1) * span_s]
    for time in range(-before, times):
        moved = t.arrival + (rng.uniform(-gap_s, gap_s, n) if time else 0.0)
        order = np.argsort(moved, kind="stable")
        index.append(order)
        arrival.append(np.clip(moved[order], begin, end) + time * span_s)
    chosen, at = np.concatenate(index), np.concatenate(arrival)
    at -= at[0]
    models = list(dict.fromkeys(model for model, _ in t.roots))
    model_of = np.array([models.index(model) for model, _ in t.roots], dtype=np.int64)
    named = all(model == task for model, task in t.roots)
    root = t.root[chosen]
    requests = Requests(
        models,
        model_of[root],
        at,
        at + (t.deadline - t.arrival)[chosen],
        None if t.size is None else t.size[chosen],
        None if named else root,
        () if named else [task for _, task in t.roots],
    )
    return _Played(requests, root, len(part) + before * n)


class _Trial:
    """One setting on its way through the traffic."""

    def __init__(self, problem: Rehearsal, setting: Setting, played: _Played, edges: Ints) -> None:
        self._edges, self._root, self._requests = edges, played.root, played.requests
        self._roots = len(problem.traffic.roots)
        trees = [Tree.from_json(tree) for tree in problem.trees]
        policy = make(setting, problem.cluster, trees, problem.planned, problem.composing)
        self._run = _run(problem, policy, played, trees)
        if hasattr(policy, "expect_load"):  # as of one that takes over
            policy.expect_load(0.0, _rates(problem.traffic))
        self._done = 0
        self.value: Floats = np.zeros(0)  # by stretch so far

    def advance(self, until: float, stretches: int) -> None:
        """Play until then, and count the first `stretches`."""
        self._run.loop(until)
        self._worth, self._latency_s = _worth(self._run, self._requests)
        self._done = stretches
        edges = self._edges[: stretches + 1]
        sums = np.concatenate([[0.0], np.cumsum(self._worth)])
        self.value = np.diff(sums[edges])

    def score(self) -> Score:
        """What came of it."""
        begin, end = self._edges[0], self._edges[self._done]
        worth, latency_s = self._worth[begin:end], self._latency_s[begin:end]
        root, roots = self._root[begin:end], self._roots
        good = np.bincount(root[worth > 0], minlength=roots)
        sums = np.bincount(root, weights=worth, minlength=roots)
        answered = latency_s[np.isfinite(latency_s)]
        whole = self._done == len(self._edges) - 1
        return Score(
            tuple(self.value.tolist()),
            tuple(good.tolist()),
            tuple(
                100 * s / n if n else None
                for s, n in zip(sums.tolist(), good.tolist(), strict=True)
            ),
            float(np.median(answered)) if whole and len(answered) else None,
        )


def _rates(t: Traffic) -> dict[str, float]:
    """Items per second by model that clients ask for."""
    over_s = max(float(t.arrival[-1] - t.arrival[0]), 1e-9)
    counts = np.bincount(t.root, weights=t.size, minlength=len(t.roots)) / over_s
    return {model: float(rate) for (model, _), rate in zip(t.roots, counts, strict=True)}


def _run(problem: Rehearsal, policy: Policy, played: _Played, trees: Sequence[Tree]) -> Run:
    told, requests = problem.cluster, played.requests
    real = replace(told, models=_paced(told, problem.pace))
    noise_rng, items_rng = np.random.default_rng(problem.seed).spawn(2)
    noise = noise_factors(problem.noise, noise_rng)
    if not any(len(tree.tasks) > 1 for tree in trees):
        return Run(policy, told, real, requests, noise, 0.0, told.preempt_delay_s, [])
    trees = _all_trees(trees, told, problem.factors)
    tree_of = {tree.root: tree.name for tree in trees}
    streams = [tree_of[task] for _, task in problem.traffic.roots]
    clients = Requests(streams, played.root, requests.arrival, requests.deadline, requests.size)
    shape = Shape(
        tuple(trees),
        told,
        real,
        {},
        problem.composing.get("communication_s", 0.0),
        samplers(
            trees,
            {m.name: [v.name for v in m.variants] for m in told.models.values()},
            "poisson",
            items_rng,
        ),
        noise,
        preempt_delay_s=told.preempt_delay_s,
    )
    return ApplicationRun(policy, shape, clients, Timing(), learns=False)


def _paced(cluster: Cluster, pace: Mapping[tuple[str, str], float]) -> dict[str, Model]:
    """Models with profiles as measured."""

    def measured(variant: Variant) -> Variant:
        profiles = {
            hardware: LatencyProfile([factor * t for t in profile.table])
            if (factor := pace.get((variant.name, hardware), 1.0)) != 1.0
            else profile
            for hardware, profile in variant.profiles.items()
        }
        return replace(variant, profiles=profiles)

    return {
        m.name: replace(m, variants=tuple(measured(v) for v in m.variants))
        for m in cluster.models.values()
    }


def _all_trees(
    trees: Sequence[Tree], cluster: Cluster, factors: Mapping[tuple[str, str], float]
) -> list[Tree]:
    """With trees of one task for models alone, and factors as measured."""

    def measured(tree: Tree) -> Tree:
        tasks = []
        for task in tree.tasks:
            of = {variant: dict(made) for variant, made in task.factors.items()}
            for (variant, child), factor in factors.items():
                if child in tree.children(task.name):
                    of.setdefault(variant, {})[child] = factor
            tasks.append(replace(task, factors=of))
        return replace(tree, tasks=tuple(tasks))

    used = {task.model for tree in trees for task in tree.tasks}
    alone = [
        Tree(m.name, (TreeTask(m.name, m.name),), {"": m.latency_slo_s})
        for m in cluster.models.values()
        if m.name not in used
    ]
    return [*map(measured, trees), *alone]


def _worth(run: Run, requests: Requests) -> tuple[Floats, Floats]:
    """Of every request so far: accuracy of its answer (share; 0: late or none), and its latency,
    seconds (NaN: none)."""
    n = len(requests)
    if isinstance(run, ApplicationRun):
        found = run.results({})
        frames, leaves = found["frames"], found["leaves"]
        count = np.bincount(leaves["frame"], minlength=n)
        sums = np.bincount(leaves["frame"], weights=leaves["accuracy"], minlength=n)
        end = np.where(frames["dropped"] | np.isnan(frames["end_s"]), np.inf, frames["end_s"])
        worth = sums / np.maximum(count, 1) / 100
        if any(v.accuracy is None for v in run.truth.variants.values()):
            worth = (count > 0).astype(float)
    else:
        batch = run.answers(n)["batch"]
        columns = run.batches()
        accuracy = np.array([_share(v) for v in run.truth.variants.values()] or [1.0])
        served = (batch >= 0) & _finished(columns, batch)
        end = np.full(n, np.inf)
        end[served] = columns["finished_s"][batch[served]]
        worth = np.zeros(n)
        worth[served] = accuracy[columns["variant"][batch[served]]]
    worth = np.where(end <= requests.deadline + EPSILON_S, worth, 0.0)
    return worth, np.where(np.isfinite(end), end - requests.arrival, np.nan)


def _share(variant: Variant) -> float:
    return 1.0 if variant.accuracy is None else variant.accuracy / 100


def _finished(columns: Mapping[str, Any], batch: Ints) -> Any:
    """Whether each request's batch has come to its end."""
    if not len(columns["status"]):
        return np.zeros(len(batch), dtype=bool)
    return columns["status"][batch] == 0
