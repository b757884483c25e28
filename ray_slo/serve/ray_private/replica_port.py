"""The address on which a replica listens for calls of other replicas.

Serve opens a gRPC port in every replica, on all interfaces of the machine. Others know it by the
node's address. Our replicas listen only on that address: on loopback if Ray does. This replaces a
private function of Serve; `tests/serve/ray_private/test_replica_port.py` fails when Serve has
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private import replica

_EVERYWHERE = "[::]:"
# Ray 2.60 opens the port with the first; before, the server did it itself, after the second.
_listen: Callable[[Any, str], int] | None = getattr(replica, "add_port_to_grpc_server", None)
_serves = replica.add_ASGIServiceServicer_to_server


def listen_on_node_only() -> None:
    """For this process's replica; call it from the replica's constructor."""
    if _listen is not None:
        replica.add_port_to_grpc_server = _listen_on_node
    else:
        replica.add_ASGIServiceServicer_to_server = _serve_on_node


def _listen_on_node(server: Any, address: str) -> int:
    assert _listen is not None
    return _listen(server, _on_node(address))


def _serve_on_node(servicer: Any, server: Any) -> None:
    listen = server.add_insecure_port
    server.add_insecure_port = lambda address: listen(_on_node(address))
    _serves(servicer, server)


def _on_node(address: str) -> str:
    if not address.startswith(_EVERYWHERE):
        return address
    host: str = ray.util.get_node_ip_address()
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{address.removeprefix(_EVERYWHERE)}"
