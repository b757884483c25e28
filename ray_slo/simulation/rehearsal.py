"""Rehearsals: simulations of several settings of a policy on the traffic of the last seconds
(`rehearse(rehearsal)`).

Every setting serves the same requests, in a simulated system with the measured workers, profiles
and scatter. A warm-up comes before the counted requests: the earlier traffic, or the traffic itself
if too little is known. So the settings have measured the load at the start, and meet a change of
the load as the system did. A tail comes after the counted requests, so that the last of them do not
have the workers for themselves. The settings advance together. A setting that is worse than the
best by more than chance explains is stopped on the way.

Some settings do well until the load rises, and collapse then (`auto_settings.collapses`). Those
that are near the best serve the same requests once more, in two thirds of the time.
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
from ray_slo.papers import ramsis
from ray_slo.policies.auto_settings import collapses, make
from ray_slo.simulation.application_run import ApplicationRun, Shape
from ray_slo.simulation.arrivals import Floats, Ints
from ray_slo.simulation.engine import Run, noise_factors
from ray_slo.simulation.fleet import Timing
from ray_slo.simulation.frames import EPSILON_S
from ray_slo.simulation.samplers import samplers
from ray_slo.simulation.workloads import Requests

_STRETCHES = 12
_LOOKS = {4: 0.15, 8: 0.08}
"""After such a stretch, a setting is stopped if it is behind the best value by more than this part,
and by 3 standard errors. A smaller gap may close in a later burst."""
# The warm-up: seconds, SLOs, and at most this multiple of the traffic.
_WARM_S, _WARM_SLOS, _MOST_WARM = 0.3, 5.0, 4.0
_ENOUGH, _MOST_TIMES = 3000, 3  # requests; less traffic is repeated at most this often
_RISE = 1.5  # times the load, for settings that may collapse
_RISE_NEAR = 0.97  # of the best value: a setting with less is not tried under it


def solve(problem: Any) -> Any:
    """Solve a policy's problem: a rehearsal, or a table of `ramsis`."""
    return rehearse(problem) if isinstance(problem, Rehearsal) else ramsis.solve(problem)


def rehearse(problem: Rehearsal) -> Rehearsed:
    """Try all settings, and return their scores. If a setting cannot serve this traffic, its score
    has the `error`."""
    played = _played(problem)
    requests, counted = played.requests, played.counted
    edges = np.linspace(0, len(counted), min(_STRETCHES, len(counted)) + 1).astype(np.int64)
    runs: dict[str, _Trial] = {}
    errors: dict[str, Score] = {}
    for setting in problem.settings:
        try:
            runs[setting.label] = _Trial(problem, setting, played, edges)
        except Exception as error:  # any policy may raise, also a user's
            errors[setting.label] = _failed(error)
    racing = dict(runs)
    last = len(edges) - 1
    for look in (*(look for look in _LOOKS if look < last), last):
        until = _until(requests, counted[: edges[look]])
        for label, trial in list(racing.items()):
            try:
                trial.advance(until, look)
            except Exception as error:
                errors[label] = _failed(error)
                del racing[label], runs[label]
        if look in _LOOKS:
            if problem.calm and _loses_nothing(problem, played, edges[: look + 1], runs):
                edges = edges[: look + 1]
                counted = counted[: edges[-1]]
                break
            _give_up(racing, np.diff(edges)[:look], problem.settings[0].label, _LOOKS[look])
    whole = len(edges) - 1
    scores = {label: trial.score(whole) for label, trial in runs.items()}
    scores |= _falls(problem, played, edges, scores)
    at = problem.traffic.arrival[problem.traffic.before :]
    over_s = max(float(at[-1] - at[0]), 1e-9)
    roots = problem.traffic.roots
    return Rehearsed(
        problem.number,
        float(at[-1]),
        len(at) / over_s,
        tuple(task for _, task in roots),
        tuple(np.bincount(played.root[counted], minlength=len(roots)).tolist()),
        tuple(np.diff(edges).tolist()),
        scores | errors,
    )


def _until(requests: Requests, counted: Ints) -> float:
    """The last deadline of the counted requests, and of those before them."""
    return float(requests.deadline[: counted[-1] + 1].max())


def _loses_nothing(
    problem: Rehearsal, played: _Played, edges: Ints, runs: Mapping[str, _Trial]
) -> bool:
    """Whether the current setting answers all requests in time, with the most accurate variants."""
    trial = runs.get(problem.settings[0].label)
    if trial is None or any(len(tree["tasks"]) > 1 for tree in problem.trees):
        return False
    models = problem.cluster.models
    most = [max(map(_share, models[model].variants)) for model, _ in problem.traffic.roots]
    possible = np.array(most)[played.root[played.counted[: edges[-1]]]].sum()
    return bool(trial.value.sum() >= possible - 1e-9)


def _falls(
    problem: Rehearsal, played: _Played, edges: Ints, scores: Mapping[str, Score]
) -> dict[str, Score]:
    """Scores of settings that may collapse, with what they lose if the load rises."""
    whole = {label: sum(s.value) for label, s in scores.items() if s.p50_s is not None}
    settings = {s.label: s for s in problem.settings if s.label in whole}
    near = _RISE_NEAR * max(whole.values(), default=0.0)
    fragile = [s for s in settings.values() if collapses(s) and whole[s.label] >= near]
    sturdy = [s for s in settings.values() if not collapses(s)]
    if not fragile or not sturdy:
        return {}
    best = max(sturdy, key=lambda s: whole[s.label])
    r = played.requests
    at = r.arrival / _RISE
    risen = played._replace(requests=replace(r, arrival=at, deadline=at + (r.deadline - r.arrival)))
    until = _until(risen.requests, played.counted[: edges[-1]])
    values = {}
    for setting in (best, *fragile):
        trial = _Trial(problem, setting, risen, edges)
        trial.advance(until, len(edges) - 1)
        values[setting.label] = float(trial.value.sum())
    most = max(values[best.label], 1e-9)
    return {
        s.label: replace(scores[s.label], fall=max(1 - values[s.label] / most, 0.0))
        for s in fragile
    }


def _failed(error: Exception) -> Score:
    return Score(error=f"{type(error).__name__}: {error}")


def _give_up(racing: dict[str, _Trial], counts: Ints, current: str, far: float) -> None:
    """Stop settings that are too far behind. The setting in force is not stopped."""
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
    """Requests from time 0 on.

    Attributes:
        root: index of each request's root in the traffic's roots.
        counted: indices of the counted requests, ascending. The warm-up is before them, and the
            tail after them.
    """

    requests: Requests
    root: Ints
    counted: Ints


def _played(problem: Rehearsal) -> _Played:
    """Return the requests of a rehearsal: warm-up, counted requests and tail.

    Short traffic is repeated, with its arrivals shifted by about a gap, because the result of one
    sequence is partly chance. If the earlier traffic is shorter than the warm-up, the traffic
    itself comes first. In overload, queues need several SLOs to reach their final length.
    """
    t = problem.traffic
    n = len(t) - t.before
    new = np.arange(t.before, len(t))
    slo_s = float((t.deadline - t.arrival).max())
    begin, end = float(t.arrival[t.before]), float(t.arrival[-1])
    gap_s = (end - begin) / max(n - 1, 1)
    span_s = end - begin + gap_s
    warm_s = min(max(_WARM_S, _WARM_SLOS * slo_s), _MOST_WARM * span_s)
    before = np.flatnonzero(t.arrival[: t.before] > begin - warm_s)
    before_s = begin - float(t.arrival[before[0]]) if len(before) else 0.0
    rng = np.random.default_rng([problem.seed, 1])
    parts: list[tuple[Ints, Floats, bool]] = []  # index in the traffic, time, and whether it counts
    start = 0.0

    def add(of: Ints, since: float, over_s: float, *, count: bool, moved: bool = True) -> None:
        nonlocal start
        at = t.arrival[of] - since
        if moved:
            at = np.clip(at + rng.uniform(-gap_s, gap_s, len(of)), 0.0, over_s)
        order = np.argsort(at, kind="stable")
        parts.append((of[order], start + at[order], count))
        start += over_s

    whole, part_s = divmod(max(warm_s - before_s, 0.0), span_s)
    since = begin + span_s - part_s
    add(new[t.arrival[new] >= since], since, part_s, count=False)
    for _ in range(int(whole)):
        add(new, begin, span_s, count=False)
    for time in range(min(max(round(_ENOUGH / n), 1), _MOST_TIMES)):
        if len(before):
            add(before, begin - before_s, before_s, count=False, moved=time > 0)
        add(new, begin, span_s, count=True, moved=time > 0)
    add(new[t.arrival[new] < begin + slo_s], begin, slo_s, count=False)
    chosen = np.concatenate([of for of, _, _ in parts])
    at = np.concatenate([at for _, at, _ in parts])
    counted = np.flatnonzero(np.concatenate([np.full(len(of), c) for of, _, c in parts]))
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
    return _Played(requests, root, counted)


class _Trial:
    """One setting that serves the traffic."""

    def __init__(self, problem: Rehearsal, setting: Setting, played: _Played, edges: Ints) -> None:
        self._edges, self._counted, self._requests = edges, played.counted, played.requests
        self._root = played.root[played.counted]
        self._roots = len(problem.traffic.roots)
        trees = [Tree.from_json(tree) for tree in problem.trees]
        policy = make(setting, problem.cluster, trees, problem.planned, problem.composing)
        self._run = _run(problem, policy, played, trees)
        if hasattr(policy, "expect_load"):  # a live setting that takes over gets this too
            policy.expect_load(0.0, _rates(problem.traffic))
        self._done = 0
        self.value: Floats = np.zeros(0)  # value of each stretch so far

    def advance(self, until: float, stretches: int) -> None:
        """Run until a time, and count the first `stretches`."""
        self._run.loop(until)
        worth, latency_s = _worth(self._run, self._requests)
        self._worth, self._latency_s = worth[self._counted], latency_s[self._counted]
        self._done = stretches
        edges = self._edges[: stretches + 1]
        sums = np.concatenate([[0.0], np.cumsum(self._worth)])
        self.value = np.diff(sums[edges])

    def score(self, stretches: int) -> Score:
        """The setting's score, if so many stretches are all."""
        end = self._edges[self._done]
        worth, latency_s = self._worth[:end], self._latency_s[:end]
        root, roots = self._root[:end], self._roots
        good = np.bincount(root[worth > 0], minlength=roots)
        sums = np.bincount(root, weights=worth, minlength=roots)
        answered = latency_s[np.isfinite(latency_s)]
        whole = self._done == stretches
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
    """Return the items per second of each model that clients ask for."""
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
    return ApplicationRun(policy, shape, clients, Timing())


def _paced(cluster: Cluster, pace: Mapping[tuple[str, str], float]) -> dict[str, Model]:
    """Return the models with the measured profiles."""

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
    """Return all trees with the measured factors. Single models have trees of one task."""

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
    """Return two arrays of shape (requests,): the accuracy of each answer so far, 0 to 1, and its
    latency in seconds. A late or missing answer has accuracy 0. Without an answer, the latency is
    NaN."""
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
    """Return whether the batch of each request has ended, shape (requests,)."""
    if not len(columns["status"]):
        return np.zeros(len(batch), dtype=bool)
    return columns["status"][batch] == 0
