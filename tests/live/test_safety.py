"""Whatever a client sends, it gets a typed answer, no data of others, and no hanging call."""

import contextlib
import json
import re
import socket
import time
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest
import schemathesis
from apps import Same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from waiting import eventually, status_of

import ray_slo
from ray_slo.serve.grpc import reported
from ray_slo.serve.protos import InferRequest
from tests.serve.openapi import document

SLO_MS = 2000
LEISURE = {"x-slo-latency-ms": "30000"}  # for requests that must be answered
SECRET = "hunter2-do-not-tell"
App = ray_slo.deployment(
    latency_slo_ms=SLO_MS,
    ray_actor_options={"num_cpus": 0.1},
    profile_seconds=0.1,
    max_body_bytes=20_000,
    error_details=False,
    name="same",
)(Same)
TYPED = {400, 404, 405, 408, 413, 415, 422, 431, 503, 504}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
BOUNDED = settings(
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=SLO_MS / 1e3 + 30),  # 1 s after the SLO, and 29 s for a busy machine
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def handle(ray_cluster, tmp_path_factory):
    log = {"dir": str(tmp_path_factory.mktemp("decisions")), "flush_s": 0.5}
    with ray_cluster.running(App.options(decision_log=log).bind(), "safe", "/safe") as handle:
        handle.decisions = Path(log["dir"])
        yield handle


@pytest.fixture(scope="module")
def url(ray_cluster, handle):
    return f"{ray_cluster.url}/safe"


# -- what the document says ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_as_the_openapi_document_says(url, mode):
    schema = schemathesis.openapi.from_dict(document(["same"]))
    schema.config.update(base_url=url)
    for found in schema.get_all_operations():
        operation = found.ok()
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

        @settings(BOUNDED, max_examples=25)
        @given(case=cases)
        def conforms(case):
            said = case.call(timeout=30)
            assert said.status_code in {200, *TYPED}
            case.validate_response(said, checks=CHECKS)

        conforms()


# -- anything at all -----------------------------------------------------------------------------


TOKEN = st.sampled_from([b"x-slo-latency-ms", b"x-request-timeout-seconds", b"x-request-id"])
ODD = st.sampled_from(
    [b"", b"1", b"5000", b"nan", b"inf", b"-1", b"1e300", b"\xff", b"9" * 400, b"\xd9\xa1", b"a b"]
)
HEADERS = st.lists(
    st.tuples(
        TOKEN
        | st.sampled_from(
            [
                *(b"x-slo-timeout-ms", b"content-type", b"serve_multiplexed_model_id"),
                *(b"x-session-id", b"x-request-disconnect-disabled", b"traceparent", b"cookie"),
                *(b"content-encoding", b"expect", b"accept", b"range", b"authorization"),
            ]
        ),
        ODD | st.sampled_from([b"application/json", b"text/plain", b"gzip", b"deflate", b"*/*"]),
    ),
    max_size=4,
)
BODIES = (
    st.sampled_from([b"", b"[" * 15_000, b"[" * 200 + b"]" * 200, b"1" * 5000, b"NaN", b'"\xff"'])
    | st.sampled_from([b'"\\ud800"', b"1e999", b"{", b"x" * 30_000, b"\xef\xbb\xbf1"])
    | st.binary(max_size=50)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    ).map(lambda value: json.dumps(value).encode())
)
METHODS = st.sampled_from([b"POST"] * 6 + [b"GET", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"X"])
PATHS = st.sampled_from([b"", b"/", b"/same"] * 3 + [b"/slo_status", b"/../x", b"/%ff%0a", b"/a?b"])
LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def exchange(url, request, wait_s=30.0):
    """(status, headers in small letters, body); (0, …) if the server closes without an answer."""
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port)) as line:
        line.settimeout(wait_s)
        with contextlib.suppress(ConnectionError):
            line.sendall(request)
        said = b""
        with contextlib.suppress(ConnectionError):
            while got := line.recv(65536):
                said += got
                head, blank, body = said.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                if blank and length and len(body) >= int(length[1]):
                    break
    status = LINE.match(said)
    head, _, body = said.partition(b"\r\n\r\n")
    return int(status[1]) if status else 0, head.lower(), body


def framed(body, chunked):
    if not chunked:
        return [(b"content-length", b"%d" % len(body))], body
    pieces = [body[i : i + 7000] for i in range(0, len(body), 7000)]
    lines = [b"%x\r\n%s\r\n" % (len(p), p) for p in pieces]
    return [(b"transfer-encoding", b"chunked")], b"".join(lines) + b"0\r\n\r\n"


def test_any_request_is_answered(url, handle):
    root = httpx.URL(url).raw_path

    @settings(BOUNDED, max_examples=80)
    @given(METHODS, PATHS, HEADERS, BODIES, st.booleans())
    def answered(method, path, headers, body, chunked):
        framing, content = framed(body, chunked)
        lines = [b"%s: %s" % pair for pair in [(b"host", b"x"), *framing, *headers]]
        first = b"%s %s HTTP/1.1" % (method, root + path)
        status, head, said = exchange(url, b"\r\n".join([first, *lines, b"", content]))
        assert status in {200, *TYPED}, (status, said)
        if status == 200 and method == b"POST" and b"application/json" in head:
            json.loads(said, parse_constant=pytest.fail)
        elif status != 200 and said not in (b"Invalid HTTP request received.", b""):
            assert b"application/json" in head
            assert {"error", "reason", "message"} <= set(json.loads(said))
            assert len(said) < 1500

    answered()
    assert httpx.post(url, json=[1], headers=LEISURE, timeout=30).json() == [1]
    assert eventually(lambda: status_of(handle)["pending"] == 0)


def test_slow_body_ends_by_its_deadline(url):
    head = b"POST /safe HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nx-slo-latency-ms: 300\r\n\r\n1"
    begin = time.monotonic()
    status, _, said = exchange(url, head)
    assert (status, json.loads(said)["reason"]) == (408, "slow_body")
    assert time.monotonic() - begin >= 0.3


def test_a_body_without_an_end_is_cut(url):
    begin = b"POST /safe HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    status, _, said = exchange(url, begin + (b"3e8\r\n" + b"1" * 1000 + b"\r\n") * 30)
    assert (status, json.loads(said)["error"]) == (413, "BodyTooLarge")


def test_headers_without_an_end_are_cut(url):
    status, _, said = exchange(url, b"GET /safe HTTP/1.1\r\nhost: x\r\na: " + b"v" * 2_000_000)
    assert (status, said) == (0, b"")


def test_websockets_are_refused(url):
    upgrade = (
        b"GET /safe HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    assert exchange(url, upgrade)[0] == 403


# -- what is not reachable, and not told ---------------------------------------------------------


ADMIN = ["slo_status", "slo_replan", "slo_move", "slo_heartbeat", "reconfigure", "__call__"]


@pytest.mark.parametrize("name", ADMIN)
def test_admin_calls_are_not_on_the_data_ports(ray_cluster, url, name):
    assert httpx.post(f"{url}/{name}", json=1, timeout=30).status_code == 404
    named = {"x-method": name, "serve-method-name": name, **LEISURE}
    said = httpx.post(url, json=1, headers=named, timeout=30)
    assert said.json() == 1
    with grpc.insecure_channel(ray_cluster.grpc) as channel:
        for service in ("ray_slo.v1.Inference", "ray.serve.RayServeAPIService"):
            call = channel.unary_unary(f"/{service}/{name}", lambda x: x, lambda x: x)
            metadata = [("application", "safe"), ("method_name", name), ("call_method", name)]
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=metadata, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_models_raise_stays_in_the_log(ray_cluster, url):
    said = httpx.post(url, json={"raise": SECRET}, headers=LEISURE, timeout=30)
    assert (said.status_code, said.json()["error"]) == (500, "InternalError")
    assert SECRET not in said.text
    with grpc.insecure_channel(ray_cluster.grpc) as channel:
        call = channel.unary_unary("/ray_slo.v1.Inference/Infer", lambda x: x, lambda x: x)
        item = json.dumps({"raise": SECRET})
        request = InferRequest(json=item, latency_slo_ms=30_000).SerializeToString()
        with pytest.raises(grpc.RpcError) as failed:
            call(request, metadata=[("application", "safe")], timeout=30)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in json.dumps(reported(failed.value)) + failed.value.details()


def test_secrets_are_in_no_log(ray_cluster, url, handle):
    token = "token-that-nobody-writes-down"
    headers = {"authorization": f"Bearer {token}", "cookie": f"session={token}", "x-api-key": token}
    item = {"item": "an-item-that-nobody-writes-down"}
    said = httpx.post(url, json=item, headers={**headers, **LEISURE}, timeout=30)
    assert said.status_code == 200
    assert httpx.post(f"{url}/no", json=item, headers=headers, timeout=30).status_code == 404
    wrong = {**headers, "x-slo-latency-ms": "soon"}
    assert httpx.post(url, json=item, headers=wrong, timeout=30).status_code == 400
    too_large = {"item": item["item"], "rest": "x" * 30_000}
    assert httpx.post(url, json=too_large, headers=headers, timeout=30).status_code == 413
    files = eventually(lambda: list(handle.decisions.glob("*.parquet")))
    import pyarrow.parquet as pq

    assert files
    written = "".join(str(pq.read_table(f).to_pylist()) for f in files)
    logs = ray_cluster.spans.parents[1]
    for file in logs.rglob("*"):
        if file.is_file():
            written += file.read_text(encoding="utf-8", errors="replace")
    assert "same" in written
    assert token not in written and item["item"] not in written
