"""Open-loop load generator for HTTP endpoints and Serve handles.

Requests leave at the times of a `Recorded` workload, whether or not earlier ones were answered,
and latency counts from the *intended* send time: a stalled system cannot slow its own load down,
and a late generator shows in the figures instead of flattering them (no coordinated omission).

HTTP uses aiohttp: 0.3 to 0.4 ms of CPU per request here, against 1.1 to 1.2 ms for httpx. Use
`run_http_process` when this process has other work, so that neither disturbs the other.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads, Recorded

# uvicorn closes idle connections after 5 s; stop reusing them before, or a request may be lost.
_KEEP_ALIVE_S = 3.0
_STATUS_BY_CODE = {503: "refused", 408: "expired", 504: "expired"}


Send = Callable[[int, Sample], Awaitable[None]]
What = TypeVar("What")
Came = TypeVar("Came")


class Flag(Protocol):
    """An event of asyncio or of threading."""

    def is_set(self) -> bool: ...


async def paced(
    due: Iterable[tuple[float, What]],
    send: Callable[[float, What], Coroutine[Any, Any, Came]],
    *,
    start: float | None = None,
    over: Flag | None = None,
) -> list[Came]:
    """Call `send(at, what)` at each due time, whether or not earlier calls have ended.

    Args:
        due: (seconds from the start, what to send), by time. An item is read when the one before
            it was sent, so that it may depend on what has happened meanwhile.
        send: must return by itself. What it raises is raised when all calls have ended.
        start: on the event loop's clock; default: now.
        over: nothing more is sent once it is set.

    Returns:
        What the calls returned, in the order of `due`, when all of them have ended.
    """
    loop = asyncio.get_running_loop()
    start = loop.time() if start is None else start
    running: set[asyncio.Task[Came]] = set()  # without those that ended: a run may take days
    came: dict[int, Came] = {}
    errors: list[BaseException] = []

    def ended(i: int, task: asyncio.Task[Came]) -> None:
        running.discard(task)
        if task.cancelled():
            errors.append(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            errors.append(error)
        else:
            came[i] = task.result()

    for i, (at, what) in enumerate(due):
        # Yields even when behind: otherwise the requests that are due would never leave.
        await asyncio.sleep(max(start + at - loop.time(), 0.0))
        if over is not None and over.is_set():
            break
        task = loop.create_task(send(at, what))
        running.add(task)
        task.add_done_callback(partial(ended, i))
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(0)  # for the callbacks
    for error in errors:
        raise error
    return [came[i] for i in sorted(came)]


async def drive(workload: Recorded, send: Send) -> tuple[list[Sample], float]:
    """Call `send(payload index, sample)` at each intended time; all samples, and CPU seconds used.

    `send` fills the sample and must return by itself (the clients below have a timeout).
    """
    loop = asyncio.get_running_loop()
    samples = [Sample() for _ in range(len(workload))]
    cpu = time.process_time()
    start = loop.time() + 0.05

    async def one(_: float, what: tuple[int, Sample]) -> None:
        payload, sample = what
        sample.sent_s = loop.time() - start
        await send(payload, sample)
        sample.done_s = loop.time() - start

    what = zip(workload.payload.tolist(), samples, strict=True)
    gc.collect()
    gc.disable()  # a collection in the middle would delay sends
    try:
        await paced(zip(workload.times_s.tolist(), what, strict=True), one, start=start)
    finally:
        gc.enable()
    return samples, time.process_time() - cpu


def run_http(
    url: str,
    workload: Recorded,
    payloads: Payloads | None = None,
    *,
    slo_s: float,
    timeout_s: float = 30.0,
    headers: Mapping[str, str] | None = None,
    label_field: str = "label",
) -> LoadResult:
    """Send a workload to an HTTP endpoint from this process, and wait for all answers.

    POSTs the payloads; with none, sends GET requests.

    Args:
        slo_s: what counts as in time, seconds from the intended send time.
        timeout_s: a request without an answer after this is given up (`timeout`).
        label_field: where a JSON object answer holds the label.

    Raises:
        ConnectionError: nothing answers at the URL's address.
        ValueError: the workload was recorded for other payloads.
    """
    if payloads is not None:
        workload.check(payloads)
    samples, cpu_s = asyncio.run(_http(url, workload, payloads, timeout_s, headers or {}))
    return LoadResult.from_samples(
        samples, workload, payloads, slo_s=slo_s, cpu_s=cpu_s, label_field=label_field
    )


def run_http_process(
    url: str, workload: Recorded, payloads: Payloads | None = None, **options: Any
) -> Future[LoadResult]:
    """`run_http` in a fresh process of its own; returns at once with a future of the result."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    future = pool.submit(run_http, url, workload, payloads, **options)
    pool.shutdown(wait=False)
    return future


async def _http(
    url: str,
    workload: Recorded,
    payloads: Payloads | None,
    timeout_s: float,
    headers: Mapping[str, str],
) -> tuple[list[Sample], float]:
    import aiohttp

    _allow_many_connections(len(workload))
    used = set(workload.payload.tolist()) if payloads is not None else set()
    bodies = {index: payloads.body(index) for index in used} if payloads is not None else {}
    method = "GET" if payloads is None else "POST"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(index: int, sample: Sample) -> None:
            body, kind = bodies.get(index, (None, ""))
            head = {"Content-Type": kind, **headers} if body is not None else headers
            try:
                async with session.request(method, url, data=body, headers=head) as response:
                    sample.answer = await response.read()
                    sample.code = response.status
                    sample.headers = response.headers
            except asyncio.TimeoutError:
                sample.status = "timeout"
            except aiohttp.ClientError as error:
                sample.error = f"{type(error).__name__}: {error}"
            else:
                if 200 <= sample.code < 300:
                    sample.status = "answered"
                else:
                    sample.status = _STATUS_BY_CODE.get(sample.code, "error")
                    sample.error = sample.answer[:300].decode(errors="replace")

        await _probe(url, timeout_s)
        return await drive(workload, send)


async def _probe(url: str, timeout_s: float) -> None:
    """ConnectionError, said in words, if nothing listens at the URL's address."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        given = parts.port
    except ValueError:  # no number, or too large
        parts, given = parts._replace(scheme=""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: must look like http://host:port/path, got {url!r}")
    port = given or (443 if parts.scheme == "https" else 80)
    try:
        opening = asyncio.open_connection(parts.hostname, port)
        _, writer = await asyncio.wait_for(opening, min(timeout_s, 10.0))
    except (OSError, asyncio.TimeoutError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConnectionError(
            f"nothing answers at {parts.hostname}:{port} ({reason}): is the application running?"
        ) from None
    writer.close()


def _allow_many_connections(count: int) -> None:
    """An overloaded system holds a connection per waiting request: raise the soft file limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count + 64:
        wanted = count + 64 if hard == resource.RLIM_INFINITY else min(count + 64, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run_handle(
    handle: Any,
    workload: Recorded,
    payloads: Payloads,
    *,
    slo_s: float,
    timeout_s: float = 30.0,
    label_field: str = "label",
    call_kwargs: Mapping[str, Any] | None = None,
) -> LoadResult:
    """Send a workload through a Serve `DeploymentHandle` (or anything with an awaitable `remote`).

    Runs on the caller's event loop, in a driver or an actor. Arguments as in `run_http`.

    Args:
        call_kwargs: passed with every call, such as `response_metadata=True`, with which a ray-slo
            handle tells variant, batch size and times.
    """
    from ray_slo.serve.frontend.answer import Answer

    workload.check(payloads)
    kwargs = dict(call_kwargs or {})

    async def send(index: int, sample: Sample) -> None:
        try:
            response = handle.remote(payloads.items[index], **kwargs)
            answer = await asyncio.wait_for(response, timeout_s)
        except Exception as error:  # whatever the application raises is a result here
            sample.status = status_of(error)
            sample.error = f"{type(error).__name__}: {error}"[:300]
        else:
            sample.status = "answered"
            if isinstance(answer, Answer):
                sample.headers, answer = answer.headers(), answer.result
            sample.answer = answer

    samples, cpu_s = await drive(workload, send)
    return LoadResult.from_samples(
        samples, workload, payloads, slo_s=slo_s, cpu_s=cpu_s, label_field=label_field
    )


def status_of(error: BaseException) -> str:
    """ray-slo's errors carry the HTTP status they stand for; the others are told by type."""
    if type(error) in (TimeoutError, asyncio.TimeoutError):  # ours: `Expired` is a subclass
        return "timeout"
    code = getattr(error, "status_code", None)
    if isinstance(code, int) and code in _STATUS_BY_CODE:
        return _STATUS_BY_CODE[code]
    names = {cls.__name__ for cls in type(error).__mro__}  # by name: this module imports no ray
    if "BackPressureError" in names:
        return "refused"
    return "expired" if "RequestCancelledError" in names else "error"
