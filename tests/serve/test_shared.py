"""Shared memory: what is put there stays until it is freed, and other processes read it."""

import asyncio
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.serve import shared
from ray_slo.serve.shared import Lent, Offer, opened
from tests.serve import clock

PAGE = 4096


@pytest.fixture
def memory():
    lent = Lent(8 * PAGE)
    yield lent
    lent.close()


def pages(lent):
    """Return the number of pages that the system has given to the memory."""
    return os.fstat(lent.offer.file).st_blocks * 512 // PAGE


def test_what_is_there_stays_until_it_is_freed():
    @given(
        st.lists(
            st.one_of(
                st.integers(1, 5 * PAGE).map(lambda size: ("put", size)),
                st.integers(0, 7).map(lambda which: ("free", which)),
            ),
            max_size=30,
        )
    )
    def holds(steps):
        async def run():
            lent = Lent(8 * PAGE)
            reader = opened(os.getpid(), lent.offer)
            there = {}
            for number, (what, value) in enumerate(steps):
                if what == "put":
                    data = bytes([number % 256]) * value
                    place = lent.put(memoryview(data))
                    if place is None:  # no gap is large enough
                        taken = np.zeros(8, bool)
                        for at, held in there.items():
                            taken[at // PAGE : (at + len(held) - 1) // PAGE + 1] = True
                        free = "".join("x" if used else "." for used in taken)
                        assert max(map(len, free.split("x"))) * PAGE < value
                    else:
                        assert place not in there
                        there[place] = data
                elif there:
                    place = sorted(there)[value % len(there)]
                    del there[place]
                    lent.free(place)
                for at, held in there.items():
                    assert reader[at : at + len(held)] == held
            for place in there:
                lent.free(place)
            assert lent.put(memoryview(bytes(8 * PAGE))) == 0
            lent.close()
            reader.close()

        asyncio.run(run())

    holds()


def test_another_process_reads_it_and_does_not_write(memory):
    place = memory.put(memoryview(b"said"))
    program = f"""
from ray_slo.serve.shared import Offer, opened
found = opened({os.getpid()}, Offer{tuple(memory.offer)})
assert found[{place}:{place + 4}] == b"said"
try:
    found[{place}] = 0
except TypeError:
    print("refused")
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("refused\n", "")


@pytest.mark.parametrize(
    ("process", "file", "size"),
    [(0, None, None), (os.getpid(), 10**6, None), (os.getpid(), None, 9 * PAGE)],
    ids=["another container", "no such file", "smaller than it says"],
)
def test_memory_that_cannot_be_opened(memory, process, file, size):
    offer = Offer(memory.offer.file if file is None else file, size or memory.offer.size)
    assert opened(process, offer) is None


def test_unused_memory_is_given_back(memory):
    async def run():
        place = memory.put(memoryview(bytes(5 * PAGE)))
        other = memory.put(memoryview(b"1"))
        memory.free(place)
        await asyncio.sleep(2 * shared._KEEP_S)
        assert pages(memory) == 6  # part of it is in use
        memory.free(other)
        await asyncio.sleep(shared._KEEP_S - 1)
        memory.free(memory.put(memoryview(b"1")))
        await asyncio.sleep(shared._KEEP_S - 1)
        assert pages(memory) == 6
        await asyncio.sleep(2)
        assert pages(memory) == 0
        assert memory.put(memoryview(b"1")) == 0

    clock.run(run())


def test_it_is_closed_while_it_is_in_use(memory):
    place = memory.put(memoryview(b"1"))
    file = memory.offer.file
    memory.close()
    memory.free(place)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_system_without_memory_for_it(memory):
    """The limit is that of the size of files. Python ignores its signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, before[1]))
    try:
        assert memory.put(memoryview(bytes(3 * PAGE))) is None
        assert pages(memory) == 0  # though a part of it was written
        assert memory.put(memoryview(bytes(2 * PAGE))) == 0
        assert memory.put(memoryview(b"1")) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert memory.put(memoryview(bytes(6 * PAGE))) == 2 * PAGE


def test_a_system_without_such_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="only Linux"):
        Lent()
