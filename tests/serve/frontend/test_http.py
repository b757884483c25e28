"""HTTP requests are read up to the bounds; larger ones are refused with the bound's name."""

import asyncio
import contextlib
import gc
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayTaskError
from starlette.requests import ClientDisconnect, Request

from ray_slo.core.environment import MAX_BODY_BYTES
from ray_slo.core.text import quoted
from ray_slo.errors import BodyTooLarge, SlowBody
from ray_slo.serve.app.openapi import document
from ray_slo.serve.errors import UnknownModel, error_body
from ray_slo.serve.frontend.answer import to_json
from ray_slo.serve.frontend.http import MAX_DEPTH, Readers, body_of, json_of
from ray_slo.serve.proxy import middlewares
from ray_slo.serve.proxy.bounds import BoundsMiddleware
from tests.serve import clock

MANY = 1_000_000


# -- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"1", b'{"a": [1, {"b": null}]}', b'"[[["', b"[" * 99 + b"]" * 99]
)
def test_json(body):
    assert json_of(body, MANY) == json.loads(body)


def test_brackets_in_text_are_no_depth():
    text = "[{" * 500
    assert json_of(json.dumps([text, {"a": [text]}]).encode(), MANY) == [text, {"a": [text]}]
    assert json_of(json.dumps(text).encode(), MANY) == text
    wide = [[i] for i in range(1000)]
    assert json_of(json.dumps(wide).encode(), MANY) == wide


@pytest.mark.parametrize(
    ("value", "counts"), [([1] * 100, 110), ([[]] * 10, 120), ({"a": {"b": 1}, "c": 2}, 22), (5, 1)]
)
def test_bound_on_the_number_of_values(value, counts):
    body = json.dumps(value).encode()
    assert json_of(body, counts) == value
    with pytest.raises(BodyTooLarge, match=f"body has {counts} values.*max_json_values"):
        json_of(body, counts - 1)


def test_the_collector_is_as_it_was():
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            for body in (b"[1]", b"["):
                with contextlib.suppress(ValueError):
                    json_of(body, MANY)
                assert gc.isenabled() is enabled
        finally:
            gc.enable()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@given(JSON)
@settings(max_examples=200)
def test_json_is_what_python_says(value):
    assert json_of(json.dumps(value).encode(), MANY) == value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 100 deep"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested more than 100 deep"),
        (b"[" * 2_000 + b"]" * 2_000, "nested more than 100 deep"),
        (b"[NaN]", "unexpected character"),
        (b"-Infinity", "no digit after sign"),
        (b"1e999", "infinity"),
        (b"1" * 5000, "infinity"),
        (b'"\xff"', "utf-8|UTF-8"),
        (b"", "empty|no input|Input|zero-length"),
    ],
)
def test_json_beyond_bounds(body, says):
    with pytest.raises(ValueError, match=says):
        json_of(body, MANY)


def test_answers_are_json_whatever_the_number():
    assert json.loads(to_json([float("nan"), {"a": float("-inf")}, 1.5])) == [
        None,
        {"a": None},
        1.5,
    ]
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Circular"):
        to_json(loop)


# -- bodies --------------------------------------------------------------------------------------


def read(chunks, max_bytes=10, left_s=5.0, headers=()):
    """`body_of` a request that comes in such chunks; a number is a pause, None the client's end."""
    rest = list(chunks)

    async def receive():
        chunk = rest.pop(0)
        while isinstance(chunk, float):
            await asyncio.sleep(chunk)
            chunk = rest.pop(0)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": bool(rest)}

    scope = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in headers]}
    return clock.run(body_of(Request(scope, receive), max_bytes, left_s)), rest


def test_body():
    assert read([b"12345", b"67890"])[0] == b"1234567890"
    assert read([b"1"], headers=[("content-length", "1")])[0] == b"1"


@pytest.mark.parametrize("length", ["11", "9" * 18, "9" * 5000])
def test_body_that_says_it_is_too_large_is_not_read(length):
    with pytest.raises(BodyTooLarge, match="at most 10 are read"):
        read([], headers=[("content-length", length)])


def test_body_in_chunks_is_read_no_further_than_its_bound():
    chunks = [b"12345"] * 100
    with pytest.raises(BodyTooLarge, match="body has more than 10 bytes"):
        read(chunks)


def test_slow_body_ends_with_its_deadline():
    with pytest.raises(SlowBody, match=r"of the body, 1 bytes came within 0.51 s"):
        read([b"1", 60.0, b"2"], left_s=0.01)


def test_of_too_many_bodies_the_one_that_takes_longest_gives_way():
    async def run():
        readers, hears = Readers(2), asyncio.Event()

        def asked(number):
            async def receive():
                if number < 2:
                    await hears.wait()
                return {"type": "http.request", "body": b"%d" % number, "more_body": False}

            request = Request({"type": "http", "headers": []}, receive)
            return asyncio.ensure_future(body_of(request, 10, 60.0, readers=readers))

        tasks = [asked(0)]
        await asyncio.sleep(0)
        tasks.append(asked(1))
        await asyncio.sleep(0)
        tasks.append(asked(2))
        assert await tasks[2] == b"2"
        with pytest.raises(SlowBody, match="0 bytes had come when too many bodies"):
            await tasks[0]
        hears.set()
        assert await tasks[1] == b"1"

    clock.run(run())


def test_client_that_leaves():
    with pytest.raises(ClientDisconnect):
        read([b"1", None])


# -- what errors say -----------------------------------------------------------------------------


def test_errors_say_little_of_what_was_sent():
    body = UnknownModel(model="x" * 9999 + "\n", valid=["a"]).to_body()
    assert len(body["message"]) < 200 and len(body["model"]) < 120
    assert quoted("a\n\x1b[31m\u202e") == r"'a\n\x1b[31m\u202e'"
    assert quoted(10**5000) == "a huge int"


def test_the_models_own_errors():
    assert error_body(ValueError("y" * 9999))["message"].endswith("(9999 characters)")
    json.dumps(error_body(ValueError("\ud800")), ensure_ascii=False).encode()
    told = error_body(ValueError("a secret"), details=False)
    assert (told["error"], told["reason"]) == ("InternalError", "failed")
    assert "secret" not in json.dumps(told)


def test_what_crossed_a_process_is_told_without_its_stack_trace():
    trace = 'Traceback (most recent call last):\n  File "/srv/model.py", line 3, in __call__'
    error = RayTaskError("f", trace, TypeError("no number"), proctitle="x", pid=1, ip="10.1.2.3")
    assert "/srv/model.py" in str(error.as_instanceof_cause())
    told = error_body(error.as_instanceof_cause())
    assert told == {"error": "TypeError", "reason": "failed", "message": "no number"}


# -- in Serve's proxy ----------------------------------------------------------------------------


def through(headers=(), chunks=(b"",), kind="http", most=10):
    """(status or code, body as JSON, what the application got) behind the middleware."""
    rest, sent, got = list(chunks), [], []

    async def receive():
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest)}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        while True:
            message = await receive()
            got.append(message)
            if message["type"] == "http.disconnect" or not message["more_body"]:
                break
        status = 499 if message["type"] == "http.disconnect" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    scope = {
        "type": kind,
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers],
    }
    asyncio.run(BoundsMiddleware(app, most)(scope, receive, send))
    first = sent[0]
    body = json.loads(sent[1]["body"]) if len(sent) > 1 else None
    return first.get("status", first.get("code")), body, got


def test_requests_pass():
    status, _, got = through([("x-request-id", "a b~"), ("cookie", "\xff")], [b"123", b"456"])
    assert (status, [m["body"] for m in got]) == (200, [b"123", b"456"])


@pytest.mark.parametrize(
    "header",
    ["x-request-id", "X-Session-Id", "serve_multiplexed_model_id", "x-slo-anything", "traceparent"],
)
@pytest.mark.parametrize(
    ("values", "says"),
    [(["\xff"], "printable"), (["a\tb"], "printable"), (["a" * 257], "257"), (["a", "b"], "once")],
)
def test_headers_that_serve_would_choke_on(header, values, says):
    status, body, got = through([(header.lower(), value) for value in values])
    assert (status, body["error"], body["field"]) == (400, "BadHeader", header.lower())
    assert says in body["message"]
    assert not got
    assert through([(header.lower(), value) for value in values], kind="websocket")[0] == 1008


def test_headers_that_are_too_large_together():
    status, body, got = through([(f"h{i}", "v" * 1000) for i in range(70)])
    assert (status, body["reason"], got) == (431, "headers_too_large", [])


def test_body_that_is_too_large_for_the_proxy():
    status, body, got = through([("content-length", "11")])
    assert (status, body["error"], got) == (413, "BodyTooLarge", [])
    status, body, got = through(chunks=[b"123456"] * 5)
    assert (status, body["reason"]) == (413, "body_too_large")
    assert [m["type"] for m in got] == ["http.request", "http.disconnect"]


def test_bound_of_the_proxies(monkeypatch):
    monkeypatch.setenv(MAX_BODY_BYTES.name, "many")
    with pytest.raises(ValueError, match=f"{MAX_BODY_BYTES.name}: must be a whole number of bytes"):
        middlewares()


def test_openapi_document_names_every_answer():
    answers = document(["a"])["paths"]["/{model}"]["post"]["responses"]
    wanted = {"200", "400", "404", "405", "408", "413", "422", "431", "500", "503", "504"}
    assert set(answers) == wanted
    assert answers["503"]["description"].startswith("RefusedEarly: Refused now rather than")
