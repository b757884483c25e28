"""The users' code at a frontend: whose code does not end gets an answer all the same."""

import asyncio
import contextlib
import errno
import io
import math
import queue
import sqlite3
import struct
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from fastapi import HTTPException
from PIL import Image
from pydantic import BaseModel

from ray_slo.errors import BadInput, Expired
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.errors import outcome_of
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import Asked
from ray_slo.serve.user_code import HookThreads, checked_size
from tests.serve.loops import in_loop

go = threading.Event()


class Hangs:
    @staticmethod
    def preprocess(item):
        go.wait(60)
        return item

    def __call__(self, items):
        return items


class HangsAsync(Hangs):
    @staticmethod
    async def preprocess(item):
        await asyncio.sleep(60)


async def ask(hooks, is_async):
    asked = Asked("m", time.monotonic(), 0.01)
    with pytest.raises(Expired, match="the application's own code at the frontend"):
        await asyncio.wait_for(hooks.preprocessed("m", asked, 1, is_own=True), 30)
    go.set()
    if not is_async:  # the thread is free again
        later = Asked("m", time.monotonic(), 60.0)
        assert await hooks.preprocessed("m", later, 2, is_own=True) == 2


@pytest.mark.parametrize("hangs", [Hangs, HangsAsync])
def test_a_hook_that_hangs_ends_its_request_after_the_deadline(hangs):
    go.clear()
    model = {"callable": f"{__name__}:{hangs.__name__}", "latency_slo_ms": 10}
    hooks = Hooks(parse_spec({"name": "app", "models": {"m": model}}))
    try:
        asyncio.run(ask(hooks, hangs is HangsAsync))
    finally:
        go.set()
        hooks.close()


class Person(BaseModel):
    name: str
    age: int


PICTURE = io.BytesIO()
Image.effect_noise((64, 64), 80).save(PICTURE, "JPEG")


def opened(picture):
    Image.open(io.BytesIO(picture)).load()


ITEMS = {
    "cut off": (lambda item: opened(PICTURE.getvalue()[:900]), "OSError: .*trunc"),
    "no picture": (lambda item: opened(b"no"), "UnidentifiedImageError: cannot identify image"),
    "no key": (lambda item: {}["pixels"], "refused the item: KeyError: 'pixels'$"),
    "no message": (lambda item: bad(ValueError()), ": ValueError$"),
    "plain": (lambda item: bad(ValueError("send 3 numbers")), "refused the item: send 3 numbers$"),
    "zlib": (lambda item: zlib.decompress(b"no"), "error: Error -3"),
    "struct": (lambda item: struct.unpack("<I", b"no"), "error: unpack requires"),
    "assert": (lambda item: bad(AssertionError("three numbers")), "AssertionError: three numbers"),
    "kind": (lambda item: [1].shape, "'list' object has no attribute 'shape'"),
    "own class": (lambda item: bad(Own("blurred")), "refused the item: Own: blurred$"),
    "fields": (lambda item: Person(name="a", age="x"), "refused the item: age: Input should be"),
}
OURS = {
    "disk": lambda item: bad(OSError(errno.ENOSPC, "No space left on device")),
    "no file": lambda item: Path("/no/such/file").read_bytes(),
    "socket": lambda item: bad(ConnectionRefusedError("the feature store is away")),
    "time": lambda item: bad(TimeoutError("the feature store is slow")),
    "client": lambda item: bad(FeatureStoreConnectError("away")),
    "import": lambda item: __import__("no_such_module"),
    "name": lambda item: no_such_name,  # noqa: F821
    "attribute": lambda item: zlib.no_such_function(item),
    "nothing": lambda item: None.group(),
    "memory": lambda item: bad(MemoryError()),
    "state": lambda item: bad(RuntimeError("CUDA error: device-side assert triggered")),
    "exit": lambda item: sys.exit(3),
    "queue": lambda item: queue.Queue().get_nowait(),
    "database": lambda item: bad(sqlite3.OperationalError("database is locked")),
    "cause": lambda item: because(ValueError("no features"), ConnectionError("away")),
}
if sys.version_info >= (3, 11):
    OURS["group"] = lambda item: bad(ExceptionGroup("two", [ConnectionError("away")]))  # noqa: F821
    ITEMS["group"] = (
        lambda item: bad(ExceptionGroup("two", [ValueError("blurred")])),  # noqa: F821
        "ExceptionGroup: two .*ValueError: blurred",
    )


class Own(Exception):
    pass


class FeatureStoreConnectError(Exception):
    pass


def bad(error):
    raise error


def because(error, cause):
    raise error from cause


class Hooked:
    """Its hooks do what the test says."""

    does = None

    @staticmethod
    def preprocess(item):
        return Hooked.does(item)

    size = preprocess

    def __call__(self, items):
        return items


@pytest.fixture
def hooked(monkeypatch):
    """`await hooked(does, "preprocess" or "size", …)`."""

    @contextlib.asynccontextmanager
    async def made(**options):
        model = {"callable": f"{__name__}:Hooked", "latency_slo_ms": 10_000, "max_batch_size": 16}
        hooks = Hooks(parse_spec({"name": "app", "models": {"m": model}, **options}))
        try:
            yield hooks
        finally:
            hooks.close()

    async def run(does, hook="preprocess", item="an item", is_own=True, **options):
        monkeypatch.setattr(Hooked, "does", does)
        async with made(**options) as hooks:
            asked = Asked("m", time.monotonic(), 60.0)
            call = hooks.size if hook == "size" else hooks.preprocessed
            return await call("m", asked, item, is_own=is_own)

    return lambda *args, **options: asyncio.run(run(*args, **options))


@pytest.mark.parametrize("hook", ["preprocess", "size"])
@pytest.mark.parametrize(("does", "says"), ITEMS.values(), ids=ITEMS)
def test_what_is_wrong_with_an_item_is_its_clients(hooked, does, says, hook):
    with pytest.raises(BadInput, match=says.replace("refused the item", "")) as refused:
        hooked(does, hook)
    assert refused.value.field == ("age" if does is ITEMS["fields"][0] else "item")
    with pytest.raises(Exception) as raised:
        hooked(does, hook, is_own=False)  # an item that a task made: the application's fault
    assert not isinstance(raised.value, BadInput)


@pytest.mark.parametrize("hook", ["preprocess", "size"])
@pytest.mark.parametrize("does", OURS.values(), ids=OURS)
def test_what_is_wrong_with_the_server_is_not(hooked, does, hook):
    with pytest.raises(Exception) as raised:
        hooked(does, hook)
    assert outcome_of(raised.value) == ("failed", "user_error")


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("hook", ["preprocess", "size"])
@pytest.mark.parametrize("error", [BadInput("mine", field="x"), HTTPException(status_code=402)])
def test_who_says_whose_fault_it_is_is_believed(hooked, error, hook, is_own):
    with pytest.raises(type(error)) as raised:
        hooked(lambda item: bad(error), hook, is_own=is_own)
    assert raised.value is error


def test_a_function_that_is_not_async_may_return_a_coroutine(hooked):
    assert hooked(lambda item: asyncio.sleep(0, item.upper()), item="a") == "A"
    assert hooked(lambda item: asyncio.sleep(0, 3), "size") == 3


async def exits():
    sys.exit(3)


async def is_cancelled():
    raise asyncio.CancelledError


@pytest.mark.parametrize("does", [exits, is_cancelled])
def test_a_coroutine_that_a_function_returns_ends_only_its_own_request(hooked, does):
    with pytest.raises(RuntimeError, match=r"SystemExit: 3|CancelledError"):
        hooked(lambda item: does())


@in_loop
async def test_every_caller_of_a_hook_waits_for_its_coroutine():
    """Such as a pipeline, which calls `postprocess` and `join` itself."""
    hook = HookThreads(1).hook(lambda value: asyncio.sleep(0.01, value + 1))
    assert await hook(1) == 2
    left = hook(2)
    await asyncio.sleep(0)
    left.cancel()
    assert await hook(3) == 4


def test_messages_that_were_not_written_for_clients_can_be_hidden(hooked):
    with pytest.raises(BadInput, match=r"refused the item: error$"):
        hooked(lambda item: zlib.decompress(b"no"), error_details=False)
    with pytest.raises(BadInput, match=r"refused the item: send 3 numbers$"):
        hooked(lambda item: bad(ValueError("send 3 numbers")), error_details=False)


@pytest.mark.parametrize(
    "size", ["1", 1.5, 2.0, math.inf, math.nan, np.float64(2), True, np.bool_(True), None, [1]]
)
def test_a_size_is_a_whole_number(hooked, size):
    with pytest.raises(BadInput, match=r"no size: size returned \w+.*; it must return a whole"):
        hooked(lambda item: size, "size")
    with pytest.raises(ValueError, match=r"^size returned"):
        checked_size(size)


@pytest.mark.parametrize("size", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_whole_numbers_of_other_libraries_are_sizes(hooked, size):
    found = hooked(lambda item: size, "size")
    assert (found, type(found)) == (3, int)
