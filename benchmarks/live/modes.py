"""The modes of Ray Serve that live programs run in.

Each mode runs in a process of its own, because Serve reads its mode only when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.live.cluster import importable
from ray_slo.core.processes import NICENESS_ENV
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy.modes import DRAIN_ENV, HAPROXY_ENV, OPTIMIZED_ENV, variables

ORDINARY, HAPROXY, OPTIMIZED = "ordinary", "haproxy", "optimized"
MODES = (ORDINARY, HAPROXY, OPTIMIZED)  # the last is HAProxy with Serve's throughput optimization


def environment(mode: str, drain_s: float = 2.0) -> dict[str, str]:
    """Return the environment variables of a cluster in a mode, and of all its processes.

    Args:
        drain_s: how long a frontend that is being removed stays up with HAProxy, in seconds.
            Serve's default of 30 s is meant for distant load balancers.
    """
    environ = {
        **os.environ,
        HAPROXY_ENV: "0",
        OPTIMIZED_ENV: "0",
        NICENESS_ENV: "0",
        PROXY_CALLBACK_ENV: PROXY_CALLBACK,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": importable(),
    }
    if mode != ORDINARY:
        environ |= variables() | {DRAIN_ENV: f"{drain_s:g}"}
    if mode == OPTIMIZED:
        environ[OPTIMIZED_ENV] = "1"
    return environ


def rows_of(module: str, mode: str, order: Sequence[str], **environ: str) -> list[Row]:
    """Run a module as `MODE FILE ORDER…` in a mode, and return the rows that it writes to FILE."""
    return [Row(**row) for row in result_of(module, mode, order, **environ)]


def result_of(
    module: str, mode: str, order: Sequence[str], *, prefix: Sequence[str] = (), **environ: str
) -> Any:
    """Run a module as `MODE FILE ORDER…` in a mode, and return the JSON that it writes to FILE.

    Args:
        prefix: words before the command.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        subprocess.run(
            [*prefix, sys.executable, "-m", module, mode, str(file), *order],
            env={**environment(mode), **environ},
            check=True,
        )
        return json.loads(file.read_text())


def write_rows(file: str, rows: Sequence[Row]) -> None:
    """Write rows to a file, where `rows_of` reads them."""
    Path(file).write_text(json.dumps([asdict(row) for row in rows]))
