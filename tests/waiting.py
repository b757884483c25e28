"""Wait until another thread has made a condition true."""

import time


def until(condition, within_s=60.0):
    """Return once the condition holds; fail if it does not hold within `within_s` seconds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
