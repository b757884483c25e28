"""The core of the live tests once more, in Serve's fast mode with its throughput optimized.

Serve reads its mode when it is imported. So these tests run in a process and on a cluster of their
own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.live.modes import OPTIMIZED, environment
from ray_slo.serve.proxy import modes

# Deadlines, SLOs, errors and lost workers, over HTTP and gRPC; what listens where; bursts.
# `live-chaos` has the faults.
CORE = ("test_grpc.py", "test_attacks.py", "test_deployment.py", "test_redeploy.py", "test_top.py")
# hanging_up takes long
CHOSEN = "burst or other_ways or test_http or test_cancelled or test_redeploy or test_top"
CHOSEN += " or test_grpc and not hanging_up"

pytestmark = pytest.mark.timeout(900)


@pytest.mark.skipif(modes.has_haproxy_of_ours(), reason="this is that process")
@pytest.mark.skipif(not modes.is_possible(), reason="there is no fast mode here")
def test_the_core_of_these_tests_holds_in_the_fast_mode():
    tests = [str(Path(__file__).with_name(test)) for test in CORE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--reruns=1", *tests, "-k", CHOSEN],  # as make test
        env=environment(OPTIMIZED, drain_s=0.5)
        | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},  # Ray's own processes on loopback, too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
