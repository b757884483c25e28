"""What a configuration of unlike workers sustains, found by simulating the policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant, Worker
from ray_slo.core.policy import Policy
from ray_slo.planning.kairos import Configuration, Problem
from ray_slo.simulation.search import goodput_search
from ray_slo.simulation.workloads import Measured, Workload


def sustained(
    make_policy: Callable[[], Policy],
    model: str,
    problem: Problem,
    configuration: Configuration,
    most: float,
    requests: int,
) -> float:
    """The largest rate, in requests per second, whose requests are answered in time.

    Args:
        configuration: workers by instance type.
        most: a bound on the rate.
        requests: number of requests to try a rate with.
    """
    served = Model(model, problem.latency_slo_s, (Variant(model, dict(problem.profiles)),))
    workers = [
        Worker(f"{kind.name}-{i}", kind.name, frozenset({model}))
        for kind in problem.types
        for i in range(configuration.get(kind.name, 0))
    ]
    duration_s = requests / most
    found = goodput_search(
        make_policy,
        Cluster.of([served], workers),
        Workload.poisson(1.0, sizes=Measured(values=np.asarray(problem.sizes).tolist())),
        duration_s=duration_s,
        warmup_s=0.05 * duration_s,
        start_rate=0.8 * most,
        growth=1.2,
        tolerance=0.03,
        max_probes=25,
    )
    return found.rate
