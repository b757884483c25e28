"""The ways into a frontend: HTTP, gRPC and handles, with a real scheduler and worker behind it."""

import asyncio
import json
import time

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from ray_slo.errors import BadInput, ConfigError
from ray_slo.serve.frontend.surroundings import check_method
from ray_slo.serve.protos import InferRequest
from tests.serve.fakes import Silent, Steps
from tests.serve.loops import in_loop


class Model(Steps):
    """An item is (name, steps); "bytes" and "text" are answered as such, "fail" is not."""

    @staticmethod
    def postprocess(name):
        return {"bytes": b"\x00", "text": PlainTextResponse("hi"), "nan": float("nan")}.get(
            name, name
        )

    def __call__(self, items):
        if items[0][0] == "fail":
            raise KeyError("fail")
        return super().__call__(items)


async def ask(front, method="POST", path="/", item=None, **headers):
    async def receive():
        return {"type": "http.request", "body": json.dumps(item).encode(), "more_body": False}

    headers = {"content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": f"/app{path}",
        "root_path": "/app",
        "query_string": b"",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }
    return await front(Request(scope, receive))


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
        assert told.headers["x-slo-capacity"].split(";")[1] == "30000"
        described = json.loads((await ask(front, "GET")).body)
        assert described == {"models": {"m": {"latency_slo_ms": 30_000, "accuracy": None}}}


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
    for method in ("predict", "_shortfall", "answer_http", "__init__"):
        with pytest.raises(BadInput, match=f"^'Words' answers no call of '{method}': handle.rem"):
            check_method("Words", method)


class Context:
    """Of a gRPC call."""

    def __init__(self, *metadata):
        self.metadata, self.code = metadata, None

    def invocation_metadata(self):
        return self.metadata

    def set_code(self, code):
        self.code = code.name

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.trailing = metadata


@in_loop
async def test_grpc(app):
    async with app(Model, policy="eager") as (front, _):
        context = Context(("x-slo-timeout-ms", "8000"))
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
