"""How many workers there are, and Serve's own options: taken where they mean something, else
refused with what to write instead."""

import pytest

import ray_slo
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.workers import NOT_OURS, AutoscalingConfig, ServeOptions, WorkerConfig
from tests.serve.fakes import Steps


class Model:
    def __call__(self, items):
        return items


def spec_of(**options):
    return ray_slo.deployment(latency_slo_ms=100, **options)(Model)._spec((), {})


def loki_args(**worker):
    return {
        "pipeline": {"latency_slo_ms": 100, "tasks": {"only": {"callable": Model}}},
        "workers": {"w": worker},
    }


def bound(spec):
    from ray_slo.serve.app.build import build_app_from_spec

    return build_app_from_spec(spec)._bound_deployment.init_args[1]["default"]._bound_deployment


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_serve_takes_and_means_nothing_here_says_what_to_write(name):
    with pytest.raises(ValueError, match=f"^{name}: ") as refused:
        spec_of(**{name: 1})
    assert NOT_OURS[name] in str(refused.value)
    with pytest.raises(ValueError, match=f"^workers.w.{name}: ") as refused:
        parse_spec(loki_args(**{name: 1}))
    assert NOT_OURS[name] in str(refused.value)


@pytest.mark.parametrize("name", AutoscalingConfig.instead)
def test_of_serves_autoscaling_config_too(name):
    with pytest.raises(ValueError, match=rf"workers.w.autoscaling_config.{name}: ") as refused:
        parse_spec(loki_args(autoscaling_config={"max_replicas": 2, name: 1}))
    assert AutoscalingConfig.instead[name] in str(refused.value)


def test_every_option_of_serves_decorator_is_taken_or_refused_with_advice():
    import inspect

    from ray import serve

    theirs = set(inspect.signature(serve.deployment).parameters) - {"_func_or_class"}
    ours = set(inspect.signature(ray_slo.deployment).parameters)
    assert theirs - ours - set(NOT_OURS) - set(ServeOptions.model_fields) == set()
    theirs = set(serve.config.AutoscalingConfig.model_fields)
    assert theirs == set(AutoscalingConfig.model_fields) | set(AutoscalingConfig.instead) - {
        "target_num_ongoing_requests_per_replica"
    }


def test_serve_is_given_what_is_for_it():
    options = {
        "placement_group_bundles": [{"CPU": 1.0}],
        "placement_group_strategy": "STRICT_PACK",
        "health_check_period_s": 3.0,
        "graceful_shutdown_timeout_s": 7.0,
    }
    made = bound(spec_of(**options))
    assert made._deployment_config.health_check_period_s == 3.0
    assert made._deployment_config.graceful_shutdown_timeout_s == 7.0
    assert made._deployment_config.graceful_shutdown_wait_loop_s == 0.5
    assert made._replica_config.placement_group_bundles == [{"CPU": 1.0}]
    assert bound(spec_of())._deployment_config.health_check_period_s == 5
    with pytest.raises(ValueError, match=r"workers.default.placement_group_strategy: .*ODD"):
        bound(spec_of(**{**options, "placement_group_strategy": "ODD"}))
    with pytest.raises(ValueError, match=r"^max_ongoing_request: unknown key .did you mean"):
        spec_of(max_ongoing_request=1)
    with pytest.raises(ValueError, match=r"^num_replicas: write it under workers\.NAME"):
        parse_spec({"models": {"m": {"callable": Steps, "latency_slo_ms": 1}}, "num_replicas": 2})


@pytest.mark.parametrize(
    ("given", "least", "first", "most"),
    [
        ({}, 1, 1, None),
        ({"num_replicas": 3}, 1, 3, None),
        ({"max_replicas": 4}, 1, 1, 4),
        ({"min_replicas": 2, "max_replicas": 4}, 2, 2, 4),
        ({"min_replicas": 0, "max_replicas": 4}, 0, 1, 4),
        ({"num_replicas": "auto"}, 1, 1, 100),
        ({"num_replicas": "auto", "max_replicas": 8}, 1, 1, 8),
        ({"num_replicas": "auto", "autoscaling_config": {"min_replicas": 2}}, 2, 2, 100),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 5}}, 0, 1, 5),
        ({"autoscaling_config": {"max_replicas": 5, "initial_replicas": 3}}, 1, 3, 5),
        (
            {"autoscaling_config": {"min_replicas": 0, "max_replicas": 5, "initial_replicas": 0}},
            0,
            0,
            5,
        ),
    ],
)
def test_bounds_wherever_they_are_written(given, least, first, most):
    worker = WorkerConfig(**given)
    assert (worker.least_replicas, worker.first_replicas, worker.most_replicas) == (
        least,
        first,
        most,
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"autoscaling_config": {"min_replicas": 1}}, "autoscaling_config.max_replicas: required"),
        (
            {"max_replicas": 3, "autoscaling_config": {"max_replicas": 3}},
            "max_replicas: it is in autoscaling_config, too; write it once",
        ),
        (
            {"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}},
            "num_replicas: write autoscaling_config.initial_replicas",
        ),
        (
            {"autoscaling_config": {"max_replicas": 3, "initial_replicas": 4}},
            "num_replicas: must be from min_replicas 1 to max_replicas 3, got 4",
        ),
        ({"autoscaling_config": {"max_replicas": 3, "downscale_delay_s": -1}}, "downscale_delay_s"),
        ({"num_replicas": "many"}, "num_replicas"),
        ({"min_replicas": 2}, "min_replicas: give max_replicas, too, got 2 alone"),
    ],
)
def test_bounds_that_do_not_fit(given, says):
    with pytest.raises(ValueError, match=says):
        parse_spec(loki_args(**given))
