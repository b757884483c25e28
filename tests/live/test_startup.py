"""Until an application can serve, requests are refused at once with the reason; then none is."""

import functools
import json
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from ray import serve
from waiting import PATIENCE_S, eventually

import ray_slo
from ray_slo.errors import NotReady
from ray_slo.serve.grpc import InferenceStub, reported
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.watch.status import read_status


class Slow:
    """A model whose load waits for a file. If the file has text, it fails with that text."""

    def __init__(self, mark):
        until = time.monotonic() + PATIENCE_S
        while not Path(mark).exists():
            if time.monotonic() > until:
                raise RuntimeError("nobody let it go")
            time.sleep(0.05)
        if said := Path(mark).read_text():
            raise RuntimeError(said)

    @staticmethod
    def example_input():
        return 1

    def __call__(self, items):
        return items


App = ray_slo.deployment(
    latency_slo_ms=10_000,
    ray_actor_options={"num_cpus": 0.1},
    profile_seconds=0.1,
    name="slow",
)(Slow)


class Started:
    """`serve.run` in a thread, because it returns only when all replicas are up."""

    def __init__(self, mark, name):
        self.error = None
        self._name = name
        self._app = App.bind(str(mark))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            serve.run(self._app, name=self._name, route_prefix=f"/{self._name}")
        except RuntimeError as error:
            self.error = error

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def refusal(url):
    """The body of our 503, once the frontend is up."""

    def said():
        try:
            response = httpx.post(url, json=1, timeout=30)
        except httpx.TransportError:
            return None
        if response.status_code != 503 or "reason" not in response.text:
            return None
        assert int(response.headers["retry-after"]) >= 1
        return response.json()

    return eventually(said)


def test_while_it_starts_and_from_then_on(ray_cluster, tmp_path):
    mark, url = tmp_path / "go", f"{ray_cluster.url}/starting"
    started = Started(mark, "starting")
    try:
        body = refusal(url)
        assert (body["error"], body["reason"]) == ("NotReady", "starting")
        assert eventually(lambda: "building slow, 1 of 1" in refusal(url)["message"])
        state = read_status(ray_cluster.address, "starting")["starting"]["starting"]
        assert state["models"] == ["slow"]
        assert {w["state"] for w in state["workers"].values()} == {"building slow, 1 of 1"}
        with grpc.insecure_channel(ray_cluster.grpc) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                InferenceStub(channel).Infer(
                    InferRequest(json="1"), metadata=[("application", "starting")], timeout=30
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reported(refused.value)["reason"] == "starting"
        handle = serve.get_app_handle("starting")
        with pytest.raises(NotReady, match="building slow"):
            handle.remote(1).result(timeout_s=30)
        mark.touch()
        started.join()
        assert started.error is None
        assert handle.remote(2).result(timeout_s=30) == 2  # the first request after `serve.run`
        assert httpx.post(url, json=3, timeout=30).json() == 3
        read = functools.partial(read_status, ray_cluster.address, "starting")
        assert eventually(lambda: "starting" not in read()["starting"])
    finally:
        serve.delete("starting", _blocking=False)


@pytest.mark.timeout(180)
def test_what_cannot_be_loaded_fails_the_deployment(ray_cluster, tmp_path):
    mark, url = tmp_path / "go", f"{ray_cluster.url}/failing"
    mark.write_text("weights are not there")
    started = Started(mark, "failing")
    try:
        assert eventually(lambda: "weights are not there" in refusal(url)["message"])
        assert eventually(lambda: refusal(url)["reason"] == "start_failed")
        body = refusal(url)
        assert "failed, and not tried again: " in body["message"]
        assert "weights are not there" in body["message"]
        started.join()
        assert "weights are not there" in str(started.error)
        said = json.dumps(read_status(ray_cluster.address, "failing"))
        assert "weights are not there" in said
    finally:
        serve.delete("failing", _blocking=False)
