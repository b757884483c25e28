"""Two or more problems and plans per planner, with figures that a person can check.

The problems are documents: those of `ray-slo plan`, and the arguments of a live application. ℓ(b)
is the time of a batch of b requests. A request may take twice the time of its batch at each task,
because it waits for the batch before its own.
"""

import pytest

from tests.goldens.plans import check, of_live, of_simulation


def flat(ms, accuracy=100, **fields):
    """A network that gains nothing by batches: ℓ(b) = ms · b, so 1000 / ms requests per second."""
    return {"accuracy": accuracy, "profile": line(ms, 0, 4), **fields}


def line(alpha_ms, beta_ms, most=16):
    return {"alpha_ms": alpha_ms, "beta_ms": beta_ms, "max_batch_size": most}


GPUS = {"gpu": {"min_replicas": 0, "max_replicas": 4, "price_per_hour": 3}}


def application(rates, models=None, workers=GPUS, **fields):
    return {
        "workers": workers,
        "models": models or {},
        "workloads": {
            stream: {"arrivals": {"kind": "constant", "rate": rate}}
            for stream, rate in rates.items()
        },
        "duration_s": 60,
        **fields,
    }


# -- auto ----------------------------------------------------------------------------------

# 100 and 200 requests per second and worker.
VARIANTS = {"m": {"latency_slo_ms": 200, "variants": {"large": flat(10, 90), "small": flat(5, 80)}}}


def test_auto_serves_all_with_the_most_accurate_variant_if_that_is_possible():
    check(
        "auto, 250 requests/s",
        of_simulation(application({"m": 250}, VARIANTS)),
        """
        3 gpu, 9 per hour                       # 250 / 100
        large on 3 gpu: 250/s in batches of 1
        accuracy of m 90 %
        """,
    )


def test_auto_gives_up_accuracy_if_there_are_too_few_workers():
    check(
        "auto, 500 requests/s",
        of_simulation(application({"m": 500}, VARIANTS)),
        """
        4 gpu, 12 per hour
        large on 3 gpu: 300/s in batches of 1   # 100·n + 200·(4 − n) ≥ 500, so n = 3
        small on 1 gpu: 200/s in batches of 1
        accuracy of m 86 %                      # (300 · 90 + 200 · 80) / 500
        """,
    )


def test_auto_says_what_it_cannot_serve():
    check(
        "auto, 1000 requests/s",
        of_simulation(application({"m": 1000}, VARIANTS)),
        """
        4 gpu, 12 per hour
        small on 4 gpu: 800/s in batches of 1   # 4 · 200
        accuracy of m 80 %
        serves 80 % of m
        short: demand 1000 req/s is out of reach with 4 gpu: 80 % of it can be served
        """,
    )


def one(slo_ms, **profile):
    return {"m": {"latency_slo_ms": slo_ms, "profile": profile}}


def test_auto_leaves_room_for_bursts():
    """Three workers would be busy for 83 % of the time, and bursts would wait for too long."""
    check(
        "auto, SLO 30 ms",
        of_simulation(application({"m": 250}, one(30, **line(10, 0, 4)))),
        """
        4 gpu, 12 per hour
        m on 4 gpu: 250/s in batches of 1
        accuracy of m 100 %
        """,
    )
    check(
        "auto, SLO 200 ms",
        of_simulation(application({"m": 250}, one(200, **line(10, 0, 4)))),
        """
        3 gpu, 9 per hour       # in 200 ms a burst is served
        m on 3 gpu: 250/s in batches of 1
        accuracy of m 100 %
        """,
    )


def test_auto_makes_batches_as_large_as_the_slo_allows():
    """ℓ(b) = 10 + 5·b ms: 15, 20 and 30 ms for 1, 2 and 4; 67, 100 and 133 requests/s."""
    check(
        "auto, SLO 45 ms",
        of_simulation(application({"m": 250}, one(45, **line(5, 10)))),
        """
        4 gpu, 12 per hour      # 2.5 are busy
        m on 4 gpu: 250/s in batches of 2       # 2 · 20 ≤ 45 < 2 · 30
        accuracy of m 100 %
        """,
    )
    check(
        "auto, SLO 65 ms",
        of_simulation(application({"m": 250}, one(65, **line(5, 10)))),
        """
        3 gpu, 9 per hour       # 1.9 are busy
        m on 3 gpu: 250/s in batches of 4       # 2 · 30 ≤ 65
        accuracy of m 100 %
        """,
    )


def test_auto_says_that_an_slo_is_too_short():
    check(
        "auto, SLO 15 ms",
        of_simulation(application({"m": 250}, one(15, **line(10, 0, 4)))),
        """
        0 gpu, 0 per hour
        serves 0 % of m
        short: the SLO of m, 0.015 s, is too short: the fastest path takes 0.02 s, waiting …
        """,
    )


def test_auto_serves_the_classes_whose_slo_is_long_enough():
    model = {"latency_slo_ms": 200, "slo_classes": {"gold": 15, "silver": 50}, **flat(10)}
    check(
        "auto, SLO classes",
        of_simulation(application({"m": 150, "m@gold": 20}, {"m": model})),
        """
        2 gpu, 6 per hour
        m on 2 gpu: 150/s in batches of 1
        accuracy of m 100 %
        serves 0 % of m@gold
        short: the SLO of m@gold, 0.015 s, is too short: the fastest path takes 0.02 s …
        """,
    )


def test_auto_takes_the_cheapest_workers_that_keep_a_floor():
    cheap = {"objective": "cost"}
    check(
        "auto, at the least cost",
        of_simulation(application({"m": 150}, {"m": {"latency_slo_ms": 200, **flat(5)}}, **cheap)),
        """
        1 gpu, 3 per hour
        m on 1 gpu: 150/s in batches of 1
        accuracy of m 100 %
        """,
    )
    check(
        "auto, at the least cost, with 85 % accuracy",
        of_simulation(application({"m": 160}, VARIANTS, **cheap, accuracy_floor=85)),
        """
        2 gpu, 6 per hour       # 80 / 100 + 80 / 200 = 1.2 workers; one could keep 82 %
        large on 2 gpu: 160/s in batches of 1   # if there are two, 1.6 are enough for all
        accuracy of m 90 %
        """,
    )


def test_auto_fills_a_budget_with_the_kind_that_does_most_for_it():
    """A GPU is twice as fast as a CPU, and costs three times as much."""

    def network(gpu_ms, accuracy):
        profiles = {"gpu": line(gpu_ms, 0, 4), "cpu": line(2 * gpu_ms, 0, 4)}
        return {"accuracy": accuracy, "profiles": profiles}

    models = {
        "m": {
            "latency_slo_ms": 400,
            "variants": {"large": network(10, 90), "small": network(5, 80)},
        }
    }
    kinds = GPUS | {"cpu": {"min_replicas": 0, "max_replicas": 8, "price_per_hour": 1}}
    check(
        "auto, a budget of 4 per hour",
        of_simulation(application({"m": 250}, models, kinds, budget_per_hour=4)),
        """
        0 gpu, 4 cpu, 4 per hour
        large on 3 cpu: 150/s in batches of 1   # 50·n + 100·(4 − n) ≥ 250, so n = 3
        small on 1 cpu: 100/s in batches of 1
        accuracy of m 86 %
        """,
    )
    check(
        "auto, a budget of 6 per hour, 700 requests/s",
        of_simulation(application({"m": 700}, models, kinds, budget_per_hour=6)),
        """
        0 gpu, 6 cpu, 6 per hour
        small on 6 cpu: 600/s in batches of 1
        accuracy of m 80 %
        serves 85.71 % of m                     # 600 / 700
        short: demand 700 req/s is out of reach with 4 gpu, 8 cpu, a budget of 6 per hour …
        """,
    )


def test_auto_plans_a_pipeline_under_one_slo():
    tasks = {
        "detect": flat(20, 90, factors={"name": 4}),
        "name": {"parent": "detect", "variants": {"large": flat(10, 90), "small": flat(5, 80)}},
    }
    pipelines = {"photo": {"latency_slo_ms": 600, "tasks": tasks}}
    check(
        "auto, a pipeline",
        of_simulation(application({"photo": 40}, pipelines=pipelines)),
        """
        3 gpu, 9 per hour                           # 40 · 20 ms + 160 · 10 ms = 2.4 are busy
        detect on 1 gpu: 40/s in batches of 1
        large on 2 gpu: 160/s in batches of 1       # 4 faces per photo
        accuracy of photo 81 %                      # 90 % of 90 %
        """,
    )


def test_auto_puts_only_what_fits_into_a_worker():
    workers = {"gpu": {"min_replicas": 0, "max_replicas": 4, "memory_mb": 100}}

    def models(a_mb):
        return {
            name: {"latency_slo_ms": 200, **flat(10), "memory_mb": mb}
            for name, mb in (("a", a_mb), ("b", 60))
        }

    check(
        "auto, 60 and 60 MB",
        of_simulation(application({"a": 20, "b": 20}, models(60), workers)),
        """
        2 gpu, 0 per hour       # of the 100 MB of a worker
        a on 1 gpu: 20/s in batches of 1
        b on 1 gpu: 20/s in batches of 1
        accuracy of a 100 %
        accuracy of b 100 %
        """,
    )
    check(
        "auto, 40 and 60 MB",
        of_simulation(application({"a": 20, "b": 20}, models(40), workers)),
        """
        1 gpu, 0 per hour       # it serves both, and is busy for 40 % of the time
        a on 1 gpu: 20/s in batches of 1
        b on 1 gpu: 20/s in batches of 1
        accuracy of a 100 %
        accuracy of b 100 %
        """,
    )


def test_auto_chooses_the_group_of_models_that_no_group_lists():
    workers = {
        "few": {"min_replicas": 0, "max_replicas": 2, "group": "left"},
        "many": {"min_replicas": 0, "max_replicas": 4, "group": "right"},
    }
    models = {name: {"latency_slo_ms": 200, **flat(10)} for name in "abc"}
    rates = {"a": 150, "b": 180, "c": 80}
    check(
        "auto, two groups",
        of_simulation(application(rates, models, workers, groups={"a": "left"})),
        """
        2 few, 3 many, 0 per hour
        a on 2 few: 150/s in batches of 1       # the document says so; 50/s are left there
        b on 3 many: 180/s in batches of 1      # 2.6 are busy; one of them serves both
        c on 1 many: 80/s in batches of 1
        accuracy of a 100 %
        accuracy of b 100 %
        accuracy of c 100 %
        """,
    )


def test_auto_chooses_the_same_group_with_a_budget_that_does_not_bind():
    """Without a budget, three workers of "right" serve both models, for 3 per hour."""
    workers = {
        "dear": {"min_replicas": 0, "max_replicas": 4, "price_per_hour": 3, "group": "left"},
        "cheap": {"min_replicas": 0, "max_replicas": 4, "price_per_hour": 1, "group": "right"},
    }
    models = {name: {"latency_slo_ms": 200, **flat(10)} for name in "ab"}
    rates = {"a": 150, "b": 150}
    free = of_simulation(application(rates, models, workers))
    assert free[0] == "0 dear, 3 cheap, 3 per hour"
    assert of_simulation(application(rates, models, workers, budget_per_hour=4)) == free


def test_auto_plans_the_same_for_a_live_application():
    variants = {
        "large": {"load": "apps:Network", "accuracy": 90},
        "small": {"load": "apps:Network", "accuracy": 80},
    }
    document = {
        "models": {"m": {"callable": "apps:A", "latency_slo_ms": 200, "variants": variants}},
        "workers": {"gpu": {"num_replicas": 4, "min_replicas": 1, "max_replicas": 4}},
        "planner": {"name": "auto", "rates": {"m": 500}},
    }
    check(
        "auto, live, 500 requests/s",
        of_live(document, {("large", "gpu"): (10, 0, 4), ("small", "gpu"): (5, 0, 4)}),
        """
        4 gpu
        large on 3 gpu: 300/s in batches of 1
        small on 1 gpu: 200/s in batches of 1
        accuracy 86 %
        """,
    )


# -- loki ----------------------------------------------------------------------------------


def faces(rate, workers, **arguments):
    """Loki's example: 4 faces per frame; SLO 100 ms. Batches of up to 2 take as long as one."""

    def network(accuracy, **fields):
        return {"load": "apps:Network", "accuracy": accuracy, **fields}

    tasks = {
        "detect": {"callable": "apps:A", "variants": {"d": network(90, factors={"name": 4})}},
        "name": {
            "callable": "apps:A",
            "parent": "detect",
            "variants": {"large": network(90), "small": network(80)},
        },
    }
    kwargs = {"headroom_quantile": None, "batch_sizes": [1, 2], **arguments}
    document = {
        "pipeline": {"latency_slo_ms": 100, "tasks": tasks},
        "workers": {"gpu": {"num_replicas": workers, "max_replicas": workers}},
        "planner": {"name": "loki", "rates": {"detect": rate}, "kwargs": kwargs},
        "response_margin_ms": 0,
    }
    # 20, 20 and 10 ms: 100, 100 and 200 requests per second and worker.
    measured = {
        ("d", "gpu"): (0, 20, 2),
        ("large", "gpu"): (0, 20, 2),
        ("small", "gpu"): (0, 10, 2),
    }
    return of_live(document, measured)


def test_loki_scales_hardware_while_the_most_accurate_variants_suffice():
    check(
        "loki, 25 frames/s on 3 workers",
        faces(25, 3),
        """
        2 gpu                                       # 25 / 100 and 100 / 100; no worker serves both
        d on 1 gpu: 25/s in batches of 2
        large on 1 gpu: 100/s in batches of 2
        accuracy 81 %                               # 90 % of 90 %
        """,
    )


def test_loki_scales_accuracy_if_there_are_too_few_workers():
    check(
        "loki, 60 frames/s on 3 workers",
        faces(60, 3),
        """
        3 gpu
        d on 1 gpu: 60/s in batches of 2
        large on 1 gpu: 100/s in batches of 2       # all that it can
        small on 1 gpu: 140/s in batches of 2       # the rest of 240 faces/s
        accuracy 75.75 %                            # (100 · 81 + 140 · 72) / 240
        """,
    )


def test_loki_plans_for_a_quantile_of_the_demand():
    check(
        "loki, 60 frames/s on average",
        faces(60, 3, headroom_quantile=0.95),
        """
        3 gpu
        d on 1 gpu: 73/s in batches of 2            # in 95 % of all seconds there are at most 73
        large on 1 gpu: 100/s in batches of 2
        small on 1 gpu: 192/s in batches of 2       # 4 · 73 − 100
        accuracy 75.08 %                            # (100 · 81 + 192 · 72) / 292
        """,
    )


def test_loki_says_what_it_sheds():
    check(
        "loki, 60 frames/s on 2 workers",
        faces(60, 2),
        """
        2 gpu
        d on 1 gpu: 50/s in batches of 2
        small on 1 gpu: 200/s in batches of 2       # 4 · 50
        accuracy 72 %                               # 90 % of 80 %
        short: demand 60 req/s is out of reach with 2 gpu: 83.3 % of it can be served
        """,
    )


# -- kairos, kairos_plus ---------------------------------------------------------------------


def queries(planner, budget, rate=1, **arguments):
    """One request in ten has 10 items, the others have 1; SLO 1.1 s.

    An item takes 0.1 s on "big" and 0.2 s on "small", which costs a quarter. So only "big" answers
    10 items in time. Alone, it serves 1 / (0.9 · 0.1 + 0.1 · 1) = 5.26 requests/s.
    """
    kwargs = {"budget_per_hour": budget, "sizes": {1: 0.9, 10: 0.1}, **arguments}
    document = {
        "models": {"rank": {"callable": "apps:A", "latency_slo_ms": 1100, "max_batch_size": 10}},
        "workers": {"big": {"price_per_hour": 1.0}, "small": {"price_per_hour": 0.25}},
        "planner": {"name": planner, "rates": {"rank": rate}, "kwargs": kwargs},
        "response_margin_ms": 0,
    }
    return of_live(document, {("rank", "big"): (100, 0, 10), ("rank", "small"): (200, 0, 10)})


ALONE = """
1 big, 0 small
accuracy 100 %
"""


def test_kairos_takes_the_mix_with_the_highest_upper_bound():
    check(
        "kairos, a budget of 1.5",
        queries("kairos", 1.5, follow_load=False),
        """
        1 big, 2 small  # "big" takes 1 large one per second, so 10/s; the small ones 9 of these
        accuracy 100 %
        """,
    )
    check("kairos, a budget of 1", queries("kairos", 1.0, follow_load=False), ALONE)


def test_kairos_says_that_a_budget_is_too_small():
    check(
        "kairos, a budget of 0.5",
        queries("kairos", 0.5),
        """
        0 big, 2 small
        accuracy 100 %
        short: one big costs 1 per hour, the budget is 0.5
        """,
    )


def test_kairos_spends_no_more_than_the_load_needs():
    check("kairos, 1 request/s", queries("kairos", 3.0, rate=1), ALONE)
    check(
        "kairos, 20 requests/s",
        queries("kairos", 3.0, rate=20),
        """
        2 big, 4 small
        accuracy 100 %
        short: 28 req/s is more than a budget of 3 per hour sustains: about 15
        """,
    )


def test_kairos_plus_takes_what_the_simulator_confirms():
    check(
        "kairos_plus, a budget of 1.5",
        queries("kairos_plus", 1.5, follow_load=False),
        """
        1 big, 2 small
        accuracy 100 %
        """,
    )


# -- herd, partition -------------------------------------------------------------------------


def models(planner, rates, workers, memory=None, **arguments):
    """A worker serves about 90 requests/s of a model (10 ms each, SLO 100 ms)."""
    document = {
        "models": {m: {"callable": "apps:A", "latency_slo_ms": 100} for m in rates},
        "workers": {"gpu": {"num_replicas": workers}},
        "planner": {
            "name": planner,
            "rates": rates,
            "memory_mb": memory or {},
            "kwargs": arguments,
        },
    }
    return of_live(document, {(m, "gpu"): (0, 10, 1) for m in rates})


LARGE_AND_SMALL = {"a": 400, "b": 100, "c": 100}  # about 4.5, 1.1 and 1.1 workers
EACH_1_MB = dict.fromkeys("abc", 1)


@pytest.mark.slow
def test_herd_makes_groups_of_the_largest_burst_tolerance():
    """The least of a group's workers / a model's load is as large as possible."""
    check(
        "herd, groups of at most 8 workers with memory for two models",
        models("herd", LARGE_AND_SMALL, 12, EACH_1_MB, group_worker_limit=8, memory_mb=2),
        """
        a on 8 workers      # 8 / 4.5; no group may have more
        b, c on 4 workers
        """,
    )
    check(
        "herd, one scheduler can have all workers",
        models("herd", LARGE_AND_SMALL, 12, EACH_1_MB, group_worker_limit=12, memory_mb=3),
        "a, b, c on 12 workers",
    )


@pytest.mark.slow
def test_herd_says_that_a_headroom_is_out_of_reach():
    check(
        "herd, twice the load",
        models(
            "herd",
            LARGE_AND_SMALL,
            12,
            EACH_1_MB,
            group_worker_limit=8,
            memory_mb=2,
            min_headroom=2.0,
        ),
        """
        a on 8 workers
        b, c on 4 workers
        short: min_headroom 2 is out of reach: model 'a' alone needs 9 workers …   # 2 · 4.5
        """,
    )


FOUR = {"a": 50, "b": 40, "c": 30, "d": 20}


def test_partition_makes_loads_even():
    check(
        "partition into two",
        models("partition", FOUR, 4, sub_clusters=2),
        """
        a, d on 2 workers   # 70 and 70 requests/s
        b, c on 2 workers
        """,
    )
    check(
        "partition into two, with memory for 5 MB",
        models(
            "partition", FOUR, 4, {"a": 4, "b": 1, "c": 3, "d": 2}, sub_clusters=2, max_memory_mb=5
        ),
        """
        a, b on 2 workers   # 4 + 1 and 3 + 2 MB; nothing else fits
        c, d on 2 workers
        """,
    )


def test_partition_says_that_a_limit_is_too_low():
    check(
        "partition, 60 requests/s per sub-cluster",
        models("partition", FOUR, 4, sub_clusters=2, max_rate=60),
        """
        a on 2 workers
        b, d on 2 workers   # c fits nowhere
        short: the models have 140 requests/s, 2 sub-clusters take 120
        """,
    )
