"""Waiting for another thread: its turn comes, sooner or later."""

import time


def until(condition, within_s=60.0):
    """Return once the condition holds; fail where it does not."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
