"""FLEX on Serve: a burst preempts the running batch, whose requests are submitted again."""

import random
import time

import pytest
from waiting import eventually, status_of

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.errors import RefusedEarly
from ray_slo.serve.app.build import build_app

LONGER_S, LONG_S, SHORT_S = 20.0, 2.0, 0.1
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
        ("longer", "Slow", LONGER_S),
        ("brief", "Slow", SHORT_S),
        ("deaf", "Deaf", 2 * LONG_S),
        ("network", "Network", LONG_S),
    ):
        takes_s = seconds if callable == "Deaf" else SHORT_S
        args = {"args": (takes_s,), "exit_points": 50 if name == "network" else None}
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


def test_a_request_that_cannot_make_it_any_more_is_refused_and_why(embedded, tmp_path):
    app = embedded
    spare_s = 3.0  # more than the run takes
    too_late = time.monotonic() + spare_s + 0.2
    slo_ms = 1e3 * (1.2 * LONGER_S + spare_s)
    _, long = begin(app, tmp_path, "longer", latency_slo_ms=slo_ms)
    time.sleep(max(too_late - time.monotonic(), 0.0))
    assert [r.result(timeout_s=30) for r in burst(app)] == list(range(BURST))
    with pytest.raises(RefusedEarly, match="it was stopped while it ran") as refused:
        long.result(timeout_s=30)
    assert refused.value.reason == "preempted"


def test_a_batch_that_does_not_stop_is_answered_and_the_burst_is_refused(embedded, tmp_path):
    app = embedded
    mark, long = begin(app, tmp_path, "deaf")
    responses = burst(app, latency_slo_ms=600 * LONG_S)
    for response in responses:
        with pytest.raises(RefusedEarly):
            response.result(timeout_s=30)
    assert long.result(timeout_s=30) == str(mark)
    last = preemptions(app)[-1]
    assert (last["victim"], last["outcome"]) == ("deaf", "finished")
    assert app.remote("well", model="quick").result(timeout_s=30) == "well"


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
