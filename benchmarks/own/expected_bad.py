"""Bad requests that plans of `auto` expect, compared with measured ones, on random problems.

A problem has one to three tasks: in a chain, below a common root, or independent. Each has one to
three variants, which take 1, 0.6 and 0.35 of the time. There are 2 to 20 workers. The load is 0.5
to 1.2 of what they can serve with the quickest variants. Arrivals are Poisson, or come in bursts
(Gamma gaps of shape 0.3). The policy is `price`, which shares workers as a plan expects it.
(`deferred` loses more of a tree in overload.) A run lasts 30 SLOs or more, unless it would
have too many requests. A new plan is made every fifth of the run, but at most every 10 s.
*Expected* is the mean over the plans, weighted by the requests that arrived under each. Bad
requests are late or refused.

*Close*: problems whose expected share is within 2 points, or a factor of 2, of the measured share.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.own.applications import capacity, networks
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.simulation import Gamma, Poisson, Workload, simulate_application

SOURCE = "ray-slo"
ASKED = [
    ("expected", "close", "≥", 90, "of few workers, each may be busy with a batch of another model")
]
PROBLEMS, QUICK = 48, 4
SHAPE = 0.3
FACTOR, POINTS = 2.0, 0.02
SLOS, REQUESTS, MOST = 30, 4_000, 35_000
"""A run lasts at least 30 SLOs and 4,000 requests. Beyond 12 SLOs, it ends at 35,000 requests."""


def problem(rng: np.random.Generator) -> tuple[auto.Problem, dict[str, float]]:
    """Draw a problem; return it with the rate of each stream, in requests per second."""
    tasks, variants, workers = (int(rng.integers(a, b)) for a, b in ((1, 4), (1, 4), (2, 21)))
    models = []
    for i in range(tasks):
        alpha_ms, beta_ms = rng.uniform(20, 100), rng.uniform(80, 480)
        accuracies = [90.0 - 8 * j - i for j in range(variants)]
        models.append(networks(f"m{i}", alpha_ms, beta_ms, accuracies, {"k": 1.0}))
    trees = _trees(models, str(rng.choice(["chain", "fork", "apart"])), rng)
    made = auto.Problem(tuple(models), trees, {}, (auto.Kind("k", workers, workers),))
    load = rng.uniform(0.5, 1.2) / len(trees)
    most = {tree.name: workers * capacity(made, tree, "k", variants - 1) for tree in trees}
    return made, {name: load * rate for name, rate in most.items()}


def _trees(models: Sequence[auto.Model], shape: str, rng: np.random.Generator) -> tuple[Tree, ...]:
    """Return one tree with all tasks, or one per task. An SLO is 4 to 9 times an idle latency."""
    alone_s = [m.variants[0].profiles["k"].latency(1) for m in models]
    slack = rng.uniform(4, 9)
    names = [f"t{i}" for i in range(len(models))]
    if shape == "apart":
        return tuple(
            Tree(name, (TreeTask(name, model.name),), {"": slack * one_s})
            for name, model, one_s in zip(names, models, alone_s, strict=True)
        )
    tasks = []
    for i, model in enumerate(models):
        children = names[i + 1 : i + 2] if shape == "chain" else names[1:] if not i else []
        made = {child: float(rng.uniform(0.5, 2.5)) for child in children}
        parent = None if not i else names[i - 1] if shape == "chain" else names[0]
        factors = {v.name: made for v in model.variants} if made else {}
        tasks.append(TreeTask(names[i], model.name, parent, factors))
    path_s = sum(alone_s) if shape == "chain" else alone_s[0] + max(alone_s[1:], default=0.0)
    return (Tree(names[0], tuple(tasks), {"": slack * path_s}),)


def measure(seed: int) -> tuple[float, float]:
    """Run one problem; return the expected and the measured share of bad requests."""
    rng = np.random.default_rng(seed)
    asked, rates = problem(rng)
    bursts = bool(rng.integers(2))
    slo_s, total = max(max(t.slos_s.values()) for t in asked.trees), sum(rates.values())
    duration_s = max(SLOS * slo_s, REQUESTS / total)
    duration_s = min(duration_s, max(12 * slo_s, MOST / total))
    report = simulate_application(
        asked,
        {
            s: Workload(arrivals=Gamma(rate=r, shape=SHAPE) if bursts else Poisson(rate=r))
            for s, r in rates.items()
        },
        policy="price",
        duration_s=duration_s,
        interval_s=max(duration_s / 5, 10.0),
        load_s=0.2,
        seed=seed,
    )
    table = report.expected
    weights = table.requests / table.requests.sum()
    return (
        float((table.expected_bad.astype(float) * weights).sum()),
        float((table.bad_rate * weights).sum()),
    )


def run(quick: bool, seed: int) -> list[Row]:
    seeds = [1000 * (seed + 1) + i for i in range(QUICK if quick else PROBLEMS)]
    with ProcessPoolExecutor(2) as pool:  # problems are independent: two at a time change nothing
        expected, bad = np.array(list(pool.map(measure, seeds))).T
    error = np.abs(expected - bad)
    factor = np.maximum(expected, bad) / np.maximum(np.minimum(expected, bad), 1e-9)
    close = (error <= POINTS) | (factor <= FACTOR)
    return [
        Row("measured", "problems with more than 1 % bad", "", float((bad > 0.01).sum())),
        Row("expected", "close", "%", 100 * float(close.mean())),
        Row("expected", "median error", "points", 100 * float(np.median(error))),
        Row("expected", "mean error", "points", 100 * float(error.mean())),
        Row("expected", "worst error", "points", 100 * float(error.max())),
    ]
