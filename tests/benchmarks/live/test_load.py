"""Open-loop streams of live programs: over HTTP, of handle calls, and beside other work."""

import asyncio
import json
import math
import time

import numpy as np
import pytest

from benchmarks.live import load
from benchmarks.live.asked import Load
from benchmarks.live.attack import Good
from benchmarks.live.sleeper import Sleeper
from ray_slo.load.workload import Payloads
from ray_slo.serve.errors import RefusedEarly
from tests.load.server import serving
from tests.waiting import until


def test_poisson_arrivals_end_in_time():
    times = list(load.poisson(100.0, np.random.default_rng(0), 20.0))
    assert times == sorted(times) and times[-1] < 20.0
    assert len(times) == pytest.approx(2000, rel=0.1)


def test_arrivals_at_one_time_are_a_bunch():
    arrivals = {"b": [0.0, 1.0], "a": [1.0, 1.0]}
    assert load.bunches(arrivals) == [(0.0, ["b"]), (1.0, ["a", "a", "b"])]


def test_a_stream_from_a_process_of_its_own():
    with serving(lambda body: (0, 200, {}, body)) as server:
        payloads = Payloads([b"1"], None, "application/json")
        result = load.by_http(server.url, payloads, 40.0, duration_s=0.5, seed=1, slo_s=20.0)
    assert len(result.requests) == len(server.requests) > 5
    assert set(result.requests["status"]) == {"ok"}


def echo(body):
    asked = json.loads(body)
    if asked["id"] == 3:
        return 0, 503, {}, b'{"reason": "would_miss"}'
    if asked["id"] == 4:
        return 0, 500, {}, b"Internal Server Error"
    return 0, 200, {}, json.dumps({"id": asked["id"], "release": 2}).encode()


def test_requests_of_chaos_are_numbered_and_carry_orders():
    with serving(echo) as server:
        clients = Load(server.url.rstrip("/"), seed=0, first=1, rate=200.0, kb=2, path="sleeper")
        until(lambda: len(clients.asked) >= 5)
        clients.also(hang_s=5.0)
        sent = len(clients.asked)
        until(lambda: len(clients.asked) > sent + 2)
        clients.stop()
    asked = clients.asked
    assert list(asked) == list(range(1, len(asked) + 1)) and clients.in_flight == 0
    assert (asked[3].reason, asked[4].reason, asked[4].lost) == ("would_miss", "", True)
    assert {(a.echo, a.release) for n, a in asked.items() if a.answered} == {
        (n, 2) for n in asked if n not in (3, 4)
    }
    bodies = [json.loads(body) for _, body in server.requests]
    assert [body["hang_s"] for body in bodies if "hang_s" in body] == [5.0]
    assert {body["kb"] for body in bodies if "hang_s" not in body} == {2}
    assert all("POST /sleeper" in head for head, _ in server.requests)


def test_good_clients_keep_what_came():
    with serving(lambda body: (0, 200, {}, b"1")) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        began = time.monotonic()
        good = Good(port, seed=0)
        until(lambda: len(good.seen) > 12)
        good.stop()
    assert {what for _, _, what in good.seen} == {"ok"}
    share, bad = good.in_time(began, time.monotonic())
    assert 0 <= share <= 1 and sum(bad.values()) <= len(good.seen)


async def reply(what):
    await asyncio.sleep(0.01)
    if what is None:
        raise RefusedEarly("no", reason="shed")
    return what


def test_calls_go_on_until_the_work_is_done():
    async def run():
        calls = load.Calls()

        async def work():
            await asyncio.sleep(0.2)
            return "done"

        due = ((0.01 * i, i if i % 2 else None) for i in range(10**9))
        return await calls.beside(work(), due, lambda at, what: calls.call(at, reply, what))

    did, came = asyncio.run(run())
    assert did == "done" and len(came) > 2
    assert [r.status for r in came[:2]] == ["refused", "answered"]
    assert [r.answer for r in came[:2]] == [None, 1]
    assert isinstance(came[0].error, RefusedEarly) and all(r.latency_s >= 0.009 for r in came)


def test_a_failed_call_of_ours_is_heard_when_all_have_ended():
    ended = []

    async def send(at, what):
        await asyncio.sleep(what)
        ended.append(what)
        if not what:
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        asyncio.run(load.paced([(0.0, 0.0), (0.0, 0.05)], send))
    assert ended == [0.0, 0.05]


def test_a_sleeper_takes_its_time_and_answers_with_its_items():
    start = time.perf_counter()
    assert Sleeper(0.01, 0.03, steps=5)([7, 8]) == [7, 8]
    assert time.perf_counter() - start >= 0.05
    assert math.isfinite(Sleeper.example_input())
