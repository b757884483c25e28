"""A Ray cluster of several nodes on this machine: a head, and further raylets.

`ray.cluster_utils.Cluster` is Ray's tool for its own tests. Only this module uses it here. Every
node has its own raylet, object store, resources, labels, environment and loopback address
(127.0.0.2, 127.0.0.3, …). So nothing listens on an address that other machines can reach. Unlike
real hosts, the nodes share the CPUs, the file system and, unless `env` says otherwise, the clock.

    with raylets({"num_cpus": 1}, {"num_cpus": 2, "resources": {"worker": 2}}) as cluster:
        serve.run(app)                     # answers at cluster.url
        cluster.kill(cluster.nodes[1])     # as if the machine were lost
        cluster.add(num_cpus=2, resources={"worker": 2})

With `raylets(…, networks=…)`, every node has a network of its own, which can be cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.live.networks import HEAD, Network, Networks
from ray_slo.serve.proxy.modes import free_ports

OBJECT_STORE_BYTES = 100 * 1024**2  # Ray needs at least 75 MiB
STARTED_S = 60.0  # longest start of a node
# By default, Ray notices a silent node after 15 s or more. That suits a network; a test is shorter.
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
        node_id: as in `ray.nodes()` and `ray.get_runtime_context().get_node_id()`, in hex.
        pid: process id of the raylet, or of its parent.
        address: IP address.
        network: its own network, if it has one.
    """

    node_id: str
    pid: int
    address: str
    node: Any = field(repr=False)
    network: Network | None = None

    @property
    def pids(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]


@dataclass
class Raylets:
    """A running cluster; the first of `nodes` is the head.

    Attributes:
        url: address of Serve's HTTP proxy on the head, without a slash at the end.
        address: for `ray.init(address=…)` or `ray-slo --address` of another process.
    """

    url: str
    address: str
    nodes: list[Raylet]
    cluster: Any = field(repr=False)
    networks: Networks | None = None
    started: int = 0
    frozen: dict[str, list[int]] = field(default_factory=dict)

    def add(self, **node: Any) -> Raylet:
        """Start another raylet, and wait until the cluster knows it.

        Args:
            **node: `num_cpus`, `num_gpus`, `resources`, `labels`, `env` (variables of its raylet
                and of all processes that the raylet starts), `object_store_memory` in bytes.
        """
        self.started += 1
        node.setdefault("object_store_memory", OBJECT_STORE_BYTES)
        # Not Ray's `env_vars`, in which Ray overwrites LD_PRELOAD.
        with mock.patch.dict(os.environ, node.pop("env", {})):
            if self.networks is not None and self.nodes:
                raylet = started_inside(self.networks.add(), self.cluster.address, node)
            else:
                raylet = self._started_here(node)
        self.nodes.append(raylet)
        return raylet

    def _started_here(self, node: dict[str, Any]) -> Raylet:
        # Ray replaces 127.0.0.1 by the public address.
        address = HEAD if self.networks is not None else f"127.0.0.{1 + self.started}"
        started = self.cluster.add_node(node_ip_address=address, include_dashboard=False, **node)
        pid = started.all_processes["raylet"][0].process.pid
        return Raylet(started.node_id, pid, address, started)

    def kill(self, raylet: Raylet) -> None:
        """Kill a raylet and every process it started (SIGKILL), as if its machine were lost.

        Raises:
            ValueError: it is the head. Serve's controller and this process need it.
        """
        if raylet is self.nodes[0]:
            raise ValueError("the head cannot be killed: the cluster would be gone with it")
        signal_all(raylet.pids, signal.SIGKILL)
        if raylet.network is not None:
            raylet.node.wait()
        else:  # ends what is left, and waits for the ended processes
            self.cluster.remove_node(raylet.node, allow_graceful=False)
        self.nodes.remove(raylet)

    def freeze(self, raylet: Raylet) -> None:
        """Stop a raylet and every process it started (SIGSTOP), as if its machine were suspended.

        Raises:
            ValueError: it is the head.
        """
        if raylet is self.nodes[0]:
            raise ValueError("the head cannot be frozen: the cluster would stop with it")
        stopped = self.frozen[raylet.node_id] = []
        while new := [pid for pid in raylet.pids if pid not in stopped]:  # started meanwhile
            signal_all(new, signal.SIGSTOP)
            stopped += new

    def thaw(self, raylet: Raylet) -> None:
        """Let all processes of a frozen raylet go on."""
        signal_all(self.frozen.pop(raylet.node_id, []), signal.SIGCONT)


@contextlib.contextmanager
def raylets(
    *nodes: dict[str, Any],
    grpc_servicers: list[str] | None = None,
    noticing: Mapping[str, int] = QUICK_TO_NOTICE,
    networks: Networks | None = None,
) -> Iterator[Raylets]:
    """Start a head, further nodes, and Serve on a free port. Stop them at the end of the block.

    The process must not be connected to a Ray cluster yet. Serve has a proxy on the head only. Set
    variables for all nodes (`PYTHONPATH`, the proxy's callback) in `os.environ` before.

    Args:
        *nodes: arguments of `Raylets.add`, first those of the head.
        grpc_servicers: import paths; with them, Serve also has a gRPC proxy, on a free port.
        noticing: Ray's settings of when a silent node counts as dead; {}: Ray's defaults.
        networks: where to make a network for every node but the head. They take `num_cpus`,
            `resources`, `env` and `object_store_memory` only.
    """
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # A short path, because socket paths have a maximum length. A folder of its own also keeps
    # other clusters' `ray_current_cluster` as it is.
    home = tempfile.mkdtemp(prefix="rs-")
    # On a busy machine a proxy starts slowly. Without this, Serve would restart it again and again.
    own = {"RAY_TMPDIR": home, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30"}
    with mock.patch.dict(os.environ, own):
        cluster = Cluster(shutdown_at_exit=True)
        port, grpc_port = free_ports(2)
        running = Raylets(f"http://127.0.0.1:{port}", "", [], cluster, networks)
        try:
            head, *others = nodes or ({},)
            running.add(_system_config=dict(noticing), **head)
            running.address = cluster.address
            ray.init(cluster.address, log_to_driver=False, configure_logging=False)
            for node in others:
                running.add(**node)
            grpc = {"port": grpc_port, "grpc_servicer_functions": grpc_servicers}
            serve.start(
                proxy_location="HeadOnly",  # several on one machine would need several ports
                http_options={"host": "127.0.0.1", "port": port},
                grpc_options=grpc if grpc_servicers else None,
            )
            yield running
        finally:
            with contextlib.suppress(Exception):  # a test may have left the cluster broken
                serve.shutdown()
            ray.shutdown()
            for raylet in running.nodes[1:]:
                if raylet.network is not None:
                    running.kill(raylet)
            cluster.shutdown()
            shutil.rmtree(home, ignore_errors=True)


def started_inside(network: Network, cluster: str, node: dict[str, Any]) -> Raylet:
    """Start a raylet in a network of its own, and wait until the cluster knows it.

    `ray start` does it: what Ray starts from this process would be in this process's network.

    Raises:
        RuntimeError: it did not start.
    """
    import ray

    options = {
        "address": cluster,
        "node-ip-address": network.address,
        "num-cpus": node.get("num_cpus", 1),
        "object-store-memory": node["object_store_memory"],
        "resources": json.dumps(node.get("resources", {})),
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *given]
    process = subprocess.Popen(
        [*network.inside, *ray_start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + STARTED_S
    while process.poll() is None and time.monotonic() < until:
        for found in ray.nodes():
            if found["NodeManagerAddress"] == network.address and found["Alive"]:
                return Raylet(found["NodeID"], process.pid, network.address, process, network)
        time.sleep(0.2)
    signal_all([process.pid, *descendants(process.pid)], signal.SIGKILL)
    raise RuntimeError(f"the node {network.address} did not start within {STARTED_S:g} s")


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, of their children, and so on (Linux)."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def importable(folder: Path | None = None) -> str:
    """Return a `PYTHONPATH` that adds a folder (default: the current one) to the present one."""
    return os.pathsep.join(filter(None, [str(folder or Path.cwd()), os.environ.get("PYTHONPATH")]))


def memory_mb(named: bytes = rb"ServeReplica") -> float:
    """Return the memory of processes whose command line matches `named`, in MiB.

    The default matches all Serve replicas. This is the proportional set size: each shared page is
    divided among the processes that share it.
    """
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
