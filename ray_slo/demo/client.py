"""The load generator of the demo. It runs in a separate process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ray_slo.load.drive import run_http
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads, Recorded

START_S = 120.0  # a new application must answer within this time, in seconds


class Client:
    """The load generator. Its process lives as long as this object."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def send(
        self,
        url: str,
        workload: Recorded,
        payloads: Payloads,
        slo_s: float,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[LoadResult, float]:
        """Send a stream. Return its result, and its start on the monotonic clock, in seconds."""
        arguments = (url, workload, payloads, slo_s, timeout_s, headers)
        return self._pool.submit(_send, *arguments).result()

    def wait_until_answered(self, url: str, payloads: Payloads) -> None:
        """Wait until a request is answered. HAProxy may learn of a new application with a delay.

        Raises:
            ConnectionError: no request was answered within two minutes. The message has the last
                answer.
        """
        self._pool.submit(_wait_until_answered, url, payloads).result()

    def closed_loop(
        self,
        url: str,
        payloads: Payloads,
        in_flight: int,
        duration_s: float,
        headers: Mapping[str, str],
    ) -> float:
        """Return the answers per second with `in_flight` requests always in flight.

        Raises:
            RuntimeError: an answer was an error.
        """
        arguments = (url, payloads, in_flight, duration_s, headers)
        return self._pool.submit(_closed_loop, *arguments).result()


def _send(
    url: str,
    workload: Recorded,
    payloads: Payloads,
    slo_s: float,
    timeout_s: float,
    headers: Mapping[str, str] | None,
) -> tuple[LoadResult, float]:
    import aiohttp  # noqa: F401  import it before the stream begins

    began_s = time.monotonic()
    result = run_http(url, workload, payloads, slo_s=slo_s, timeout_s=timeout_s, headers=headers)
    return result, began_s


def _wait_until_answered(url: str, payloads: Payloads, within_s: float = START_S) -> None:
    one = Recorded.record([0.0], payloads, duration_s=1.0)
    end = time.monotonic() + within_s
    while True:
        try:
            result = run_http(url, one, payloads, slo_s=START_S, timeout_s=START_S)
            status, code, error = result.requests.loc[0, ["status", "code", "error"]]
        except ConnectionError as refused:
            status, code, error = "error", "nothing", refused
        if status == "ok":
            return
        if time.monotonic() > end:
            raise ConnectionError(f"{url} answers {code} after {within_s:.0f} s: {error}")
        time.sleep(0.2)


def _closed_loop(
    url: str, payloads: Payloads, in_flight: int, duration_s: float, headers: Mapping[str, str]
) -> float:
    return asyncio.run(_clients(url, payloads, in_flight, duration_s, headers))


async def _clients(
    url: str, payloads: Payloads, in_flight: int, duration_s: float, headers: Mapping[str, str]
) -> float:
    import aiohttp

    end = time.monotonic() + duration_s
    answered = 0

    async def client(session: Any, index: int) -> None:
        nonlocal answered
        while time.monotonic() < end:
            body, kind = payloads.body(index % len(payloads))
            head = {"Content-Type": kind, **headers}
            async with session.post(url, data=body, headers=head) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(f"{url} answered {response.status}: {text[:300]}")
            answered += 1
            index += in_flight

    timeout = aiohttp.ClientTimeout(total=60)
    start = time.monotonic()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        await asyncio.gather(*(client(session, index) for index in range(in_flight)))
    return answered / (time.monotonic() - start)
