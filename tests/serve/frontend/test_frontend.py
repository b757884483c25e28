"""The ways into a frontend: HTTP, gRPC and handles, with a real scheduler and worker behind it."""

import asyncio
import gzip
import json
import time
import zlib

import pytest
from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from ray_slo.errors import BadInput, ConfigError
from ray_slo.serve.frontend.surroundings import check_method
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.user_code import in_words
from tests.serve.fakes import GrpcCall, Silent, Steps, ask
from tests.serve.loops import in_loop

SHARED = PlainTextResponse("always the same")


class Model(Steps):
    """An item is (name, steps); "bytes" and "text" are answered as such, "fail" is not."""

    @staticmethod
    def postprocess(name):
        answers = {"bytes": b"\x00", "text": PlainTextResponse("hi"), "nan": float("nan")}
        return {**answers, "shared": SHARED}.get(name, name)

    def __call__(self, items):
        if items[0][0] == "fail":
            raise KeyError("fail")
        return super().__call__(items)


@in_loop
async def test_http(app):
    async with app(Model, policy="eager") as (front, _):
        for path in ("/", "/m"):
            answer = await ask(front, path=path, item=["a", 1], x_slo_latency_ms="9000")
            assert (answer.status_code, answer.body) == (200, b'"a"')
            assert answer.headers["x-slo-latency-slo-ms"] == "9000.000"
        for name, kind, body in (
            ("bytes", "application/octet-stream", b"\x00"),
            ("text", "text/plain; charset=utf-8", b"hi"),
            ("nan", "application/json", b"null"),
        ):
            answer = await ask(front, item=[name, 1])
            assert (answer.headers["content-type"], answer.body) == (kind, body)
            assert answer.headers["x-slo-model"] == "m"
        told = await ask(front, item=["a", 1], x_slo_body_whole="1")
        assert told.headers["x-slo-capacity"].split(";")[1] == "30000.000"
        for made_up in ({"path": "/x"}, {"x_slo_class": "x"}):  # which no door should keep
            told = await ask(front, item=["a", 1], x_slo_body_whole="1", **made_up)
            assert told.headers["x-slo-capacity"] == "none"
        described = json.loads((await ask(front, "GET")).body)
        assert described == {"models": {"m": {"latency_slo_ms": 30_000, "accuracy": None}}}


@in_loop
async def test_a_response_that_is_returned_again_has_the_headers_of_one_answer(app):
    model = {"slo_classes": {"gold": 9000}}
    async with app(Model, policy="eager", model=model) as (front, _):
        gold = await ask(front, item=["shared", 1], x_slo_class="gold")
        usual = await ask(front, item=["shared", 1])
        assert gold.body == usual.body == b"always the same"
        assert gold.headers["x-slo-class"] == "gold"
        assert "x-slo-class" not in usual.headers
        assert not [name for name in SHARED.headers if name.startswith("x-slo")]


@in_loop
@pytest.mark.parametrize(
    ("asked", "status", "reason"),
    [
        ({"path": "/x"}, 404, "unknown_model"),
        ({"method": "PUT"}, 405, "method_not_allowed"),
        ({"x_slo_latency_ms": "soon"}, 400, "bad_header"),
        ({"content_length": "9" * 18}, 413, "body_too_large"),
        ({"item": ["a", 99], "x_slo_latency_ms": "1"}, 503, "would_miss"),
        ({"item": ["fail", 1]}, 500, "failed"),
    ],
)
async def test_http_that_fails(app, asked, status, reason):
    async with app(Model, policy="eager") as (front, _):
        answer = await ask(front, **asked)
        assert (answer.status_code, json.loads(answer.body)["reason"]) == (status, reason)


@in_loop
async def test_a_call_takes_one_item(app):
    async with app(Model, policy="eager") as (front, _):
        item = ["a", 1]
        assert await front(item) == await front(item=item) == "a"
        for items, others, said in (
            ((item, item), {}, r"one item, got 2: .*handle.remote\(\(a, b\)\)"),
            ((), {}, "one item, got 0"),
            ((item,), {"x": 1}, "no argument 'x': put it into the item"),
            ((), {"x": 1, "item": item}, "no argument 'x'"),
        ):
            with pytest.raises(BadInput, match=said):
                await front(*items, **others)


def details(**options):
    """What Serve's controller says of an application whose frontend "m" has these options."""
    about = {"deployments": {"m": {"deployment_config": options}}}
    return {"applications": {"app": about}}


@in_loop
async def test_a_frontend_looks_at_what_serve_runs(app):
    bound = {"details": lambda: details(max_ongoing_requests=5)}
    with pytest.raises(ConfigError, match=r"^deployments: m: max_ongoing_requests is 5; leave it"):
        async with app(Model, policy="eager", around=bound):
            pass
    async with app(Model, policy="eager") as (front, _):
        assert "refused_settings" not in await front.slo_status()
        later = details(max_ongoing_requests=5)
        later["applications"]["app"]["status"] = "RUNNING"
        front._settings.look(later, 10.0)
        (said,) = (await front.slo_status())["refused_settings"]
        assert "max_ongoing_requests is 5" in said
        assert (await ask(front, item=["a", 1])).status_code == 200  # it goes on


def test_other_methods_are_refused_in_words_of_the_users_class():
    for method in ("__call__", "Infer", "Describe", "slo_status"):
        check_method("Words", method)
    for method in ("predict", "_plan_says", "answer_http", "__init__"):
        with pytest.raises(BadInput, match=f"^'Words' answers no call of '{method}': handle.rem"):
            check_method("Words", method)


@in_loop
async def test_grpc(app):
    async with app(Model, policy="eager") as (front, _):
        context = GrpcCall(("x-slo-timeout-ms", "8000"))
        reply = await front.Infer(InferRequest(json='["a", 1]'), context)
        assert (json.loads(reply.json), reply.model, reply.latency_slo_ms) == ("a", "m", 8000)
        for request, code in (
            (InferRequest(model="x"), "NOT_FOUND"),
            (InferRequest(), "INVALID_ARGUMENT"),
            (InferRequest(json='["fail", 1]'), "INTERNAL"),
        ):
            await front.Infer(request, context)
            assert context.code == code


@in_loop
async def test_a_call_for_another_application_is_not_answered(app):
    """Serve passes it to the only one that is there, as after the other one was deleted."""
    async with app(Model, policy="eager") as (front, _):
        own = front._names[0]
        for ask, request in ((front.Infer, InferRequest(json='["a", 1]')), (front.Describe, None)):
            other, none, ours = (
                GrpcCall(("application", "other")),
                GrpcCall(),
                GrpcCall(("application", own)),
            )
            assert not (await ask(request, other)).json
            assert (other.code, other.details) == (
                "NOT_FOUND",
                f"application 'other' is not there; choose {own}",
            )
            for context in (none, ours):
                assert (await ask(request, context)).json
                assert context.code is None


@in_loop
async def test_what_only_other_applications_have_is_refused(app):
    async with app(policy="eager") as (front, _):
        for call in (front.slo_replan(), front.slo_move("m", "g")):
            with pytest.raises(ConfigError, match="no serving groups"):
                await call
        with pytest.raises(ConfigError, match="user_config of a frontend"):
            front.reconfigure({"planner": {}})
        front.check_health()


@in_loop
async def test_what_more_workers_could_have_answered_is_counted_as_bad(app):
    demand = Silent()
    async with app(Model, policy="eager", around={"demand": demand}) as (front, _):
        await ask(front, item=["a", 1], x_slo_latency_ms="9000")
        await ask(front, item=["fail", 1])
        assert [seen for seen in demand.seen if seen[0] == "bad"] == []
        await ask(front, item=["a", 99], x_slo_latency_ms="1")
    assert [seen for seen in demand.seen if seen[0] == "bad"] == [("bad", "m", 1)]
    assert sum(seen[0] == "arrived" for seen in demand.seen) == 3


class Slow(Model):
    @staticmethod
    def postprocess(name):
        time.sleep(0.6)
        return name


@in_loop
async def test_an_answer_that_is_late_is_counted_as_bad(app):
    demand = Silent()
    model = {"latency_slo_ms": 500}
    async with app(Slow, policy="eager", model=model, around={"demand": demand}) as (front, _):
        await ask(front, item=["a", 1], x_slo_latency_ms="9000")
        await ask(front, item=["b", 1])
    assert [seen for seen in demand.seen if seen[0] == "bad"] == [("bad", "m", 1)]


@in_loop
async def test_what_finds_no_room_is_counted_as_bad(app):
    demand, metrics = Silent(), Silent()
    around = {"demand": demand, "metrics": metrics}
    async with app(policy="eager", max_queued_requests=1, around=around) as (front, _):
        asked = [ask(front, item=[name, 1]) for name in "ab"]
        first, second = await asyncio.gather(*asked)
    assert (first.status_code, second.status_code) == (200, 503)
    assert json.loads(second.body)["reason"] == "queue_full"
    told = [seen for seen in demand.seen if seen[0] in ("arrived", "bad")]
    assert told == [("arrived", "m", 1), ("arrived", "m", 1), ("bad", "m", 1)]
    refused = [seen for seen in metrics.seen if seen[0] == "unanswered"]
    assert refused == [("unanswered", "m", "refused", "queue_full")]


REASONS = {
    "http 401": HTTPException(status_code=401, detail="who are you?", headers={"X-Own": "1"}),
    "http 503": HTTPException(status_code=503, detail={"why": "away"}),
    "bad input": BadInput("too dark", field="picture"),
    "value": ValueError("broken"),
}
ANSWERS = {"http 401": 401, "http 503": 503, "bad input": 422, "value": 500}
OUTCOMES = {
    "http 401": ("invalid", "http_401"),
    "http 503": ("failed", "http_503"),
    "bad input": ("invalid", "bad_input"),
    "value": ("failed", "user_error"),
}


class Raises:
    """An item is (where, what): its error is raised there, or is its result."""

    @staticmethod
    def preprocess(item):
        raise_at("preprocess", item)
        return item

    @staticmethod
    def size(item):
        raise_at("size", item)
        return 1

    @staticmethod
    def postprocess(item):
        if not isinstance(item, Exception):
            raise_at("postprocess", item)
        return item

    def __call__(self, items):
        raise_at("batch", items[0])
        return [REASONS[what] if where == "result" else (where, what) for where, what in items]


def raise_at(place, item):
    where, what = item
    if where == place:
        raise REASONS[what]


@in_loop
@pytest.mark.parametrize("what", REASONS)
@pytest.mark.parametrize("where", ["preprocess", "size", "batch", "result", "postprocess"])
async def test_an_error_has_its_own_status_wherever_it_comes_from(app, where, what):
    metrics = Silent()
    async with app(Raises, policy="eager", around={"metrics": metrics}) as (front, _):
        answer = await ask(front, item=[where, what])
        status, outcome = ANSWERS[what], OUTCOMES[what]
        if what == "value" and where in ("preprocess", "size"):
            status, outcome = 422, ("invalid", "bad_input")
        assert answer.status_code == status
        body = json.loads(answer.body)
        if what.startswith("http"):
            assert body["detail"] == REASONS[what].detail
            assert answer.headers.get("x-own") == (REASONS[what].headers or {}).get("X-Own")
        elif status != 422 or what == "bad input":
            assert (body["message"], body.get("field")) == (
                (str(REASONS[what]), None) if what == "value" else ("too dark", "picture")
            )
        context = GrpcCall()
        await front.Infer(InferRequest(json=json.dumps([where, what])), context)
        codes = {401: "UNAUTHENTICATED", 503: "UNAVAILABLE", 422: "INVALID_ARGUMENT"}
        assert context.code == codes.get(status, "INTERNAL")
        told = [seen[2:] for seen in metrics.seen if seen[0] == "unanswered"]
        assert told == 2 * [outcome]
        assert not any(seen[0] == "answered" for seen in metrics.seen)
        if where == "result":  # over a handle it is a value, as in Serve
            assert in_words(await front(["result", what])) == in_words(REASONS[what])
        elif status != 422:
            with pytest.raises(type(REASONS[what])) as raised:
                await front([where, what])
            assert in_words(raised.value) == in_words(REASONS[what])


class Keyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")


class Breaks(Model):
    @staticmethod
    def preprocess(item):
        raise RuntimeError("state") if item[0] == "state" else Keyword(code=3)


@in_loop
async def test_an_error_that_cannot_be_rebuilt_keeps_its_words(app):
    async with app(Breaks, policy="eager") as (front, _):
        with pytest.raises(BadInput, match="preprocess refused the item: Keyword: code 3"):
            await front(["a", 1])


class Large(Steps):
    def __call__(self, items):
        return [[0.5] * steps for _, steps in items]


@in_loop
async def test_a_large_answer_is_written_in_parts(app):
    async with app(Large, policy="eager") as (front, _):
        answer, small = await asyncio.gather(
            ask(front, item=["a", 200_000]), ask(front, item=["b", 2])
        )
        assert json.loads(small.body) == [0.5, 0.5]
        sent = []

        async def send(message):
            sent.append(message)

        await answer({"type": "http"}, None, send)
        start, *parts = sent
        body = b"".join(part["body"] for part in parts)
        assert json.loads(body) == [0.5] * 200_000
        assert (b"content-length", b"%d" % len(body)) in start["headers"]
        assert len(parts) > 2
        assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
        reply = await front.Infer(InferRequest(json='["a", 200000]'), GrpcCall())
        assert json.loads(reply.json) == [0.5] * 200_000


class Told:
    """Answers what a client's body became."""

    @staticmethod
    def postprocess(item):
        return repr(item)

    def __call__(self, items):
        return items


class Bytes(Told):
    """Its items are numbers in text."""

    @staticmethod
    def preprocess(item):
        return item if item[:1] == b"\x89" else float(item)


class Raw(Told):
    @staticmethod
    def preprocess(item):
        return item


async def post(front, body, **headers):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/app", "root_path": "/app"}
    answer = await front(Request({**scope, "query_string": b"", "headers": pairs}, receive))
    return answer.status_code, json.loads(answer.body)


JSON = "application/json"


@in_loop
async def test_what_becomes_of_a_body(app):
    async with app(Told, policy="eager") as (front, _):
        for body, headers, item in (
            (b"[18446744073709551616]", {"content_type": JSON}, [2**64]),
            (gzip.compress(b"[1]"), {"content_type": JSON, "content_encoding": "gzip"}, [1]),
            (zlib.compress(b"[1]"), {"content_encoding": "deflate"}, [1]),
            ('"\xe9"'.encode("latin-1"), {"content_type": f"{JSON}; charset=latin-1"}, "\xe9"),
            (b"[1,2]", {"content_type": "application/x-www-form-urlencoded"}, [1, 2]),
        ):
            assert await post(front, body, **headers) == (200, repr(item))
        reply = await front.Infer(InferRequest(json="18446744073709551617"), GrpcCall())
        assert json.loads(reply.json) == repr(2**64 + 1)
        for body, headers, status, reason, says in (
            (b"1", {"content_encoding": "br"}, 415, "unsupported_encoding", "send one of gzip"),
            (b"1", {"content_type": f"{JSON}; charset=x"}, 415, "unsupported_encoding", "utf-16"),
            (b"1", {"content_encoding": "gzip"}, 422, "bad_input", "body is not gzip: "),
            (b"x=1", {"content_type": "text/plain"}, 422, "bad_input", "send it with content-type"),
        ):
            found, error = await post(front, body, **headers)
            assert (found, error["reason"]) == (status, reason) and says in error["message"]
    async with app(Raw, policy="eager") as (front, _):
        for body in (b"123", b"null", b"[1]"):
            assert await post(front, body) == (200, repr(body))
            assert await post(front, body, content_type=JSON) == (200, repr(json.loads(body)))


@in_loop
async def test_a_refused_body_that_curl_sent_as_a_form(app):
    async with app(Bytes, policy="eager") as (front, _):
        form = "application/x-www-form-urlencoded"
        assert await post(front, b"1", content_type=form) == (200, "1.0")
        status, error = await post(front, b"[1,2]", content_type=form)
        assert status == 422 and f"its content-type is {form}" in error["message"]
        assert "for JSON, send it with content-type: application/json" in error["message"]
        status, error = await post(front, b"[1,2]", content_type="image/png")
        assert status == 422 and "content-type" not in error["message"]
