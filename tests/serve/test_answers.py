"""Each caller gets its own answer or an error, whatever the batch method does with its lists.

The method of these tests sorts, empties and extends the list that it is given, changes items in
place, keeps what it was given and what it returned, and changes that later. It returns its results
in many forms: some are lists of results, others are not, and some raise while they are read. A
sequence has some batches; each has its own misdeeds.

`RAY_SLO_SEQUENCES=100000 pytest --timeout=0 tests/serve/test_answers.py` runs 100,000 sequences for
each way in.
"""

import array
import asyncio
import concurrent.futures
import functools
import os
import random
import sys
import threading
import time
from collections import UserDict, UserList, deque, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ray_slo
from ray_slo.errors import BatchResultError, ConfigError
from ray_slo.serve import results
from ray_slo.serve.messages import Piece
from tests.serve import clock
from tests.serve.loops import in_loop

SEQUENCES = int(os.environ.get("RAY_SLO_SEQUENCES", "0"))
MANY = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SLO_MS = 30_000
WIDTH = 3


class Misdeed(Exception):
    """Raised on purpose."""


# -- results: what one is, and the forms of many ------------------------------------------


@dataclass
class Record:
    number: int
    values: list


Pair = namedtuple("Pair", "number values")
RESULTS = {
    "number": lambda n: n,
    "text": lambda n: f"answer {n}",
    "array": lambda n: np.full(WIDTH, float(n)),
    "dict": lambda n: {"number": n, "values": [n, n]},
    "list": lambda n: [n, [n]],
    "tuple": lambda n: (n, np.full(2, n)),
    "pair": lambda n: Pair(n, [n]),
    "record": lambda n: Record(n, [n]),
    "bytes": lambda n: bytearray([n % 256] * 4),
    "set": lambda n: {n},
}


def number_of(answer):
    """The item's number in an answer; None if its parts do not agree."""
    if isinstance(answer, Record | Pair):
        parts = [answer.number, *answer.values]
    elif isinstance(answer, dict):
        parts = [answer["number"], *answer["values"]]
    elif isinstance(answer, str):
        parts = [int(answer.split()[1])]
    elif isinstance(answer, tuple | list):
        parts = [answer[0], *answer[1]]
    else:
        parts = list(answer) if hasattr(answer, "__len__") else [answer]
    numbers = {int(part) for part in parts}
    return numbers.pop() if len(numbers) == 1 else None


class Lazy(Sequence):
    """Computes each result when it is read."""

    def __init__(self, found, fails_at=None):
        self.found, self.fails_at = found, fails_at

    def __len__(self):
        if self.fails_at == "len":
            raise Misdeed("len")
        return len(self.found)

    def __getitem__(self, at):
        if at == self.fails_at:
            raise Misdeed("read")
        return self.found[at]


class Shrinking(Lazy):
    """Has the right length, and ends too early when it is read."""

    def __iter__(self):
        return iter(self.found[:-1])


class Endless(Lazy):
    def __iter__(self):
        while True:
            yield self.found[0]


def in_place(method, found):
    """Results in the method's own list, which it uses again."""
    method.kept[:] = found
    return method.kept


def views(method, found):
    """Rows of one output array that every batch fills; the numbers are in it."""
    rows = method.buffer[: len(found)]
    for row, one in zip(rows, found, strict=True):
        row[:] = number_of(one)
    return rows


def same_dicts(method, found):
    for one, answer in zip(method.dicts, found, strict=False):
        one.update(number=number_of(answer), values=[number_of(answer)])
    return method.dicts[: len(found)]


def objects(method, found):
    rows = np.empty(len(found), dtype=object)
    rows[:] = found if found and not isinstance(found[0], np.ndarray | list | tuple) else None
    for at, one in enumerate(found):
        rows[at] = one
    return rows


LISTS = {
    "list": lambda method, found: found,
    "tuple": lambda method, found: tuple(found),
    "deque": lambda method, found: deque(found),
    "lazy": lambda method, found: Lazy(found),
    "its own list": in_place,
    "its own array": views,
    "rows of its own array": lambda method, found: list(views(method, found)),
    "its own dicts": same_dicts,
    "array of objects": objects,
    "array of numbers": lambda method, found: array.array("d", map(number_of, found)),
    "series": lambda method, found: pd.Series(list(map(number_of, found))),
    "range": lambda method, found: np.array(list(map(number_of, found))),
}
NO_LISTS = {
    "frame": lambda method, found: pd.DataFrame(
        {"label": [0] * len(found), "score": [1] * len(found)}
    ),
    "square frame": lambda method, found: pd.DataFrame(np.ones((len(found), len(found)))),
    "dict": lambda method, found: dict.fromkeys(range(len(found)), 7),
    "user dict": lambda method, found: UserDict.fromkeys(range(len(found)), 7),
    "columns": lambda method, found: namedtuple("Out", [f"c{i}" for i in range(len(found))])(
        *found
    ),
    "views of a dict": lambda method, found: dict.fromkeys(range(len(found)), 7).values(),
    "set": lambda method, found: set(range(len(found))),
    "text": lambda method, found: "x" * len(found),
    "bytes": lambda method, found: b"x" * len(found),
    "bytearray": lambda method, found: bytearray(len(found)),
    "generator": lambda method, found: (one for one in found),
    "iterator": lambda method, found: iter(found),
    "map": lambda method, found: map(str, found),
    "one": lambda method, found: 7.0,
    "nothing": lambda method, found: None,
    "no axis": lambda method, found: np.array(7.0),
    "too few": lambda method, found: found[:-1],
    "too many": lambda method, found: [*found, found[0]],
    "shrinking": lambda method, found: Shrinking(found),
    "endless": lambda method, found: Endless(found),
}
RAISING = {
    "at once": None,
    "len": lambda method, found: Lazy(found, "len"),
    "the first": lambda method, found: Lazy(found, 0),
    "the last": lambda method, found: Lazy(found, len(found) - 1),
}


# -- misdeeds with the list of items ------------------------------------------------------


def change(items):
    for item in items:
        item["numbers"] *= -1
        item.pop("numbers")
        item["number"] = -1


LIST_MISDEEDS = {
    "nothing": lambda items: None,
    "sort": lambda items: items.sort(key=lambda item: -item["number"]),
    "reverse": lambda items: items.reverse(),
    "pop": lambda items: items.pop(),
    "empty": lambda items: [items.pop() for _ in list(items)],
    "clear": lambda items: items.clear(),
    "extend": lambda items: items.extend(list(items)),
    "replace": lambda items: items.__setitem__(slice(None), [{"number": -5}] * len(items)),
    "change": change,
}


class Method:
    """A batch method. `todo` has the misdeeds of its next batches."""

    def __init__(self):
        self.todo = deque()
        self.kept, self.given = [], []
        self.buffer = np.zeros((64, WIDTH))
        self.dicts = [{} for _ in range(64)]

    def spoil(self):
        """Change everything that the method was given, and that it returned."""
        self.kept[:] = ["spoilt"]
        self.buffer[:] = -99.0
        for one in self.dicts:
            one.clear()
        for items in self.given:
            for item in items:
                item["number"] = -9
            items[:] = []
        self.given.clear()

    def __call__(self, items):
        self.spoil()
        numbers = [item["number"] for item in items]
        step = (
            self.todo.popleft()
            if self.todo
            else SimpleNamespace(misdeed="nothing", raises=None, result="number", form="list")
        )
        found = [RESULTS[step.result](n) for n in numbers]
        LIST_MISDEEDS[step.misdeed](items)
        self.given.append(items)
        if step.raises == "at once":
            raise Misdeed("at once")
        form = RAISING[step.raises] if step.raises else {**LISTS, **NO_LISTS}[step.form]
        return form(self, found)


FIELDS = {
    "misdeed": sorted(LIST_MISDEEDS),
    "result": sorted(RESULTS),
    "form": sorted(LISTS) * 2 + sorted(NO_LISTS),
    "raises": [None, None, None, *RAISING],
}
STEPS = st.builds(SimpleNamespace, **{name: st.sampled_from(of) for name, of in FIELDS.items()})
PLAYS = st.lists(
    st.tuples(st.integers(min_value=1, max_value=5), STEPS, STEPS), min_size=1, max_size=4
)


def play_of(seed):
    """A play for the long mode: chance with a seed costs a tenth of what hypothesis does."""
    chance = random.Random(seed)

    def step():
        return SimpleNamespace(**{name: chance.choice(of) for name, of in FIELDS.items()})

    return [(chance.randint(1, 5), step(), step()) for _ in range(chance.randint(1, 4))]


def for_all_plays(check, share=1):
    """Check many plays; in the long mode this share of `SEQUENCES`."""
    if not SEQUENCES:
        settings(MANY, max_examples=MANY.max_examples // share)(given(PLAYS)(check))()
    for seed in range(SEQUENCES // share):
        try:
            check(play_of(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


async def play(method, ask, batches, alone_again=False):
    """Run some batches, and check every answer at the end, when nothing can change any more."""
    method.todo.clear()
    asked, number = [], 1
    for size, step, other in batches:
        method.todo.extend((step, other))
        calls = [
            asyncio.ensure_future(ask({"number": number + i, "numbers": np.full(2, number + i)}))
            for i in range(size)
        ]
        done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        # The batch may have run in two parts, each with one of these steps.
        asked += [(number + i, answer, (step, other)) for i, answer in enumerate(done)]
        method.todo.clear()
        number += size
    method.spoil()
    for number, answer, steps in asked:
        bad = any(step.raises or step.form in NO_LISTS for step in steps)
        if isinstance(answer, BaseException):
            assert isinstance(answer, BatchResultError | Misdeed), answer
            assert bad, answer
        else:
            assert number_of(answer) == number, (answer, number, steps)
            assert alone_again or not all(step.raises or step.form in NO_LISTS for step in steps), (
                answer,
                steps,
            )


def of_batch(kind):
    """A method with `@ray_slo.batch`, and how it is asked."""
    method = Method()
    if kind == "def":

        @ray_slo.batch(SLO_MS)
        def ask(items):
            return method(items)

    else:

        @ray_slo.batch(SLO_MS)
        async def ask(items):
            found = method(items)
            # This runs as soon as the event loop may run anything else.
            asyncio.get_running_loop().call_soon(method.spoil)
            return found

    return method, ask


@pytest.mark.timeout(0 if SEQUENCES else 240)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_with_batch(kind):
    method, ask = of_batch(kind)
    loop = asyncio.new_event_loop()
    try:
        for_all_plays(lambda batches: loop.run_until_complete(play(method, ask, batches)), share=2)
    finally:
        loop.close()


@pytest.mark.timeout(0 if SEQUENCES else 240)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("isolate_errors", [False, True])
def test_with_a_deployment(app, isolate_errors, is_async):
    method = Method()

    class Thread:
        def __call__(self, items):
            return method(items)

    class Loop:
        async def __call__(self, items):
            found = method(items)
            asyncio.get_running_loop().call_soon(method.spoil)
            return found

    loop = asyncio.new_event_loop()
    running = app(Loop if is_async else Thread, policy="eager", isolate_errors=isolate_errors)
    front, _ = loop.run_until_complete(running.__aenter__())

    def check(batches):
        loop.run_until_complete(play(method, front, batches, isolate_errors))

    try:
        for_all_plays(check, share=4)
    finally:
        loop.run_until_complete(running.__aexit__(None, None, None))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


# -- workers: what runs again, what is measured --------------------------------------------


class Sorting:
    """Changes its items and their order, and has memory for two of them."""

    def __call__(self, items):
        items.sort(key=lambda item: -item["number"])
        numbers = [item.pop("number") for item in items]
        if len(numbers) > 2:
            raise MemoryError(f"{len(numbers)} items")
        return numbers[::-1]  # in the order that it was given


@in_loop
async def test_a_batch_that_runs_again_in_halves_starts_from_what_clients_sent(app):
    async with app(Sorting, policy="eager") as (_, worker):
        piece = Piece("b", "m", [{"number": n} for n in range(8)], 0, 1, 0.0)
        found = (await worker.execute(piece, "w0")).results
        assert found == [(True, n) for n in range(8)]


class Pops:
    """The usual handler: what it pops is not there for a second item or call."""

    @staticmethod
    def example_input():
        return {"inputs": [1.0]}

    def __call__(self, items):
        time.sleep(0.001)
        return [sum(item.pop("inputs")) for item in items]


@in_loop
async def test_each_example_is_new(app):
    async with app(Pops, policy="eager", model={"max_batch_size": 8}) as (front, worker):
        assert worker.models.loaded["m"].profile.prior.measured_to == 8
        assert await front({"inputs": [2.0, 3.0]}) == 5.0


class OneForAll:
    @staticmethod
    def example_input():
        return 1.0

    def __call__(self, items):
        return self.wrong(items) if len(items) > 1 else [0.0]


WRONG = {
    "returned a number": lambda self, items: 7.0,
    "returned nothing": lambda self, items: None,
    "returned a generator": lambda self, items: (0.0 for _ in items),
    "returned 1 result": lambda self, items: [0.0],
    r"returned a DataFrame.*itertuples": lambda self, items: pd.DataFrame({"a": items}),
}


@pytest.mark.parametrize(
    ("said", "slow"), [*((said, False) for said in WRONG), ("returned a number", True)]
)
def test_the_warm_up_notices_what_is_no_list_of_results(app, said, slow):
    """Also if a batch of one takes all the time that there is for measuring."""

    class Model(OneForAll):
        wrong = WRONG[said]

        def __call__(self, items):
            time.sleep(0.5 if slow else 0.001)
            return super().__call__(items)

    async def run():
        async with app(Model, policy="eager", model={"latency_slo_ms": 600}):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=said):
        clock.run(run())


class Sized:
    """Its worker has the sizes that the frontend has checked."""

    @staticmethod
    def size(item):
        return np.int64(len(item))

    def __call__(self, items):
        return [len(item) for item in items]


@in_loop
async def test_the_checked_sizes_travel_to_the_worker(app):
    async with app(Sized, policy="eager", model={"max_batch_size": 16}) as (front, worker):
        assert await asyncio.gather(front("abc"), front("de"), front("f")) == [3, 2, 1]
        Sized.size = staticmethod(lambda item: "1")  # as a client's item may make it
        assert (await worker.execute(Piece("b", "m", ["abc"], 0, 1, 0.0, sizes=(3,)), "w0")).results


# -- `@ray_slo.batch`: whatever can be called -----------------------------------------------


class Caller:
    def __call__(self, items):
        return [2 * item for item in items]


class AsyncCaller:
    async def __call__(self, items):
        return [2 * item for item in items]


class StreamCaller:
    async def __call__(self, items):
        yield [2 * item for item in items]


def times(factor, items):
    return [factor * item for item in items]


async def times_async(factor, items):
    return [factor * item for item in items]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (functools.partial(times, 2), "times"),
        (functools.partial(times_async, 2), "times_async"),
        (Caller(), "Caller"),
        (AsyncCaller(), "AsyncCaller"),
        (functools.partial(AsyncCaller()), "AsyncCaller"),
        (lambda items: times_async(2, items), "<lambda>"),
    ],
)
def test_partials_and_objects_are_functions(made, name):
    ask = ray_slo.batch(SLO_MS)(made)

    async def run():
        assert await asyncio.gather(ask(1), ask(2)) == [2, 4]
        with pytest.raises(TypeError, match=f"^{name}: .*; it takes items"):
            await ask(1, 2, 3)

    clock.run(run())


def test_an_object_may_stream():
    ask = ray_slo.batch(SLO_MS)(StreamCaller())

    async def run():
        return [value async for value in ask(1)]

    assert clock.run(run()) == [2]


def test_an_answer_is_not_shared():
    """Callers may change their answers; tensors are rows of their own."""

    @ray_slo.batch(SLO_MS)
    async def shared(items):
        return [one] * len(items)

    @ray_slo.batch(SLO_MS)
    async def rows(items):
        return torch.ones(len(items), 1000) * torch.tensor(items)[:, None]

    one = {"labels": []}

    async def run():
        first, second = await asyncio.gather(shared(1), shared(2))
        first["labels"].append("mine")
        assert second == one == {"labels": []}
        answers = await asyncio.gather(*map(rows, range(3)))
        assert [answer[0].item() for answer in answers] == [0, 1, 2]
        assert {answer.untyped_storage().nbytes() for answer in answers} == {4000}

    clock.run(run())


def test_what_cannot_be_copied_is_handed_on():
    lock = threading.Lock()
    assert results.own(lock, results.copied) is lock
    itself = [1]
    itself.append(itself)
    assert (made := results.own(itself, results.copied))[1] is made and made is not itself


class MadeWhenRead(list):
    """Makes each element when it is read, so that two may have the same `id`."""

    def __getitem__(self, at):
        return np.full(3, float(super().__getitem__(at)[0]))


def test_elements_that_are_made_when_they_are_read_are_not_mistaken_for_others():
    made = MadeWhenRead([[n] for n in range(20)])
    assert [int(row[0]) for row in list(results.own(made, results.as_it_is))] == [*range(20)]


def test_a_part_that_cannot_be_copied_spares_the_others():
    row, lock = np.zeros(2), threading.Lock()
    kept, same = results.own((row, frozenset([1]), lock), results.as_it_is)[::2]
    row += 1
    assert list(kept) == [0, 0] and same is lock


class OneBuffer:
    """Both hooks fill one array for every item."""

    preprocessed, postprocessed = np.zeros(2), np.zeros(2)

    @classmethod
    def preprocess(cls, item):
        cls.preprocessed[:] = item
        return cls.preprocessed

    @classmethod
    async def postprocess(cls, row):
        cls.postprocessed[:] = row
        return {"row": cls.postprocessed}

    def __call__(self, rows):
        return np.stack(rows)


@in_loop
async def test_quick_hooks_may_use_their_output_again(app):
    async with app(OneBuffer, policy="eager") as (front, _):
        answers = await asyncio.gather(*map(front, range(1, 9)))
        assert [list(answer["row"]) for answer in answers] == [[n, n] for n in range(1, 9)]


class CancelledInside:
    """As `.result()` of a future that was cancelled."""

    def __call__(self, items):
        if "cancelled" in items:
            raise concurrent.futures.CancelledError
        return items


@in_loop
async def test_a_cancelled_future_in_a_method_ends_no_worker(app):
    async with app(CancelledInside, policy="eager") as (front, worker):
        with pytest.raises(RuntimeError, match="CancelledError"):
            await front("cancelled")
        assert await front("next") == "next"
        await worker.check_health()
        worker._running.cancel()
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="runs no batches"):
            await worker.check_health()


class OutOfMemoryAndPoison:
    def __call__(self, items):
        if len(items) > 2:
            raise MemoryError(f"{len(items)} items")
        if "poison" in items:
            raise ValueError("poison")
        return items


@in_loop
async def test_items_are_isolated_also_after_a_batch_was_too_large(app):
    async with app(OutOfMemoryAndPoison, policy="eager", isolate_errors=True) as (_, worker):
        piece = Piece("b", "m", ["poison", "a", "b", "c"], 0, 1, 0.0)
        found = (await worker.execute(piece, "w0")).results
        assert [ok for ok, _ in found] == [False, True, True, True]


def test_a_stream_that_never_waits_lets_its_callers_leave():
    steps = []

    @ray_slo.batch(SLO_MS)
    async def endless(items):
        try:
            while len(steps) < 10_000:
                steps.append(1)
                yield items
        finally:
            sys.exit(3)

    async def run():
        stream = endless("a")
        assert await anext(stream) == "a"
        await stream.aclose()
        assert await with_batch("next") == "next"  # the loop lives
        assert len(steps) < 1000

    @ray_slo.batch(SLO_MS)
    async def with_batch(items):
        return items

    clock.run(run())


class Point(tuple):
    def __new__(cls, x, y):
        made = super().__new__(cls, (x, y))
        made.x = x
        return made


class Immutable(dict):
    def __setitem__(self, key, value):
        raise TypeError("immutable")


@pytest.mark.parametrize(
    "make",
    [
        deque,
        UserList,
        lambda parts: UserDict(enumerate(parts)),
        lambda parts: Point(parts[0], 1),
        lambda parts: [Immutable(a=1), parts[0]],
        lambda parts: {"score": parts[0], "config": Immutable(a=[1])},
    ],
)
def test_arrays_in_other_containers_are_copied_too(make):
    row = np.zeros(2)
    made = make([row])
    found = results.own(made, results.as_it_is)
    row += 1
    assert type(found) is type(made) and "1." not in repr(found)
    assert getattr(found, "x", row) is not getattr(made, "x", None)


def test_a_view_of_numbers_stays_one():
    given = memoryview(array.array("d", [1, 2, 3]))
    found = results.own(given, results.as_it_is)
    given[0] = 9.0
    assert (found.format, list(found)) == ("d", [1, 2, 3])


class Large(np.ndarray):
    def copy(self, order="C"):
        raise MemoryError("no memory for a copy")


def test_what_there_is_no_memory_to_copy_is_not_shared():
    with pytest.raises(MemoryError):
        results.own([np.zeros(2).view(Large)], results.copied)
