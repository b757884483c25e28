"""The part of `live-heterogeneous` that needs no Ray."""

import pandas as pd
import pytest

from benchmarks.kairos import systems as kairos
from benchmarks.live.heterogeneous import (
    CASE,
    POLICIES,
    POOL,
    SERVER_SLO_S,
    STRETCH,
    STRONG,
    WEAK,
    Measured,
    predict,
    queries,
    weak_limit,
    worker,
)
from deployments.recommender import Recommender

TOLD = {kind: CASE.profiles()[kind].scaled(STRETCH) for kind in POOL}


def seen(requests=()):
    frame = pd.DataFrame(requests, columns=["status", "size", "answer"])
    return Measured(frame, 10.0, TOLD, 0.002)


def test_queries_are_valid_and_of_the_distributions_sizes():
    sizes = [Recommender.size(Recommender.preprocess(q)) for q in queries(50, 0).items]
    assert sizes == sorted(sizes) and sizes[0] < 20 and 500 < sizes[-1] <= 1000
    assert 0.2 < sum(size > weak_limit() for size in sizes) / 50 < 0.4


def test_only_the_strong_type_ranks_all_in_time():
    assert TOLD[STRONG].latency(1000) < SERVER_SLO_S < TOLD[WEAK].latency(weak_limit() + 1)
    assert TOLD[WEAK].latency(weak_limit()) <= SERVER_SLO_S


def test_workers_take_as_long_as_the_zoo_says_stretched():
    for kind, profile in TOLD.items():
        variables = worker(kind, 1)["ray_actor_options"]["runtime_env"]["env_vars"]
        base, item = (float(variables[f"SIMULATED_{x}_MS"]) for x in ("BASE", "ITEM"))
        assert base + 1000 * item == pytest.approx(1e3 * profile.latency(1000), rel=1e-3)


def test_large_queries_are_counted_where_they_ran():
    large = weak_limit() + 1
    rows = [("ok", large, STRONG), ("late", large, WEAK), ("refused", large, None), ("ok", 9, WEAK)]
    measured = seen(rows)
    assert measured.large_on_weak == 50
    assert measured.in_time.tolist() == [True, False, False, True]
    assert seen().large_on_weak == 0


def test_simulated_kairos_beats_first_come_first_served():
    rate = 0.5 * kairos.bound(CASE, POOL) / STRETCH
    missed = {n: predict(p, POOL, seen(), rate, 10.0, 150.0, 0) for n, p in POLICIES.items()}
    assert missed["kairos"] < 3 < 10 < missed["FCFS"]
