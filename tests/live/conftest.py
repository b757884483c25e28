"""One local Ray with Serve for all live tests of a session, in the mode that the environment says
(`test_fast_mode`)."""

# ruff: noqa: E402
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ray_slo.serve.proxy.modes import OPTIMIZED_ENV, free_ports

# For Ray's processes alone: Ray, imported with it, calls handles on an event loop only.
OPTIMIZED = os.environ.pop(OPTIMIZED_ENV, "0")

import pytest
import ray
from ray import serve
from ray.serve._private import client
from ray.serve._private.constants import DEFAULT_TRACING_EXPORTER_IMPORT_PATH

from ray_slo.serve.grpc import SERVICER
from ray_slo.serve.proxy.bounds import PROXY_CALLBACK, PROXY_CALLBACK_ENV


@dataclass(frozen=True)
class LocalCluster:
    """A local Ray with Serve.

    Attributes:
        url: of Serve's HTTP proxy, without a slash at the end.
        grpc: of Serve's gRPC proxy, host and port.
        address: for `ray.init(address=…)` of another process.
        folder: modules in it can be imported by replicas.
        spans: where Serve's tracing writes its files, of requests whose caller's span is sampled.
    """

    url: str
    grpc: str
    address: str
    spans: Path
    folder: Path

    @contextlib.contextmanager
    def running(self, app, name="app", route_prefix="/"):
        """Deploy `app`, yield its handle, and delete it whatever happens.

        Nobody waits for replicas that stop, but who takes the name of an application.
        """
        while name in serve.status().applications:
            time.sleep(0.1)
        handle = serve.run(app, name=name, route_prefix=route_prefix)
        try:
            yield handle
        finally:
            serve.delete(name, _blocking=False)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """Start Ray and Serve once; stop what was started, and nothing else."""
    port, grpc_port = free_ports(2)
    # For Ray's processes: the deadline middleware in Serve's proxy, and the tests' own modules.
    os.environ[PROXY_CALLBACK_ENV] = PROXY_CALLBACK
    os.environ[OPTIMIZED_ENV] = OPTIMIZED
    # A proxy that is not there in time is killed and started again: 5 s are short where much runs.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # Ray runs its workers at niceness 15: other tests, and whatever else runs, would come first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_metrics_report_interval_ms", "3000")  # Ray's 10 s are long to wait
    # Traced is what a caller asks to be: for nobody else it costs next to nothing.
    os.environ["RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"] = DEFAULT_TRACING_EXPORTER_IMPORT_PATH
    os.environ["RAY_SERVE_TRACING_SAMPLING_RATIO"] = "0"
    client.CLIENT_POLLING_INTERVAL_S = 0.1  # s: how often `serve.run` looks; its 1 s add up
    here = str(Path(__file__).parent)
    folder = tmp_path_factory.mktemp("modules")
    paths = [here, str(folder), os.getenv("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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
