"""HTTP requests are read up to the bounds; larger ones are refused with the bound's name."""

import asyncio
import contextlib
import gc
import gzip
import json
import time
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayTaskError
from ray.serve._private.common import RequestMetadata
from starlette.requests import ClientDisconnect, Request

from ray_slo.core.environment import MAX_BODY_BYTES
from ray_slo.core.text import quoted
from ray_slo.errors import BodyTooLarge, RefusedEarly, SlowBody, UnsupportedEncoding
from ray_slo.serve.errors import UnknownModel, error_body
from ray_slo.serve.frontend.answer import to_json
from ray_slo.serve.frontend.http import MAX_DEPTH, Readers, body_of, decoded, json_of
from ray_slo.serve.proxy import middlewares
from ray_slo.serve.proxy.bounds import BoundsMiddleware
from tests.serve import clock
from tests.serve.openapi import document

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
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(JSON)
@settings(max_examples=80)
def test_json_is_what_python_says(value):
    assert json_of(json.dumps(value).encode(), MANY) == value


@pytest.mark.parametrize(
    "body",
    [
        b"18446744073709551616",
        b'{"id": -9223372036854775809, "n": [0.1]}',
        b"[9223372036854775807, 18446744073709551615, 1e300, -0.1234567890123456789]",
        b"1" * 300,
    ],
)
def test_integers_are_exact(body):
    assert repr(json_of(body, MANY)) == repr(json.loads(body))


TEXT = '{"é": "ß"}'


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/json", "utf-8"),
        ("application/json", "utf-8-sig"),
        ("application/json", "utf-16"),  # says so itself
        ("application/json", "utf-32-be"),
        ("application/json; charset=utf-8", "utf-8-sig"),
        ("application/json; charset=UTF8", "utf-8"),
        ('application/json; x=1; Charset="latin-1"', "latin-1"),
        ("text/plain;charset=iso-8859-15", "iso-8859-15"),
        ("text/plain; charset=windows-1252", "cp1252"),
        ("application/json; charset=utf-16", "utf-16"),
        ("application/json; charset=utf-16", "utf-16-be"),
        ("application/json; charset=utf-16le", "utf-16-le"),
        ("application/json; charset=UTF-32", "utf-32-le"),
    ],
)
def test_json_in_its_charset(content_type, encoding):
    assert json_of(TEXT.encode(encoding), MANY, content_type) == {"é": "ß"}


@pytest.mark.parametrize(
    "charset", ["x", "idna", "punycode", "zlib", "unicode_escape", "utf-7", "iso-8859-12", "a" * 99]
)
def test_a_charset_that_is_not_taken(charset):
    with pytest.raises(UnsupportedEncoding, match="send one of utf-8, utf-16") as bad:
        json_of(b"1", MANY, f"application/json; charset={charset}")
    assert (bad.value.http_status, bad.value.field) == (415, "content-type")


def test_a_body_that_is_not_in_its_charset():
    for charset, body in (("utf-8", b'"\xe9"'), ("us-ascii", b'"\xe9"'), ("utf-16", b'"\0a')):
        with pytest.raises(ValueError, match=r"utf-8|ascii|utf-16"):
            json_of(body, MANY, f"application/json; charset={charset}")


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


def test_of_too_many_bodies_one_that_takes_longer_than_a_second_gives_way():
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
        with pytest.raises(RefusedEarly, match="2 bodies are being read") as full:
            await asked(2)  # those before it may come at any moment
        assert (full.value.reason, full.value.retry_after_s) == ("queue_full", 1.0)
        await asyncio.sleep(1.1)
        assert await asked(2) == b"2"
        with pytest.raises(SlowBody, match="0 bytes of the body had come when too many bodies"):
            await tasks[0]
        hears.set()
        assert await tasks[1] == b"1"

    clock.run(run())


def test_bodies_that_are_read_need_bounded_memory():
    async def run():
        readers, ends = Readers(1000, 10), asyncio.Event()

        def asked():
            messages = [{"body": b"", "more_body": False}, {"body": b"1" * 9, "more_body": True}]

            async def receive():
                if len(messages) == 1:
                    await ends.wait()
                return {"type": "http.request", **messages.pop()}

            request = Request({"type": "http", "headers": []}, receive)
            return asyncio.ensure_future(body_of(request, 10, 60.0, readers=readers))

        tasks = [asked() for _ in range(18)]  # of 10 bytes; 160 are the most together
        with pytest.raises(RefusedEarly, match="9 bytes of the body had come when too many"):
            await tasks.pop()
        assert readers._num_bytes == 17 * 9
        await asyncio.sleep(1.1)
        later = asked()
        with pytest.raises(SlowBody, match=r"9 bytes .* had sent nothing for 1 s"):
            await tasks.pop(0)
        ends.set()
        assert await asyncio.gather(later, *tasks) == [b"1" * 9] * 17
        assert readers._num_bytes == 0

    clock.run(run())


class Proxy:
    """What Serve passes to a replica as `receive`. The proxy does not answer when it is busy."""

    def __init__(self, is_busy):
        self.is_busy, self.queue = is_busy, asyncio.Queue()
        self._request_metadata = RequestMetadata("one", "one")

    async def __call__(self):
        await asyncio.Event().wait()

    async def _receive_asgi_messages(self, metadata):
        assert metadata.internal_request_id == ""
        if self.is_busy:
            await asyncio.Event().wait()
        raise KeyError("no such request")


@pytest.mark.parametrize("is_busy", [False, True])
def test_only_a_client_that_was_slow_is_told_so(is_busy):
    request = Request({"type": "http", "headers": []}, Proxy(is_busy))
    error, says = (RefusedEarly, "too busy to read") if is_busy else (SlowBody, "of the body")
    with pytest.raises(error, match=f"{says}.* 0 bytes came within 0.51 s") as raised:
        clock.run(body_of(request, 10, 0.01))
    assert raised.value.reason == ("queue_full" if is_busy else "slow_body")


def test_a_process_that_was_busy_does_not_blame_the_client():
    async def run():
        async def receive():
            await asyncio.Event().wait()

        request = Request({"type": "http", "headers": []}, receive)
        reading = asyncio.ensure_future(body_of(request, 10, 0.0))
        await asyncio.sleep(0.4)
        time.sleep(0.3)  # noqa: ASYNC251 (the loop stands still)
        with pytest.raises(RefusedEarly, match="too busy"):
            await reading

    clock.run(run())


@pytest.mark.slow
def test_many_small_pieces_need_little_memory():
    pieces = [b"%05d" % i for i in range(60_000)]
    tracemalloc.start()
    try:
        body, _ = read([*pieces], max_bytes=300_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body == b"".join(pieces)
    assert peak < 2_000_000  # the list of pieces is 480 kB


# -- compressed bodies -----------------------------------------------------------------------------


def raw_deflate(body):
    one = zlib.compressobj(wbits=-15)
    return one.compress(body) + one.flush()


@pytest.mark.parametrize("body", [b"", b"[1, 2]", bytes(500_000)])
@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress),
        ("gzip", lambda body: gzip.compress(body[:3]) + gzip.compress(body[3:])),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
    ],
    ids=["gzip", "two members", "zlib", "raw"],
)
def test_compressed_bodies(coding, packed, body):
    assert decoded(packed(body), coding, len(body)) == body
    if body:
        with pytest.raises(BodyTooLarge, match=f"more than {len(body) - 1} bytes after {coding}"):
            decoded(packed(body), coding, len(body) - 1)


def test_a_bomb_is_not_unpacked():
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decoded(bomb, "gzip", 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    with pytest.raises(ValueError, match="more than 1000 parts"):
        decoded(gzip.compress(b"", mtime=0) * 1001, "gzip", 1000)


@pytest.mark.parametrize(
    ("coding", "body", "says"),
    [
        ("gzip", b"[1, 2]", "incorrect header"),
        ("gzip", gzip.compress(b"[1, 2]", mtime=0)[:-1], "too early"),
        ("gzip", b"", "too early"),
        ("gzip", gzip.compress(b"1", mtime=0) + b"2", "incorrect header|too early"),
        ("deflate", zlib.compress(b"1") + b"2", "more bytes follow"),
        ("deflate", b"\xff\xff", "invalid"),
    ],
)
def test_a_body_that_is_not_compressed_as_it_says(coding, body, says):
    with pytest.raises(ValueError, match=says):
        decoded(body, coding, 100)


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
    wanted = {"200", "400", "404", "405", "408", "413", "415", "422", "431", "500", "503", "504"}
    assert set(answers) == wanted
    assert answers["503"]["description"].startswith("RefusedEarly: Refused now rather than")
