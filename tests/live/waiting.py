"""Wait for a condition, and not for a fixed time that is too short on a busy machine."""

import contextlib
import json
import socket
import time
import uuid
from pathlib import Path

import httpx
import pytest
from ray.exceptions import RayError

from ray_slo.serve.ray_private.http_head import HALF_CLOSED_S

PATIENCE_S = 60
MUTE = {"starting", "unreachable"}


def eventually(condition, within_s=PATIENCE_S):
    """The condition's value, once it is true or the time is over."""
    until = time.monotonic() + within_s
    while not (said := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return said


def status_of(handle):
    """`slo_status`, once it is complete. A frontend that is busy, or has just started, may not get
    the answers of all schedulers and of the planner in time."""
    told = {}

    def is_whole():
        told.clear()
        with contextlib.suppress(RayError):
            told.update(handle.slo_status.remote().result(timeout_s=PATIENCE_S))
            schedulers = [told, *told.get("groups", {}).values()]
            states = {part.get("state") for part in schedulers}
            # A planner that is starting has reported what it knows.
            return told.get("plan", {}).get("state") != "unreachable" and not states & MUTE
        return False

    assert eventually(is_whole), told
    return told


@contextlib.contextmanager
def held(handle, folder, workers=2):
    """Keep workers of `apps.Tasks` busy until the end of the block.

    Their batches fail in the end: of one that succeeds, the scheduler learns its time, and each
    would have to be held longer than the one before.
    """
    # With fewer workers, one would get two batches: the second waits there for the first.
    assert eventually(lambda: len(status_of(handle)["workers"]) >= workers)
    holds = []
    try:
        for _ in range(workers):
            mark = folder / uuid.uuid4().hex
            holds.append((mark, handle.remote(("hold_and_fail", str(mark)))))
            assert eventually(mark.exists)  # before the next request, so that they are two batches
        # Shortly before its predicted end, a worker would be sent its next batch.
        assert eventually(lambda: are_overdue(status_of(handle)["workers"].values(), workers))
        yield
    finally:
        for mark, _ in holds:
            let_go(mark)
    for _, answer in holds:
        with pytest.raises(TimeoutError, match="let go"):
            answer.result(timeout_s=PATIENCE_S)


def are_overdue(workers, count):
    """Whether this many workers have a batch that runs longer than predicted."""
    first = [worker["running"][0] for worker in workers if worker.get("running")]
    return sum(batch["for_ms"] > batch["expected_ms"] for batch in first) >= count


def let_go(mark):
    Path(f"{mark}.go").touch()


@contextlib.contextmanager
def posted(url, item):
    """Send a request over HTTP, and close the connection at the end of the block. Until then, the
    server must have begun to handle it."""
    parts, body = httpx.URL(url), json.dumps(item).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.host}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((parts.host, parts.port)) as line:
        line.sendall(head.encode() + body)
        yield
        time.sleep(2 * HALF_CLOSED_S)  # within this time, only the sending side seems to be shut
