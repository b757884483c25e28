"""What Serve's own settings do to an application, by Serve's own code and without a cluster."""

import logging

import pytest
from ray import cloudpickle, serve
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app as built_by_serve
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.request_router import RequestRouter
from ray.serve.schema import ServeApplicationSchema, _deployment_info_to_schema

import ray_slo
from ray_slo.errors import ConfigError
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.app.settings import Settings, refusals
from ray_slo.serve.config.resolve import parse_spec
from tests.serve.loops import in_loop


class Model:
    def __call__(self, items):
        return items


class OtherRouter(RequestRouter):
    async def choose_replicas(self, candidate_replicas, pending_request=None):
        return [candidate_replicas]


WORKERS = {"w": None, "w-cpu-worker": "cpu"}


class App:
    """An application "a" that Serve runs, and what its controller says of it.

    Args:
        worker: fields of its workers, of kind "cpu".
        args: more fields of `args`.
    """

    def __init__(self, worker=None, **args):
        self.args = {
            "models": {"m": {"callable": Model, "latency_slo_ms": 2000}},
            "workers": {"cpu": worker or {}},
            "name": "w",
            **args,
        }
        self.spec = parse_spec(self.args)
        built = built_by_serve(
            build_app_from_spec(self.spec), name="a", make_deployment_handle=lambda *_: None
        )
        self.infos = {
            d.name: DeploymentInfo(d._deployment_config, d._replica_config, 0, "")
            for d in built.deployments
        }

    def details(self, frontend=None, worker=None, of_serve=None, **of_app):
        """With `deployments:` of the two, settings of the application and of Serve."""
        blocks = {"w": frontend, "w-cpu-worker": worker}
        config = ServeApplicationSchema(
            name="a",
            import_path="ray_slo.serve:build_app",
            args={"name": "w"},
            deployments=[{"name": name, **block} for name, block in blocks.items() if block],
            **of_app,
        )
        deployments = {
            name: {
                "deployment_config": _deployment_info_to_schema(name, info).model_dump(
                    exclude_unset=True
                ),
                "target_num_replicas": info.deployment_config.num_replicas,
                "replicas": [{"state": "RUNNING", "node_id": "n1"}, {"state": "STARTING"}],
            }
            for name, info in override_deployment_info(self.infos, config).items()
        }
        about = {
            "status": "RUNNING",
            "route_prefix": "/",
            "deployed_app_config": config.model_dump(exclude_unset=True),
            "external_scaler_enabled": config.external_scaler_enabled,
            "deployment_topology": {"ingress_deployment": "w"},
            "deployments": deployments,
        }
        return {"applications": {"a": about}, **(of_serve or {})}

    def refusals(self, **given):
        details = self.details(**given)
        return list(refusals(self.spec, details, "a", "w", {"cpu": "w-cpu-worker"}))


FIXED, SCALED = {"num_replicas": 2}, {"max_replicas": 4}
ROUTER = {"request_router_class": f"{__name__}:OtherRouter"}


@pytest.mark.parametrize("worker", [FIXED, SCALED], ids=["fixed", "scaled"])
def test_what_the_application_is_built_with_is_not_refused(worker):
    assert App(worker).refusals() == []
    assert App(worker, num_frontends=2).refusals() == []


@pytest.mark.parametrize(
    ("worker", "given", "name", "says"),
    [
        (FIXED, {"max_ongoing_requests": 5}, "w", ["max_ongoing_requests is 5", "max_queued_"]),
        (FIXED, {"max_ongoing_requests": 5}, "w-cpu-worker", ["max_batch_size"]),
        (FIXED, {"max_queued_requests": 16}, "w", ["max_queued_requests: 16 in args"]),
        (FIXED, {"max_queued_requests": 1}, "w-cpu-worker", ["max_queued_requests is 1"]),
        (FIXED, {"num_replicas": 2}, "w", ["num_replicas is 2", "num_frontends: 2 in args"]),
        (FIXED, {"num_replicas": "auto"}, "w", ["num_replicas is 'auto'", "num_frontends"]),
        (
            FIXED,
            {"autoscaling_config": {"max_replicas": 3}},
            "w",
            ["autoscaling_config is {'max_replicas': 3}", "write num_frontends"],
        ),
        (FIXED, {"max_surge_percent": 100}, "w", ["max_surge_percent is 100"]),
        (
            FIXED,
            {"ray_actor_options": {"num_cpus": 1}},
            "w",
            ["ray_actor_options is {'num_cpus': 1", "frontend_actor_options"],
        ),
        (
            SCALED,
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}},
            "w-cpu-worker",
            ["autoscaling_config is {'min_replicas': 1", "min_replicas: 1 and max_replicas: 3"],
        ),
        (
            FIXED,
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}, "num_replicas": None},
            "w-cpu-worker",
            ["max_replicas: 3"],
        ),
        (FIXED, {"num_replicas": "auto"}, "w-cpu-worker", ["num_replicas is 'auto'", "planner"]),
        (SCALED, {"num_replicas": 3}, "w-cpu-worker", ["num_replicas is 3", "ignores"]),
        (
            SCALED,
            {"autoscaling_config": None, "num_replicas": 3},
            "w-cpu-worker",
            ["autoscaling_config is None", "from 1 to 4"],
        ),
        (FIXED, {"request_router_config": ROUTER}, "w-cpu-worker", ["OtherRouter", "policy"]),
        (FIXED, {"backpressure_config": {"status_code": 429}}, "w", ["429", "leave it out"]),
    ],
)
def test_what_would_break_it_is_refused_with_what_to_write(worker, given, name, says):
    (said,) = App(worker).refusals(**{"worker" if WORKERS[name] else "frontend": given})
    assert said.startswith(f"deployments: {name}: {next(iter(given))} ")
    for part in says:
        assert part in said


@pytest.mark.parametrize(
    ("worker", "args", "given"),
    [
        (FIXED, {}, {"worker": {"num_replicas": 7}}),
        (FIXED, {}, {"worker": {"user_config": {"m": 1}, "ray_actor_options": {"num_cpus": 1}}}),
        (FIXED, {}, {"worker": {"health_check_period_s": 3, "graceful_shutdown_timeout_s": 5}}),
        (FIXED, {}, {"worker": {"rolling_update_percentage": 1.0, "max_surge_percent": 100}}),
        (FIXED, {}, {"frontend": {"max_ongoing_requests": 100_000, "num_replicas": 1}}),
        (FIXED, {}, {"frontend": {"graceful_shutdown_timeout_s": 60, "logging_config": {}}}),
        (FIXED, {"num_frontends": 2}, {"frontend": {"num_replicas": 3, "max_surge_percent": 50}}),
        (SCALED, {}, {"worker": {"num_replicas": "auto"}}),  # with our policy and bounds
        (FIXED, {}, {"external_scaler_enabled": True}),
        (SCALED, {}, {"of_serve": {"http_options": {"request_timeout_s": 2}}}),
        (SCALED, {}, {"of_serve": {"http_options": {"request_timeout_s": None}}}),
    ],
)
def test_what_serve_can_do_for_us_is_left_to_serve(worker, args, given):
    assert App(worker, **args).refusals(**given) == []


def test_what_serve_build_writes_is_not_refused():
    app = App(SCALED)
    routers = {
        name: str(info.deployment_config.request_router_config.request_router_class)
        for name, info in app.infos.items()
    }
    policy = {
        "policy_function": "ray_slo.serve.planner.autoscaling:PlanAutoscaling",
        "policy_kwargs": {"frontend": "w", "kind": "cpu"},
    }
    worker = {
        "num_replicas": None,
        "max_ongoing_requests": 100_000,
        "request_router_config": {
            "request_router_class": routers["w-cpu-worker"],
            "request_router_kwargs": {"frontend": "w"},
        },
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "policy": policy},
    }
    assert app.refusals(worker=worker) == []


def test_settings_of_the_application_and_of_the_proxies():
    app = App(SCALED)
    policy = {"policy_function": "my:policy"}
    (said,) = app.refusals(autoscaling_policy=policy)
    assert said.startswith("autoscaling_policy is {'policy_function': 'my:policy'}; leave it out")
    (said,) = app.refusals(external_scaler_enabled=True)
    assert said.startswith("external_scaler_enabled is true") and "max_replicas" in said
    for options in ("http_options", "grpc_options"):
        short = {options: {"request_timeout_s": 1.5}}
        (said,) = app.refusals(of_serve=short)
        assert said.startswith(f"{options}: request_timeout_s is 1.5") and "SLO of 'm', 2 s" in said
    details = app.details(of_serve={"http_options": {"request_timeout_s": 1}})
    behind_fastapi = {"deployment_topology": {"ingress_deployment": "Api"}}
    only_by_handle = {"route_prefix": None}
    for changed in (behind_fastapi, only_by_handle):
        about = {"a": {**details["applications"]["a"], **changed}}
        found = refusals(app.spec, {**details, "applications": about}, "a", "w", {})
        assert list(found) == []


def test_the_longest_slo_counts():
    model = {"callable": Model, "latency_slo_ms": 2000, "slo_classes": {"bulk": 60_000}}
    (said,) = App(models={"m": model}).refusals(
        of_serve={"http_options": {"request_timeout_s": 30}}
    )
    assert "at least 60" in said


def test_every_mistake_is_named():
    said = App(SCALED).refusals(
        frontend={"max_ongoing_requests": 5, "num_replicas": 2},
        worker={"max_ongoing_requests": 5, "num_replicas": 3},
        external_scaler_enabled=True,
    )
    assert len(said) == 5


def settings(app, *details):
    """Settings that read these details, one after the other."""
    told = iter(details)
    return Settings(app.spec, "a", "w", {"cpu": "w-cpu-worker"}, lambda: next(told))


@in_loop
async def test_a_frontend_refuses_to_start():
    app = App(FIXED)
    wrong = app.details(frontend={"num_replicas": 2, "max_ongoing_requests": 5})
    with pytest.raises(ConfigError, match=r"max_ongoing_requests is 5.*; deployments: w: num_rep"):
        await settings(app, wrong).begin()
    assert await settings(app, app.details()).begin() is app.spec
    assert await settings(app).begin() is app.spec  # the controller does not answer


@in_loop
async def test_frontends_count_themselves_as_serve_does():
    app = App(FIXED, num_frontends=2)
    spec = await settings(app, app.details(frontend={"num_replicas": 3})).begin()
    assert (spec.num_frontends, spec.embedded) == (3, False)
    spec = await settings(app, app.details(frontend={"num_replicas": 1})).begin()
    assert not spec.embedded  # the workers look for the scheduler actor


@in_loop
async def test_what_changes_later_is_said_until_it_is_right_again(caplog):
    app = App(FIXED)
    found = settings(app, app.details())
    await found.begin()
    wrong, right = app.details(frontend={"max_ongoing_requests": 5}), app.details()
    caplog.set_level(logging.WARNING)
    for now in (10.0, 20.0, 75.0):
        found.look(wrong, now)
        (said,) = (await found.status())["refused_settings"]
        assert "max_ongoing_requests is 5" in said
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 2  # at once, and once a minute
    assert all(said in r.getMessage() for r in errors)
    found.look(right, 80.0)
    assert await found.status() == {"nodes": {"cluster": [], "frontends": ["n1"]}}
    assert "right again" in caplog.text


@in_loop
async def test_a_frontend_that_is_being_replaced_does_not_judge_its_successors():
    app = App(FIXED)
    found = settings(app, app.details())
    await found.begin()
    successors = app.details(frontend={"num_replicas": 2})
    successors["applications"]["a"]["deployed_app_config"]["args"] = {"num_frontends": 2}
    found.look(successors, 10.0)
    assert found.refused == []

    # Without a config file, Serve does not say which version its settings are for.
    imperative = app.details(frontend={"num_replicas": 2})
    imperative["applications"]["a"] |= {"deployed_app_config": None, "status": "DEPLOYING"}
    found = settings(app, imperative)
    found.look(imperative, 10.0)
    assert found.refused == []
    imperative["applications"]["a"]["status"] = "RUNNING"
    found.look(imperative, 20.0)
    assert len(found.refused) == 1


def test_serves_decorator_over_ours():
    """The last lines are how Serve starts a replica of it; see `initialize_callable`."""

    @serve.deployment
    @ray_slo.deployment(latency_slo_ms=100)
    class Under:
        def __call__(self, items):
            return items

    made = Under.func_or_class
    assert cloudpickle.loads(cloudpickle.dumps(made)).name == "Under"
    with pytest.raises(ConfigError, match=r"Under: @serve.deployment is written over @ray_slo"):
        made.__new__(made)
