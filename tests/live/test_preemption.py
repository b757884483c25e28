"""FLEX on Serve: a burst preempts the running batch, whose requests are submitted again."""

import random
import time

import pytest
from waiting import eventually, status_of

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.serve.app.build import build_app

LONG_S, SHORT_S = 2.0, 0.1
QUICK_MS, SLOW_MS = 30_000, 60_000
BURST = 8


def model(folder, callable, latency_slo_ms, alpha_s, beta_s, max_batch_size=1, **options):
    """A model with a profile from a file, so that nothing is measured at start."""
    file = folder / f"{callable}-{beta_s}.json"
    save_profiles(file, {"x": LatencyProfile.linear(alpha_s, beta_s, max_batch_size)})
    return {
        "callable": f"stoppable:{callable}",
        "latency_slo_ms": latency_slo_ms,
        "max_batch_size": max_batch_size,
        "profile": str(file),
        **options,
    }


@pytest.fixture(scope="module", params=["embedded", "actor"])
def app(ray_cluster, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    models = {"quick": model(folder, "Quick", QUICK_MS, 0.002, 0.03, 16)}
    for name, callable, seconds in (
        ("slow", "Slow", LONG_S),
        ("brief", "Slow", SHORT_S),
        ("network", "Network", LONG_S),
    ):
        args = {"args": (SHORT_S,), "exit_points": 50 if name == "network" else None}
        models[name] = model(folder, callable, SLOW_MS, 0.0, 1.2 * seconds, **args)
    spec = {
        "models": models,
        "workers": {"cpu": {"ray_actor_options": {"num_cpus": 0.5}}},
        "policy": "flex",
        "scheduler": request.param,
        "num_frontends": 1 if request.param == "embedded" else 2,
    }
    name = f"preempting-{request.param}"  # a name that no application has
    with ray_cluster.running(build_app(spec), name, f"/{name}") as handle:
        yield handle


@pytest.fixture
def embedded(app, request):
    """The application with an embedded scheduler; an actor would show the same."""
    if "actor" in request.node.callspec.id:
        pytest.skip("no other with an actor")
    return app


def preemptions(handle):
    return status_of(handle)["preemptions"]


def begin(handle, tmp_path, name, **options):
    """Send a request and return when it runs."""
    mark = tmp_path / f"{name}-{time.monotonic_ns()}"
    response = handle.remote(str(mark), model=name, **options)
    assert eventually(mark.exists)
    return mark, response


def burst(handle, size=BURST, **options):
    return [handle.remote(i, model="quick", **options) for i in range(size)]


@pytest.mark.parametrize("name", ["slow", "network"])
def test_a_burst_stops_a_long_batch_and_is_answered(app, tmp_path, name, request):
    if name == "network":
        pytest.importorskip("torch")
        request.getfixturevalue("embedded")
    before = len(preemptions(app))
    mark, long = begin(app, tmp_path, name)
    answers = [r.result(timeout_s=30) for r in burst(app)]
    assert answers == list(range(BURST))
    assert long.result(timeout_s=30) == str(mark)
    stopped = preemptions(app)[before:]
    assert [(p["victim"], p["by"], p["outcome"]) for p in stopped] == [(name, "quick", "preempted")]
    assert stopped[0]["gain"] >= 1


def test_preemptions_that_race_with_the_end_lose_nothing(app):
    rng = random.Random(1)
    before = len(preemptions(app))
    responses = []
    for i in range(12):
        responses.append((i, app.remote(i, model="brief")))
        time.sleep(rng.uniform(0.5, 1.1) * SHORT_S)
        responses += enumerate(burst(app, 4))
    for expected, response in responses:
        assert response.result(timeout_s=30) == expected
    assert len(preemptions(app)) > before
