"""Several Ray nodes on this machine: a head and further raylets, each as a host of its own.

`ray.cluster_utils.Cluster` is Ray's tool for its own tests; this module is its only user here.
Every node has its own raylet, object store, resources, labels, environment and loopback address
(127.0.0.2, 127.0.0.3, …), so that nothing listens beyond this machine. What they share with one
another and not with real hosts: the CPUs, the file system and, unless `env` says otherwise, the
clock.

    with raylets({"num_cpus": 1}, {"num_cpus": 2, "resources": {"worker": 2}}) as cluster:
        serve.run(app)                     # answers at cluster.url
        cluster.kill(cluster.nodes[1])     # as a lost machine
        cluster.add(num_cpus=2, resources={"worker": 2})
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ray_slo.serve.proxy.modes import free_ports

OBJECT_STORE_BYTES = 100 * 1024**2  # Ray's least is 75 MiB
# Ray's own notice a silent node after 15 s or more: long for a test, right for a real network.
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@dataclass(eq=False)
class Raylet:
    """A node of the cluster.

    Attributes:
        node_id: as `ray.nodes()` and `ray.get_runtime_context().get_node_id()` have it, in hex.
        pid: of the raylet process.
        address: its IP address.
    """

    node_id: str
    pid: int
    address: str
    node: Any = field(repr=False)


@dataclass
class Raylets:
    """A running cluster; the first of `nodes` is the head.

    Attributes:
        url: of Serve's HTTP proxy on the head, without a slash at the end.
        address: for `ray.init(address=…)` or `ray-slo --address` of another process.
    """

    url: str
    address: str
    nodes: list[Raylet]
    cluster: Any = field(repr=False)
    started: int = 0

    def add(self, **node: Any) -> Raylet:
        """Start another raylet and wait until the cluster knows it.

        Args:
            **node: `num_cpus`, `num_gpus`, `resources`, `labels`, `env` (variables of its raylet
                and of all processes that this starts), `object_store_memory` in bytes.
        """
        self.started += 1
        node.setdefault("object_store_memory", OBJECT_STORE_BYTES)
        address = f"127.0.0.{1 + self.started}"  # Ray takes 127.0.0.1 for the public address
        # Not Ray's own `env_vars`: it puts its LD_PRELOAD over that.
        with mock.patch.dict(os.environ, node.pop("env", {})):
            started = self.cluster.add_node(
                node_ip_address=address, include_dashboard=False, **node
            )
        pid = started.all_processes["raylet"][0].process.pid
        raylet = Raylet(started.node_id, pid, address, started)
        self.nodes.append(raylet)
        return raylet

    def kill(self, raylet: Raylet) -> None:
        """`kill -9` of a raylet and of every process it started, at once: a machine that is gone.

        Raises:
            ValueError: for the head, on which Serve's controller and this process depend.
        """
        if raylet is self.nodes[0]:
            raise ValueError("the head cannot be killed: the cluster would be gone with it")
        for pid in [raylet.pid, *descendants(raylet.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(raylet.node, allow_graceful=False)  # what is left, and to reap it
        self.nodes.remove(raylet)


@contextlib.contextmanager
def raylets(*nodes: dict[str, Any], grpc_servicers: list[str] | None = None) -> Iterator[Raylets]:
    """Start a head and further nodes, connect to them, start Serve on a free port; stop all of it.

    The process must not be connected to a Ray. Serve's proxy is on the head only. What is to be in
    the environment of every node (`PYTHONPATH`, the proxy's callback) is set in `os.environ`
    before.

    Args:
        *nodes: arguments of `Raylets.add`, the head's first.
        grpc_servicers: import paths; with them Serve has a gRPC proxy, too, on any port.
    """
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # Short, for the paths of sockets. Also keeps `ray_current_cluster` of others as it is.
    home = tempfile.mkdtemp(prefix="rs-")
    # And a proxy may take its time on a busy machine, rather than be started again and again.
    own = {"RAY_TMPDIR": home, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30"}
    with mock.patch.dict(os.environ, own):
        cluster = Cluster(shutdown_at_exit=True)
        port, grpc_port = free_ports(2)
        running = Raylets(f"http://127.0.0.1:{port}", "", [], cluster)
        try:
            head, *others = nodes or ({},)
            running.add(_system_config=QUICK_TO_NOTICE, **head)
            for node in others:
                running.add(**node)
            running.address = cluster.address
            ray.init(cluster.address, log_to_driver=False, configure_logging=False)
            grpc = {"port": grpc_port, "grpc_servicer_functions": grpc_servicers}
            serve.start(
                proxy_location="HeadOnly",  # several on one machine would need several ports
                http_options={"host": "127.0.0.1", "port": port},
                grpc_options=grpc if grpc_servicers else None,
            )
            yield running
        finally:
            with contextlib.suppress(Exception):  # a cluster that a test broke cannot say goodbye
                serve.shutdown()
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(home, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """Ids of all processes that a process started, and those that these started (Linux)."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def importable(folder: Path | None = None) -> str:
    """A `PYTHONPATH` with which other processes import from a folder (default: from here), too."""
    return os.pathsep.join(filter(None, [str(folder or Path.cwd()), os.environ.get("PYTHONPATH")]))


def memory_mb(named: bytes = rb"ServeReplica") -> float:
    """Memory of processes by their command lines; shared pages are divided among those that share
    them. Default: all replicas of Serve."""
    total_kb = 0
    for entry in Path("/proc").iterdir():
        try:
            if re.search(named, (entry / "cmdline").read_bytes()) is None:
                continue
            said = re.search(r"^Pss: +(\d+) kB", (entry / "smaps_rollup").read_text(), re.MULTILINE)
        except OSError:
            continue
        total_kb += int(said[1]) if said else 0
    return total_kb / 1024
