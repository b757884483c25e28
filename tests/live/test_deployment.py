"""`@ray_slo.deployment` on a local Ray, with the scheduler embedded and as an actor."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from apps import Digest, Echo, Tasks
from fastapi import FastAPI
from ray import serve
from ray.serve._private.proxy_request_response import ResponseStatus
from waiting import eventually, held, posted, status_of

import ray_slo
from ray_slo.errors import BadInput, BatchResultError, RefusedEarly, UnknownModel
from ray_slo.serve.grpc import InferenceStub
from ray_slo.serve.protos import InferRequest

SLO_MS = 30_000  # generous; calls that must be refused bring a shorter deadline
TaskApp = ray_slo.deployment(
    latency_slo_ms=SLO_MS,
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.1},
    accuracy=99.5,
    profile_seconds=0.5,
    name="tasks",
)(Tasks)


@pytest.fixture(scope="module", params=["embedded", "actor"])
def app(ray_cluster, request):
    """(handle, url) of the application, with one and with two frontends."""
    frontends = 1 if request.param == "embedded" else 2
    deployed = TaskApp.options(scheduler=request.param, num_frontends=frontends)
    # Different names, because deletion does not wait until an application has stopped.
    name = f"tasks-{request.param}"
    with ray_cluster.running(deployed.bind(), name, f"/{name}") as handle:
        yield handle, f"{ray_cluster.url}/{name}"


def test_first_answers_come_in_time_and_in_order(app):
    handle, _ = app
    answers = [handle.remote(x) for x in range(40)]
    assert [a.result() for a in answers] == [{"value": float(x * x)} for x in range(40)]


def test_answer_says_how_it_came_about(app):
    handle, _ = app
    answer = handle.remote(3, response_metadata=True).result()
    assert answer.result == {"value": 9.0}
    assert (answer.model, answer.variant, answer.accuracy) == ("tasks", "tasks", 99.5)
    assert answer.batch_size >= 1
    assert answer.exec_ms >= 30
    assert 0 <= answer.queue_ms < answer.latency_ms <= SLO_MS
    assert answer.deadline_met


def test_a_burst_is_batched_across_frontends(app, tmp_path):
    handle, _ = app
    with held(handle, tmp_path):
        calls = [handle.remote(x, response_metadata=True) for x in range(60)]
        assert eventually(lambda: queued(handle) == 60)
    sizes = [c.result().batch_size for c in calls]
    assert max(sizes) > 4


def test_own_slo_of_a_call(app):
    handle, _ = app
    answer = handle.remote(2, latency_slo_ms=25_000, response_metadata=True).result()
    assert answer.latency_slo_ms == 25_000
    with pytest.raises(RefusedEarly) as refused:
        handle.remote(2, latency_slo_ms=0.5).result()
    assert (refused.value.reason, refused.value.latency_slo_ms) == ("would_miss", 0.5)
    with pytest.raises(BadInput, match="latency_slo_ms must be a positive number"):
        handle.remote(2, latency_slo_ms=-1).result()
    with pytest.raises(UnknownModel, match="choose one of tasks"):
        handle.remote(2, model="task").result()


@pytest.mark.parametrize(
    ("item", "error", "says"),
    [
        (("raise", "value"), ValueError, "poison"),
        (("raise", "stop"), RuntimeError, "StopIteration: stop"),
        (("raise", "exit"), RuntimeError, "SystemExit: exit"),
        (("drop_one", 0), BatchResultError, "was given 1 item and returned 0 results"),
        (("lock", 0), BatchResultError, "a result of type lock cannot be sent: it cannot be pick"),
        (("unread", 0), BatchResultError, "it cannot be read there: TypeError: Unread.__init__"),
        ("bad", BadInput, "this item is bad"),
        ("lock", BatchResultError, "cannot be pickled"),
    ],
)
def test_an_error_reaches_its_caller_and_nobody_else(app, item, error, says):
    handle, _ = app
    assert handle.remote(2).result() == {"value": 4.0}
    with pytest.raises(error, match=says):
        handle.remote(item).result()
    assert handle.remote(2).result() == {"value": 4.0}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("lock", BatchResultError),
        ("unread", BatchResultError),
        (("lock", 0), BatchResultError),
        (("unread", 0), BatchResultError),
    ],
)
def test_what_cannot_be_sent_spares_its_batch(app, bad, error):
    handle, _ = app
    calls = [handle.remote(bad if x == 7 else x) for x in range(20)]
    for x, call in enumerate(calls):
        if x == 7:
            with pytest.raises(error, match="cannot be sent"):
                call.result()
        else:
            assert call.result() == {"value": float(x * x)}


def queued(handle):
    return status_of(handle)["queued"]["tasks"]


@pytest.mark.parametrize("way", ["handle", "http"])
def test_cancelled_calls_are_withdrawn(app, tmp_path, way):
    handle, url = app
    before = status_of(handle)["counts"]["cancelled"]
    with held(handle, tmp_path):
        if way == "handle":
            late = handle.remote(2)
            assert eventually(lambda: queued(handle))
            late.cancel()
        else:
            with posted(url, 2):
                assert eventually(lambda: queued(handle))
        assert eventually(lambda: not queued(handle))
        assert status_of(handle)["counts"]["cancelled"] == before + 1
    assert handle.remote(2).result() == {"value": 4.0}


def test_status(app):
    handle, _ = app
    seen = status_of(handle)
    assert seen["models"] == {"tasks": {"latency_slo_ms": SLO_MS, "accuracy": 99.5}}
    assert len(seen["workers"]) == 2
    assert seen["queued"] == {"tasks": 0}
    assert seen["counts"]["granted"] > 0
    profile = seen["profiles"]["tasks@default"]
    assert 20 <= profile["latency_1_ms"] <= profile["latency_max_ms"]  # learned, so about 30
    assert seen["policy"] == "auto"


# This test is the last, because it changes the application.
def test_scaled_and_reconfigured_in_place_under_load(app, request):
    handle, _ = app
    mode = request.node.callspec.params["app"]
    changed = TaskApp.options(scheduler=mode, num_frontends=1 if mode == "embedded" else 2)

    def workers():
        return set(status_of(handle)["workers"])

    def redeploy(wanted, **options):
        serve.run(
            changed.options(**options).bind(), name=f"tasks-{mode}", route_prefix=f"/tasks-{mode}"
        )
        assert eventually(lambda: len(workers()) == wanted)

    before, epoch = workers(), status_of(handle)["epoch"]
    answers = []
    with ThreadPoolExecutor(1) as pool:
        stop = []

        def load():
            while not stop:
                answers.append(handle.remote(3))
                time.sleep(0.05)

        loading = pool.submit(load)
        try:
            redeploy(3, num_replicas=3)
            assert before < workers()
            redeploy(1, num_replicas=1)
            config = {"power": 3}
            redeploy(1, num_replicas=1, user_config=config)
        finally:
            stop.append(True)
        loading.result()
    values = [a.result()["value"] for a in answers]
    assert set(values) <= {9.0, 27.0}
    assert status_of(handle)["epoch"] == epoch  # the frontends and the scheduler stayed
    assert handle.remote(3).result() == {"value": 27.0}


def test_http_large_bodies_arrive_whole_and_through_shared_memory(ray_cluster):
    digest = ray_slo.deployment(
        Digest, latency_slo_ms=SLO_MS, ray_actor_options={"num_cpus": 0.1}, profile_seconds=0.5
    )
    octets = {"content-type": "application/octet-stream"}
    rng = random.Random(1)
    with (
        ray_cluster.running(digest.bind(), "digest", "/digest"),
        httpx.Client(timeout=60) as client,
    ):

        def said_of(body, tries=2):
            answer = client.post(f"{ray_cluster.url}/digest", content=body, headers=octets)
            if tries > 1 and answer.status_code == 503 and "frontend_lost" in answer.text:
                # HAProxy gets new settings in the first second of an application. If a connection
                # ends meanwhile, it cannot send a large body again; the client can.
                return said_of(body, tries - 1)
            assert answer.status_code == 200, answer.text
            found, is_shared = answer.json()
            assert found == hashlib.sha256(body).hexdigest()
            return is_shared

        assert eventually(lambda: said_of(rng.randbytes(100_000)))
        bodies = [rng.randbytes(size) for size in (0, 1, 70_000, 300_000, 5_000_000, 16_000_000)]
        with ThreadPoolExecutor(12) as threads:
            assert all(threads.map(said_of, bodies * 3))


def test_two_applications_with_equal_names(ray_cluster):
    """No way leads to the other one's workers."""
    powers = {"first": 2, "second": 3}
    with contextlib.ExitStack() as running:
        handles = {}
        for app, power in powers.items():
            made = TaskApp.options(scheduler="actor", name="equal", num_replicas=1)
            made = made.bind(power=power)
            handles[app] = running.enter_context(ray_cluster.running(made, app, f"/{app}"))
        stub = InferenceStub(running.enter_context(grpc.insecure_channel(ray_cluster.grpc)))
        asked = [(app, n) for n in range(20) for app in powers]

        def over_http(app, n):
            return httpx.post(f"{ray_cluster.url}/{app}", json=n, timeout=30).json()

        def over_grpc(app, n):
            named = [("application", app)]
            return json.loads(stub.Infer(InferRequest(json=str(n)), metadata=named).json)

        def by_handle(app, n):
            return handles[app].remote(n).result()

        with ThreadPoolExecutor(12) as threads:
            for ask in (over_http, over_grpc, by_handle):
                found = list(threads.map(lambda one, ask=ask: ask(*one), asked))
                assert found == [{"value": float(n ** powers[app])} for app, n in asked]
        first, second = (status_of(handle) for handle in handles.values())
        assert not first["workers"].keys() & second["workers"].keys()
        assert first["counts"]["granted"] == second["counts"]["granted"] == 60


class Threads:
    """Answer how many threads libraries of numbers may use."""

    def __call__(self, items):
        import numpy as np
        from threadpoolctl import threadpool_info

        np.ones((8, 8)) @ np.ones((8, 8))  # loads BLAS
        seen = {pool["num_threads"] for pool in threadpool_info()}
        tokenizers = int(os.environ["RAYON_NUM_THREADS"])
        return [sorted(seen | {tokenizers})] * len(items)


@pytest.mark.parametrize("cores", [0.5, 2])
def test_libraries_use_as_many_threads_as_the_worker_has_cores(ray_cluster, cores):
    options = {"num_cpus": cores}
    app = ray_slo.deployment(latency_slo_ms=SLO_MS, ray_actor_options=options)(Threads)
    with ray_cluster.running(app.bind(), f"threads-{cores}", f"/threads-{cores}") as handle:
        assert handle.remote(0).result() == [max(1, cores)]


def test_composition_and_fastapi(ray_cluster):
    """A FastAPI ingress over two ray-slo applications of one class."""
    web = FastAPI()
    echo = ray_slo.deployment(latency_slo_ms=SLO_MS, ray_actor_options={"num_cpus": 0.1})(Echo)

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(web)
    class Front:
        def __init__(self, a, b):
            self.a, self.b = a, b

        @web.get("/both/{word}")
        async def both(self, word: str):
            return await asyncio.gather(self.a.remote(word), self.b.remote(word))

        @web.get("/refused/{word}")
        async def refused(self, word: str):
            return await self.a.remote(word, latency_slo_ms=0.01)

    front = Front.bind(echo.bind("a-"), echo.bind(prefix="b-"))
    with ray_cluster.running(front, "front", "/front"):
        url = f"{ray_cluster.url}/front"
        assert httpx.get(f"{url}/both/x", timeout=30).json() == ["a-x", "b-x"]
        answer = httpx.get(f"{url}/refused/x", timeout=30)
        assert answer.status_code == 503
        assert answer.json()["reason"] == "would_miss"
        if hasattr(ResponseStatus, "headers"):  # from Ray 2.58 on
            assert "retry-after" in answer.headers
