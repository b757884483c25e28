"""Processes of this machine, as Linux shows them."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

NICENESS_ENV = "RAY_worker_niceness"
"""Ray's own variable: the niceness of its workers. It is read where Ray starts."""

_OPENMP = "OMP_NUM_THREADS"  # Ray sets it to `num_cpus` of a worker, rounded down, and at least 1
# Libraries with threads of their own, which do not read it: tokenizers, Numba, Polars, TensorFlow.
_NOT_OPENMP = (
    "RAYON_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_CHOSEN = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
THREAD_VARIABLES = (_OPENMP, *_CHOSEN)
"""They bound the threads of NumPy, SciPy, scikit-learn and PyTorch."""

_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer
_STILL = "TtXZ"  # states of a process that is stopped, traced or dead


def peer_of(line: Any) -> tuple[int, int]:
    """Return the ID of the process at the other end of a socket, and the ID of its user.

    Args:
        line: a Unix socket. The process is 0 if it is in another container.
    """
    said = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(said)
    return process, user


def is_running(process: int) -> bool:
    """Return whether a process of this machine is there, and is not stopped."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] not in _STILL


def come_forward() -> int:
    """Let this process have CPU time before no other and after no other: niceness 0 for each of its
    threads, if the system allows it.

    Ray starts its workers with niceness 15. Beside one busy program with niceness 0, such a process
    gets a thirtieth of a core. If an operator has chosen a niceness (`NICENESS_ENV`), it stays.

    Returns:
        The remaining niceness of this thread.
    """
    if NICENESS_ENV not in os.environ and os.getpriority(os.PRIO_PROCESS, 0) > 0:
        # In Linux, a niceness belongs to a thread. Later threads inherit that of their maker.
        with suppress(OSError):  # not allowed, or no /proc
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    return os.getpriority(os.PRIO_PROCESS, 0)


def bound_threads() -> None:
    """Let libraries use as many threads as OpenMP may. Without this, some of them use all cores of
    the machine, and workers disturb each other. Variables that are set already stay.

    Ray may have run another task in this process, with another number. Libraries that were loaded
    then get the new number if `threadpoolctl` is installed, as it is with scikit-learn: BLAS for
    the process, and OpenMP for the calling thread.
    """
    if not (count := os.environ.get(_OPENMP)):
        return
    for name in _NOT_OPENMP:
        os.environ.setdefault(name, count)
    if any(name in os.environ for name in _CHOSEN):
        return  # somebody wants another number
    with suppress(ImportError, ValueError):
        from threadpoolctl import threadpool_limits

        threadpool_limits(int(count))
