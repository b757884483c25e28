"""Parts that need no network: one is good, one fails, one takes too long."""

from __future__ import annotations

import time

from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row


def good(setting):
    yield Row(f"good · {setting.tiny}", "seed", "", setting.seed)


def bad(setting):
    yield Row("bad · before", "m", "", 1)
    raise RuntimeError("the device is gone")


def slow(setting):
    yield Row("slow · before", "m", "", 1)
    time.sleep(600)


def absent(setting):
    raise Missing("Ray is not installed")
    yield  # a generator, as parts are
