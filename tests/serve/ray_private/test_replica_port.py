"""Replicas listen on their node's address, not on all interfaces."""

import inspect
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.serve._private import replica

from ray_slo.serve.ray_private import replica_port

NODES = pytest.mark.parametrize(
    ("node", "asked", "listens"),
    [
        ("127.0.0.1", "[::]:0", "127.0.0.1:0"),
        ("10.1.2.3", "[::]:9", "10.1.2.3:9"),
        ("fd00::1", "[::]:0", "[fd00::1]:0"),
        ("10.1.2.3", "127.0.0.1:9", "127.0.0.1:9"),
    ],
)


@NODES
def test_all_interfaces_become_the_nodes_address(monkeypatch, node, asked, listens):
    told = []
    monkeypatch.setattr(replica_port, "_listen", lambda server, address: told.append(address) or 7)
    monkeypatch.setattr(replica_port.ray.util, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(replica, "add_port_to_grpc_server", None, raising=False)
    replica_port.listen_on_node_only()
    assert replica.add_port_to_grpc_server(Mock(), asked) == 7
    assert told == [listens]


@NODES
def test_the_same_where_the_server_opens_its_port_itself(monkeypatch, node, asked, listens):
    """As in Ray before 2.60."""
    told, served = [], []
    server = SimpleNamespace(add_insecure_port=lambda address: told.append(address) or 7)
    monkeypatch.setattr(replica_port, "_listen", None)
    monkeypatch.setattr(replica_port, "_serves", lambda *both: served.append(both))
    monkeypatch.setattr(replica_port.ray.util, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(replica, "add_ASGIServiceServicer_to_server", None)
    replica_port.listen_on_node_only()
    replica.add_ASGIServiceServicer_to_server("replica", server)
    assert server.add_insecure_port(asked) == 7
    assert told == [listens]
    assert served == [("replica", server)]


def test_serve_still_opens_its_port_by_that_function_after_the_constructor():
    """Where this fails, Serve has changed: see where its replicas listen now."""
    source = inspect.getsource(replica.Replica._on_initialized)
    if hasattr(replica, "add_port_to_grpc_server"):
        assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source
    else:
        asks, listens = source.split("add_ASGIServiceServicer_to_server(self, self._server)")
        assert 'self._server.add_insecure_port("[::]:0")' in listens
        assert "add_insecure_port" not in asks
