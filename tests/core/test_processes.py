"""What Linux shows of processes."""

import os
import signal
import subprocess
import sys

import pytest

from ray_slo.core.processes import NICENESS_ENV, THREAD_VARIABLES, bound_threads, is_running


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_stopped_process_does_not_run():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not is_running(process.pid)
        process.kill()
    assert not is_running(process.pid)


NICE = """
import os, threading
from ray_slo.core.processes import come_forward
os.nice(7)
seen, go, done = [], threading.Event(), threading.Event()
def look():
    go.wait()
    seen.append(os.getpriority(os.PRIO_PROCESS, 0))
thread = threading.Thread(target=look)
thread.start()  # it inherits the niceness
seen.append(come_forward())
go.set()
thread.join()
print(*seen)
"""


def niceness(environ):
    command = [sys.executable, "-c", NICE]
    said = subprocess.run(command, env=os.environ | environ, capture_output=True, check=True)
    return said.stdout.decode().split()


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness of threads is Linux's")
def test_a_process_comes_forward_with_all_its_threads_if_it_may(monkeypatch):
    monkeypatch.delenv(NICENESS_ENV, raising=False)
    first, second = niceness({})
    assert first == second
    if os.geteuid() == 0:
        assert first == "0"


def test_a_niceness_that_an_operator_chose_stays():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness({NICENESS_ENV: "5"}) == [str(min(before + 7, 19))] * 2


def test_libraries_get_the_threads_of_openmp_unless_somebody_chose(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NUMBA_NUM_THREADS": "3"})
    bound_threads()
    assert os.environ == {"NUMBA_NUM_THREADS": "3"}
    os.environ["OMP_NUM_THREADS"] = "2"
    bound_threads()
    assert (os.environ["NUMBA_NUM_THREADS"], os.environ["RAYON_NUM_THREADS"]) == ("3", "2")


BLAS = """
import os, numpy
from threadpoolctl import threadpool_info
from ray_slo.core.processes import bound_threads
os.environ["OMP_NUM_THREADS"] = "2"  # after BLAS was loaded
bound_threads()
print(*{pool["num_threads"] for pool in threadpool_info()})
"""


@pytest.mark.parametrize(("chosen", "threads"), [({}, b"2"), ({"OPENBLAS_NUM_THREADS": "1"}, b"1")])
def test_a_library_that_is_loaded_gets_the_new_number_unless_somebody_chose(chosen, threads):
    pytest.importorskip("threadpoolctl")
    own = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    environ = own | {"OMP_NUM_THREADS": "1"} | chosen
    done = subprocess.run(
        [sys.executable, "-c", BLAS], env=environ, capture_output=True, check=True
    )
    assert done.stdout.split() == [threads]
