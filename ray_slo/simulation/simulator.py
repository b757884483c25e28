"""The function `simulate(policy, cluster, workload, …) -> Report`, which runs a policy in virtual
time (`engine.Run`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster
from ray_slo.core.policy import Policy
from ray_slo.policies.registry import make_policy, refuse_sizes
from ray_slo.simulation.arrivals import Ints
from ray_slo.simulation.engine import (
    Run,
    WorkerEvent,
    noise_factors,
    non_negative,
    pace_factors,
)
from ray_slo.simulation.learning import Learner
from ray_slo.simulation.report import Report
from ray_slo.simulation.workloads import Requests, Workload


def simulate(
    policy: str | Policy,
    cluster: Cluster,
    workload: Workload,
    *,
    duration_s: float | None = None,
    seed: int = 0,
    warmup_s: float = 0.0,
    latency_noise: float = 0.0,
    truth: Cluster | None = None,
    report_delay_s: float = 0.0,
    preempt_delay_s: float = 0.0,
    worker_events: Iterable[WorkerEvent] = (),
    policy_kwargs: Mapping[str, Any] | None = None,
    first_profile: float | None = None,
    pace: Sequence[tuple[float, float]] = (),
) -> Report:
    """Run `policy` on `workload` in virtual time until every request has been answered.

    Args:
        policy: a policy object, which cannot be used again; or a name, with `policy_kwargs`.
        cluster: the cluster that the policy sees.
        duration_s: requests arrive in [0, duration_s); default: the workload's length.
        seed: seed of the arrivals and the noise (independent streams).
        warmup_s: requests that arrive before this time are served but not counted.
        latency_noise: standard deviation σ of the logarithm of actual over profiled execution
            time (median 1); 0.05 is about ± 5 %.
        truth: the real cluster, if its profiles or delays differ from `cluster`.
        report_delay_s: time from a batch's end until the policy hears of it.
        preempt_delay_s: time from a `Preempt` until the batch stops (message and exit point).
        worker_events: workers that leave and join.
        first_profile: factor of the profiles that the policy's host believes at first. It learns
            from batches, as a live one does. Default: the policy knows the profiles of `cluster`.
        pace: (time in seconds, factor of execution times), rising, for machines whose speed
            changes. Factors between two times are interpolated.

    Raises:
        ValueError: an argument is not valid.
        PolicyError: the policy broke its contract.
    """
    duration_s = workload.duration_s(duration_s)
    if not 0 <= warmup_s < duration_s:
        raise ValueError(
            f"warmup_s must be at least 0 and less than duration_s = {duration_s}, got {warmup_s}"
        )
    non_negative("latency_noise", latency_noise)
    non_negative("report_delay_s", report_delay_s)
    non_negative("preempt_delay_s", preempt_delay_s)
    if not cluster.models:
        raise ValueError("cluster must have at least one model")
    arrivals_rng, noise_rng = np.random.default_rng(seed).spawn(2)
    requests = workload.generate(cluster, duration_s, arrivals_rng)
    if requests.size is not None:
        _check_sizes(requests.size, requests, cluster, policy, policy_kwargs)
    made = make_policy(policy, policy_kwargs)
    if first_profile is not None:
        made = Learner(made, cluster, first_profile)
    run = Run(
        made,
        cluster,
        truth or cluster,
        requests,
        noise_factors(latency_noise, noise_rng),
        report_delay_s,
        preempt_delay_s,
        sorted(worker_events, key=lambda e: e.at_s),
        pace=pace_factors(pace),
    )
    run.loop()
    return run.report({"duration_s": duration_s, "warmup_s": warmup_s, "seed": seed})


def _check_sizes(
    sizes: Ints,
    requests: Requests,
    cluster: Cluster,
    policy: str | Policy,
    policy_kwargs: Mapping[str, Any] | None,
) -> None:
    """Check that some worker can serve each request, and that the policy takes account of sizes."""
    refuse_sizes(policy, policy_kwargs)
    for i, name in enumerate(requests.models):
        largest = int(sizes[requests.model == i].max(initial=1))
        profiles = [p for v in cluster.models[name].variants for p in v.profiles.values()]
        most = max((p.max_batch_size for p in profiles), default=largest)
        if largest > most:
            raise ValueError(
                f"workload.sizes: a request for {name!r} has {largest} items, and its profiles end "
                f"at {most}: give sizes.max_size, or profiles of larger batches"
            )
