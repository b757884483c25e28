"""What live programs send: open-loop streams, paced by `ray_slo.load.drive`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.load.drive import paced, run_http_process, status_of
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads, Recorded
from ray_slo.simulation.arrivals import Poisson

What = TypeVar("What")
Came = TypeVar("Came")
Did = TypeVar("Did")
GIVEN_UP_S = 30.0  # a call without an answer after this


def poisson(rate: float, rng: np.random.Generator, seconds: float = math.inf) -> Iterator[float]:
    """Arrival times; each is drawn when it is asked for."""
    at = 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        yield at


def bunches(arrivals: Mapping[str, list[float]]) -> list[tuple[float, list[str]]]:
    """Arrivals by model, as what arrives at each time."""
    due = sorted((at, name) for name, times in arrivals.items() for at in times)
    return [(at, [name for _, name in bunch]) for at, bunch in groupby(due, itemgetter(0))]


def by_http(
    url: str,
    payloads: Payloads,
    rate: float,
    *,
    duration_s: float,
    warmup_s: float = 0.0,
    seed: int,
    **options: Any,
) -> LoadResult:
    """A Poisson stream from a process of its own, and what became of it.

    Args:
        **options: of `ray_slo.load.drive.run_http`.
    """
    times = Poisson(rate=rate).times(duration_s, np.random.default_rng(seed))
    workload = Recorded.record(times, payloads, duration_s=duration_s, warmup_s=warmup_s, seed=seed)
    return run_http_process(url, workload, payloads, **options).result()


@contextlib.asynccontextmanager
async def http(heard_s: float | None = None, **connector: Any) -> AsyncIterator[Any]:
    """A session of aiohttp with as many connections as there are requests.

    Args:
        heard_s: a request without an answer after this is given up.
        **connector: of `aiohttp.TCPConnector`.
    """
    import aiohttp

    # uvicorn closes idle connections after 5 s; a request sent right then would be lost.
    idle = {} if connector.get("force_close") else {"keepalive_timeout": 3.0}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **idle, **connector),
        timeout=aiohttp.ClientTimeout(total=heard_s),
    ) as session:
        yield session


class Clients(ABC):
    """HTTP clients with an event loop in a thread of its own, from `start` until `stop`.

    Args:
        rate: of their requests per second, a Poisson stream.
        session: arguments of `http`.
    """

    def __init__(self, url: str, rate: float, seed: int, **session: Any) -> None:
        self._url = url
        self._times = poisson(rate, np.random.default_rng(seed))
        self._session = session
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drive()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for all that was sent."""
        self._over.set()
        self._thread.join()

    def _due(self) -> Iterator[tuple[float, Any]]:
        """What is sent when."""
        for at in self._times:
            yield at, None

    @abstractmethod
    async def _one(self, session: Any, at: float, what: Any) -> None:
        """Send a request and keep what becomes of it."""

    async def _drive(self) -> None:
        async with http(**self._session) as session:
            await paced(self._due(), partial(self._one, session), over=self._over)


@dataclass(frozen=True)
class Reply:
    """What became of a call of a handle, in seconds from the start of the stream.

    Attributes:
        status: answered, or as `ray_slo.load.drive.status_of` has it.
        latency_s: from when the call was due.
    """

    at_s: float
    status: str
    latency_s: float
    answer: Any = None
    error: Exception | None = None


class Calls:
    """Open-loop calls of a handle; times count from when this is made, in an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    @property
    def now_s(self) -> float:
        return self._loop.time() - self._start

    async def until(self, at_s: float) -> None:
        await asyncio.sleep(max(at_s - self.now_s, 0.0))

    async def call(
        self, at_s: float, remote: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Reply:
        """`remote(*args, **kwargs)`, which was due then."""
        try:
            answer = await asyncio.wait_for(remote(*args, **kwargs), GIVEN_UP_S)
        except Exception as error:  # whatever it raises is a result here
            return Reply(at_s, status_of(error), self.now_s - at_s, error=error)
        return Reply(at_s, "answered", self.now_s - at_s, answer)

    async def beside(
        self,
        work: Coroutine[Any, Any, Did],
        due: Iterable[tuple[float, What]],
        send: Callable[[float, What], Coroutine[Any, Any, Came]],
    ) -> tuple[Did, list[Came]]:
        """Send a stream until the work is done; what the work and the calls returned."""
        over = asyncio.Event()
        sending = asyncio.ensure_future(self.send(due, send, over))
        try:
            did = await work
        finally:
            over.set()
            came = await sending
        return did, came

    async def send(
        self,
        due: Iterable[tuple[float, What]],
        send: Callable[[float, What], Coroutine[Any, Any, Came]],
        over: asyncio.Event | None = None,
    ) -> list[Came]:
        return await paced(due, send, start=self._start, over=over)


def some_of(known: Collection[str], what: str, text: str) -> list[str]:
    """The names in a text with commas, in the order of those that are known; for argparse."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    among = ", ".join(known)
    if unknown := sorted(names - set(known)):
        raise argparse.ArgumentTypeError(f"no {what} {unknown[0]!r}; choose from {among}")
    if not names:
        raise argparse.ArgumentTypeError(f"name some of {among}")
    return [name for name in known if name in names]


def learned(status: dict[str, Any], by_kind: bool = False) -> dict[str, LatencyProfile]:
    """Profiles that the policy goes by: by variant, or by kind of worker."""
    found = {}
    for name, profile in status["profiles"].items():
        variant, _, kind = name.partition("@")
        found[kind if by_kind else variant] = LatencyProfile.from_json(profile)
    return found
