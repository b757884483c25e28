"""Headers with random content are read correctly, or refused with the header and the reason."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from ray_slo.errors import BadHeader, BadInput
from ray_slo.serve.deadlines import HEADERS, HTTP_PAGE
from ray_slo.serve.frontend.http import headers_of
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.proxy.bounds import BoundsMiddleware
from tests.serve.intakes import intake

OURS = [header.name for header in HEADERS.values() if header.said_by == "client"]
NAMES = [*HEADERS, "x-request-id", "traceparent", "content-length", "accept", "x-slo-unknown"]
ODD = [
    *("", " ", "0", "-0", "-1", "+5", "nan", "inf", "-inf", "1e309", "1e-400", "1e308", "0x10"),
    *("9" * 31, "9" * 400, "1_0", "1,5", "1.5.5", "5ms", "null", "true", "[]", "250;q=1", "5, 6"),
    *("\x00", "\r\n", "\x7f", "é", "\xff" * 10, "gold", "silver", "GOLD", "a" * 101, "a" * 9999),
]
VALUES = st.sampled_from(ODD) | st.text(st.characters(max_codepoint=255), max_size=40)
FUZZ = settings(max_examples=120)
MODEL = {"callable": "apps:M", "latency_slo_ms": 400, "slo_classes": {"gold": 50}}


def told(error):
    """The refusal says which header, what is wrong, and where the docs explain it."""
    body = error.to_body()
    json.dumps(body).encode()
    assert len(body["message"]) < 400
    assert body["field"] in (*HEADERS, "slo_class")
    if isinstance(error, BadHeader):
        assert body["message"].startswith(f"header {body['field']} ")
        assert body["message"].endswith(f". See {HTTP_PAGE}#requests")
    else:
        assert "its classes are gold" in body["message"]


@pytest.fixture(scope="module")
def app():
    async def make():
        return intake(models={"m": MODEL})

    return asyncio.run(make())


@FUZZ
@given(pairs=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
def test_http(app, pairs):
    raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    request = Request({"type": "http", "headers": raw})
    try:
        asked = app.asked_http(request, headers_of(request), "m", 7.0)
    except BadInput as error:
        told(error)
    else:
        assert 0 < asked.slo_s <= 86_400
        app.heed_proxy(headers_of(request), asked)


@FUZZ
@given(pairs=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
def test_grpc(app, pairs):
    message = InferRequest(json="1")
    try:
        asked, _, _ = app.asked_grpc(message, tuple(pairs), "m", 7.0)
    except BadInput as error:
        told(error)
    else:
        assert 0 < asked.slo_s <= 86_400


@pytest.mark.slow
@FUZZ
@given(pairs=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
def test_the_proxy_passes_on_or_refuses_with_a_reason(pairs):
    sent, passed = [], []

    async def application(scope, receive, send):
        passed.append(scope)

    async def run():
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
        scope = {"type": "http", "headers": raw}
        await BoundsMiddleware(application, 10**9)(scope, receive, send)

    asyncio.run(run())
    if not passed:
        status, body = sent[0]["status"], json.loads(sent[1]["body"])
        assert status in (400, 413, 431)
        assert body["field"] in (*NAMES, "body", "headers")
        assert (status == 400) == body["message"].endswith(f"See {HTTP_PAGE}#requests")


@pytest.mark.parametrize("name", OURS)
def test_a_header_that_is_there_twice_is_refused(app, name):
    value = {"x-slo-class": "gold"}.get(name, "5")
    raw = [(name.encode(), value.encode())] * 2
    request = Request({"type": "http", "headers": raw})
    with pytest.raises(BadHeader, match=f"header {name} is there 2 times; send one"):
        app.asked_http(request, headers_of(request), "m", 7.0)
    with pytest.raises(BadHeader, match=f"header {name} is there 2 times; send one"):
        app.asked_grpc(InferRequest(json="1"), [(name, value)] * 2, "m", 7.0)


def test_a_class_with_a_long_name_is_unknown_and_not_ignored(app):
    request = Request({"type": "http", "headers": [(b"x-slo-class", b"g" * 200)]})
    with pytest.raises(BadInput, match=r"has no SLO class .* its classes are gold"):
        app.asked_http(request, headers_of(request), "m", 7.0)
