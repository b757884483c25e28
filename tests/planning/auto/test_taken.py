"""Spot workers, which may be interrupted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.auto.taken import most_busy, room
from ray_slo.planning.result import Infeasible

ONE = LatencyProfile([0.01])  # 100 requests per second
LOSS = st.sampled_from([0.001, 0.01, 0.05])


def lost(busy, workers, there):
    """Workers' worth of work that is lost on average; of one value, or of several at once."""
    k = np.arange(workers + 1)
    return np.maximum(np.subtract.outer(busy, k), 0) @ binom.pmf(k, workers, there)


@given(st.integers(1, 60), st.floats(0.5, 0.999), LOSS)
def test_as_much_is_planned_as_may_be_lost(workers, there, loss):
    busy = most_busy(workers, there, loss)
    assert 0 <= busy <= workers
    assert lost(busy, workers, there) <= loss * busy + 1e-9
    if busy < workers:
        more = busy + 1e-3
        assert lost(more, workers, there) > loss * more


@given(st.integers(1, 30), st.floats(0.7, 0.999), LOSS, st.floats(0.05, 20))
def test_room_is_enough_and_no_worker_too_much(most, there, loss, busy):
    found = room(busy, there, loss, most)
    needed = next((n for n in range(1, most + 1) if most_busy(n, there, loss) >= busy), None)
    if needed is not None:
        assert found.workers(busy) == needed
    else:
        assert found.workers(busy) >= most


def pool(rate, kinds, **kwargs):
    profiles = {kind.name: ONE for kind in kinds}
    return Problem(
        (Model("m", (Variant("v", 100.0, profiles),)),),
        (Tree.of_model("m", {"": 0.02}),),
        {"m": Demand(rate)},
        tuple(kinds),
        headroom=False,
        waiting_factor=1.0,
        batch_sizes=(1,),
        backend="highs",
        **kwargs,
    )


@pytest.mark.parametrize("budget", [1.0, 1.7, 2.6, 4.0])
@pytest.mark.parametrize("interruptions", [0.5, 2.0, 6.0])
def test_spot(budget, interruptions):
    """What a pool of spot workers serves under a budget: at most 1 % of the requests are lost on
    average, and the expected number of workers is enough."""
    workers = int(budget / 0.2 + 1e-9)
    kind = Kind("k", 0, 40, 0.2, interruptions_per_hour=interruptions)
    kinds, there = (kind,), kind.there
    busy = np.linspace(0.01, there * workers, 5000)
    most = 100 * busy[lost(busy, workers, there) <= 0.01 * busy].max()
    assert not isinstance(auto.plan(pool(0.98 * most, kinds, budget_per_hour=budget)), Infeasible)
    assert isinstance(auto.plan(pool(1.02 * most, kinds, budget_per_hour=budget)), Infeasible)


def test_spot_workers_are_taken_where_they_are_cheaper_with_their_spares():
    firm, risky = Kind("firm", 0, 20, 1.0), Kind("spot", 0, 20, 0.3, interruptions_per_hour=6.0)
    made = auto.plan(pool(450.0, (firm, risky)))
    assert made.workers["spot"] > 5 and made.workers["firm"] == 0
    assert most_busy(made.workers["spot"], risky.there, 0.01) >= 4.5
    dear = Kind("spot", 0, 20, 0.9, interruptions_per_hour=6.0)
    made = auto.plan(pool(450.0, (firm, dear)))
    assert made.workers["firm"] >= 4
    made = auto.plan(pool(450.0, (firm, Kind("spot", 0, 20, 0.3))))
    assert made.workers == {"firm": 0, "spot": 5}
