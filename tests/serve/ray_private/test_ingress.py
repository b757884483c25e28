"""The short way of HTTP requests in an ingress replica."""

import asyncio
import contextlib
import inspect
import logging
import sys
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from ray._private.log import INTERNAL_TIMESTAMP_LOG_KEY
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.replica import Replica
from starlette.middleware import Middleware
from starlette.responses import Response

from ray_slo.serve.proxy.direct import DirectMiddleware
from ray_slo.serve.ray_private import ingress
from ray_slo.serve.ray_private.http_head import LEAVING
from ray_slo.serve.ray_private.ingress import PARTS, answer_with, quick_access_log


class Frontend:
    def __init__(self):
        self.seen, self.ended = [], []

    async def answer(self, request):
        self.seen.append(request)
        try:
            if request.url.path.endswith("slow"):
                await asyncio.sleep(60)
            if request.url.path.endswith("broken"):
                raise ValueError("no")
            return Response(await request.body(), status_code=201)
        finally:
            self.ended.append(request)


class ServesWay(Exception):
    """A request got to the application that Serve made."""


class FakeReplica:
    """What the way uses of Serve's replica. Errors end at `_wrap_request`, as there."""

    def __init__(self, prefix="/app", timeout_s=None, separate=False, is_full=False):
        self._route_prefix, self.is_full = prefix, is_full
        self._deployment_id = SimpleNamespace(app_name="app")
        self._http_options = SimpleNamespace(request_timeout_s=timeout_s)
        self._user_callable_wrapper = SimpleNamespace(_run_user_code_in_separate_thread=separate)
        self.log, self.ongoing, self.began = [], 0, asyncio.Event()
        self._semaphore = asyncio.Semaphore(1)
        self._metrics_manager = self

    def get_asgi_tracing_context(self, headers):
        return None

    def _can_accept_request(self, metadata):
        return not self.is_full

    @contextlib.contextmanager
    def _wrap_request(self, metadata):
        statuses = []
        try:
            yield statuses.append
        except (Exception, asyncio.CancelledError) as error:
            statuses.append(type(error).__name__)
        self.log.append((metadata, statuses))

    def inc_num_ongoing_requests(self, metadata):
        assert self._semaphore.locked()
        self.ongoing += 1
        self.began.set()

    def dec_num_ongoing_requests(self, metadata):
        self.ongoing -= 1

    async def app(self, scope, receive, send):
        self.got = scope
        raise ServesWay


def scope_of(path="/app/m", method="POST", **headers):
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs, LEAVING: []}
    return scope | {"query_string": b"", "client": ("127.0.0.1", 7), "root_path": ""}


@pytest.fixture
def frontend(monkeypatch):
    monkeypatch.setattr(ingress, "_handler", None)
    one = Frontend()
    answer_with(one.answer)
    return one


async def asked(replica, scope):
    """Whether the short way was taken, and what was sent. Serve builds its server so, too."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"7", "more_body": False}

    async def send(message):
        sent.append(message)

    server = _apply_middlewares(replica.app, [Middleware(DirectMiddleware)])
    try:
        await server(scope, receive, send)
    except ServesWay:
        return False, sent
    return True, sent


def test_a_request_is_answered_and_serve_knows_of_it(frontend):
    replica = FakeReplica()
    headers = {"x_request_id": "abc", "serve_multiplexed_model_id": "v2"}
    took, sent = asyncio.run(asked(replica, scope_of(**headers)))
    assert took and sent[0]["status"] == 201 and sent[1]["body"] == b"7"
    assert (b"x-request-id", b"abc") in sent[0]["headers"]
    assert frontend.seen[0].scope["root_path"] == "/app"
    ((metadata, statuses),) = replica.log
    assert statuses == ["201"] and replica.ongoing == 0
    assert (metadata.request_id, metadata.multiplexed_model_id) == ("abc", "v2")
    assert (metadata.route, metadata.app_name, metadata._client) == ("/app", "app", "127.0.0.1:7")
    assert metadata.is_http_request and metadata.is_direct_ingress


def test_one_whose_client_leaves_is_cancelled(frontend):
    async def run(replica, **headers):
        scope = scope_of("/app/slow", **headers)
        task = asyncio.ensure_future(asked(replica, scope))
        await replica.began.wait()
        for leave in scope[LEAVING]:
            leave()
        await asyncio.wait([task], timeout=0.05)
        done = task.done()
        task.cancel()
        return done, await task

    replica = FakeReplica()
    assert asyncio.run(run(replica)) == (True, (True, []))
    assert [statuses for _, statuses in replica.log] == [["499", "CancelledError"]]
    assert len(frontend.ended) == 1 and replica.ongoing == 0
    done, _ = asyncio.run(run(FakeReplica(), x_request_disconnect_disabled="?1"))
    assert not done


def test_an_error_is_for_serve(frontend):
    replica = FakeReplica()
    assert asyncio.run(asked(replica, scope_of("/app/broken"))) == (True, [])
    assert [statuses for _, statuses in replica.log] == [["ValueError"]]


@pytest.mark.parametrize(
    ("replica", "scope"),
    [
        (FakeReplica(), scope_of(method="GET")),
        (FakeReplica(), scope_of("/other")),
        (FakeReplica(), scope_of() | {"root_path": "/proxy"}),
        (FakeReplica(prefix=None), scope_of()),
        (FakeReplica(timeout_s=3.0), scope_of()),
        (FakeReplica(separate=True), scope_of()),
        (FakeReplica(is_full=True), scope_of()),
    ],
)
def test_others_take_serves_way(frontend, replica, scope):
    before = dict(scope)
    assert asyncio.run(asked(replica, scope)) == (False, [])
    assert {part: replica.got[part] for part in before} == before | {"headers": ANY}
    assert frontend.seen == [] and scope[LEAVING] == []


def test_a_replica_without_a_part_is_reported(frontend, caplog):
    replica = FakeReplica()
    del replica._http_options
    with caplog.at_level("WARNING"):
        assert asyncio.run(asked(replica, scope_of())) == (False, [])
    assert "has no _http_options. Requests take Serve's longer way" in caplog.text


def test_without_a_frontend_all_take_serves_way(monkeypatch):
    monkeypatch.setattr(ingress, "_handler", None)
    assert asyncio.run(asked(FakeReplica(), scope_of())) == (False, [])
    answer_with(Frontend().answer)  # it is gone at once
    assert asyncio.run(asked(FakeReplica(), scope_of())) == (False, [])


def test_serve_has_these_parts():
    """Serve's own way uses the same parts in the same way."""
    own = inspect.getsource(Replica._direct_ingress_asgi)
    assert "with self._wrap_request(request_metadata) as " in " ".join(
        own.replace("with (", "with").split()
    )
    for used in ("async with self._start_request(request_metadata)", "_can_accept_request(request"):
        assert used in own
    start = inspect.getsource(Replica._start_request)
    for used in (
        *("await self._semaphore.acquire()", "self._semaphore.release()"),
        *("inc_num_ongoing_requests(request_metadata)", "dec_num_ongoing_requests(request_"),
    ):
        assert used in start
    source = inspect.getsource(sys.modules[Replica.__module__])
    for part in (*PARTS, "_run_user_code_in_separate_thread"):
        assert hasattr(Replica, part) or f"self.{part}" in source


def test_lines_of_the_access_log_are_those_of_logging(caplog):
    module = SimpleNamespace(logger=logging.getLogger("serve of a test"))
    quick_access_log(module)
    quick_access_log(module)  # a second time changes nothing
    caplog.set_level("INFO")
    context = {"serve_access_log": True, "skip_context_filter": True, "route": "/m"}

    def write(extra):
        module.logger.info(f"POST {extra['route']} 200 1.5ms", extra=extra)

    for extra in (context, context | {"route": "/n"}, context | {"serve_access_log": False}):
        write(extra)
    module.logger.info("%d requests", 3)
    module.logger.info("failed", extra=context, exc_info=ValueError("no"))
    one, other, plain, counted, failed = caplog.records
    assert failed.exc_info[0] is ValueError
    assert counted.getMessage() == "3 requests"
    assert counted.lineno > plain.lineno and counted.funcName != plain.funcName
    assert [r.getMessage() for r in (one, other)] == ["POST /m 200 1.5ms", "POST /n 200 1.5ms"]
    assert plain.created >= other.created >= one.created
    clocks = {"created", "msecs", "relativeCreated", INTERNAL_TIMESTAMP_LOG_KEY}
    own = {"msg", "message", "route", "serve_access_log"}  # `message` is made by caplog
    said = [
        {k: v for k, v in vars(r).items() if k not in clocks | own} for r in (one, other, plain)
    ]
    assert said[0] == said[1] == said[2]
    for record in (one, plain):
        assert record.msecs == int(1e3 * record.created) % 1000
        assert vars(record).keys() == vars(plain).keys()
    logging.getLogger("serve of a test").setLevel("WARNING")
    write(context)
    assert len(caplog.records) == 5
