"""Memory is returned to the system after a peak."""

import ctypes
import gc
import math
import subprocess
import sys

import pytest

from ray_slo.serve import memory
from ray_slo.serve.memory import Trim, settle

PEAK = """
import ctypes
from ray_slo.serve.memory import Trim, resident_mb, trimmer
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
trim, before = Trim(trimmer()), resident_mb()
blocks = [libc.malloc(50_000) for _ in range(4000)]
for block in blocks:
    ctypes.memset(block, 1, 50_000)
for i, block in enumerate(blocks):
    if i % 100 != 99:  # the last one stays, so glibc keeps what is below it
        libc.free(block)
peak = resident_mb()
assert trim.look()
after = resident_mb()
print(before, peak, after)
"""


@pytest.mark.skipif(memory.trimmer() is None, reason="no glibc")
def test_what_glibc_keeps_is_given_back():
    said = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    before, peak, after = map(float, said.stdout.split())
    assert peak > before + 150
    assert after < before + 30


BODIES = """
import resource, threading
from ray_slo.serve.memory import keep_blocks
keep_blocks()

def read():
    came = bytearray()
    for _ in range(31):
        came += bytes(65_536)
    body = bytes(came)
    return b"".join([body[:1_000_000], body[1_000_000:]])

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def count():
    for _ in range(5):
        read()
    before = faults()
    for _ in range(20):
        read()
    found.append(faults() - before)

found = []
count()
thread = threading.Thread(target=count)  # it has a heap of its own
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(memory.trimmer() is None, reason="no glibc")
def test_the_memory_of_a_large_body_serves_the_next_one():
    said = subprocess.run(
        [sys.executable, "-c", BODIES], capture_output=True, text=True, check=True
    )
    assert all(int(pages) < 500 for pages in said.stdout.split())  # a body has 500 pages


def test_only_after_a_peak():
    sizes, trimmed = iter([100, 105, 112, 200, 110, 121, 100, 117, 101, math.nan]), []
    trim = Trim(lambda: trimmed.append(1), lambda: next(sizes))
    assert [trim.look() for _ in range(2)] == [False, False]
    assert trim.look() and trimmed == [1]  # 200, and 110 after it
    assert not trim.look()
    assert not trim.look()  # 100: it went by itself
    assert trim.look()  # 117
    assert not trim.look()  # not known


def test_what_was_in_use_at_the_last_time_is_given_back_later():
    now, trimmed = {"resident": 100, "used": 50}, []

    def trim():
        trimmed.append(1)
        now["resident"] = now["used"] + 50

    one = Trim(trim, lambda: now["resident"], lambda: now["used"])
    now.update(resident=500, used=450)  # large bodies are here
    assert not one.look()
    now.update(used=50)  # they are gone; glibc keeps their memory
    assert one.look() and now["resident"] == 100
    now.update(resident=120, used=70)
    assert not one.look() and trimmed == [1]


HELD = """
from ray_slo.serve.memory import Trim, keep_blocks, resident_mb, trimmer, used_mb
keep_blocks()
trims = Trim(trimmer(), used=used_mb)
before = resident_mb()
bodies, others = [], []
for _ in range(100):
    bodies.append(b"1" * 3_000_000)
    others.append(b"1" * 3_000)
looks = [trims.look(), trims.look()]  # while they are held
peak = resident_mb()
bodies.clear()
looks.append(trims.look())
print(before, peak, resident_mb(), looks[-1])
"""


@pytest.mark.skipif(not memory.used_mb(), reason="no glibc since 2.33")
def test_what_was_held_for_long_is_given_back():
    said = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    before, peak, after, looked = said.stdout.split()
    assert float(peak) > float(before) + 250 and looked == "True"
    assert float(after) < float(before) + 30


def test_where_there_is_no_such_call(monkeypatch):
    def missing(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert memory.trimmer() is None and memory.used_mb() == 0.0
    memory.give_back()  # does nothing


def test_what_is_loaded_is_left_out_of_later_collections():
    before = gc.get_freeze_count()
    loaded = [[] for _ in range(1000)]
    try:
        settle()
        assert gc.get_freeze_count() >= before + len(loaded)
    finally:
        gc.unfreeze()
