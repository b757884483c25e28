"""The rate that workers sustain, by simulation of the policy: several workers of different kinds,
or one worker alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant, Worker
from ray_slo.core.policy import Policy, PolicyWrapper, unwrapped
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import DEFAULT_CLASS, Tree, TreeTask
from ray_slo.papers.kairos import Configuration, Market
from ray_slo.policies.auto import Auto
from ray_slo.policies.registry import live_arguments, policy_for
from ray_slo.simulation.search import goodput_search
from ray_slo.simulation.workloads import Measured, Workload

_REQUESTS = 1000  # number of requests in a run at the guess; it has at least 10 SLOs of traffic
_MANY = 200  # with more requests within one SLO, chance does not matter


def sustained(
    make_policy: Callable[[], Policy],
    model: str,
    market: Market,
    configuration: Configuration,
    most: float,
    requests: int,
) -> float:
    """Return the largest rate whose requests are answered in time, in requests per second.

    Args:
        configuration: number of workers by instance type.
        most: upper bound on the rate.
        requests: number of requests in each simulated run.
    """
    served = Model(model, market.latency_slo_s, (Variant(model, dict(market.profiles)),))
    workers = [
        Worker(f"{kind.name}-{i}", kind.name, frozenset({model}))
        for kind in market.types
        for i in range(configuration.get(kind.name, 0))
    ]
    duration_s = requests / most
    found = goodput_search(
        make_policy,
        Cluster.of([served], workers),
        Workload.poisson(1.0, sizes=Measured(values=np.asarray(market.sizes).tolist())),
        duration_s=duration_s,
        warmup_s=0.05 * duration_s,
        start_rate=0.8 * most,
        growth=1.2,
        tolerance=0.03,
        max_probes=25,
    )
    return found.rate


def of_one_worker(
    policy: Any,
    kwargs: Mapping[str, Any],
    accuracies: Mapping[str, float | None],
    model: str,
    profiles: Mapping[str, LatencyProfile],
    slo_s: float,
    guess: float,
) -> float:
    """Return the largest rate at which a live policy answers 99 % of the requests in time on one
    worker, in requests per second (T of SHEPHERD §4). Arrivals are Poisson.

    Args:
        policy: a name, or another argument of `policies.policy_for`. `auto` keeps its first
            setting, because rehearsals would take ten times as long, and there may be hundreds of
            models.
        kwargs: arguments of the policy.
        accuracies, profiles: accuracies and profiles of the model's variants.
        model: name of the model.
        guess: first rate of the search. If hundreds of requests come within the SLO, it is the
            result, because chance does not matter then.
    """
    if guess * slo_s > _MANY:
        return guess
    duration_s = max(_REQUESTS / guess, 10 * slo_s)
    variants = tuple(Variant(v, {"worker": p}, accuracies.get(v)) for v, p in profiles.items())
    given = {**live_arguments(policy, 1e3 * slo_s), **kwargs}
    tree = Tree(model, (TreeTask(model, model),), {DEFAULT_CLASS: slo_s})
    found = goodput_search(
        lambda: _unrehearsed(policy_for(policy, given, (tree,), {model: len(variants)})),
        Cluster.uniform([Model(model, slo_s, variants)], 1, "worker"),
        Workload.poisson(guess),
        duration_s=duration_s,
        warmup_s=0.05 * duration_s,
        start_rate=0.8 * guess,
        growth=1.25,
        tolerance=0.05,
        max_probes=25,
    )
    return found.rate


class _Unrehearsed(PolicyWrapper):
    """The policy `auto` that keeps its first setting."""

    def wanted(self) -> list[Any]:
        return []


def _unrehearsed(policy: Policy) -> Policy:
    return _Unrehearsed(policy) if isinstance(unwrapped(policy), Auto) else policy
