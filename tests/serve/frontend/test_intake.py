"""What clients may ask for, in which forms, and the errors for everything else."""

import asyncio
import contextlib
import gzip
import json
import math
import time
from types import SimpleNamespace

import pytest
from ray.serve import context as serve_context
from starlette.requests import Request

from ray_slo.errors import (
    BadHeader,
    BadInput,
    BodyTooLarge,
    RefusedEarly,
    UnknownModel,
    UnsupportedEncoding,
)
from ray_slo.serve import deadlines
from ray_slo.serve.errors import error_body
from ray_slo.serve.frontend.http import headers_of
from ray_slo.serve.messages import Capacity
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.proxy.gate import FEW
from tests.serve.intakes import intake
from tests.serve.loops import in_loop

JSON, BYTES = "application/json", "application/octet-stream"


def http(**headers):
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    request = Request({"type": "http", "headers": pairs})
    return request, headers_of(request)


@in_loop
async def test_the_model_that_is_meant():
    assert intake().model_name(None) == "m"
    two = intake("a", "b")
    assert two.model_name("b") == "b"
    with pytest.raises(UnknownModel, match="say which model; choose one of a, b"):
        two.model_name(None)
    with pytest.raises(UnknownModel, match="model 'c' is unknown"):
        two.model_name("c")
    assert two.seen == [("unanswered", "", "invalid", "unknown_model")] * 2


@in_loop
async def test_what_serve_hands_down_to_a_call_by_handle(monkeypatch, caplog):
    """gRPC metadata shortens the SLO; headers of HTTP requests do not come, which is told once."""
    one, current = intake(), serve_context._serve_request_context
    deadlines._warn_of_lost_headers.cache_clear()

    def asked(*args, **about):
        token = current.set(serve_context._RequestContext(**about))
        try:
            return one.asked("m", 7.0, *args).slo_s
        finally:
            current.reset(token)

    for metadata, slo_s in (
        ((("x-slo-latency-ms", "50"),), 0.05),
        ((("x-slo-latency-ms", "5000"),), 0.4),
        ((("x-request-timeout-seconds", "0.2"),), 0.2),
        ((("x-slo-latency-ms", "odd"),), 0.4),
        ((), 0.4),
    ):
        about = SimpleNamespace(invocation_metadata=lambda metadata=metadata: metadata)
        assert asked(grpc_context=about) == slo_s
        assert asked(300, grpc_context=about) == 0.3
    assert asked() == 0.4
    assert asked(300, route="/app") == 0.3
    assert not caplog.records
    assert [asked(route="/app") for _ in range(2)] == [0.4, 0.4]
    (line,) = caplog.records
    assert "headers x-slo-latency-ms and x-request-timeout-seconds, so they have" in line.message


@in_loop
async def test_the_deadline_of_a_call():
    one = intake()
    asked = one.asked("m", 7.0, None)
    assert (asked.arrival, asked.deadline, asked.traceparent) == (7.0, 7.4, None)
    assert one.asked("m", 7.0, 50).slo_s == 0.05
    for wrong in (0, -1, math.nan, "soon", 1e9):
        with pytest.raises(BadInput, match="latency_slo_ms must be a positive number") as bad:
            one.asked("m", 7.0, wrong)
        assert (bad.value.field, bad.value.model) == ("latency_slo_ms", "m")


@in_loop
async def test_the_deadline_of_an_http_request():
    one = intake()
    asked = one.asked_http(*http(x_slo_latency_ms="90", traceparent="00-x"), "m", 7.0)
    assert (asked.slo_s, asked.traceparent) == (pytest.approx(0.09), "00-x")
    assert one.asked_http(*http(), "m", 7.0).slo_s == 0.4
    with pytest.raises(BadHeader) as bad:
        one.asked_http(*http(x_slo_latency_ms="soon"), "m", 7.0)
    assert (bad.value.model, one.seen) == ("m", [("unanswered", "m", "invalid", "bad_header")])


@in_loop
async def test_a_multiplexed_model_id_is_refused_at_every_door():
    one = intake()
    doors = [
        lambda: one.asked("m", 7.0),
        lambda: one.asked_http(*http(), "m", 7.0),
        lambda: one.asked_grpc(InferRequest(json="1"), [], "m", 7.0),
    ]
    for door in doors:
        door()
        token = serve_context._serve_request_context.set(
            serve_context._RequestContext(multiplexed_model_id="v2")
        )
        with pytest.raises(BadInput, match=r"'v2' cannot be honoured.*use @ray_slo.batch") as bad:
            door()
        serve_context._serve_request_context.reset(token)
        assert (bad.value.http_status, bad.value.field) == (422, "multiplexed_model_id")
    assert one.seen == [("unanswered", "m", "invalid", "bad_input")] * 3


CLASSES = {"m": {"callable": "apps:M", "latency_slo_ms": 400, "slo_classes": {"gold": 50}}}


@in_loop
async def test_an_slo_class_by_header():
    one = intake(models=CLASSES)
    asked = one.asked_http(*http(x_slo_class="gold"), "m", 7.0)
    assert (asked.slo_s, asked.slo_class, asked.stream) == (0.05, "gold", "m@gold")
    assert one.asked_http(*http(), "m", 7.0).stream == "m"
    own = one.asked_http(*http(x_slo_class="gold", x_slo_latency_ms="90"), "m", 7.0)
    assert (own.slo_s, own.stream) == (pytest.approx(0.09), "m@gold")
    with pytest.raises(BadInput, match="no SLO class 'silver'; its classes are gold") as bad:
        one.asked_http(*http(x_slo_class="silver"), "m", 7.0)
    assert (bad.value.http_status, bad.value.field, bad.value.model) == (422, "slo_class", "m")
    assert one.seen == [("unanswered", "m", "invalid", "bad_input")]
    message, metadata = InferRequest(json="1"), [("x-slo-class", "gold")]
    assert one.asked_grpc(message, metadata, "m", 7.0)[0].stream == "m@gold"
    assert one.asked_grpc(message, metadata, "m", 7.0)[0].slo_s == 0.05
    message = InferRequest(json="1", latency_slo_ms=90)
    assert one.asked_grpc(message, metadata, "m", 7.0)[0].slo_s == pytest.approx(0.09)


@in_loop
@pytest.mark.parametrize(
    "has_door, said, way_s",
    [(True, "12.5", 0.0125), (True, "-1", 0.0), (True, "x", 0.0), (False, "12.5", 0.0)],
)
async def test_a_door_says_how_long_the_way_from_it_takes(has_door, said, way_s):
    one = intake(has_door_before=has_door)
    assert one.asked_http(*http(x_slo_way_ms=said), "m", 7.0).way_s == way_s
    message = InferRequest(json="1")
    assert one.asked_grpc(message, [("x-slo-way-ms", said)], "m", 7.0)[0].way_s == way_s


@in_loop
async def test_refusals_at_a_door_count_for_the_class():
    one = intake(models=CLASSES, has_door_before=True)
    one.heed_proxy({"x-slo-refused-before": "7"}, one.asked("m", 0.0, slo_class="gold"))
    assert one.refused == [("m@gold", 7)]
    assert one.capacity_said("m", "gold").split(";")[1] == "50.000"
    assert one.capacity_said("m", "silver") == "none"


@in_loop
async def test_what_a_grpc_message_asks():
    one = intake(max_json_bytes=9, max_body_bytes=20)
    asked, kind, body = one.asked_grpc(InferRequest(json="[1]"), [("traceparent", "t")], "m", 7.0)
    assert (asked.slo_s, asked.traceparent, kind, body) == (0.4, "t", JSON, b"[1]")
    left = [("x-slo-timeout-ms", "100")]
    asked, kind, body = one.asked_grpc(InferRequest(data=b"12", latency_slo_ms=90), left, "m", 7.0)
    assert (asked.slo_s, kind, body) == (pytest.approx(0.09), BYTES, b"12")
    asked, _, _ = one.asked_grpc(InferRequest(data=b"", latency_slo_ms=900), left, "m", 7.0)
    assert asked.slo_s == pytest.approx(0.1)  # then the client hangs up
    for message, error, says in (
        (InferRequest(), BadInput, "no item"),
        (InferRequest(json="1" * 10), BodyTooLarge, "max_json_bytes"),
        (InferRequest(data=b"1" * 21), BodyTooLarge, "max_body_bytes"),
    ):
        with pytest.raises(error, match=says):
            one.asked_grpc(message, (), "m", 7.0)
    assert [seen[1:3] for seen in one.seen] == [("m", "invalid")] * 3


@in_loop
@pytest.mark.parametrize(
    ("content_type", "preprocess", "body", "item"),
    [
        (JSON, "", b'{"a": 1}', {"a": 1}),
        ("text/x+json; charset=utf-8", "m", b"[1]", [1]),
        ("", "", b"3", 3),
        ("image/png", "m", b"[1]", b"[1]"),  # `preprocess` takes it as it is
        ("image/png", "", b"[1]", [1]),
        ("", "m", b"\x89PNG", b"\x89PNG"),
        *(("", "m", body, body) for body in (b"123", b"null", b'{"a": 1}', b"")),
        ("text/plain", "m", b"123", b"123"),
        (JSON, "", json.dumps(["x" * 40_000]).encode(), ["x" * 40_000]),  # on a thread
    ],
)
async def test_the_item_in_a_body(content_type, preprocess, body, item):
    assert await intake(preprocess=preprocess).item(content_type, body, "m") == item


@in_loop
async def test_a_body_that_is_no_json():
    one = intake(max_json_values=5)
    for content_type, says in (
        (JSON, "body is not JSON"),
        ("image/png", "content-type 'image/png'.; for JSON, send it with content-type: appl"),
        ("", "content-type missing.; for JSON, send it with content-type: application/json"),
    ):
        with pytest.raises(BadInput, match=says) as bad:
            await one.item(content_type, b"\x89PNG", "m")
        assert (bad.value.field, bad.value.model) == ("body", "m")
    with pytest.raises(BodyTooLarge, match="max_json_values"):
        await one.item(JSON, b"[1, 2, 3]", "m")
    assert [seen[2] for seen in one.seen] == ["invalid"] * 4


def posted(body, **headers):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "headers": pairs}, receive)


@in_loop
@pytest.mark.parametrize("preprocess", ["", "m"])
async def test_a_compressed_body_is_what_it_was(preprocess):
    one = intake(preprocess=preprocess, max_body_bytes=100, max_json_bytes=50)
    asked = one.asked("m", time.monotonic())
    for coding in ("gzip", "X-GZIP", "", "identity"):
        body = gzip.compress(b"[1]") if "g" in coding.lower() else b"[1]"
        assert await one.body(posted(body, content_encoding=coding), JSON, asked) == b"[1]"
    assert not one.seen
    for body, coding, kind, error, says in (
        (b"", "br", JSON, UnsupportedEncoding, "'br' is not taken; send one of gzip, x-gzip, defl"),
        (b"", "gzip, gzip", JSON, UnsupportedEncoding, "'gzip, gzip' is not taken"),
        (b"[1]", "gzip", JSON, BadInput, "body is not gzip: "),
        (gzip.compress(bytes(51)), "gzip", JSON, BodyTooLarge, "50 bytes after gzip.*max_json_by"),
        (gzip.compress(bytes(101)), "gzip", "", BodyTooLarge, "(50|100) bytes after gzip.*max_"),
    ):
        with pytest.raises(error, match=says) as bad:
            await one.body(posted(body, content_encoding=coding), kind, asked)
        assert bad.value.model == "m"
    assert [seen[1:3] for seen in one.seen] == [("m", "invalid")] * 5


@in_loop
async def test_decompressed_bodies_need_bounded_memory():
    one, ends = intake(preprocess="m", max_body_bytes=1000), asyncio.Event()
    packed = gzip.compress(bytes(1000))

    async def request():
        await one.body(posted(packed, content_encoding="gzip"), "", one.asked("m", 0.0))
        await ends.wait()

    held = [asyncio.ensure_future(request()) for _ in range(17)]
    await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
    [refused] = [task.exception() for task in held if task.done()]
    assert (refused.reason, one._held_bytes) == ("queue_full", 16_000)
    ends.set()
    await asyncio.wait(held)
    await request()
    assert one._held_bytes == 1000  # this test's own


@in_loop
async def test_a_body_that_we_were_too_busy_to_read_is_our_refusal():
    one = intake(max_queued_requests=1)

    async def never():
        await asyncio.Event().wait()

    first = Request({"type": "http", "headers": []}, never)
    asked = one.asked("m", time.monotonic())
    reading = asyncio.ensure_future(one.body(first, JSON, asked))
    await asyncio.sleep(0)
    with pytest.raises(RefusedEarly) as full:
        await one.body(posted(b"1"), JSON, asked)
    assert (full.value.http_status, full.value.reason) == (503, "queue_full")
    assert one.seen == [("unanswered", "m", "refused", "queue_full", 1)]
    assert one.refused == [("m", 1)]  # it is demand
    reading.cancel()


@in_loop
async def test_bytes_that_were_meant_as_json():
    one = intake(preprocess="m")
    hint = "its content-type is application/x-www-form-urlencoded; for JSON, send it with"

    async def refused(kind, error):
        with pytest.raises(type(error)) as raised:
            async with one.admitted(one.asked("m", time.monotonic()), kind):
                raise error
        return error_body(raised.value)["message"]

    form = "application/x-www-form-urlencoded"
    said = await refused(form, BadInput("could not convert", field="item"))
    assert said.startswith("could not convert; preprocess got the body's bytes") and hint in said
    said = await refused(form, AttributeError("'bytes' object has no attribute 'get'"))
    assert hint in said
    assert "it has no content-type" in await refused("", BadInput("bad", field="item"))
    for kind in (JSON, "image/png", None):
        assert await refused(kind, BadInput("bad", field="item")) == "bad"
    assert await refused(form, AttributeError("another")) == "another"


@in_loop
async def test_what_is_refused_at_the_doors_is_demand():
    one = intake(has_door_before=True)
    one.heed_proxy({"x-slo-refused-before": "7"}, one.asked("m", 0.0))
    assert (one.seen, one.refused) == ([("unanswered", "m", "refused", "door", 7)], [("m", 7)])


@in_loop
async def test_what_our_door_in_the_proxy_is_told():
    options = {"max_queued_requests": 50, "num_frontends": 2, "scheduler": "actor"}
    options |= {"max_body_bytes": 2000, "max_json_bytes": 1000}
    assert intake(**options).capacity_said("m") == "inf;400.000;100;2000;1000"
    known = intake(capacity=Capacity(80.0, frozenset({"w"})), **options)
    assert known.capacity_said("") == "80.000;400.000;100;2000;1000"
    for made_up in ("no/model", "M", "m/", "m;v=1", "m\0", "../m", "m" * 60_000):
        assert known.capacity_said(made_up) == "none"


@in_loop
async def test_haproxy_which_reads_no_exponent_can_read_large_numbers():
    one = intake(
        capacity=Capacity(2e6, frozenset({"w"})),
        models={"m": {"callable": "apps:M", "latency_slo_ms": 86_400_000}},
    )
    assert one.capacity_said("m").startswith("2000000.000;86400000.000;")


@in_loop
async def test_a_busy_frontend_takes_fewer_requests():
    classes = {"gold": 50}
    models = {"m": {"callable": "apps:M", "latency_slo_ms": 400, "slo_classes": classes}}
    for turn_s, is_slow in ((0.01, False), (1.0, True)):
        one = intake(capacity=Capacity(1e4, frozenset({"w"})), models=models)
        one._door.turn_s = turn_s
        # The request's own SLO does not count: with 1 ms, every turn would be slow.
        asked = one.asked("m", now := time.monotonic(), 1e-3)
        for ago_s in (1.2, 0.9, 0.6, 0.3):
            one._congestion["m"].answered(now - ago_s, turn_s, 0.4)
        with contextlib.suppress(RefusedEarly):
            async with one.admitted(asked):
                pass
        rate, _, most, *_ = one.capacity_said("m").split(";")
        assert rate == "10000.000"
        assert int(most) == (FEW if is_slow else one._spec.max_queued_requests)
        # No request of the class was answered.
        usual = str(one._spec.max_queued_requests)
        assert one.capacity_said("m", "gold").split(";")[2] == usual
        assert list(one._congestion) == ["m"]


@in_loop
async def test_a_client_that_leaves_before_its_body_is_there_sent_no_input():
    async def leaves():
        return {"type": "http.disconnect"}

    one = intake()
    request = Request({"type": "http", "headers": []}, leaves)
    with pytest.raises(BadInput, match="the client left before its body was here") as bad:
        await one.body(request, "", one.asked("m", time.monotonic(), None))
    assert (bad.value.model, one.seen) == ("m", [("unanswered", "m", "invalid", "bad_input")])
