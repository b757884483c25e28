"""Serve's request context, and HTTP headers in a replica."""

import asyncio
import inspect
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve import context as serve_context
from ray.serve._private import replica
from ray.serve._private.common import RequestMetadata
from ray.serve._private.config import DeploymentConfig

from ray_slo.serve.deadlines import note_headers, remaining_ms, without_request
from ray_slo.serve.ray_private import context


@pytest.fixture
def entry(monkeypatch):
    """How a replica calls user code for an HTTP request: here `user(scope)`."""
    monkeypatch.setattr(context, "_note", None)
    monkeypatch.setattr(context, "_say", None)

    async def call(self, info, scope, receive, send):
        answer = await self.user(scope)
        if send is not None and scope["type"] == "http":
            await send({"type": "http.response.start", "headers": [(b"a", b"1")]})
            await send({"type": "http.response.body", "body": b""})
        return answer

    monkeypatch.setattr(replica.UserCallableWrapper, "_call_http_entrypoint", call)

    def ask(user, scope, send=None, is_asgi_app=False):
        wrapper = SimpleNamespace(user=user)
        info = SimpleNamespace(is_asgi_app=is_asgi_app)
        now = replica.UserCallableWrapper._call_http_entrypoint
        return asyncio.run(now(wrapper, info, scope, None, send))

    return ask


SCOPE = {"type": "http", "headers": [(b"x-slo-latency-ms", b"60000")]}


async def user(scope):
    return remaining_ms()


def test_user_code_knows_the_deadline_of_its_http_request(entry):
    context.install()
    assert entry(user, SCOPE) is None  # nobody asked for headers
    for _ in range(2):
        context.install(note_headers)
    assert 50_000 < entry(user, SCOPE) <= 60_000
    assert entry(user, {"type": "http", "headers": []}) is None
    assert remaining_ms() is None

    async def cut_off(scope):
        return without_request().run(remaining_ms)

    assert entry(cut_off, SCOPE) is None


def test_an_answer_gets_headers_of_the_context_of_user_code(entry):
    sent, used = [], ContextVar("used", default=())

    async def using(scope):
        used.set((*used.get(), scope["path"]))

    async def send(message):
        sent.append(message)

    context.install(lambda headers: used.set(()), lambda: [(b"b", p) for p in used.get()])
    for path in (b"1", b"2"):
        entry(using, {"type": "http", "path": path, "headers": []}, send)
        assert sent[-2]["headers"] == [(b"a", b"1"), (b"b", path)]
        assert sent[-1] == {"type": "http.response.body", "body": b""}


def test_websockets_are_refused_where_user_code_takes_none(entry):
    context.install()
    sent = []

    async def send(message):
        sent.append(message)

    entry(user, {"type": "websocket"}, send)
    assert sent == [{"type": "websocket.close", "code": 1003}]
    entry(user, {"type": "websocket"}, send, is_asgi_app=True)
    assert len(sent) == 1


def test_serve_counts_clients_requests_and_not_our_own_calls(monkeypatch):
    """Where the wrapped method gets other arguments, Serve has changed."""
    original = replica.Replica._record_errors_and_metrics
    about = list(inspect.signature(original).parameters)
    assert about == ["self", "user_exception", "status_code", "latency_ms", "request_metadata"]
    assert RequestMetadata(request_id="", internal_request_id="").call_method == "__call__"
    counted = []

    def record(self, error, status, latency_ms, metadata):
        counted.append((metadata.call_method, latency_ms))

    monkeypatch.setattr(replica.Replica, "_record_errors_and_metrics", record)
    for _ in range(2):
        context.count_only(("__call__", "Infer"))
    for method in ("__call__", "slo_heartbeat", "Infer", "slo_status"):
        metadata = SimpleNamespace(call_method=method)
        replica.Replica._record_errors_and_metrics(None, None, "200", 1.5, metadata)
    assert counted == [("__call__", 1.5), ("Infer", 1.5)]


def test_only_some_methods_can_be_called(monkeypatch):
    asked, wrapper_class = [], replica.UserCallableWrapper
    assert list(inspect.signature(wrapper_class.get_user_method_info).parameters)[1:] == [
        "method_name"
    ]
    monkeypatch.setattr(wrapper_class, "get_user_method_info", lambda self, method_name: 7)

    def check(name):
        asked.append(name)
        if name == "predict":
            raise ValueError(name)

    for _ in range(2):
        context.answer_only(check)
    wrapper = SimpleNamespace(_cached_user_method_info={"cached": 7})
    find = wrapper_class.get_user_method_info
    assert [find(wrapper, "cached"), find(wrapper, "__call__")] == [7, 7]
    with pytest.raises(ValueError, match="predict"):
        find(wrapper, "predict")
    assert asked == ["__call__", "predict"]


def test_outside_a_replica_nothing_is_known():
    assert context.max_ongoing_requests() is None
    assert context.grpc_metadata() is None


def test_ray_changed_here():
    """Where this fails, Serve has changed: see where it keeps the request that runs now."""
    entry = inspect.signature(replica.UserCallableWrapper._call_http_entrypoint)
    assert list(entry.parameters) == ["self", "user_method_info", "scope", "receive", "send"]
    request = serve_context._RequestContext()
    assert (request.multiplexed_model_id, request.grpc_context) == ("", None)
    assert (request.route, request.is_http_request) == ("", False)
    about = inspect.signature(serve_context.ReplicaContext).parameters
    assert "_deployment_config" in about
    assert DeploymentConfig().max_ongoing_requests > 0
    with context.batch_context([serve_context._RequestContext(multiplexed_model_id="a")]):
        assert serve_context._get_serve_batch_request_context()[0].multiplexed_model_id == "a"
    assert serve_context._get_serve_batch_request_context() == []


def test_multiplexed_methods_are_known():
    """Where this fails, Serve has changed: see what `@serve.multiplexed` returns now."""

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model_of(model_id):
        return model_id

    assert context.is_multiplexed(model_of)
    assert not context.is_multiplexed(test_multiplexed_methods_are_known)
    assert not context.is_multiplexed("a text")


def test_the_buckets_of_serves_batches():
    times_ms, shares, sizes = context.batch_buckets()
    assert all(buckets == sorted(buckets) for buckets in (times_ms, shares, sizes))
    assert shares[-1] <= 100 and sizes[0] == 1
