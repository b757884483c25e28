"""The answers that clients get until an application can serve."""

from types import SimpleNamespace

import pytest
from ray import serve

from ray_slo.serve.errors import NotReady, RefusedEarly
from ray_slo.serve.frontend.startup import Deployment, Startup, in_a_line
from ray_slo.serve.frontend.surroundings import worker_states
from ray_slo.serve.messages import SERVING, Progress

TRACE = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "/somewhere/replica.py", line 1, in initialize
    await self._call()
ray_slo.serve.errors.ConfigError: models.m.variants.v1: load failed: RuntimeError: no weights
"""
LOADING = Progress("w1", "gpu", "loading", "resnet50", 2, 5)


def test_a_model_without_a_worker_is_refused_and_one_with_a_worker_is_not():
    startup = Startup({"a": ["a"], "b": ["b"]})
    refusal = startup.refusal("a", 0.0)
    assert isinstance(refusal, NotReady) and isinstance(refusal, RefusedEarly)
    assert refusal.reason == "starting"
    assert refusal.retry_after_s == 2.0
    assert "its workers are starting" in str(refusal)
    startup.plan_says(None, start_s=7.5)
    assert startup.refusal("a", 0.0).retry_after_s == 7.5  # measured
    startup.serves(["a"])
    assert startup.refusal("a", 0.0) is None
    assert not startup.complete
    assert startup.refusal("b", 0.0) is not None
    assert startup.status(0.0)["starting"]["models"] == ["b"]
    startup.serves(["b"])
    assert startup.complete
    assert startup.status(0.0) == {}


def test_a_pipeline_needs_all_of_its_tasks():
    startup = Startup({"faces": ["detect", "name"]})
    startup.serves(["detect"])
    assert startup.refusal("faces", 0.0) is not None
    startup.serves(["name"])
    assert startup.refusal("faces", 0.0) is None


def test_what_workers_do_is_said_until_they_are_silent():
    startup = Startup({"m": ["m"]})
    startup.heard(LOADING, 10.0)
    assert str(startup.refusal("m", 10.0)) == "'m' cannot be served yet: loading resnet50, 2 of 5"
    startup.heard(LOADING._replace(worker="w2"), 10.0)  # said once
    assert str(startup.refusal("m", 10.0)).count("resnet50") == 1
    workers = startup.status(10.0)["starting"]["workers"]
    assert workers["w1"] == {"kind": "gpu", "state": "loading resnet50, 2 of 5"}
    assert "its workers are starting" in str(startup.refusal("m", 16.0))


def test_when_all_are_up_and_nobody_loads_a_request_may_wait():
    """The scheduler will hear of them in a moment."""
    startup = Startup({"m": ["m"]})
    startup.deployments({"gpu": Deployment(running=1)})
    assert startup.refusal("m", 0.0) is None
    startup.heard(LOADING, 0.0)
    assert startup.refusal("m", 0.0) is None  # older than what Serve says
    startup.deployments({"gpu": Deployment(running=1, starting=1)})
    assert "loading resnet50, 2 of 5" in str(startup.refusal("m", 0.0))


def test_a_worker_that_has_started_is_believed_at_once():
    """Serve calls the application running then, and its caller sends the first request."""
    startup = Startup({"m": ["m"]})
    startup.heard(LOADING, 0.0)
    startup.heard(Progress("w1", "gpu", SERVING), 0.1)
    assert startup.refusal("m", 0.1) is None
    startup.heard(LOADING, 0.2)  # was sent before
    assert startup.refusal("m", 0.2) is None
    assert startup.status(0.2)["starting"]["workers"]["w1"]["state"] == "serving"
    startup.heard(LOADING._replace(worker="w2"), 0.2)
    assert "loading resnet50, 2 of 5" in str(startup.refusal("m", 0.2))
    assert startup.refusal("m", 6.0) is not None  # not for ever


def test_the_first_worker_of_an_application_that_had_none_is_awaited():
    startup = Startup({"m": ["m"]})
    assert not startup.is_awaited(0.0)
    startup.deployments({"cpu": Deployment(0, 1, awaited=True)})
    startup.heard(LOADING, 0.0)
    assert startup.is_awaited(0.0)
    startup.heard(LOADING._replace(worker="w2", failed="ConfigError: no weights"), 0.0)
    assert not startup.is_awaited(0.0)
    assert startup.is_awaited(6.0)  # that worker is gone
    startup.plan_says("no memory for m")
    assert not startup.is_awaited(6.0)


@pytest.mark.parametrize(
    ("status", "trigger", "replicas", "awaited"),
    [
        ("HEALTHY", "CONFIG_UPDATE_COMPLETED", {}, True),  # it may begin without a worker
        ("DOWNSCALING", "AUTOSCALING", {"STOPPING": 1}, True),
        ("UPSCALING", "AUTOSCALING", {"STARTING": 1}, True),
        ("UPSCALING", "REPLICA_STARTUP_FAILED", {"STARTING": 1}, False),
        ("UPDATING", "CONFIG_UPDATE_STARTED", {"STARTING": 1}, False),
        ("UNHEALTHY", "REPLICA_STARTUP_FAILED", {}, False),
    ],
)
def test_a_worker_is_awaited_where_the_planner_wanted_none(
    monkeypatch, status, trigger, replicas, awaited
):
    seen = SimpleNamespace(
        status=status, status_trigger=trigger, replica_states=replicas, message=""
    )
    found = SimpleNamespace(deployments={"cpu of m": seen})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": found}))
    assert worker_states("app", {"cpu": "cpu of m"})["cpu"].awaited == awaited


def test_failures_are_said_and_so_is_that_nobody_tries_again():
    startup = Startup({"m": ["m"]})
    startup.deployments({"gpu": Deployment(0, 1, in_a_line(TRACE))})
    startup.heard(LOADING, 0.0)
    startup.heard(LOADING._replace(worker="w2", failed="ConfigError: no weights"), 0.0)
    refusal = startup.refusal("m", 0.0)
    assert refusal.reason == "starting"
    assert str(refusal) == (
        "'m' cannot be served yet: failed, will be tried 2 more times: ConfigError: "
        "models.m.variants.v1: load failed: RuntimeError: no weights; loading resnet50, 2 of 5"
    )
    startup.deployments({"gpu": Deployment(0, 0, in_a_line(TRACE, failed=True), failed=True)})
    refusal = startup.refusal("m", 100.0)
    assert refusal.reason == "start_failed"
    assert refusal.retry_after_s == 30.0
    assert "failed, and not tried again: ConfigError: models.m" in str(refusal)
    assert "/somewhere" not in str(refusal)


def test_before_serve_has_noticed_the_worker_itself_says_that_it_failed():
    startup = Startup({"m": ["m"]})
    startup.heard(LOADING._replace(failed="ConfigError: no weights"), 0.0)
    assert "failed: ConfigError: no weights" in str(startup.refusal("m", 0.0))


def test_details_may_be_kept_to_the_log():
    startup = Startup({"m": ["m"]}, details=False)
    startup.heard(LOADING, 0.0)
    assert "loading resnet50" in str(startup.refusal("m", 0.0))
    startup.heard(LOADING._replace(failed="ConfigError: /secret"), 0.0)
    startup.deployments({"gpu": Deployment(0, 1, in_a_line(TRACE))})
    assert "secret" not in str(startup.refusal("m", 0.0))
    assert "no weights" not in str(startup.refusal("m", 0.0))
    assert "the log of the application says why" in str(startup.refusal("m", 0.0))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", ""),
        (TRACE.replace("2 more", "1 more"), "failed, will be tried 1 more time: ConfigError: "),
        ("Deployment 'x' has 1 replicas that wait.\n", "Deployment 'x' has 1 replicas that wait."),
        (
            "The deployment failed to start 3 times in a row. Error:\nstrange",
            "The deployment failed to start 3 times in a row. Error: strange",
        ),
    ],
)
def test_what_serve_says_fits_a_line(message, said):
    assert in_a_line(message).startswith(said)
    assert "\n" not in in_a_line(message)


def test_progress_before_anything_is_loaded():
    assert str(Progress("w", "gpu")) == "starting"
