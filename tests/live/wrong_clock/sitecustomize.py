"""Python's wall clock, put ahead: for processes that have this folder in PYTHONPATH.

Not by libfaketime: timed waits of Ray's own C++ take an absolute wall time, and a process that has
another one than its kernel then waits for an hour.
"""

import os
import time

AHEAD_S = int(os.environ["CLOCK_AHEAD_S"])


def ahead(clock, by):
    return lambda: clock() + by


time.time = ahead(time.time, AHEAD_S)
time.time_ns = ahead(time.time_ns, AHEAD_S * 10**9)
