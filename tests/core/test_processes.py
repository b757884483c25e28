"""What Linux shows of processes."""

import os
import signal
import subprocess
import sys

import pytest

from ray_slo.core.processes import is_running


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_stopped_process_does_not_run():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not is_running(process.pid)
        process.kill()
    assert not is_running(process.pid)
