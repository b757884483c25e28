"""The smallest number that passes, compared with all smaller numbers where these are few."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ray_slo.core.documents import read_yaml
from ray_slo.planning.catalogue import CATALOGUE
from ray_slo.simulation.sizing import PlanSpec, size, what_if
from ray_slo.simulation.sizing.question import Figures
from ray_slo.simulation.sizing.search import Search, _bounds, predicted

CONFIGS = Path(__file__).parents[2] / "configs"


def question(**changes):
    return PlanSpec.model_validate(
        {
            "cluster": {
                "models": {
                    "m": {"latency_slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}},
                }
            },
            "workload": {"arrivals": {"kind": "poisson", "rate": 4000}},
            "duration_s": 1.5,
            "warmup_s": 0.2,
            **changes,
        }
    ).build()


def of(models, **changes):
    return question(cluster={"models": models}, **changes)


POOL = {
    "cluster": {
        "models": {
            "m": {
                "latency_slo_ms": 40,
                "variants": {
                    "m": {
                        "profiles": {
                            "g4dn.xlarge": {"alpha_ms": 0.2, "beta_ms": 8, "max_batch_size": 100},
                            "t3.xlarge": {"alpha_ms": 1.4, "beta_ms": 2, "max_batch_size": 100},
                        }
                    }
                },
            }
        }
    },
    "workload": {
        "arrivals": {"kind": "poisson", "rate": 150},
        "sizes": {"kind": "measured", "values": [4, 6, 8, 10, 12, 90]},
    },
    "pool": {"types": ["g4dn.xlarge", "t3.xlarge"]},
    "policies": ["kairos"],
    "duration_s": 3,
}


def bad(ask, policy, counts):
    """The worst over the seeds."""
    return max(predicted(ask, policy, counts, seed).bad_rate for seed in ask.seeds)


def passes(ask, policy, counts):
    """Whether at most 1 % are bad with every seed."""
    return all(predicted(ask, policy, counts, seed).bad_rate <= 0.01 for seed in ask.seeds)


def budgeted(budget, *policies):
    return question(
        **{**POOL, "pool": {**POOL["pool"], "budget_per_hour": budget}, "policies": policies}
    )


# -- the search --------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [1, 3, 7, 30, 99])
def test_the_search_finds_the_smallest_that_passes_with_every_seed(guess):
    for first, second in itertools.product(range(1, 24), (0, 1, 3)):
        least = {0: first, 1: first + second}

        def run(n, seed, least=least):
            return Figures(0.0 if n >= least[seed] else 0.5, 0.01, 1.0)

        search = Search(question(), run)
        assert search.smallest(guess, 40) == first + second
        assert len(search.probes) == len(search._known)
        assert sum(1 for n, _ in search.probes) < 20
        assert Search(question(), run).smallest(guess, first) == (None if second else first)


def test_the_search_ends_where_nothing_passes():
    search = Search(question(), lambda n, seed: None)
    assert search.smallest(5, 50) is None
    assert [n for n, _ in search.probes] == [5, 6, 8, 12, 20, 36, 50]


# -- workers -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_worked_example():
    load = {"arrivals": {"kind": "poisson", "rate": 3600}}
    ask = question(workload=load, policies=["deferred", "eager"])
    for answer in size(ask):
        assert answer.least == 5
        assert answer.workers == 6
        policy = (answer.name, {})
        assert bad(ask, policy, {"default": answer.workers - 1}) > 0.01
        assert bad(ask, policy, {"default": answer.workers}) == answer.figures.bad_rate <= 0.01
        assert 0.015 < answer.figures.p99_s <= 0.025
        assert answer.to_json()["p99_ms"] == pytest.approx(1e3 * answer.figures.p99_s)


@pytest.mark.slow
def test_a_variant_mix_is_as_accurate_as_it_has_to_be():
    variants = {
        "small": {"accuracy": 70, "profile": {"alpha_ms": 1, "beta_ms": 5}},
        "large": {"accuracy": 90, "profile": {"alpha_ms": 5, "beta_ms": 8}},
    }
    models = {"m": {"latency_slo_ms": 100, "variants": variants}}
    load = {"arrivals": {"kind": "poisson", "rate": 400}}
    ask = of(models, workload=load, policies=["price"], duration_s=2)
    (any_,) = size(ask)
    (good,) = size(replace(ask, accuracy_floor=85.0))
    assert any_.workers < good.workers
    assert any_.figures.accuracy < 85 <= good.figures.accuracy
    assert good.least <= good.workers
    assert sum(good.figures.variants.values()) == pytest.approx(1)
    assert good.figures.variants["large"] > any_.figures.variants["large"]


@pytest.mark.slow
def test_two_models_are_judged_by_the_worse():
    models = {
        "a": {"latency_slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}},
        "b": {"latency_slo_ms": 40, "profile": {"alpha_ms": 2, "beta_ms": 9}},
    }
    load = {"arrivals": {"kind": "poisson", "rate": 1500}}
    (answer,) = size(of(models, workload=load, policies=["deferred"]))
    assert answer.figures.models.keys() == {"a", "b"}
    assert answer.figures.bad_rate == max(rate for rate, _ in answer.figures.models.values())
    assert answer.figures.models["a"][1] <= 0.025


def test_a_trace_is_sized_for_as_long_as_it_lasts():
    trace = {"arrivals": {"kind": "trace", "rates": [500, 3000, 500], "interval_s": 0.5}}
    spec = {"workload": trace, "duration_s": None, "warmup_s": 0, "policies": ["deferred"]}
    flat = {
        "workload": {"arrivals": {"kind": "poisson", "rate": 4000 / 3}},
        "policies": ["deferred"],
    }
    (answer,), (average,) = size(question(**spec)), size(question(**flat))
    assert answer.workers > average.workers


def test_no_number_of_workers_makes_one_faster():
    (answer,) = size(what_if(question(), "slo=5ms"))
    assert answer.workers is None
    assert answer.why == "m: a batch of one takes 6 ms, longer than the SLO of 5 ms allows"
    assert answer.probes == ()


@pytest.mark.slow
def test_the_search_ends_at_max_workers():
    (answer,) = size(question(max_workers=3, policies=["deferred"]))
    assert answer.workers is None
    assert answer.why.startswith("no number up to 3 passes; ")
    assert answer.to_json()["bad_rate"] is None


# -- pools -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cheapest_pool_is_the_cheapest_that_passes():
    ask = question(**POOL)
    fast, slow, pool = size(ask)
    assert slow.workers is None
    assert "16.7% of the requests take t3.xlarge longer" in slow.why
    assert set(pool.counts) == {"g4dn.xlarge", "t3.xlarge"}
    assert pool.cost_per_hour < fast.cost_per_hour
    assert bad(ask, ("kairos", {}), pool.counts) == pool.figures.bad_rate <= 0.01
    prices = {name: CATALOGUE[name].price_per_hour for name in POOL["pool"]["types"]}
    for row in itertools.product(range(fast.workers), range(12)):
        counts = {k: n for k, n in zip(prices, row, strict=True) if n}
        cost = sum(prices[k] * n for k, n in counts.items())
        # A mix that serves the large requests, and costs less.
        if counts.get("g4dn.xlarge") and cost < pool.cost_per_hour - 1e-9:
            assert not passes(ask, ("kairos", {}), counts), counts


@pytest.mark.slow
def test_a_budget_buys_what_carries_most():
    """A policy that makes batches needs fewer workers, and carries more."""
    ask = what_if(budgeted(5, "kairos", "deferred"), "budget=1")
    *_, alone_cheapest, alone_most, _, _, cheapest, most = size(ask)
    assert alone_cheapest.why.startswith("above the budget of 1 per hour; ")
    assert alone_most.cost_per_hour <= 1 < alone_cheapest.cost_per_hour
    assert alone_most.carries < 150
    assert alone_most.figures.bad_rate > 0.01
    assert most.cost_per_hour <= 1
    assert cheapest.cost_per_hour <= alone_cheapest.cost_per_hour
    assert most.carries > alone_most.carries
    assert "highest upper bound" in most.why
    *_, cheapest, most = size(what_if(budgeted(1, "kairos"), "budget=2x"))
    assert not cheapest.why.startswith("above")
    assert most.carries > 150


@pytest.mark.slow
def test_no_pool_serves_more_than_its_bound():
    ask = question(**{**POOL, "policies": ["deferred"]})
    rows = np.array([[1, 0], [1, 3], [2, 1], [0, 4]])
    for policy in (("deferred", {}), ("kairos", {"batch": True}), ("kairos", {})):
        bounds = _bounds(ask, policy, rows, 9.0)
        assert bounds[-1] == 0  # the largest requests are too large for t3.xlarge
        for row, bound in zip(rows[:-1], bounds, strict=False):
            counts = {"g4dn.xlarge": int(row[0]), "t3.xlarge": int(row[1])}
            above = replace(ask, workload=ask.workload.at_rate(1.15 * bound))
            assert not passes(above, policy, {k: n for k, n in counts.items() if n})


@pytest.mark.slow
def test_a_pool_of_requests_without_sizes():
    profiles = {"g4dn.xlarge": {"alpha_ms": 1, "beta_ms": 5}, "t3.xlarge": {"alpha_ms": 12}}
    models = {"m": {"latency_slo_ms": 30, "variants": {"m": {"profiles": profiles}}}}
    pool = {"types": ["g4dn.xlarge", "t3.xlarge"], "budget_per_hour": 1.3}
    load = {"arrivals": {"kind": "poisson", "rate": 1300}}
    ask = of(models, workload=load, pool=pool, policies=["deferred"])
    fast, slow, cheapest, most = size(ask)
    assert cheapest.cost_per_hour <= min(fast.cost_per_hour, slow.cost_per_hour)
    assert cheapest.figures.bad_rate <= 0.01
    assert most.cost_per_hour <= 1.3
    assert most.carries > 0


# -- pipelines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "deferred"])
def test_a_pipeline_planned_as_by_loki_has_one_policy(policy):
    document = read_yaml(CONFIGS / "plan-pipeline.yaml") | {"policies": [policy]}
    with pytest.raises(ValueError, match=f"served by 'pipeline', got '{policy}'; for other"):
        PlanSpec.model_validate(document).build(CONFIGS)


@pytest.mark.slow
def test_a_pipeline_has_fewest_workers_with_any_and_with_the_best_variants():
    ask = PlanSpec.model_validate(read_yaml(CONFIGS / "plan-pipeline.yaml")).build(CONFIGS)
    ask = replace(ask, duration_s=2.0)
    any_, best = size(ask)
    assert any_.workers < best.workers
    assert set(best.counts) == {"detect-large", "name-large"}
    assert 85 <= any_.figures.accuracy < best.figures.accuracy
    assert max(any_.figures.bad_rate, best.figures.bad_rate) <= 0.01
    assert best.figures.p99_s <= 0.2
    assert dict(best.probes)[best.workers - 1] > 0.01
    slower = size(what_if(ask, "latency=+30%"))
    assert slower[1].workers > best.workers
    late = size(replace(what_if(ask, "slo=30ms"), most=10))
    assert [a.workers for a in late] == [None, None]
    assert "0.03 s, is too short" in late[0].why


# -- what if, and the document -------------------------------------------------------------------


def test_what_if():
    ask = budgeted(5, "kairos")
    assert what_if(ask, "load=+20%").workload.rate == pytest.approx(180)
    assert what_if(ask, "load=60/s").workload.rate == 60
    assert what_if(ask, "slo=-10%").models[0].latency_slo_s == pytest.approx(0.036)
    assert what_if(ask, "budget=-50%").budget_per_hour == 2.5
    both = what_if(ask, "load=2x, slo=80ms,latency=1.5x")
    assert (both.workload.rate, both.models[0].latency_slo_s) == (300, 0.08)
    assert both.models[0].variants[0].profiles["g4dn.xlarge"](10) == pytest.approx(0.015)
    assert ask == budgeted(5, "kairos")


def test_what_if_the_slo_and_requests_that_ask_for_another():
    load = {"arrivals": {"kind": "poisson", "rate": 9}, "slo_mix": [{"slo_ms": 50, "share": 1}]}
    ask = question(workload=load)
    assert what_if(ask, "slo=2x").workload.slo_mix[0].slo_ms == 100
    with pytest.raises(ValueError, match="has an slo_mix; give a percentage"):
        what_if(ask, "slo=80ms")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rate=5", "'rate' must be one of load, slo, latency, budget"),
        ("load", r"load=: wants a value like \+20%, -10%, 1.5x or 4800/s"),
        ("load=20%", "load=20%: wants a value like"),
        ("load=+20", r"load=\+20: wants a value like"),
        ("slo=80", "1.5x or 80ms"),
        ("latency=5ms", "1.5x or 1.2x"),
        ("load=-100%", "nothing is left"),
        ("budget=3", r"the spec has no pool.budget_per_hour"),
    ],
)
def test_what_if_says_what_it_wants(change, message):
    with pytest.raises(ValueError, match=message):
        what_if(question(), change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": None}, "give exactly one of cluster and pipeline, got none"),
        ({"duration_s": None}, "duration_s: required, as the workload's arrivals go on for ever"),
        ({"policy": {"name": "eager"}, "policies": ["eager"]}, "either policy or policies"),
        ({"policies": ["eagre"]}, "policy 'eagre' is unknown; choose one of auto, deferred"),
        ({"bad_rate": 1}, "bad_rate"),
        (
            {**POOL, "policies": ["kairos", {"name": "ramsis", "kwargs": {"solver": None}}]},
            r"policies.1: policy 'ramsis' counts requests, not the items in them",
        ),
        (
            {**POOL, "policies": [], "policy": {"name": "ramsis", "kwargs": {"solver": None}}},
            r"policy: policy 'ramsis' counts requests, not the items in them",
        ),
        ({"pool": {"types": ["m5"]}}, "pool.types.0: must be one of g4dn.xlarge, .* got 'm5'"),
        ({"pool": {"types": ["t3.xlarge"] * 2}}, "pool.types: must be different"),
        (
            {"cluster": {**POOL["cluster"], "workers": {"t4": 3}}},
            "unlike machines go into pool.types",
        ),
    ],
)
def test_a_mistake_in_the_spec(changes, message):
    with pytest.raises((ValueError, ValidationError), match=message):
        question(**changes)


def test_a_pool_is_for_one_model():
    models = {**POOL["cluster"]["models"], "n": {"latency_slo_ms": 9, "profile": {"alpha_ms": 1}}}
    with pytest.raises(ValueError, match="planned for one model, got 2"):
        size(question(**{**POOL, "cluster": {"models": models}}))


@pytest.mark.slow
def test_workers_are_where_the_search_begins():
    cluster = {"models": {"m": {"latency_slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}}}}
    plain = {"policies": ["deferred"]}
    (answer,) = size(question(cluster={**cluster, "workers": 9}, **plain))
    assert answer.probes[0][0] == 9
    assert answer.workers == size(question(**plain))[0].workers
