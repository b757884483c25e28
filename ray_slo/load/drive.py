"""Open-loop load generator for HTTP endpoints and Serve handles.

Requests are sent at the times of a `Recorded` workload, whether or not earlier ones were answered.
The latency counts from the *intended* send time. So a slow system does not reduce its own load, and
a late generator makes the latencies longer, not shorter (no coordinated omission).

HTTP uses aiohttp, which took 0.3 to 0.4 ms of CPU per request here; httpx took 1.1 to 1.2 ms. If
this process has other work, use `run_http_process`, so that neither disturbs the other.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from ray_slo.load.report import LoadResult, Sample
from ray_slo.load.workload import Payloads, Recorded

# uvicorn closes idle connections after 5 s. The client stops using them earlier, because a request
# on a connection that is being closed is lost.
_KEEP_ALIVE_S = 3.0
_STATUS_BY_CODE = {503: "refused", 408: "expired", 504: "expired"}


Send = Callable[[int, Sample], Awaitable[None]]
What = TypeVar("What")
Came = TypeVar("Came")


async def paced(
    due: Iterable[tuple[float, What]],
    send: Callable[[float, What], Coroutine[Any, Any, Came]],
    *,
    start: float | None = None,
    over: asyncio.Event | threading.Event | None = None,
) -> list[Came]:
    """Call `send(at, what)` at each due time, whether or not earlier calls have ended. Return when
    all calls have ended.

    Args:
        due: pairs of a time in seconds from the start, and an object to send; in order of time. An
            item is read after the previous one was sent, so it may depend on earlier answers.
        send: coroutine function that ends by itself. If it raises an error, the error is raised
            when all calls have ended.
        start: start time on the event loop's clock, in seconds. Default: now.
        over: when it is set, nothing more is sent.

    Returns:
        The results of the calls, in the order of `due`.
    """
    loop = asyncio.get_running_loop()
    start = loop.time() if start is None else start
    running: set[asyncio.Task[Came]] = set()  # only unfinished tasks, because a run may take days
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
        # Sleep even when late, if only for 0 s: otherwise the created tasks would never run.
        await asyncio.sleep(max(start + at - loop.time(), 0.0))
        if over is not None and over.is_set():
            break
        task = loop.create_task(send(at, what))
        running.add(task)
        task.add_done_callback(partial(ended, i))
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(0)  # let the callbacks run
    for error in errors:
        raise error
    return [came[i] for i in sorted(came)]


async def drive(workload: Recorded, send: Send) -> tuple[list[Sample], float]:
    """Call `send(payload index, sample)` at each intended time. Return all samples, and the used
    CPU time in seconds.

    `send` fills in the sample. It must end by itself; the clients below have a timeout.
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
    gc.disable()  # a garbage collection would delay requests
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

    Payloads are sent as POST requests. Without payloads, GET requests are sent.

    Args:
        slo_s: largest latency that counts as in time, in seconds from the intended send time.
        timeout_s: a request without an answer after this time, in seconds, has the status
            `timeout`.
        label_field: field of a JSON answer that contains the label.

    Raises:
        ConnectionError: no server answers at the URL's address.
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
    """Start `run_http` in a new process. Return a future of its result at once."""
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
    """Check that a server listens at the URL's address.

    Raises:
        ValueError: the URL has another form.
        ConnectionError: no server listens there.
    """
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
    """Raise the soft limit of open files. Every waiting request has a connection, and in overload
    there are many."""
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
    """Send a workload through a Serve `DeploymentHandle`, or any object with an awaitable `remote`.

    This runs on the caller's event loop, in a driver or an actor. The other arguments are those of
    `run_http`.

    Args:
        call_kwargs: keyword arguments of every call. With `response_metadata=True`, a ray-slo
            handle adds variant, batch size and times to the answer.
    """
    from ray_slo.serve.frontend.answer import Answer

    workload.check(payloads)
    kwargs = dict(call_kwargs or {})

    async def send(index: int, sample: Sample) -> None:
        try:
            response = handle.remote(payloads.items[index], **kwargs)
            answer = await asyncio.wait_for(response, timeout_s)
        except Exception as error:  # an error of the application is a result of the run
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
    """Return the status of a request that raised `error`. It comes from the HTTP status that
    ray-slo's errors have; for other errors, from their class."""
    # The load generator's own timeout has exactly these classes. `Expired` is a subclass.
    if type(error) in (TimeoutError, asyncio.TimeoutError):
        return "timeout"
    code = getattr(error, "status_code", None)
    if isinstance(code, int) and code in _STATUS_BY_CODE:
        return _STATUS_BY_CODE[code]
    # Compare names of classes, because this module does not import Ray.
    names = {cls.__name__ for cls in type(error).__mro__}
    if "BackPressureError" in names:
        return "refused"
    return "expired" if "RequestCancelledError" in names else "error"
