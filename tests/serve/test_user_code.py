"""An error of user code ends only its own call."""

import asyncio
import pickle
import sys
import threading
import time

import pytest
from fastapi import HTTPException as FastAPIHTTPException
from pydantic import BaseModel, ValidationError
from ray import cloudpickle
from starlette.exceptions import HTTPException

from ray_slo.models.checkpoint import Preempted, PreemptionFlag
from ray_slo.serve import user_code
from ray_slo.serve.user_code import HookThreads, as_exception, in_words, sendable
from tests.serve import clock


class Panic(BaseException):
    """As pyo3's `PanicException`."""


class Mute(Exception):
    def __str__(self):
        raise Panic("even its message")


class Unpicklable(Exception):
    def __reduce__(self):
        sys.exit(3)


ODD = [
    Panic("rust"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(1),
    StopAsyncIteration(),
    asyncio.CancelledError(),
]


def raising(error):
    def raises(*values):
        raise error

    return raises


def raising_async(error):
    async def raises(*values):
        await asyncio.sleep(0)
        raise error

    return raises


@pytest.mark.parametrize("error", ODD, ids=lambda e: type(e).__name__)
def test_an_odd_error_becomes_one_that_says_so(error):
    said = type(error).__name__
    with pytest.raises(RuntimeError, match=said):
        user_code.call(raising(error))

    async def run():
        with pytest.raises(RuntimeError, match=said):
            await user_code.call_async(raising_async(error), 1)
        threads = HookThreads(2)
        for made in (raising, raising_async):
            with pytest.raises(RuntimeError, match=said):
                await threads.hook(made(error))(1)
        await asyncio.sleep(0)  # the loop lives
        return "alive"

    assert asyncio.run(run()) == "alive"


@pytest.mark.parametrize("error", [ValueError("x"), Preempted(PreemptionFlag())])
def test_others_are_as_they_are(error):
    with pytest.raises(type(error)) as raised:
        user_code.call(raising(error))
    assert raised.value is error

    async def run():
        with pytest.raises(type(error)) as raised:
            await user_code.call_async(raising_async(error))
        assert raised.value is error

    asyncio.run(run())


def test_errors_whose_own_code_raises():
    assert in_words(Mute()) == "Mute, whose message cannot be made"
    assert str(as_exception(Panic("rust"))) == "Panic: rust"
    assert in_words(sendable(Unpicklable("x"))) == "Unpicklable: x"
    assert isinstance(sendable(ValueError("x")), ValueError)


class TwoArguments(ValueError):
    def __init__(self, field, why):
        super().__init__(f"{field}: {why}")
        self.field, self.cause, self.lock = field, None, threading.Lock()


class Model(BaseModel):
    pixels: int


def invalid():
    try:
        Model(pixels="x")
    except ValidationError as error:
        return error


def local():
    class Local(KeyError):
        pass

    return Local("pixels")


@pytest.mark.parametrize(
    "error",
    [
        TwoArguments("pixels", "missing"),
        HTTPException(status_code=401, detail="no", headers={"x-a": "b"}),
        FastAPIHTTPException(status_code=418, detail={"why": "tea"}),
        invalid(),
        local(),
        Unpicklable("x"),
        Mute(),
        OSError(2, "No such file", "x.png"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_and_message_survive_each_hop(error):
    said = in_words(error)
    sent = error
    for _ in range(3):
        sent = pickle.loads(cloudpickle.dumps(sendable(sent)))
        assert in_words(sent) == said or isinstance(error, Mute)
        assert type(sent).__name__ == type(error).__name__
    assert isinstance(sent, type(error).__mro__[1])
    for name in ("status_code", "detail", "headers", "field", "cause"):
        if hasattr(error, name):
            assert getattr(sent, name) == getattr(error, name)


def test_a_large_error_is_cut_because_every_request_of_a_batch_gets_it():
    for error in (ValueError("x" * 10**6), TwoArguments("a", "b" * 10**6)):
        sent = cloudpickle.dumps(sendable(error))
        assert len(sent) < 20_000
        assert type(pickle.loads(sent)).__name__ == type(error).__name__
    refused = HTTPException(401, {"user": object(), "also": lambda: 1})
    assert pickle.loads(cloudpickle.dumps(sendable(refused))).status_code == 401


def test_who_leaves_takes_the_call_along():
    async def run():
        seen = []

        async def waits():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        task = asyncio.ensure_future(user_code.call_async(waits))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(run()) == ["cancelled"]


def test_a_hook_that_blocks_costs_its_own_callers_only():
    async def run():
        threads, go = HookThreads(4), threading.Event()
        slow, quick = threads.hook(lambda x: go.wait(30) and x), threads.hook(lambda x: x)
        blocked = [asyncio.ensure_future(slow(i)) for i in range(3)]
        assert [await quick(i) for i in range(20)] == list(range(20))
        assert not any(task.done() for task in blocked)
        go.set()
        return await asyncio.gather(*blocked)

    assert asyncio.run(run()) == [0, 1, 2]


def test_quick_hooks_run_one_after_the_other():
    """In virtual time all of them are quick, however slow the machine is."""
    running, overlaps = set(), []

    def hook(i):
        overlaps.extend(running)
        running.add(i)
        threading.Event().wait(0.001)  # others may run now
        running.remove(i)
        return i

    async def run():
        used = HookThreads(4).hook(hook)
        return await asyncio.gather(*(used(i) for i in range(50)))

    assert clock.run(run()) == list(range(50))
    assert overlaps == []


def test_hooks_behind_a_slow_one_go_to_other_threads():
    async def run():
        threads, go = HookThreads(2), threading.Event()
        slow, quick = threads.hook(lambda: go.wait(30)), threads.hook(lambda x: x)
        blocked = asyncio.ensure_future(slow())
        behind = [asyncio.ensure_future(quick(i)) for i in range(3)]  # nothing comes after them
        assert await asyncio.gather(*behind) == [0, 1, 2]
        assert not blocked.done()
        go.set()
        return await blocked

    assert asyncio.run(run())


def test_hooks_of_requests_that_left_do_not_run():
    async def run():
        threads, go, ran = HookThreads(1), threading.Event(), []
        slow = asyncio.ensure_future(threads.hook(lambda: go.wait(30))())
        left = asyncio.ensure_future(threads.hook(lambda: ran.append(1))())
        await asyncio.sleep(0.02)
        left.cancel()
        await asyncio.sleep(0)
        go.set()
        await slow
        await threads.hook(lambda: ran.append(2))()
        return ran

    assert asyncio.run(run()) == [2]


def test_hooks_of_requests_whose_time_is_over_do_not_run():
    async def run():
        threads, go, ran = HookThreads(1), threading.Event(), []
        slow = threads.hook(lambda: go.wait(30))()
        late = threads.hook(lambda: ran.append(1))()
        late.set_exception(TimeoutError())
        go.set()
        await slow
        await threads.hook(lambda: ran.append(2))()
        with pytest.raises(TimeoutError):
            await late
        return ran

    assert asyncio.run(run()) == [2]


def test_hooks_that_never_end_are_noticed(monkeypatch):
    async def run():
        threads, go = HookThreads(4), threading.Event()
        slow = threads.hook(lambda: go.wait(30))
        calls = [asyncio.ensure_future(slow()) for _ in range(2)]
        await asyncio.sleep(0.05)
        threads.check()
        real = time.monotonic
        monkeypatch.setattr(user_code.time, "monotonic", lambda: real() + 61)
        try:
            with pytest.raises(RuntimeError, match=r"2 calls of preprocess.*more than 60 s"):
                threads.check()
        finally:
            monkeypatch.undo()
            go.set()
        await asyncio.gather(*calls)
        threads.check()

    asyncio.run(run())


def test_hooks_see_the_context_of_their_request():
    from ray_slo.serve.deadlines import deadline_scope, remaining_ms

    async def run():
        with deadline_scope(60_000):
            return await HookThreads(1).hook(remaining_ms)()

    assert 0 < asyncio.run(run()) <= 60_000
