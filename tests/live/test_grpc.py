"""HTTP and gRPC give the same answers, for the same reasons, by the same deadlines."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from apps import Tasks
from waiting import eventually, held, posted, status_of

import ray_slo
from benchmarks.live.cluster import descendants
from benchmarks.live.shipped import beyond_loopback, listening
from ray_slo.serve.grpc import PUSHBACK_METADATA, InferenceStub, reported
from ray_slo.serve.protos import DescribeRequest, InferRequest

SLO_MS = 30_000
MARGIN_MS = 3_000  # time between a refusal and the client's own timeout
TaskApp = ray_slo.deployment(
    latency_slo_ms=SLO_MS,
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.1},
    accuracy=99.5,
    profile_seconds=0.3,
    retries=0,
    response_margin_ms=MARGIN_MS,
    max_body_bytes=1000,
    name="tasks",
)(Tasks)

STATUS = {  # HTTP status and gRPC code of each reason
    "ok": (200, "OK"),
    "refused": (503, "RESOURCE_EXHAUSTED"),
    "lost": (503, "UNAVAILABLE"),
    "expired": (504, "DEADLINE_EXCEEDED"),
    "bad": (422, "INVALID_ARGUMENT"),
    "bad_slo": (400, "INVALID_ARGUMENT"),  # a header in HTTP, a field in gRPC
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "unknown": (404, "NOT_FOUND"),
    "failed": (500, "INTERNAL"),
}


@dataclass
class Said:
    status: int | str
    value: object = None
    about: dict = field(default_factory=dict)
    error: dict = field(default_factory=dict)
    retry_after_s: float | None = None


class Http:
    def __init__(self, cluster):
        self.url = f"{cluster.url}/both"

    def ask(self, item=None, *, body=None, raw=False, model="", slo_ms=None, timeout_s=None):
        headers = {"content-type": "application/octet-stream" if raw else "application/json"}
        if slo_ms is not None:
            headers["x-slo-latency-ms"] = str(slo_ms)
        if timeout_s is not None:
            headers["x-request-timeout-seconds"] = str(timeout_s)
        body = json.dumps(item).encode() if body is None else body
        answer = httpx.post(f"{self.url}/{model}", content=body, headers=headers, timeout=30)
        if answer.status_code != 200:
            retry = answer.headers.get("retry-after")
            retry_s = None if retry is None else float(retry)
            return Said(answer.status_code, error=answer.json(), retry_after_s=retry_s)
        about = {k.removeprefix("x-slo-"): v for k, v in answer.headers.items()}
        return Said(200, answer.json(), about)

    def describe(self):
        return httpx.get(self.url, timeout=30).json()

    def sent(self, item):
        """Send a request, and cancel it at the end of the block."""
        return posted(self.url, item)

    @staticmethod
    def status(name):
        return STATUS[name][0]


class Grpc:
    metadata = (("application", "both"),)

    def __init__(self, cluster):
        self.channel = grpc.insecure_channel(cluster.grpc)
        self.stub = InferenceStub(self.channel)

    def ask(self, item=None, *, body=None, raw=False, model="", slo_ms=None, timeout_s=None):
        body = json.dumps(item).encode() if body is None else body
        content = {"data": body} if raw else {"json": body.decode()}
        request = InferRequest(model=model, latency_slo_ms=slo_ms, **content)
        try:
            reply = self.stub.Infer(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            pushback = dict(error.trailing_metadata() or ()).get(PUSHBACK_METADATA)
            retry_s = None if pushback is None else float(pushback) / 1e3
            return Said(error.code().name, error=reported(error), retry_after_s=retry_s)
        names = ("model", "variant", "accuracy", "batch_size", "queue_ms", "exec_ms", "latency_ms")
        about = {name.replace("_", "-"): getattr(reply, name) for name in names}
        about["deadline-met"] = str(reply.deadline_met).lower()
        return Said("OK", json.loads(reply.json), about)

    def describe(self):
        return json.loads(self.stub.Describe(DescribeRequest(), metadata=self.metadata).json)

    @contextlib.contextmanager
    def sent(self, item):
        call = self.stub.Infer.future(InferRequest(json=json.dumps(item)), metadata=self.metadata)
        yield
        assert call.cancel()

    @staticmethod
    def status(name):
        return STATUS[name][1]


@pytest.fixture(scope="module")
def handle(ray_cluster):
    with ray_cluster.running(TaskApp.bind(), "both", "/both") as handle:
        yield handle


@pytest.fixture(scope="module", params=[Http, Grpc], ids=["http", "grpc"])
def client(ray_cluster, handle, request):
    made = request.param(ray_cluster)
    yield made
    if request.param is Grpc:
        made.channel.close()


def test_answer_says_how_it_came_about(client):
    said = client.ask(5, model="tasks")
    assert (said.status, said.value) == (client.status("ok"), {"value": 25.0})
    assert (said.about["model"], said.about["variant"]) == ("tasks", "tasks")
    assert float(said.about["accuracy"]) == 99.5
    assert int(said.about["batch-size"]) == 1
    assert float(said.about["exec-ms"]) >= 30
    assert 0 <= float(said.about["queue-ms"]) < float(said.about["latency-ms"]) <= SLO_MS
    assert said.about["deadline-met"] == "true"


def test_bytes_are_the_models_to_read(client):
    assert client.ask(body=b"7", raw=True).value == {"value": 49.0}


def test_what_is_served(client, handle):
    assert client.describe()["models"] == status_of(handle)["models"]


@pytest.mark.parametrize(
    ("asked", "status", "error", "says"),
    [
        ({"body": b"{bad"}, "bad", "BadInput", "not JSON"),
        ({"item": "bad"}, "bad", "BadInput", "this item is bad"),
        ({"item": "lock"}, "failed", "BatchResultError", "cannot be pickled"),
        ({"item": 1, "slo_ms": -1}, "bad_slo", None, "must be a positive number"),
        ({"item": 1, "slo_ms": float("nan")}, "bad_slo", None, "must be a positive number"),
        ({"item": "x" * 1000}, "too_large", None, "1002 bytes; at most 1000"),
        ({"item": 1, "model": "task"}, "unknown", "UnknownModel", "choose one of tasks"),
        ({"item": ["raise", "value"]}, "failed", "ValueError", "poison"),
        ({"item": ["drop_one", 0]}, "failed", "BatchResultError", "returned 0 results"),
    ],
)
def test_what_is_wrong(client, asked, status, error, says):
    said = client.ask(**asked)
    assert said.status == client.status(status)
    assert says in said.error["message"]
    assert error in (None, said.error["error"])
    assert said.retry_after_s is None


def test_own_slo_that_cannot_be_met(client):
    said = client.ask(5, slo_ms=20)  # less than a batch takes; enough time for a refusal
    assert said.status == client.status("refused")
    assert (said.error["error"], said.error["reason"]) == ("RefusedEarly", "would_miss")
    assert said.error["model"] == "tasks"
    assert 0 < said.error["latency_slo_ms"] <= 20  # less the time to the frontend
    assert said.error["predicted_finish_ms"] > 20
    assert said.retry_after_s > 0


def test_clients_deadline_is_known_and_bounds_the_slo(client):
    said = client.ask(5, timeout_s=0.9 * MARGIN_MS / 1e3)
    assert said.status == client.status("refused")
    assert said.error["reason"] == "would_miss"
    assert 0 < said.error["latency_slo_ms"] < MARGIN_MS  # gRPC rounds a timeout up
    assert client.ask(5, timeout_s=60).about["deadline-met"] == "true"


def test_deadline_and_hanging_up_while_workers_are_busy(client, handle, tmp_path):
    before = status_of(handle)["counts"]["cancelled"]
    with held(handle, tmp_path):
        with client.sent(3):
            assert eventually(lambda: status_of(handle)["queued"]["tasks"])
        assert eventually(lambda: not status_of(handle)["queued"]["tasks"])
        assert status_of(handle)["counts"]["cancelled"] == before + 1
        said = client.ask(5, timeout_s=1e-3 * MARGIN_MS + 1)
    expected = {"would_miss": "refused", "shed": "refused", "expired": "expired"}
    assert said.status == client.status(expected[said.error["reason"]])
    assert 0 < said.error["latency_slo_ms"] < MARGIN_MS + 1100
    assert client.ask(2).value == {"value": 4.0}


def test_grpc_listens_on_one_host(ray_cluster):
    port = int(ray_cluster.grpc.rpartition(":")[2])
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    if not tables[0].exists():
        pytest.skip("needs Linux")
    rows = [row.split() for t in tables if t.exists() for row in t.read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port}
    loopback = f"0100007F:{port:04X}"
    assert listening <= {loopback, f"0000000000000000FFFF0000{loopback}"}
    assert listening


@pytest.mark.skipif(
    os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0",
    reason="Ray's own processes listen for other nodes; `make test` says that there are none",
)
def test_nothing_listens_beyond_loopback(handle):
    """Neither Ray, Serve, HAProxy nor replicas."""
    mine = listening([os.getpid(), *descendants(os.getpid())])
    assert len(mine) > 5
    assert beyond_loopback(mine) == []


# These tests are the last, because each of them ends a worker.
def test_worker_lost(client, tmp_path):
    said = client.ask(["die_once", str(tmp_path / "died")])
    assert said.status == client.status("lost")
    assert (said.error["error"], said.error["reason"]) == ("WorkerLost", "worker_lost")
    assert said.retry_after_s == 1.0
