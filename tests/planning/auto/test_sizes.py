"""Classes of request sizes, and plans for requests of different sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree
from ray_slo.papers import kairos
from ray_slo.planning import auto
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Size, Variant
from ray_slo.planning.auto.sizes import MOST, by_size, classes_of, ends_of
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.result import Infeasible

COUNTS = st.dictionaries(st.integers(1, 500), st.floats(0.01, 1e4), min_size=1, max_size=40)


@given(COUNTS, st.sets(st.integers(1, 500), max_size=3))
def test_classes_share_all_requests_and_items_and_end_where_workers_do(counts, ends):
    found = classes_of(counts, ends)
    total = sum(counts.values())
    assert sum(size.share for size in found) == pytest.approx(1)
    items = sum(size.share * size.items for size in found)
    assert items == pytest.approx(sum(s * n for s, n in counts.items()) / total)
    largest = [size.largest for size in found]
    assert largest == sorted(set(largest)) and largest[-1] == max(counts)
    assert len(found) <= MOST + len(ends) + 1
    for end in ends:
        below = [size for size in counts if size <= end]
        above = [size for size in counts if size > end]
        assert not (below and above) or max(below) in largest


def ranker(**kwargs):
    """Nine in ten requests are small. Large ones are in time on fast workers alone."""
    profiles = {
        "cheap": LatencyProfile.linear(0.004, 0.006, 100),
        "fast": LatencyProfile.linear(0.0008, 0.003, 100),
    }
    sizes = Size(2, 2.0, 0.9), Size(80, 80.0, 0.1)
    given = {
        "models": (Model("rank", (Variant("rank", 90.0, profiles),), 9.8, sizes),),
        "trees": (Tree.of_model("rank", {"": 0.2}),),
        "demand": {"rank": Demand(60.0)},
        "kinds": (Kind("cheap", 1, 12, 0.1), Kind("fast", 0, 6, 2.0)),
    }
    return Problem(**{**given, **kwargs})


def test_large_requests_have_workers_that_are_fast_enough_and_small_ones_the_cheap():
    made = auto.plan(ranker())
    assert made.served == {"rank": 1.0}
    assert made.workers["fast"] >= 1
    by_kind = dict.fromkeys(made.workers, 0.0)
    for slot in made.slots:
        by_kind[slot.kind] += sum(part.load for part in slot.parts)
    assert by_kind["fast"] >= 6 * (1 - 1e-6)  # all large ones
    blind = auto.plan(ranker(models=(Model("rank", ranker().models[0].variants, 9.8),)))
    assert blind.workers["fast"] == 0


def test_classes_of_slos_and_sizes_go_together():
    trees = (Tree.of_model("rank", {"": 0.4, "gold": 0.15}),)
    demand = {"rank": Demand(20.0), "rank@gold": Demand(10.0)}
    problem = ranker(trees=trees, demand=demand)
    streams = by_size(problem)
    assert {s: streams.rate(s) for s in streams.streams if streams.rate(s)} == pytest.approx(
        {"rank@≤2": 18.0, "rank@≤80": 2.0, "rank@gold≤2": 9.0, "rank@gold≤80": 1.0}
    )
    made = auto.plan(problem)
    assert made.served == {"rank": 1.0, "rank@gold": 1.0}


def test_a_size_that_nobody_has_in_time_is_named_and_the_others_are_served():
    made = auto.plan(ranker(kinds=(Kind("cheap", 1, 12, 0.1), Kind("fast", 0, 0))))
    assert isinstance(made, Infeasible)
    assert "the SLO of rank@≤80, 0.2 s, is too short" in made.reason
    assert made.best_effort.served["rank"] == pytest.approx(0.9)


def test_where_a_class_must_end():
    assert ends_of(ranker(), ranker().models[0]) == {23, 100}


@pytest.mark.parametrize("seed", range(8))
def test_kairos(seed):
    """What a pool can serve of requests of unlike sizes is Kairos' bound (§5.2)."""
    rng = np.random.default_rng(seed)
    profiles = {
        name: LatencyProfile.linear(rng.uniform(1, 4) / 1e3, rng.uniform(1, 9) / 1e3, 32)
        for name in ("base", "aux")
    }
    values = sorted(rng.choice(np.arange(1, 25), 4, replace=False).tolist())
    weights = rng.integers(1, 10, 4).tolist()
    sizes = [size for size, n in zip(values, weights, strict=True) for _ in range(n)]
    types = [InstanceType(name=name, price_per_hour=1.0) for name in profiles]
    slo_s = max(profiles["base"].latency(values[-1]) * 1.05, profiles["aux"].latency(values[1]))
    counts = {"base": int(rng.integers(1, 4)), "aux": int(rng.integers(0, 6))}
    theirs = kairos.Market(types, profiles, slo_s, sizes, budget_per_hour=10.0, xi=1.0)
    bound = float(kairos.fluid_bounds(theirs, np.array([list(counts.values())]), 32)[0])
    each = tuple(
        Size(size, float(size), n / len(sizes)) for size, n in zip(values, weights, strict=True)
    )

    def is_served(rate):
        made = auto.plan(
            Problem(
                (Model("m", (Variant("v", 100.0, profiles),), sizes=each),),
                (Tree.of_model("m", {"": slo_s}),),
                {"m": Demand(rate)},
                tuple(Kind(name, 0, 9) for name in counts),
                present=counts,
                headroom=False,
                waiting_factor=1.0,
                batch_sizes=(1,),
                backend="highs",
            )
        )
        return not isinstance(made, Infeasible)

    assert bound > 0
    assert is_served(bound * 0.98)  # the bound is an upper one
    assert not is_served(bound * 1.005)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((Size(4, 2.0, 0.5),), "shares of the sizes of model 'm' must sum to 1"),
        ((Size(4, 2.0, 0.5), Size(2, 2.0, 0.5)), "must come by rising largest ones"),
    ],
)
def test_mistakes_are_named(sizes, said):
    with pytest.raises(ValueError, match=said):
        Model("m", (Variant("v", 90.0, {}),), sizes=sizes)
    with pytest.raises(ValueError, match="items of a class of sizes must be at most largest 2"):
        Size(2, 3.0, 1.0)
