"""Load of live programs: open-loop streams, sent on time by `ray_slo.load.drive`."""

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
GIVEN_UP_S = 30.0  # a call fails if it has no answer after this


def poisson(rate: float, rng: np.random.Generator, seconds: float = math.inf) -> Iterator[float]:
    """Yield arrival times of a Poisson process; each is drawn only when it is asked for."""
    at = 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        yield at


def bunches(arrivals: Mapping[str, list[float]]) -> list[tuple[float, list[str]]]:
    """Group the arrivals of several models by time: (time, models with an arrival then)."""
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
    """Send a Poisson stream over HTTP from a separate process, and return the outcomes.

    Args:
        **options: arguments of `ray_slo.load.drive.run_http`.
    """
    times = Poisson(rate=rate).times(duration_s, np.random.default_rng(seed))
    workload = Recorded.record(times, payloads, duration_s=duration_s, warmup_s=warmup_s, seed=seed)
    return run_http_process(url, workload, payloads, **options).result()


@contextlib.asynccontextmanager
async def http(heard_s: float | None = None, **connector: Any) -> AsyncIterator[Any]:
    """Open an aiohttp session without a limit on the number of connections.

    Args:
        heard_s: a request fails if it has no answer after this, in seconds.
        **connector: arguments of `aiohttp.TCPConnector`.
    """
    import aiohttp

    # uvicorn closes idle connections after 5 s, and a request sent at that moment would be lost.
    idle = {} if connector.get("force_close") else {"keepalive_timeout": 3.0}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **idle, **connector),
        timeout=aiohttp.ClientTimeout(total=heard_s),
    ) as session:
        yield session


class Clients(ABC):
    """HTTP clients that send until `stop`, on an event loop in a thread of their own.

    Args:
        rate: requests per second of their Poisson stream.
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
        """Stop sending, and wait for all requests that were sent."""
        self._over.set()
        self._thread.join()

    def _due(self) -> Iterator[tuple[float, Any]]:
        """Yield (when, what to send)."""
        for at in self._times:
            yield at, None

    @abstractmethod
    async def _one(self, session: Any, at: float, what: Any) -> None:
        """Send one request, and keep what becomes of it."""

    async def _drive(self) -> None:
        async with http(**self._session) as session:
            await paced(self._due(), partial(self._one, session), over=self._over)


@dataclass(frozen=True)
class Reply:
    """What became of one call of a handle; times are in seconds from the start of the stream.

    Attributes:
        status: "answered", or as in `ray_slo.load.drive.status_of`.
        latency_s: from when the call was due until it ended.
    """

    at_s: float
    status: str
    latency_s: float
    answer: Any = None
    error: Exception | None = None


class Calls:
    """Open-loop calls of a handle. Create it in an event loop; its times count from then."""

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
        """Await `remote(*args, **kwargs)`, which was due at `at_s`; return what became of it."""
        try:
            answer = await asyncio.wait_for(remote(*args, **kwargs), GIVEN_UP_S)
        except Exception as error:  # an error is a result here
            return Reply(at_s, status_of(error), self.now_s - at_s, error=error)
        return Reply(at_s, "answered", self.now_s - at_s, answer)

    async def beside(
        self,
        work: Coroutine[Any, Any, Did],
        due: Iterable[tuple[float, What]],
        send: Callable[[float, What], Coroutine[Any, Any, Came]],
    ) -> tuple[Did, list[Came]]:
        """Send a stream until the work is done; return what the work and the calls returned."""
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
    """Parse a list with commas for argparse; return the names in the order of `known`."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    among = ", ".join(known)
    if unknown := sorted(names - set(known)):
        raise argparse.ArgumentTypeError(f"no {what} {unknown[0]!r}; choose from {among}")
    if not names:
        raise argparse.ArgumentTypeError(f"name some of {among}")
    return [name for name in known if name in names]


def learned(status: dict[str, Any], by_kind: bool = False) -> dict[str, LatencyProfile]:
    """Return the profiles that the policy uses now, by variant or by kind of worker."""
    found = {}
    for name, profile in status["profiles"].items():
        variant, _, kind = name.partition("@")
        found[kind if by_kind else variant] = LatencyProfile.from_json(profile)
    return found
