"""Our changes of Serve's gRPC server and proxy."""

import inspect

import pytest
from ray.serve._private import default_impl, grpc_util, proxy

from ray_slo.serve.ray_private import grpc_server
from tests.serve.loops import in_loop


def test_it_listens_on_one_host(monkeypatch):
    told = []
    monkeypatch.setattr(default_impl, "add_grpc_address", lambda server, at: told.append(at))
    for host in ("127.0.0.1", "10.1.2.3"):
        grpc_server.bind_to(host)
        default_impl.add_grpc_address(None, "[::]:9000")
    assert told == ["127.0.0.1:9000", "10.1.2.3:9000"]


def test_messages_are_bounded_and_calls_are_not(monkeypatch):
    key = "grpc.max_receive_message_length"
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", [("a", 1), (key, 10_000)])
    for most, bound in ((20_000, 10_000), (5096, 5096)):
        grpc_server.bound_messages(most, 250)
        assert dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)[key] == bound
    options = dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)
    assert options["a"] == 1
    assert options["grpc.max_allowed_incoming_connections"] == 250
    assert options["grpc.server.max_pending_requests"] == 20_000  # gRPC cancels beyond 1,000


@in_loop
async def test_no_port_is_shared(monkeypatch):
    server = grpc_util.gRPCGenericServer
    monkeypatch.setattr(server, "__init__", server.__init__)
    for _ in range(2):
        grpc_server.keep_port()

    def made(reuses):  # as `start_grpc_server` does
        options = [("grpc.so_reuseport", str(int(reuses)))]
        return server(lambda **_: None, extra_options=options)

    for reuses in (False, True):
        first, second = made(reuses), made(reuses)
        port = first.add_insecure_port("127.0.0.1:0")
        if reuses:
            assert second.add_insecure_port(f"127.0.0.1:{port}") == port
        else:
            with pytest.raises(RuntimeError, match="bind"):
                second.add_insecure_port(f"127.0.0.1:{port}")
        for one in (first, second):
            await one.stop(None)


def test_failures_are_told_once(monkeypatch):
    monkeypatch.setattr(proxy, "get_grpc_response_status", lambda exc, *about: (exc, about))
    told = []
    for _ in range(2):
        grpc_server.on_failure(told.append)
    error = ValueError()
    assert proxy.get_grpc_response_status(error, 1.0, "id") == (error, (1.0, "id"))
    assert told == [error]


def test_ray_changed_here():
    """Where this fails, Serve has changed: see how its proxy starts gRPC now."""
    assert list(inspect.signature(default_impl.add_grpc_address).parameters) == [
        "grpc_server",
        "server_address",
    ]
    assert isinstance(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS, list)
    assert "options=DEFAULT_GRPC_SERVER_OPTIONS" in inspect.getsource(grpc_util.gRPCGenericServer)
    assert "self.service_handler_factory(" in inspect.getsource(grpc_util.gRPCGenericServer)
    assert '("grpc.so_reuseport", str(int(' in inspect.getsource(grpc_util.start_grpc_server)
    assert "get_grpc_response_status(" in inspect.getsource(proxy.gRPCProxy)
