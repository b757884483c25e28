"""One local Ray with Serve for all live tests of a session, in the mode that the environment says
(`test_fast_mode`)."""

# ruff: noqa: E402
import contextlib
import functools
import inspect
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ray_slo.serve.proxy.modes import OPTIMIZED_ENV, free_ports

# Set only for Ray's processes. If Ray is imported with it, handles need an event loop.
OPTIMIZED = os.environ.pop(OPTIMIZED_ENV, "0")

import httpx._transports.default as httpx_transports
import pytest
import ray
from ray import serve
from ray._private import services
from ray.serve._private import client
from ray.serve._private.constants import DEFAULT_TRACING_EXPORTER_IMPORT_PATH
from xdist.scheduler import LoadScopeScheduling

from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.grpc import SERVICER

# Serve kills and restarts a proxy that starts too slowly. Its 5 s are short on a busy machine.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
# Ray runs its workers at niceness 15, so every other process would come first.
os.environ.setdefault("RAY_worker_niceness", "0")


@dataclass(frozen=True)
class LocalCluster:
    """A local Ray with Serve.

    Attributes:
        url: URL of Serve's HTTP proxy, without a slash at the end.
        grpc: host and port of Serve's gRPC proxy.
        address: address for `ray.init(address=…)` in another process.
        folder: folder from which replicas can import modules.
        spans: folder where Serve's tracing writes the spans of requests whose caller is sampled.
    """

    url: str
    grpc: str
    address: str
    spans: Path
    folder: Path

    @contextlib.contextmanager
    def running(self, app, name="app", route_prefix="/"):
        """Deploy `app`, yield its handle, and delete it whatever happens.

        Deletion does not wait until the replicas have stopped. So each application needs a new
        name.
        """
        while name in serve.status().applications:
            time.sleep(0.1)
        handle = serve.run(app, name=name, route_prefix=route_prefix)
        try:
            yield handle
        finally:
            serve.delete(name, _blocking=False)


# They start a cluster of their own, and mostly wait for it.
OF_THEIR_OWN = (
    "test_controller_options.py",
    "test_demo.py",
    "test_fast_mode.py",
    "test_two_nodes.py",
    "program_of_its_own",
)


class Scheduling(LoadScopeScheduling):
    """Tests with a cluster of their own run in one process, beside those that share one."""

    def _split_scope(self, nodeid):
        return "own" if any(name in nodeid for name in OF_THEIR_OWN) else "shared"


def pytest_collection_modifyitems(items):
    """Rehearsals run when nothing else does: they come last, when the other process has ended."""
    items.sort(key=lambda item: item.path.name == "test_auto.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """Start Ray and Serve once; stop what was started, and nothing else."""
    port, grpc_port = free_ports(2)
    # For Ray's processes: the deadline middleware in Serve's proxy, and the tests' own modules.
    os.environ[PROXY_CALLBACK_ENV] = PROXY_CALLBACK
    os.environ[OPTIMIZED_ENV] = OPTIMIZED
    os.environ.setdefault("RAY_metrics_report_interval_ms", "3000")  # shorter than Ray's 10 s
    # Only requests whose caller asks for it are traced; the others cost almost nothing.
    os.environ["RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"] = DEFAULT_TRACING_EXPORTER_IMPORT_PATH
    os.environ["RAY_SERVE_TRACING_SAMPLING_RATIO"] = "0"
    client.CLIENT_POLLING_INTERVAL_S = 0.1  # of `serve.run`, by default 1 s
    # `httpx.post` would read all certificates each time, which takes longer than the request.
    httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)
    here = str(Path(__file__).parent)
    folder = tmp_path_factory.mktemp("modules")
    paths = [here, str(folder), os.getenv("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if sys.platform == "linux":
        _fork_workers()
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=bool(os.environ.get("RAY_SLO_TEST_LOGS")),
        configure_logging=False,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options={"port": grpc_port, "grpc_servicer_functions": [SERVICER]},
    )
    try:
        yield LocalCluster(
            f"http://127.0.0.1:{port}",
            f"127.0.0.1:{grpc_port}",
            context.address_info["address"],
            Path(context.address_info["session_dir"]) / "logs" / "serve" / "spans",
            folder,
        )
    finally:
        serve.shutdown()
        ray.shutdown()


def _fork_workers():
    """Let the raylets of this process start workers as forks (`forked`)."""
    start = services.start_raylet

    @functools.wraps(start)
    def start_raylet(*args, **kwargs):
        bound = inspect.signature(start).bind(*args, **kwargs)
        bound.arguments["setup_worker_path"] = str(Path(__file__).parent / "forked.py")
        return start(*bound.args, **bound.kwargs)

    services.start_raylet = start_raylet
