"""A short day of each shape of application, in figures (`tests/goldens/days.py` says which).

Seeds are fixed. Most loads are so high for a while that batches form and requests are refused.
"""

import pytest

from tests.goldens.days import check


def line(alpha_ms, beta_ms, most=16):
    return {"alpha_ms": alpha_ms, "beta_ms": beta_ms, "max_batch_size": most}


def day(*rates, each_s=4, **fields):
    """Poisson arrivals, whose rate changes every `each_s` seconds."""
    return {"arrivals": {"kind": "trace", "rates": list(rates), "interval_s": each_s}, **fields}


def fixed(**kinds):
    """So many workers of each kind, all the time."""
    return {kind: {"min_replicas": n, "max_replicas": n} for kind, n in kinds.items()}


def application(workloads, policy, workers=None, **fields):
    """By default, on two workers."""
    document = {"workloads": workloads, "workers": workers or fixed(gpu=2), "seed": 1, **fields}
    return document if policy is None else document | {"policy": {"name": policy}}


# ℓ(b) = 10 + 2·b ms. With batches of 16, a worker serves 380 requests per second.
ONE = {"m": {"latency_slo_ms": 100, "profile": line(2, 10)}}
RUSH = {"m": day(200, 600, 900, 400, each_s=3)}


def test_one_model():
    check(
        "one model, deferred",
        application(RUSH, "deferred", models=ONE),
        "asked 6171, in time 5818, refused 353, accuracy 100 %, mean batch 7, worker-hours 0.0067",
    )


@pytest.mark.slow
def test_one_model_with_the_default_policy():
    check(
        "one model, auto",
        application(RUSH, None, models=ONE),
        "asked 6171, in time 5826, refused 345, "
        "accuracy 100 %, mean batch 5.63, worker-hours 0.0067",
    )


def test_one_model_of_which_eager_batching_serves_less():
    """Small batches are made while there is time, and then heads are late (Symphony §3.4)."""
    check(
        "one model, eager",
        application(RUSH, "eager", models=ONE),
        "asked 6171, in time 4288, refused 1883, "
        "accuracy 100 %, mean batch 3.04, worker-hours 0.0067",
    )


# At most 84 and 217 requests per second and worker.
LARGE, SMALL = {"accuracy": 90, "profile": line(10, 30)}, {"accuracy": 80, "profile": line(4, 10)}
VARIANTS = {"m": {"latency_slo_ms": 200, "variants": {"large": LARGE, "small": SMALL}}}


def test_variants():
    check(
        "variants, price",
        application({"m": day(30, 150, 400, 80, each_s=3)}, "price", models=VARIANTS),
        "asked 1893, in time 1893, refused 0, "
        "accuracy 84.0 %, mean batch 5.99, worker-hours 0.0067",
    )


def test_variants_chosen_for_a_policy_that_does_not_choose():
    check(
        "variants, deferred",
        application({"m": day(30, 150, 400, 80, each_s=3)}, "deferred", models=VARIANTS),
        "asked 1893, in time 1830, refused 63, "
        "accuracy 83.0 %, mean batch 5.45, worker-hours 0.0067",
    )


SEVERAL = {
    "a": {"latency_slo_ms": 80, "profile": line(2, 10)},
    "b": {"latency_slo_ms": 300, "profile": line(5, 20)},
}
BOTH = {"a": day(100, 400, 200), "b": day(50, 150, 50)}


def test_several_models():
    check(
        "several models, deferred",
        application(BOTH, "deferred", models=SEVERAL),
        "asked 3761, in time 3702, refused 59, "
        "accuracy 100 %, mean batch 4.75, worker-hours 0.0067",
    )


def test_several_models_with_preemption():
    check(
        "several models, flex",
        application(BOTH, "flex", models=SEVERAL),
        "asked 3761, in time 3677, refused 84, "
        "accuracy 100 %, mean batch 3.86, worker-hours 0.0067",
    )


def test_a_pipeline():
    tasks = {
        "detect": {"accuracy": 90, "profile": line(6, 12), "factors": {"who": 2}},
        "who": {"parent": "detect", "variants": {"large": LARGE, "small": SMALL}},
    }
    pipelines = {"photo": {"latency_slo_ms": 400, "tasks": tasks}}
    check(
        "a pipeline, deferred",
        application({"photo": day(10, 80, 140, 25)}, "deferred", fixed(gpu=3), pipelines=pipelines),
        "asked 977, in time 941, refused 36, accuracy 77.9 %, mean batch 6.19, worker-hours 0.0133",
    )


def unlike(**fields):
    """A CPU takes twice as long as a GPU."""
    return {"latency_slo_ms": 150, "profiles": {"gpu": line(2, 10), "cpu": line(4, 20)}, **fields}


@pytest.mark.slow
def test_unlike_workers():
    check(
        "unlike workers, deferred",
        application(
            {"m": day(100, 400, 900, 200)}, "deferred", fixed(gpu=1, cpu=2), models={"m": unlike()}
        ),
        "asked 6279, in time 5760, refused 519, "
        "accuracy 100 %, mean batch 4.66, worker-hours 0.0133",
    )


def test_groups():
    workers = {
        "few": {"min_replicas": 1, "max_replicas": 2, "group": "left"},
        "many": {"min_replicas": 1, "max_replicas": 2, "group": "right"},
    }
    check(
        "groups, deferred",
        application(
            {"a": day(100, 900, 200), "b": day(50, 50, 50)},
            "deferred",
            workers,
            models=SEVERAL,
            groups={"a": "left", "b": "right"},
        ),
        "asked 5292, in time 4660, refused 632, accuracy 100 %, mean batch 4.13, worker-hours 0.01",
    )


SIZES = {"kind": "log_normal", "median": 3, "sigma": 0.8, "max_size": 16}


def test_requests_with_sizes():
    check(
        "sizes, deferred",
        application({"m": day(40, 120, 250, 80, sizes=SIZES)}, "deferred", models=ONE),
        "asked 1874, in time 1693, refused 181, "
        "accuracy 100 %, mean batch 2.15, worker-hours 0.0089",
    )


@pytest.mark.slow
def test_requests_with_sizes_on_unlike_workers():
    check(
        "sizes on unlike workers, kairos",
        application(
            {"m": day(20, 80, 140, 60, sizes=SIZES)},
            "kairos",
            fixed(gpu=1, cpu=2),
            models={"m": unlike()},
        ),
        "asked 1138, in time 1082, refused 56, accuracy 100 %, mean batch 1, worker-hours 0.0133",
    )


def test_slo_classes():
    models = {"m": {"latency_slo_ms": 200, "slo_classes": {"gold": 50}, "profile": line(2, 10)}}
    check(
        "SLO classes, deferred",
        application(
            {"m": day(100, 400, 300), "m@gold": day(50, 300, 50)}, "deferred", models=models
        ),
        "asked 4733, in time 4672, refused 61, "
        "accuracy 100 %, mean batch 4.64, worker-hours 0.0067",
    )


@pytest.mark.slow
def test_the_number_of_workers_follows_the_load():
    """At most 6 workers for 25 s: 0.0417 worker-hours. A new one starts within 2 s."""
    check(
        "autoscaling, price",
        application(
            {"m": day(20, 100, 250, 60, 20, each_s=5)},
            "price",
            {"gpu": {"min_replicas": 1, "max_replicas": 6}},
            models=VARIANTS,
            start_s=2,
            load_s=0.5,
            interval_s=3,
        ),
        "asked 2197, in time 2193, refused 4, "
        "accuracy 88.3 %, mean batch 2.79, worker-hours 0.0239",
    )


def test_without_a_planner_all_workers_run_all_the_time():
    check(
        "no planner, price",
        application(
            {"m": day(20, 100, 250, 60, 20, each_s=5)},
            "price",
            {"gpu": {"min_replicas": 1, "max_replicas": 6}},
            models=VARIANTS,
            planner=None,
        ),
        "asked 2197, in time 2197, refused 0, accuracy 90 %, mean batch 1.49, worker-hours 0.0417",
    )
