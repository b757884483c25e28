"""Where a replica listens for calls of other replicas.

Serve 2.60 opens a gRPC port in every replica, on all interfaces of the machine, and names it to
others by the node's address. Ours listen on that address alone: on loopback where Ray does. A
private function of Serve is replaced for that; `tests/serve/ray_private/test_replica_port.py` says
when Serve has changed.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica

_EVERYWHERE = "[::]:"
_listen = replica.add_port_to_grpc_server


def listen_on_node_only() -> None:
    """For the replica that this process is; to be called from its constructor."""
    replica.add_port_to_grpc_server = _listen_on_node


def _listen_on_node(server: Any, address: str) -> int:
    if address.startswith(_EVERYWHERE):
        host: str = ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        address = f"{host}:{address.removeprefix(_EVERYWHERE)}"
    port: int = _listen(server, address)
    return port
