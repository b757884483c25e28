"""`@ray_slo.batch` inside Serve deployments: over HTTP, through handles, with FastAPI."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve._private.proxy_request_response import ResponseStatus
from ray.serve.exceptions import BackPressureError
from waiting import eventually

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.errors import RefusedEarly
from ray_slo.serve.deadlines import remaining_ms

SLO_MS = 30_000  # generous; calls that must be refused bring a shorter deadline


@serve.deployment(max_ongoing_requests=100)
class Doubler:
    """Item −1 blocks the model until "release" is called, anything else is doubled."""

    def __init__(self):
        self.batches = []
        self.released = asyncio.Event()
        self.came = self.went = 0

    @ray_slo.batch(latency_slo_ms=SLO_MS)
    async def double(self, items):
        self.batches.append(list(items))
        if -1 in items:
            await self.released.wait()
        return [2 * i for i in items]

    @ray_slo.batch(latency_slo_ms=SLO_MS)
    async def count(self, limits):
        for i in range(max(limits)):
            yield [i if i < limit else StopIteration for limit in limits]

    @ray_slo.batch(latency_slo_ms=SLO_MS)
    async def model_ids(self, items):
        return [serve.get_multiplexed_model_id()] * len(items)

    @serve.multiplexed(max_num_models_per_replica=3)
    async def load(self, model_id):
        return model_id

    async def watched(self, item):
        self.came += 1
        try:
            return await self.double(item)
        except asyncio.CancelledError:
            self.went += 1
            raise

    async def came_and_went(self):
        return self.came, self.went

    async def fan_out(self, items):
        return await asyncio.gather(*(self.double(i) for i in items))

    async def __call__(self, request):
        # The request's deadline must also reach a child task of asyncio.
        return (await self.fan_out([int((await request.body()).decode())]))[0]

    async def seen(self):
        return self.batches

    async def release(self):
        self.released.set()

    async def reset(self):
        self.released.set()
        self.batches, self.released = [], asyncio.Event()
        self.came = self.went = 0


@pytest.fixture(scope="module")
def url(ray_cluster):
    return f"{ray_cluster.url}/double"


@pytest.fixture(scope="module")
def deployed(ray_cluster):
    with ray_cluster.running(Doubler.bind(), "doubler", "/double") as handle:
        yield handle


@pytest.fixture
def handle(deployed):
    deployed.reset.remote().result()
    return deployed


def block(handle):
    """Keep the model busy; the answer comes after release."""
    blocked = handle.double.remote(-1)
    assert eventually(lambda: [-1] in handle.seen.remote().result())
    return blocked


def came_and_went(handle):
    return handle.came_and_went.remote().result()


# This test is the first, because it needs a batcher that has learned nothing.
def test_refusal_through_a_handle_is_typed(handle):
    blocked = block(handle)
    with pytest.raises(RefusedEarly) as refused:
        handle.double.remote(1, latency_slo_ms=100).result()
    assert isinstance(refused.value, BackPressureError)
    assert refused.value.latency_slo_ms == pytest.approx(100)
    assert refused.value.to_body()["error"] == "RefusedEarly"
    handle.release.remote().result()
    assert blocked.result() == -2
    assert handle.seen.remote().result() == [[-1]]


def batch_metrics():
    """The metrics of `double` on this node, by name."""
    port = ray.nodes()[0]["MetricsExportPort"]
    found = {}
    try:
        told = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    except httpx.HTTPError:  # it has just started, or is busy
        return found
    for line in told.splitlines():
        if 'function_name="double"' in line:
            found[line.partition("{")[0]] = float(line.rpartition(" ")[2])
    return found


def test_it_has_the_metrics_of_serve_batch(handle):
    assert [r.result() for r in [handle.double.remote(i) for i in range(5)]] == [0, 2, 4, 6, 8]
    names = {
        "ray_serve_actual_batch_size_count",
        "ray_serve_batch_execution_time_ms_count",
        "ray_serve_batch_queue_length",
        "ray_serve_batch_utilization_percent_count",
        "ray_serve_batch_wait_time_ms_count",
        "ray_serve_batches_processed_total",
    }

    def are_there():
        found = batch_metrics()
        counted = found.get("ray_serve_batches_processed_total", 0)
        return names <= found.keys() and counted == found["ray_serve_actual_batch_size_count"] > 1

    assert eventually(are_there), batch_metrics()


def test_handle_and_http(handle, url):
    assert [r.result() for r in [handle.double.remote(i) for i in range(20)]] == [
        2 * i for i in range(20)
    ]
    assert handle.double.remote(4, latency_slo_ms=20_000).result() == 8
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: httpx.post(url, content=str(i), timeout=30), range(16))
        assert [int(a.text) for a in answers] == [2 * i for i in range(16)]


def test_refusal_over_http_is_503_with_retry_after(handle, url):
    blocked = block(handle)
    for headers in ({"x-slo-latency-ms": "100"}, {"X-Request-Timeout-Seconds": "3"}):
        answer = httpx.post(url, content="1", headers=headers, timeout=30)
        assert answer.status_code in (503, 504), answer.text
        if answer.status_code == 503 and hasattr(ResponseStatus, "headers"):  # from Ray 2.58 on
            assert int(answer.headers["retry-after"]) >= 0
        body = answer.json()
        assert body["error"] in ("RefusedEarly", "Expired")
        if "no frontend answered" in body["message"]:
            continue  # an answer of Serve's proxy, on a very busy machine
        assert body["model"] == "double"
        assert 0 < body["latency_slo_ms"] <= 3000
        assert body["reason"] in ("would_miss", "shed", "expired")
    handle.release.remote().result()
    assert blocked.result() == -2
    # A request's timeout must not relax the SLO. A request without headers has no timeout.
    assert httpx.post(url, content="3", timeout=30).text == "6"


def test_a_cancelled_call_harms_nobody(handle):
    blocked = block(handle)
    gone, stays = handle.watched.remote(1), handle.watched.remote(2)
    assert eventually(lambda: came_and_went(handle) == (2, 0))
    gone.cancel()
    assert eventually(lambda: came_and_went(handle) == (2, 1))
    handle.release.remote().result()
    assert (blocked.result(), stays.result()) == (-2, 4)
    assert [2] in handle.seen.remote().result()
    assert handle.double.remote(3).result() == 6


def test_streams(handle):
    stream = handle.options(stream=True).count
    streams = [stream.remote(n) for n in (3, 1)]
    assert [list(s) for s in streams] == [[0, 1, 2], [0]]


def test_models_are_not_mixed_in_a_batch(handle):
    def call(model):
        return handle.options(multiplexed_model_id=model).model_ids.remote(0)

    answers = [call(model) for model in "abcabc"]
    assert [a.result() for a in answers] == list("abcabc")


app = FastAPI()


@serve.deployment(max_ongoing_requests=100)
@serve.ingress(app)
class Api:
    def __init__(self, model):
        self.model = model

    @ray_slo.batch(latency_slo_ms=SLO_MS, max_batch_size=16)
    def square(self, items):
        time.sleep(0.8)
        return [i * i for i in items]

    @app.get("/square/{i}")
    async def get_square(self, i: int) -> int:
        return await self.square(i)

    @app.get("/passed-on/{i}")
    async def passed_on(self, i: int) -> int:
        left_ms = remaining_ms()
        return await self.model.double.remote(i, latency_slo_ms=left_ms)


def test_fastapi_and_composition(ray_cluster):
    with ray_cluster.running(Api.bind(Doubler.bind()), "api", "/api"):
        url = f"{ray_cluster.url}/api"
        for i in range(3):
            assert httpx.get(f"{url}/square/{i}", timeout=30).json() == i * i
        assert httpx.get(f"{url}/passed-on/4", timeout=30).json() == 8
        hurry = {"x-slo-latency-ms": "700"}  # all batches so far took longer
        answer = httpx.get(f"{url}/square/5", headers=hurry, timeout=30)
        assert answer.status_code == 503
        assert answer.json()["reason"] == "would_miss"
        # The proxy refuses it without a prediction if an earlier request has not left it yet.
        assert answer.json().get("predicted_finish_ms", math.inf) > 700
        blocked = block(serve.get_deployment_handle("Doubler", "api"))
        answer = httpx.get(f"{url}/passed-on/5", headers=hurry, timeout=30)
        assert answer.status_code in (503, 504)  # so the deadline was passed on
        blocked.cancel()


@serve.deployment(max_ongoing_requests=256)
class Busy:
    @ray_slo.batch(latency_slo_ms=400, max_batch_size=4, profile=LatencyProfile([0.05] * 4))
    def same(self, items):
        time.sleep(0.05)
        return items

    async def __call__(self, request):
        return await self.same(7)


def test_the_door_refuses_what_it_cannot_do_in_time(ray_cluster):
    """It answers 80 requests/s, so 40 may be on their way. 64 clients at a time are too many."""
    with (
        ray_cluster.running(Busy.bind(), name="busy", route_prefix="/busy"),
        ThreadPoolExecutor(64) as clients,
    ):
        url = f"{ray_cluster.url}/busy"
        for _ in range(4):
            answer = httpx.post(url, timeout=30)
            assert "x-batch-capacity" not in answer.headers
        answers = list(clients.map(lambda _: httpx.post(url, timeout=30), range(320)))
        assert {answer.status_code for answer in answers} <= {200, 503, 504}
        assert any("are on their way" in answer.text for answer in answers)
        assert any(answer.status_code == 200 for answer in answers)
