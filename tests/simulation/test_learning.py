"""First profiles that are wrong, and machines whose speed changes, under every policy."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.policies.registry import POLICIES
from ray_slo.simulation import Workload, simulate, simulate_application

SETTLED = 20  # batches, or five times the SLO: whichever is later
# `pipeline` serves trees only, and the tables of `ramsis` take seconds.
KWARGS = {name: {} for name in POLICIES if name not in ("pipeline", "ramsis")} | {
    "timeout": {"timeout_ms": 10}
}
ALL = pytest.mark.parametrize("policy", KWARGS)


def cluster_of(alpha_s, beta_s, slo_s, workers=1, largest=12):
    profile = LatencyProfile.linear(alpha_s, beta_s, largest)
    model = Model("m", slo_s, (Variant("v", {"default": profile}),))
    return Cluster.uniform([model], workers, delay=DispatchDelay(0.002))


def in_time(report, slo_s, since_s=0.0):
    """Share of the requests after this time, and after the first batches, that are in time."""
    ends = np.sort(report.batches["finished_s"])
    settled_s = max(since_s + 5 * slo_s, ends[ends >= since_s][:SETTLED][-1])
    requests = report.requests
    return (requests["outcome"][requests["arrival_s"] >= settled_s] == "good").mean()


def capacity_of(cluster, policy):
    """Requests per second that a policy can answer in time, at leisure."""
    profile = cluster.models["m"].variants[0].profiles["default"]
    most = max(profile.max_batch_within(0.45 * cluster.models["m"].latency_slo_s), 1)
    return len(cluster.workers) * profile.throughput(1 if policy == "kairos" else most)


machines = st.tuples(
    st.floats(0.001, 0.02),  # seconds per item
    st.floats(0.002, 0.1),  # and per batch
    st.floats(2.6, 8.0),  # the SLO, as a multiple of a batch of one
    st.integers(1, 3),  # workers
)


def share(policy, machine, load, since_s=0.0, **kwargs):
    """Share in time at a part of the policy's capacity."""
    alpha_s, beta_s, slo, workers = machine
    slo_s = slo * (alpha_s + beta_s)
    cluster = cluster_of(alpha_s, beta_s, slo_s, workers)
    rate = load * capacity_of(cluster, policy)
    if policy == "kairos":  # it serves single requests: one that waits for two others is late
        rate *= 0.3
    report = simulate(
        *(policy, cluster, Workload.poisson(rate)),
        duration_s=since_s + max(250 / rate, 20 * slo_s),
        latency_noise=0.05,
        policy_kwargs=KWARGS.get(policy, {}),
        **kwargs,
    )
    return in_time(report, slo_s, since_s)


def check(policy, *args, first_profile=1.0, **kwargs):
    """As many are in time as 95 %, or as many as with profiles that are right all the time."""
    found = share(policy, *args, first_profile=first_profile, **kwargs)
    assert found >= 0.95 or found >= share(policy, *args, **kwargs | {"pace": ()}) - 0.02


@pytest.mark.slow
@ALL
@settings(max_examples=4)
@given(machines, st.floats(0.3, 5.0), st.floats(0.1, 0.6), st.integers(0, 99))
def test_whatever_the_first_profile_requests_are_in_time_soon(policy, machine, first, load, seed):
    check(policy, machine, load, seed=seed, first_profile=first)


@pytest.mark.parametrize("first", [0.3, 5.0])
def test_also_with_ramsis(first):
    check("ramsis", (0.01, 0.05, 4.0, 1), 0.5, seed=0, first_profile=first)


CHANGES = {"halves": (1, 1, 2), "doubles": (2, 2, 1), "stalls": (1, 1, 20, 1)}


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("change", CHANGES)
def test_so_they_are_after_the_speed_of_the_machine_has_changed(policy, change):
    pace = [(6.0 + 0.5 * (i - i % 2), factor) for i, factor in enumerate(CHANGES[change])]
    check(policy, (0.01, 0.05, 8.0, 2), 0.25, pace[-1][0], seed=1, pace=pace)


def share_of_chain(policy, planner, first, seed):
    """Share in time of a pipeline whose second task makes two requests per request, and has a slow
    and a quick variant. Two to four workers."""
    profiles = {
        "first": LatencyProfile.linear(0.008, 0.04, 12),
        "slow": LatencyProfile.linear(0.008, 0.06, 12),
        "quick": LatencyProfile.linear(0.002, 0.02, 12),
    }
    models = [
        auto.Model(name, tuple(auto.Variant(v, 90.0, {"cpu": profiles[v]}) for v in variants))
        for name, variants in {"first": ["first"], "second": ["slow", "quick"]}.items()
    ]
    tasks = (TreeTask("first", "first", None, {"first": {"second": 2.0}}),)
    tree = Tree("both", (*tasks, TreeTask("second", "second", "first")), {"": 0.3})
    problem = auto.Problem(tuple(models), (tree,), {}, (auto.Kind("cpu", 2, 4),))
    report = simulate_application(
        *(problem, {"both": Workload.poisson(80.0)}),
        duration_s=8.0,
        policy=policy,
        policy_kwargs=KWARGS.get(policy, {}),
        planner=planner,
        latency_noise=0.05,
        first_profile=first,
        seed=seed,
    )
    settled = report.requests[report.requests["arrival_s"] >= 4.0]
    return (settled["outcome"] == "ok").mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, planner, first",
    [
        ("auto", "auto", 5.0),
        *((p, None, f) for p in ("pipeline", "deferred_flex") for f in (0.3, 5.0)),
        ("eager", None, 5.0),
        ("price", None, 5.0),
    ],
)
def test_so_are_those_of_a_pipeline(policy, planner, first):
    found = share_of_chain(policy, planner, first, seed=1)
    assert found >= 0.95 or found >= share_of_chain(policy, planner, 1.0, seed=1) - 0.02


@pytest.mark.parametrize("policy, least", [("flex", 0.65), ("deferred", 0.6)])
def test_times_that_scatter_do_not_refuse_what_would_mostly_be_in_time(policy, least):
    """Batches of one take 44 % of the SLO, and one in twenty nearly twice as long. With the 95th
    percentile as the prediction, 52 and 46 % were in time."""
    slo_s = 0.57
    cluster = cluster_of(0.012, 0.238, slo_s, largest=32)
    found = []
    for seed in (1, 2, 3):
        report = simulate(
            *(policy, cluster, Workload.poisson(0.7 * 4 / 0.286)),
            duration_s=160 * slo_s,
            latency_noise=0.35,
            first_profile=1.0,
            seed=seed,
        )
        found.append(in_time(report, slo_s))
    assert np.mean(found) >= least


@pytest.mark.parametrize("policy", ["flex", "deferred"])
def test_times_that_scatter_a_little_cost_little(policy):
    """At 0.7 of capacity, with times that scatter by 15 %. With the 95th percentile as the
    prediction all the time, 93.8 and 93.7 % were in time."""
    cluster = cluster_of(0.0115, 0.18, 0.588, largest=32)
    requests = []
    for seed in (1, 2, 3):
        report = simulate(
            *(policy, cluster, Workload.poisson(21.0)),
            duration_s=60.0,
            latency_noise=0.15,
            first_profile=1.0,
            seed=seed,
        )
        requests.append(report.requests)
    found = pd.concat(requests)
    found = found["outcome"][found["arrival_s"] > 5.0].value_counts(normalize=True)
    assert found["good"] >= 0.95
    assert found["late"] <= 0.02
