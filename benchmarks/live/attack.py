"""Live on Ray Serve: attacks by clients and models, and their effect on good clients.

The application has two frontends and two workers that sleep 20 + 4·b ms for a batch of b. The SLO
is 400 ms. It runs over HTTP on loopback, with Serve's own proxy and with HAProxy. Good clients send
20 requests/s with Poisson arrivals, while another process attacks. Each attack has a row:

* *sent*, *answered in time*, *refused*, *other*. Refused requests got a typed error with a reason.
  Others got a proxy's error without a reason, a closed connection, or no reply in time.
* *refused, p99*: seconds from the first byte of the request to the refusal.
* *good in time*: share of the good requests in time, of those sent during the attack or in the 2 s
  after it.
* *recovery*: seconds from the attack's last reply until good requests are answered in time again.
* *memory*: of proxies and replicas twenty seconds after the attack, as a multiple of before.

For a burst, *workers could* is how many requests both workers can complete within the SLO.

    python -m benchmarks live-attack [--mode ordinary] [--attacks burst,json] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import re
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.cluster import memory_mb
from benchmarks.live.load import Clients, some_of
from benchmarks.live.modes import HAPROXY, ORDINARY, rows_of, write_rows
from benchmarks.live.sleeper import Sleeper

SOURCE = "ray-slo"
ASKED = [
    (  # 90 % of what the workers can complete
        "*, burst*",
        "answered in time",
        "≥",
        162,
        "on two cores, proxies need longer than the SLO to accept 3,000 requests",
    ),
    (
        "*burst*",
        "refused, p99",
        "≤",
        1.4,
        "over gRPC, the client (one Python process) needs seconds to send its burst",
    ),
    ("*burst*", "recovery", "≤", 1.0),
    ("*, 3,000*", "recovery", "≤", 1.0),
    ("*, 3,000*", "other", "≤", 0),
    (  # all attacks except the bursts
        "*, ?[!uR,]*",
        "good in time",
        "≥",
        99,
        "beside made-up paths and in the flood, good requests wait for others, and for the "
        "processor",
    ),
    (
        "*, gRPC: ?[!u]*",
        "good in time",
        "≥",
        99,
        "messages of 20 MB by Serve's proxy; the reason is not known",
    ),
    ("*", "memory", "≤", 1.5),
]
APP = "attacked"
ALPHA_S, BETA_S = 0.004, 0.02  # a batch of b takes ALPHA_S · b + BETA_S
WORKERS = 2
MAX_BATCH = 45  # takes half the SLO: an urgent request waits no longer for a batch of patient ones
SLO_S = 0.4
RATE = 20.0  # requests per second of the good clients
DAY_MS = 86_400_000
MODES = (ORDINARY, HAPROXY)
PROCESSES = rb"ServeReplica|ProxyActor"  # the processes whose memory is counted
QUICK = ("burst", "json", "panic")
HEARD_S = 20.0  # a client gives up after this
SETTLED = 10  # recovered: so many good requests in a row are answered in time


class Panic(BaseException):
    """A stand-in for `PanicException` of Rust extensions."""


class Unreadable:
    """A value that can be pickled, and not read."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Attacked(Sleeper):
    """A sleeper whose item is a number, or an order: what to do, and in which hook."""

    def __init__(self) -> None:
        super().__init__(ALPHA_S, BETA_S)

    @staticmethod
    def preprocess(item: Any) -> Any:
        obey(item, "preprocess")
        return item

    @staticmethod
    def postprocess(result: Any) -> Any:
        obey(result, "postprocess")
        return result

    def __call__(self, items: list[Any]) -> list[Any]:
        super().__call__(items)
        for item in items:
            obey(item, "batch")
        return [answer_to(item) for item in items]


def answer_to(item: Any) -> Any:
    if not isinstance(item, dict):
        return 0
    return Unreadable() if item["do"] == "unreadable" else item


def obey(item: Any, place: str) -> None:
    """Carry out an item's order if it is for this hook."""
    if not isinstance(item, dict) or item.get("in") != place:
        return
    what = item["do"]
    if what == "panic":
        raise Panic("thread '<unnamed>' panicked")
    if what == "exit":
        sys.exit(1)
    if what == "die":
        os._exit(1)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "sleep":
        time.sleep(5.0)
    if what == "hold":  # keep the GIL for 3 s
        ctypes.PyDLL(None).usleep(3_000_000)
    if what == "memory":
        bytearray(500 * 2**20)


# -- attackers, which are separate processes -------------------------------------------------


@dataclass
class Reply:
    """One reply. Seconds count from the request's first byte. `status` is 0 if nothing came."""

    took_s: float
    status: int
    reason: str = ""


def at_once(
    port: int, requests: list[bytes], heard_s: float = HEARD_S, waves: int = 1
) -> list[Reply]:
    """Send requests in waves, each wave at once and each request on a connection of its own."""
    replies = []
    for wave in np.array_split(np.arange(len(requests)), waves):
        replies += _wave(port, [requests[i] for i in wave], heard_s)
    return replies


def _wave(port: int, requests: list[bytes], heard_s: float) -> list[Reply]:
    selector = selectors.EpollSelector()
    open_: dict[int, tuple[socket.socket, memoryview, bytearray]] = {}
    began: dict[int, float] = {}
    replies = []
    for request in requests:
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(("127.0.0.1", port))
        open_[line.fileno()] = (line, memoryview(request), bytearray())
        selector.register(line, selectors.EVENT_WRITE)
    until = time.monotonic() + heard_s
    while open_ and time.monotonic() < until:
        for key, events in selector.select(0.1):
            line, rest, answer = open_[key.fd]
            try:
                if events & selectors.EVENT_WRITE:
                    began.setdefault(key.fd, time.monotonic())
                    rest = rest[line.send(rest) :]
                    open_[key.fd] = (line, rest, answer)
                    if not rest:
                        selector.modify(line, selectors.EVENT_READ)
                    continue
                chunk = line.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            answer += chunk
            if chunk and not _is_whole(answer):
                continue
            now = time.monotonic()
            replies.append(_reply(now - began.get(key.fd, now), answer))
            selector.unregister(line)
            line.close()
            del open_[key.fd]
    for line, _, _ in open_.values():
        replies.append(Reply(math.inf, 0))
        line.close()
    selector.close()
    return replies


def _is_whole(answer: bytearray) -> bool:
    head, found, body = bytes(answer).partition(b"\r\n\r\n")
    said = re.search(rb"(?i)content-length: *(\d+)", head)
    return bool(found) and said is not None and len(body) >= int(said[1])


def _reply(took_s: float, answer: bytearray) -> Reply:
    status = re.match(rb"HTTP/1\.\d (\d+)", answer)
    reason = re.search(rb'"reason": ?"(\w+)"', answer)
    return Reply(took_s, int(status[1]) if status else 0, reason[1].decode() if reason else "")


def post(item: Any, *headers: str, body: bytes | None = None, path: str = "/") -> bytes:
    body = json.dumps(item).encode() if body is None else body
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def burst(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(1)] * 3000)


def alias(number: int) -> str:
    """Return one of the ways to write the path `/`, another one for every number."""
    return "/" + "".join("%2f" if digit == "1" else "/" for digit in f"{number:b}")


def aliases(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(1, path=alias(i)) for i in range(3000)])


def classes(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(1, f"x-slo-class: made-up-{i}") for i in range(3000)])


def flood(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(1, f"x-slo-latency-ms: {DAY_MS}")] * 10_000, waves=4)


def bombs(port: int, seed: int) -> list[Reply]:
    """Send 18 bodies of nested empty lists at once: six of each of three sizes up to 15 MiB."""
    requests = []
    for megabytes in (15.0, 7.9, 2.9):
        body = b"[" + b"[]," * int(megabytes * 2**20 / 3 - 2) + b"[]]"
        requests += [post(None, body=body)] * 6
    return at_once(port, requests)


def deep(port: int, seed: int) -> list[Reply]:
    bodies = [b"[" * n + b"]" * n for n in (101, 1000, 100_000)]
    bodies += [b'{"a":' * 200 + b"1" + b"}" * 200, b"1e999", b"[NaN]", b"\xff\xfe", b""]
    return at_once(port, [post(None, body=body) for body in bodies * 10])


def large(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(None, body=b"1" * 20 * 2**20)] * 12, waves=3)


def slow_bodies(port: int, seed: int) -> list[Reply]:
    """Send requests whose bodies are shorter than their content-length."""
    return at_once(port, [post(1, body=b"1" * 99)[:-9]] * 500, heard_s=6.0)


def slow_heads(port: int, seed: int) -> list[Reply]:
    return at_once(port, [post(1)[:40]] * 500, heard_s=6.0)


def garbage(port: int, seed: int) -> list[Reply]:
    rng = np.random.default_rng(seed)
    heads = [b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"]
    return at_once(port, [rng.bytes(300) + b"\r\n\r\n" for _ in range(200)] + heads * 50, 6.0)


def trailers(port: int, seed: int) -> list[Reply]:
    """Send chunked bodies, whose trailers are headers that only ray-slo's proxies may set."""
    said = {
        "x-slo-refused-before": "999999",
        "x-slo-timeout-ms": "1",
        "x-slo-arrived": "1",
        "x-slo-known-ms": "1",
        "x-slo-mark": "x",
    }
    heads = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    heads += b"transfer-encoding: chunked\r\nconnection: close\r\n"
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items()).encode()
    chunks = b"1\r\n1\r\n0\r\n"
    requests = [
        heads + lines + b"\r\n" + chunks + b"\r\n",
        heads + b"\r\n" + chunks + lines + b"\r\n",
    ]
    return at_once(port, requests * 50, waves=10)


def unsent_bodies(port: int, seed: int) -> list[Reply]:
    """Declare 200 bodies of 16 MiB, and send one byte of each."""
    head = post(1)[:-1].replace(b"application/json", b"application/octet-stream")
    head = head.replace(b"content-length: 1", b"content-length: %d" % 2**24)
    return at_once(port, [head + b"1"] * 200, heard_s=6.0)


def foreign_pages(port: int, seed: int) -> list[Reply]:
    """Ask for the status pages as pages of other sites do."""
    foreign = ["host: evil.example", "host: 127.0.0.1\r\norigin: http://evil.example"]
    foreign += ["host: 127.0.0.1\r\nsec-fetch-site: cross-site", "host: 127.0.0.1.evil.example:80"]
    pages = [
        f"GET /-/{page} HTTP/1.1\r\n{lines}\r\nconnection: close\r\n\r\n".encode()
        for page in ("status", "top", "screen")
        for lines in foreign
    ]
    return at_once(port, pages * 5)


def cancels(port: int, seed: int) -> list[Reply]:
    """Send 2,000 requests; each client leaves after at most 0.3 s."""
    rng = np.random.default_rng(seed)
    waves = [at_once(port, [post(1)] * 100, float(rng.uniform(0, 0.3))) for _ in range(20)]
    return [reply for wave in waves for reply in wave]


def idle_connections(port: int, seed: int) -> list[Reply]:
    return at_once(port, [b""] * 3000, heard_s=10.0)


def ordered(place: str, what: str, count: int, gap_s: float = 0.0) -> Callable[..., list[Reply]]:
    def attack(port: int, seed: int) -> list[Reply]:
        replies = []
        for _ in range(count if gap_s else 1):
            requests = [post({"in": place, "do": what})] * (1 if gap_s else count)
            replies += at_once(port, requests)
            time.sleep(gap_s)
        return replies

    return attack


# -- attacks over gRPC, on the port after that of HTTP -----------------------------------------


def calls_at_once(
    port: int,
    requests: list[Any],
    heard_s: float = HEARD_S,
    metadata: Sequence[Sequence[tuple[str, Any]]] = ((("application", APP),),),
    leave_s: Sequence[float] = (HEARD_S,),
) -> list[Reply]:
    """Call `Infer` with all requests at once, over 20 connections.

    Args:
        metadata: of the calls, in turn.
        leave_s: seconds until the caller of each cancels it, in turn.
    """
    import grpc

    from ray_slo.serve.grpc import InferenceStub, reported

    async def call(stub: Any, request: Any, slot: int, replies: list[Reply]) -> None:
        began, status, reason = time.monotonic(), 200, ""
        told = list(metadata[slot % len(metadata)])
        pending = stub.Infer(request, metadata=told, timeout=heard_s)
        asyncio.get_running_loop().call_later(leave_s[slot % len(leave_s)], pending.cancel)
        try:
            await pending
        except asyncio.CancelledError:
            status = 0
        except grpc.aio.AioRpcError as error:
            reason = reported(error).get("reason", "")
            number, _ = error.code().value
            status = 503 if reason else 900 + number  # 900 + gRPC's code where there is no reason
        replies[slot] = Reply(time.monotonic() - began, status, reason)

    async def attack() -> list[Reply]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port + 1}", options=options) for _ in range(20)
        ]
        stubs = [InferenceStub(channel) for channel in channels]
        replies = [Reply(math.inf, 0)] * len(requests)
        await asyncio.gather(*(call(stubs[i % 20], r, i, replies) for i, r in enumerate(requests)))
        for channel in channels:
            await channel.close()
        return replies

    return asyncio.run(attack())


def infer(item: Any = 1, **fields: Any) -> Any:
    from ray_slo.serve.protos import InferRequest

    return InferRequest(**({"json": json.dumps(item), **fields}))


def grpc_burst(port: int, seed: int) -> list[Reply]:
    return calls_at_once(port, [infer()] * 3000)


def grpc_json(port: int, seed: int) -> list[Reply]:
    bomb = "[" + "[]," * (2 * 2**20) + "[]]"
    bodies = [bomb] * 6 + ["[" * 1000 + "]" * 1000, "1e999", "[NaN]", ""] * 5
    return calls_at_once(port, [infer(json=body) for body in bodies])


def grpc_large(port: int, seed: int) -> list[Reply]:
    return calls_at_once(port, [infer(json="1" * 20 * 2**20)] * 12)


def grpc_cancels(port: int, seed: int) -> list[Reply]:
    rng = np.random.default_rng(seed)
    return calls_at_once(port, [infer()] * 2000, leave_s=rng.uniform(0, 0.3, 2000).tolist())


def grpc_metadata(port: int, seed: int) -> list[Reply]:
    """Name 2,000 unknown applications, and send 1,000 odd values to the right one."""
    odd = [
        [("x-slo-latency-ms", "9" * 500)],
        [("x-request-timeout-seconds", "-1")],
        [("x-slo-class", "x"), ("x-slo-class", "y")],
        [(f"k{i}", "v" * 20) for i in range(100)],
        [("k-bin", bytes(range(256)))],
        [("k", "v" * 20_000)],
    ]
    ours = [[("application", APP), *odd[i % len(odd)]] for i in range(1000)]
    others = [[("application", f"{seed}-{i}")] for i in range(2000)]
    return calls_at_once(port, [infer()] * 3000, metadata=ours + others)


def grpc_garbage(port: int, seed: int) -> list[Reply]:
    rng = np.random.default_rng(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return at_once(port + 1, [preface + rng.bytes(300) for _ in range(200)], 6.0)


def grpc_ordered(place: str, what: str, count: int) -> Callable[..., list[Reply]]:
    return lambda port, seed: calls_at_once(port, [infer({"in": place, "do": what})] * count)


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes:
        says: what it is, in a few words.
        run: carries it out, in a separate process.
        slo_s: SLO of its requests.
    """

    says: str
    run: Callable[[int, int], list[Reply]]
    slo_s: float = SLO_S


ATTACKS = {
    "burst": Attack("burst of 3,000 at once", burst),
    "aliases": Attack("3,000 ways to write one path, at once", aliases),
    "classes": Attack("3,000 made-up SLO classes, at once", classes),
    "flood": Attack("10,000 with an SLO of a day", flood, DAY_MS / 1e3),
    "json": Attack("JSON of 3 to 15 MB, six at a time", bombs),
    "deep": Attack("malformed or deeply nested JSON", deep),
    "large": Attack("bodies of 20 MB", large),
    "slow-bodies": Attack("500 bodies that do not come", slow_bodies),
    "slow-heads": Attack("500 heads that do not end", slow_heads),
    "garbage": Attack("bytes that are no HTTP", garbage),
    "panic": Attack("batch raises a BaseException", ordered("batch", "panic", 10, 0.2)),
    "exit": Attack("batch calls sys.exit", ordered("batch", "exit", 10, 0.2)),
    "pre-panic": Attack("preprocess panics", ordered("preprocess", "panic", 20)),
    "pre-exit": Attack("preprocess calls sys.exit", ordered("preprocess", "exit", 20)),
    "post-exit": Attack("postprocess calls sys.exit", ordered("postprocess", "exit", 10)),
    "pre-sleep": Attack("preprocess blocks for 5 s, ten times", ordered("preprocess", "sleep", 10)),
    "memory": Attack("batch takes 500 MB", ordered("batch", "memory", 4, 0.2)),
    "hold": Attack("batch holds Python's lock for 3 s", ordered("batch", "hold", 1)),
    "pre-hold": Attack("preprocess holds Python's lock for 3 s", ordered("preprocess", "hold", 1)),
    "segfault": Attack("batch ends in a segfault", ordered("batch", "segfault", 1)),
    "die": Attack("batch calls os._exit", ordered("batch", "die", 1)),
    "pre-die": Attack("preprocess calls os._exit", ordered("preprocess", "die", 1)),
    "grpc-burst": Attack("gRPC: burst of 3,000 at once", grpc_burst),
    "grpc-json": Attack("gRPC: JSON of 6 MB, nested, or none", grpc_json),
    "grpc-large": Attack("gRPC: messages of 20 MB", grpc_large),
    "grpc-garbage": Attack("gRPC: bytes that are no HTTP/2", grpc_garbage),
    "grpc-panic": Attack("gRPC: batch raises a BaseException", grpc_ordered("batch", "panic", 10)),
    "grpc-exit": Attack("gRPC: preprocess calls sys.exit", grpc_ordered("preprocess", "exit", 10)),
    "grpc-die": Attack("gRPC: preprocess calls os._exit", grpc_ordered("preprocess", "die", 1)),
    "trailers": Attack("headers of proxies, also as trailers", trailers),
    "unsent-bodies": Attack("200 bodies of 16 MiB that do not come", unsent_bodies),
    "foreign-pages": Attack("status pages for pages of other sites", foreign_pages),
    "unreadable": Attack("results that cannot be read", ordered("batch", "unreadable", 10, 0.2)),
    "cancels": Attack("2,000 clients that leave", cancels),
    "descriptors": Attack("connections without a request: 3,000", idle_connections),
    "grpc-cancels": Attack("gRPC: 2,000 calls that are cancelled", grpc_cancels),
    "grpc-metadata": Attack("gRPC: unknown applications, odd metadata", grpc_metadata),
}


def _attack(name: str, port: int, seed: int, pipe: Any) -> None:
    os.nice(19)  # attackers are other machines
    pipe.send(ATTACKS[name].run(port, seed))


# -- good clients --------------------------------------------------------------------------


class Good(Clients):
    """Good HTTP clients, with Poisson arrivals."""

    def __init__(self, port: int, seed: int) -> None:
        self.seen: list[tuple[float, float, str]] = []  # (when sent, seconds it took, outcome)
        url = f"http://127.0.0.1:{port}/"
        super().__init__(url, RATE, seed, heard_s=HEARD_S, force_close=True)

    async def _one(self, session: Any, at: float, what: Any) -> None:
        sent = time.monotonic()
        try:
            async with session.post(self._url, json=1) as response:
                text = await response.text()
                said = re.search(r'"reason": ?"(\w+)"', text)
                came = "ok" if response.status == 200 else said[1] if said else str(response.status)
        except Exception as error:
            came = type(error).__name__
        self.seen.append((sent, time.monotonic() - sent, came))

    def in_time(self, since: float, until: float) -> tuple[float, Counter[str]]:
        """Return the share in time of the requests sent then, and the outcomes of the others."""
        seen = [(took, what) for sent, took, what in list(self.seen) if since <= sent < until]
        good = [what == "ok" and took <= SLO_S for took, what in seen]
        bad = Counter(
            "late" if what == "ok" else what
            for (_, what), ok in zip(seen, good, strict=True)
            if not ok
        )
        return sum(good) / max(len(good), 1), bad

    def recovery_s(self, since: float) -> float:
        """Return the seconds until `SETTLED` good requests in a row are in time, or infinity."""
        run: list[float] = []
        for sent, took, what in sorted(self.seen):
            if sent >= since:
                run = [*run, sent] if what == "ok" and took <= SLO_S else []
                if len(run) == SETTLED:
                    return max(run[0] - since - 1 / RATE, 0.0)
        return math.inf


# -- the run -------------------------------------------------------------------------------


@dataclass
class Seen:
    """What became of an attack, and of the good requests meanwhile."""

    mode: str
    name: str
    took_s: float
    replies: list[Reply]
    good: float
    bad: Counter[str] = field(default_factory=Counter)
    recovery_s: float = math.nan
    memory: float = math.nan

    def rows(self) -> list[Row]:
        attack = ATTACKS[self.name]
        case = f"{self.mode}, {attack.says}"
        in_time = sum(r.status == 200 and r.took_s <= attack.slo_s for r in self.replies)
        refused = [r for r in self.replies if r.reason and r.status != 200]
        p99 = float(np.percentile([r.took_s for r in refused], 99)) if refused else None
        made = [
            Row(case, "sent", "", len(self.replies)),
            Row(case, "answered in time", "", in_time),
            Row(case, "answered late", "", sum(r.status == 200 for r in self.replies) - in_time),
            Row(case, "refused", "", len(refused)),
            Row(case, "refused, p99", "s", p99),
            Row(case, "other", "", sum(r.status != 200 and not r.reason for r in self.replies)),
            Row(case, "good in time", "%", 100 * self.good),
            Row(case, "recovery", "s", self.recovery_s if math.isfinite(self.recovery_s) else None),
            Row(case, "memory", "×", self.memory),
        ]
        if self.name.endswith("burst"):
            made.append(Row(case, "workers could", "", WORKERS * most_within(SLO_S)))
        return made

    @property
    def said(self) -> str:
        statuses = Counter(f"{r.status} {r.reason}".strip() for r in self.replies)
        return (
            f"{self.mode}, {self.name}: {dict(statuses)} in {self.took_s:.1f} s; good in time "
            f"{self.good:.1%}, {dict(self.bad)}, recovery {self.recovery_s:.1f} s, memory × "
            f"{self.memory:.2f}"
        )


def most_within(time_s: float) -> int:
    """Return the largest number of requests that one worker can complete in this time."""
    full, rest_s = divmod(time_s, BETA_S + ALPHA_S * MAX_BATCH)
    return MAX_BATCH * int(full) + max(math.floor((rest_s - BETA_S) / ALPHA_S), 0)


chosen = partial(some_of, ATTACKS, "attack")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, help="run only in this mode of Serve")
    parser.add_argument(
        "--attacks",
        type=chosen,
        metavar="A,B",
        help=f"run only these attacks, out of {', '.join(ATTACKS)}",
    )


def run(
    quick: bool, seed: int, mode: str | None = None, attacks: list[str] | None = None
) -> list[Row]:
    order = [str(int(quick)), str(seed), ",".join(attacks or (QUICK if quick else ATTACKS))]
    wanted = (mode,) if mode else MODES[:1] if quick else MODES
    module, on_loopback = "benchmarks.live.attack", {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return [row for one in wanted for row in rows_of(module, one, order, **on_loopback)]


def attacked(mode: str, quick: bool, seed: int, names: list[str]) -> list[Row]:
    """Serve the application, attack it with one attack after another, and return the rows.

    Runs in a process of its own, in whose environment the mode is set.
    """
    rows: list[Row] = []
    with serving(quick) as port:
        for number, name in enumerate(names):
            seen = strike(mode, name, port, seed + number, quick)
            print(seen.said, file=sys.stderr, flush=True)
            rows += seen.rows()
    return rows


@contextlib.contextmanager
def serving(quick: bool) -> Iterator[int]:
    """Serve the application on a Ray cluster of its own; yield the port of its HTTP proxy."""
    import ray
    from ray import serve

    from ray_slo.serve import build_app
    from ray_slo.serve.grpc import SERVICER

    port = two_free_ports()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            grpc_options={"port": port + 1, "grpc_servicer_functions": [SERVICER]},
        )
        cpu = {"num_cpus": 0.1}
        app = {
            "models": {
                "m": {
                    "callable": "benchmarks.live.attack:Attacked",
                    "latency_slo_ms": 1e3 * SLO_S,
                    "max_batch_size": MAX_BATCH,
                }
            },
            "workers": {"default": {"num_replicas": WORKERS, "ray_actor_options": cpu}},
            "num_frontends": 2,
            "profile_seconds": 1.0 if quick else 3.0,
            "status_page": True,
            "name": APP,
        }
        serve.run(build_app(app), name=APP, route_prefix="/")
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def two_free_ports() -> int:
    """Return a free port whose successor is free, too."""
    from ray_slo.serve.proxy.modes import free_ports

    while True:
        (port,) = free_ports(1)
        with socket.socket() as second, contextlib.suppress(OSError):
            second.bind(("127.0.0.1", port + 1))
            return port


def strike(mode: str, name: str, port: int, seed: int, quick: bool) -> Seen:
    """Carry out one attack, with good requests before, during and after it."""
    before_s, after_s, rest_s = (1.0, 2.0, 0.0) if quick else (4.0, 10.0, 10.0)
    good = Good(port, seed)
    try:
        time.sleep(before_s)
        before_mb = memory_mb(PROCESSES)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        attacker = multiprocessing.get_context("spawn").Process(
            target=_attack, args=(name, port, seed, theirs)
        )
        began = time.monotonic()
        attacker.start()
        replies = ours.recv()
        ended = time.monotonic()
        attacker.join()
        until = time.monotonic() + (30.0 if quick else 120.0)
        time.sleep(after_s)
        while not math.isfinite(good.recovery_s(ended)) and time.monotonic() < until:
            time.sleep(1.0)
        time.sleep(rest_s)
        memory = memory_mb(PROCESSES) / before_mb
    finally:
        good.stop()
    share, bad = good.in_time(began, ended + 2.0)
    return Seen(mode, name, ended - began, replies, share, bad, good.recovery_s(ended), memory)


if __name__ == "__main__":
    mode, file, quick, seed, names = sys.argv[1:]
    write_rows(file, attacked(mode, quick == "1", int(seed), names.split(",")))
