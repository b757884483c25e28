"""Direct connections: what they carry, what goes over Serve's handle, and how they end."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.serve import direct
from ray_slo.serve.direct import (
    Disconnected,
    Listener,
    NotDirect,
    connect,
    decode,
    encode,
)
from ray_slo.serve.frontend import workers
from ray_slo.serve.frontend.workers import Connections
from ray_slo.serve.payloads import Items
from ray_slo.serve.shared import Lent
from tests.serve.loops import in_loop, settle, until

LARGE = bytes(range(256)) * 1024


class Heard(direct._Messages):
    def __init__(self):
        super().__init__()
        self.messages = []

    def _hear(self, message):
        self.messages.append(decode(message))


@pytest.mark.slow
def test_a_message_arrives_whole_however_it_is_cut():
    @given(
        values=st.lists(
            st.one_of(
                st.text(),
                st.binary(),
                st.integers(0, 200_000).map(bytes),
                st.integers(0, 40_000).map(lambda n: [1, np.arange(n)]),
            ),
            max_size=4,
        ),
        cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    )
    def holds(values, cuts):
        sent = b"".join(
            bytes(piece)
            for call, value in enumerate(values)
            for piece in encode(call, Items([value]))
        )
        heard, turn = Heard(), 0
        while sent:
            room = heard.get_buffer(-1)
            taken = min(len(room), cuts[turn % len(cuts)], len(sent))
            room[:taken] = sent[:taken]
            heard.buffer_updated(taken)
            sent, turn = sent[taken:], turn + 1
        assert [call for call, _ in heard.messages] == list(range(len(values)))
        for (_, [found]), value in zip(heard.messages, values, strict=True):
            np.testing.assert_equal(found, value)
            assert type(found) is type(value)

    holds()


def test_large_parts_lie_beside_the_pickle_and_arrays_are_not_copied():
    array = np.arange(100_000)
    *_, last = encode(1, Items([LARGE, array]))
    assert np.shares_memory(np.frombuffer(last, array.dtype), array)
    message = memoryview(bytearray(b"".join(encode(1, Items([LARGE, array])))[8:]))
    _, (data, found) = decode(message)
    assert data == LARGE and type(data) is bytes
    assert np.shares_memory(found, np.frombuffer(message, np.uint8))
    assert found.flags.aligned and found.flags.writeable


@pytest.mark.parametrize(
    "value",
    [lambda: 1, threading.Lock(), [ray.ObjectRef(b"x" * 28)]],
    ids=["by value", "not at all", "a reference"],
)
def test_what_plain_pickle_cannot_take_or_only_ray_can_pass_on_is_not_sent(value):
    with pytest.raises(NotDirect):
        encode(1, value)


@contextlib.asynccontextmanager
async def listening(answer):
    listener = Listener(answer)
    await listener.begin()
    connection = await connect(listener.address)
    try:
        yield listener, connection
    finally:
        if connection is not None:
            connection.close()
        await settle()  # who connected is accepted
        listener.close()
        await until(lambda: not listener.is_heard)


@in_loop
async def test_calls_are_answered_as_they_end():
    async def answer(value):
        await asyncio.sleep(value[0])
        if value[1] == "raise":
            raise ValueError("said")
        return [value[1], Items([LARGE]), lambda: 3]

    async with listening(answer) as (_, connection):
        slow = asyncio.ensure_future(connection.call((0.05, "slow")))
        with pytest.raises(ValueError, match="said"):
            await connection.call((0.0, "raise"))
        assert not slow.done()
        name, [large], function = await slow
        assert (name, large, function()) == ("slow", LARGE, 3)


@in_loop
async def test_what_is_told_arrives_in_order_and_is_not_answered(caplog):
    heard, written = [], []

    async def answer(value):
        heard.append(value)
        if value == "raise":
            raise ValueError("said")

    async with listening(answer) as (_, connection):
        connection._hear = written.append
        for value in (1, "raise", 2):
            connection.tell(value)
        await until(lambda: len(heard) == 3)
        with pytest.raises(NotDirect):
            connection.tell(threading.Lock())
    assert heard == [1, "raise", 2]
    assert written == []
    assert "said" in caplog.text  # nobody else would learn of it
    with pytest.raises(NotDirect):
        connection.tell(3)


@in_loop
async def test_an_answer_that_cannot_be_sent_is_an_error():
    async def answer(value):
        return threading.Lock()

    async with listening(answer) as (_, connection):
        with pytest.raises(TypeError, match=r"cannot be sent: .*lock"):
            await connection.call(1)


@in_loop
async def test_who_waits_hears_that_the_worker_ended():
    async def answer(value):
        await asyncio.sleep(60)

    async with listening(answer) as (listener, connection):
        waiting = asyncio.ensure_future(connection.call(1))
        await until(lambda: listener.is_heard)
        listener.close()
        with pytest.raises(Disconnected):
            await waiting
        with pytest.raises(NotDirect):
            await connection.call(2)


@in_loop
async def test_another_user_is_not_heard(monkeypatch):
    async def answer(value):
        return value

    monkeypatch.setattr(direct, "peer_of", lambda line: (1, os.geteuid() + 1))
    async with listening(answer) as (listener, connection):
        assert connection is None
        await settle()
        assert not listener.is_heard


@in_loop
async def test_refused_connections_cost_a_line_and_not_one_each(monkeypatch, caplog):
    async def answer(value):
        return value

    monkeypatch.setattr(direct, "peer_of", lambda line: (1, os.geteuid() + 1))
    async with listening(answer) as (listener, _):
        for _ in range(50):
            assert await connect(listener.address) is None
        await settle()
    assert [record.getMessage() for record in caplog.records].count(
        "a process of another user tried to connect; it is not heard"
    ) == 1


@in_loop
async def test_it_connects_once_and_again_when_the_connection_is_lost():
    async def answer(value):
        return value

    asked = []

    async def address_of(kind, worker):
        asked.append((kind, worker))
        if worker == "gone":
            raise LookupError(worker)
        found = {"elsewhere": "nowhere", "old": ""}
        return found.get(worker, listener.address)

    async with listening(answer) as (listener, _):
        connections = Connections(address_of, asyncio.ensure_future)
        to = connections.to
        names = ("here", "elsewhere", "old", "gone")
        assert [to("gpu", name) for name in names] == [None] * 4
        assert [to("gpu", name) for name in names] == [None] * 4
        await until(lambda: to("gpu", "here") is not None)
        assert await to("gpu", "here").call(5) == 5
        await until(lambda: to("gpu", "here")._lent is not None)
        assert [to("gpu", name) for name in names[1:]] == [None] * 3
        assert asked == [("gpu", name) for name in names]  # once each
        to("gpu", "here").close()
        assert to("gpu", "here") is None
        again = await until(lambda: to("gpu", "here"))
        assert await again.call(6) == 6
        again.close()  # this worker is gone; the next one has another name
        await until(lambda: to("gpu", "next"))
        assert [*connections._open] == ["next"]
        connections.close()


@contextlib.contextmanager
def lending(size=1 << 24):
    lent = Lent(size)
    try:
        yield lent
    finally:
        lent.close()


def is_whole(lent):
    """Return whether nothing is in use."""
    return len(lent._gaps) == 1 and not lent._taken


@in_loop
async def test_large_parts_go_through_shared_memory():
    """They arrive as what they were, stay when the memory is used again, and free it."""
    heard, sizes = [], []

    async def answer(value):
        heard.append(value)
        return len(heard)

    fixed = np.frombuffer(LARGE, np.uint16)
    with lending() as lent:
        async with listening(answer) as (_, connection):
            await connection.share(lent)
            write = connection._write
            connection._write = lambda pieces: (sizes.append(sum(map(len, pieces))), write(pieces))
            for turn in range(3):
                array = np.arange(100_000) + turn
                value = [LARGE, array, fixed, LARGE[:20_000], "small"]
                assert await connection.call(Items(value)) == turn + 1
                assert is_whole(lent)
    assert len(heard) == 3
    for turn, (data, array, still, short, text) in enumerate(heard):
        assert (data, short, text) == (LARGE, LARGE[:20_000], "small")
        assert type(data) is bytes
        np.testing.assert_array_equal(array, np.arange(100_000) + turn)
        np.testing.assert_array_equal(still, fixed)
        assert array.flags.writeable and array.flags.aligned
        assert still.flags.writeable and still.flags.aligned
    assert max(sizes) < 30_000  # only the short part is in the message


@in_loop
async def test_parts_without_room_in_shared_memory_are_in_the_message():
    async def answer(value):
        return [bytes(part) for part in value]

    parts = [bytes([number]) * 100_000 for number in range(5)]
    with lending(1 << 18) as lent:
        async with listening(answer) as (_, connection):
            await connection.share(lent)
            assert await connection.call(Items(parts)) == parts
        assert is_whole(lent)


@in_loop
async def test_memory_that_the_other_side_cannot_open_is_not_used(monkeypatch):
    async def answer(value):
        return len(value[0])

    monkeypatch.setattr(direct, "opened", lambda process, offer: None)
    with lending() as lent:
        monkeypatch.setattr(lent, "put", None)
        async with listening(answer) as (_, connection):
            await connection.share(lent)
            assert await connection.call(Items([LARGE])) == len(LARGE)


@in_loop
async def test_memory_of_a_call_is_kept_until_the_other_side_has_answered_or_ended():
    goes_on = asyncio.Event()

    async def answer(value):
        await goes_on.wait()

    with lending() as lent:
        async with listening(answer) as (listener, connection):
            await connection.share(lent)
            calls = [asyncio.ensure_future(connection.call(Items([LARGE]))) for _ in range(2)]
            await settle()
            calls[0].cancel()  # the message is on its way all the same
            await settle()
            assert len(lent._taken) == 2
            goes_on.set()
            await calls[1]
            await until(lambda: is_whole(lent))
            goes_on.clear()
            lost = asyncio.ensure_future(connection.call(Items([LARGE])))
            await settle()
            assert len(lent._taken) == 1
            listener.close()
            with pytest.raises(Disconnected):
                await lost
            assert is_whole(lent)


@in_loop
async def test_a_system_without_shared_memory_connects_all_the_same(monkeypatch):
    async def answer(value):
        return len(value[0])

    def refused():
        raise OSError("no such memory")

    async def address_of(kind, worker):
        return listener.address

    monkeypatch.setattr(workers, "Lent", refused)
    async with listening(answer) as (listener, _):
        connections = Connections(address_of, asyncio.ensure_future)
        connection = await until(lambda: connections.to("gpu", "w"))
        assert await connection.call(Items([LARGE])) == len(LARGE)
        connections.close()


@in_loop
async def test_nobody_waits_for_a_listener_that_accepts_no_connection(monkeypatch):
    """The kernel connects, and a process without descriptors never accepts."""
    monkeypatch.setattr(direct, "_HELLO_S", 0.02)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(f"\0ray-slo-{os.getpid()}")
        line.listen()
        assert await connect(f"ray-slo-{os.getpid()}") is None
        await settle()
        accepted, _ = line.accept()
        with accepted:
            while accepted.recv(4096):  # our end is closed
                pass


@in_loop
async def test_without_descriptors_calls_go_another_way(monkeypatch, caplog):
    """Nothing fails, nothing stays open, and all is well when there are descriptors again."""

    async def answer(value):
        return value

    monkeypatch.setattr(direct, "_HELLO_S", 0.05)
    monkeypatch.setattr(direct, "_ACCEPT_AGAIN_S", 0.01)
    async with listening(answer) as (listener, connection):
        before = open_files()
        for spare in (0, 1, 2):
            with descriptors(spare):
                assert await connection.call(spare) == spare
                if (made := await connect(listener.address)) is not None:
                    made.close()
                other = Listener(answer)
                await other.begin()
                other.close()
                with contextlib.suppress(OSError):
                    Lent(1 << 16).close()
            await settle()
        assert "direct connections are not possible" in caplog.text
        assert caplog.text.count("no direct connection can be accepted") == 1
        await until(lambda: open_files() <= before)
        again = await until(lambda: listener.is_heard) and await connect(listener.address)
        assert await again.call(5) == 5
        again.close()


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def descriptors(spare):
    """Leave this process so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    last = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 10, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in taken:
            os.close(one)
