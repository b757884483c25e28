"""The admission control's messages to the frontends."""

import asyncio
import json
import time

import pytest
from starlette.requests import Request

from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.errors import BodyTooLarge, Expired
from ray_slo.serve.protos import InferRequest
from ray_slo.serve.proxy.door import ProxyDoor, mode_in_words
from ray_slo.serve.proxy.gate import Known
from ray_slo.serve.proxy.modes import BINARY_ENV, COMMAND, has_door_before
from ray_slo.serve.proxy.places import Place
from tests.serve import clock
from tests.serve.fakes import Silent
from tests.serve.loops import in_loop

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
M = Place("/p", "m")


@pytest.mark.parametrize(
    ("variables", "is_there"),
    [
        ({}, False),
        ({PROXY_CALLBACK_ENV: "somebody:else"}, False),
        ({PROXY_CALLBACK_ENV: PROXY_CALLBACK}, True),
        ({PROXY_CALLBACK_ENV: PROXY_CALLBACK, HA_PROXY: "1"}, False),
        ({PROXY_CALLBACK_ENV: PROXY_CALLBACK, BINARY_ENV: f"/x/{COMMAND}", HA_PROXY: "1"}, True),
        ({BINARY_ENV: f"/x/{COMMAND}", HA_PROXY: "1"}, False),
        ({BINARY_ENV: "/x/haproxy", HA_PROXY: "1"}, False),
        ({BINARY_ENV: f"/x/{COMMAND}"}, False),
    ],
)
def test_whether_there_is_one(monkeypatch, variables, is_there):
    for name in (PROXY_CALLBACK_ENV, HA_PROXY, BINARY_ENV):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_door_before() is is_there


def test_replicas_with_batch_functions_count_while_they_answer(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    door = ProxyDoor()

    def known():
        return door._batches[M].known

    door.heard_of_batch(M, "a;10;400")
    assert known() == Known(10.0, who=str(M))
    assert (door.slo_s(M), door.is_batch(M)) == (0.4, True)
    door.heard_of_batch(M, "b;20;400")
    assert known().rate == 30.0
    now += 5.0
    door.heard_of_batch(M, "b;30;400")
    assert known().rate == 40.0
    now += 6.0
    door.heard_of_batch(M, "b;30;400")
    assert known().rate == 30.0  # the other one has gone, or nothing comes to it


def http(refused):
    async def receive():
        return {"type": "http.request", "body": b'["a", 1]', "more_body": False}

    headers = {"content-type": "application/json", "x-slo-refused-before": refused}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    return Request(scope, receive)


@in_loop
@pytest.mark.parametrize(
    ("is_there", "said", "count"),
    [(True, "7", 7), (False, "7", 0), (True, "-7", 0), (True, "7.5", 0), (True, "9" * 8, 0)],
)
async def test_what_was_refused_there_is_demand(app, is_there, said, count):
    demand, metrics = Silent(), Silent()
    around = {"has_door_before": is_there, "demand": demand, "metrics": metrics}
    async with app(policy="eager", around=around) as (front, _):
        response = await front(http(said))
        assert (response.status_code, json.loads(response.body)) == (200, "a")
    refused = [seen for seen in metrics.seen if seen[0] == "unanswered"]
    assert refused == ([("unanswered", "m", "refused", "door", count)] if count else [])
    came = [seen for seen in demand.seen if seen[0] == "arrived"]
    assert came == ([("arrived", "m", count)] if count else []) + [("arrived", "m", 1)]


@in_loop
async def test_grpc_says_it_likewise(app):
    class Context:
        trailing: list[tuple[str, str]] = []  # noqa: RUF012

        def invocation_metadata(self):
            return (("x-slo-attempt", "a" * 32), ("x-slo-refused-before", "3"))

        def trailing_metadata(self):
            return self.trailing

        def set_trailing_metadata(self, metadata):
            self.trailing = self.trailing + metadata  # only a list will do, as with Serve

    context, metrics = Context(), Silent()
    around = {"has_door_before": True, "metrics": metrics}
    async with app(policy="eager", around=around) as (front, _):
        reply = await front.Infer(InferRequest(json='["a", 1]'), context)
        assert json.loads(reply.json) == "a"
        assert ("unanswered", "m", "refused", "door", 3) in metrics.seen
        ((name, said),) = context.trailing
        assert (name, said.split(";")[1]) == ("x-slo-capacity", "30000.000")


@in_loop
async def test_paths_of_clients_that_left_are_not_kept():
    door = ProxyDoor()
    entering = (door.enter(Place("", f"{i}"), time.monotonic(), None) for i in range(200))
    left = [asyncio.ensure_future(one) for one in entering]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert any(task.cancelled() for task in left)
    assert not door._refused


@pytest.mark.parametrize(("budget_s", "waited_s"), [(0.4, 0.4), (3.0, 1.0), (None, 1.0)])
def test_where_nobody_answers_a_request_waits_for_a_second_or_until_its_deadline(
    budget_s, waited_s
):
    async def main():
        door, began = ProxyDoor(), time.monotonic()
        tickets = [await door.enter(M, began, 9.0, is_ours=True) for _ in range(16)]
        if budget_s == waited_s:
            with pytest.raises(Expired):
                await door.enter(M, began, budget_s, is_ours=True)
        else:
            tickets.append(await door.enter(M, began, budget_s, is_ours=True))
        waited = time.monotonic() - began
        for ticket in tickets:
            door.leave(ticket)
        assert door.gate.inside == door.gate.waiting == 0
        return waited

    assert clock.run(main()) == pytest.approx(waited_s, abs=0.01)


def test_when_the_first_answer_is_there_all_go_on():
    async def main():
        door, began = ProxyDoor(), time.monotonic()
        tickets = [await door.enter(M, began, 9.0, is_ours=True) for _ in range(16)]
        rest = [asyncio.ensure_future(door.enter(M, began, 3.0, is_ours=True)) for _ in range(20)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in rest)
        assert door.slo_s(M) is None
        door.heard(M, "1000;400;2000;9000;5000", 0.02, 0.01)
        tickets += await asyncio.gather(*rest)
        assert door.slo_s(M) == 0.4
        assert door.gate.inside == 36
        for ticket in tickets:
            door.leave(ticket)
        assert door.gate.inside == 0
        return time.monotonic() - began

    assert clock.run(main()) == pytest.approx(0.5, abs=0.01)


def test_the_least_time_is_that_of_about_the_last_hundred_answers():
    door, least = ProxyDoor(), []
    # No time for an error; a quarter of the SLO of 400 ms at most; then 1 % more per answer.
    for took_s in (None, 0.5, 0.04, 0.5, 0.0402, None):
        door.heard(M, "1000;400;2000;9000;5000", took_s, None)
        least.append(door._places[M].known.least_s)
    assert least == pytest.approx([0.0, 0.1, 0.04, 0.0404, 0.0402, 0.0402])
    known = door._places[M].known
    assert (known.rate, known.most) == (1000, 2000)


@pytest.mark.parametrize(
    ("way_s", "window"), [(0.05, 64.5), (0.059, 64.5), (0.061, 64.0 * 0.8), (0.3, 64.0 * 0.8)]
)
def test_the_way_may_take_50_ms_or_15_percent_of_the_slo(way_s, window):
    door = ProxyDoor()
    door.heard(M, "1000;400;2000;9000;5000", 0.1 + way_s, 0.1)
    assert door.gate.window == pytest.approx(window)


def test_the_way_is_known_and_forgotten_while_nobody_is_answered():
    async def main():
        door = ProxyDoor()
        assert door.way_s(M) == 0.0
        for i in range(50):
            door.heard(M, "1000;400;2000;9000;5000", 0.1 + 0.001 * i, 0.1)
        door.heard(M, "1000;400;2000;9000;5000", None, None)  # an error
        assert door.way_s(M) == pytest.approx(0.0465, abs=1e-3)
        await asyncio.sleep(1.0)
        assert door.way_s(M) == pytest.approx(0.0465, abs=1e-3)
        await asyncio.sleep(3.0)
        return door.way_s(M)

    assert clock.run(main()) == pytest.approx(0.0465 / 8, abs=1e-3)


@pytest.mark.parametrize(
    ("sizes", "is_json", "most", "option"),
    [
        ("9000;5000", False, 9000, "max_body_bytes"),
        ("9000;5000", True, 5000, "max_json_bytes"),
        ("5000;9000", True, 5000, "max_body_bytes"),
    ],
)
def test_too_large_a_body_hears_which_option_says_so(sizes, is_json, most, option):
    async def main():
        door = ProxyDoor()
        door.heard(M, f"1000;400;2000;{sizes}", None, None)
        known = {"budget_s": 1.0, "is_json": is_json}
        door.leave(await door.enter(M, time.monotonic(), num_bytes=most, **known))
        with pytest.raises(BodyTooLarge, match=f"at most {most} are read .{option}."):
            await door.enter(M, time.monotonic(), num_bytes=most + 1, **known)

    clock.run(main())


def test_a_missing_door_is_said_with_the_mode(monkeypatch):
    monkeypatch.delenv(PROXY_CALLBACK_ENV, raising=False)
    assert "no admission control before the frontend (`ray-slo run`" in mode_in_words()
    monkeypatch.setenv(PROXY_CALLBACK_ENV, PROXY_CALLBACK)
    monkeypatch.delenv(HA_PROXY, raising=False)
    assert mode_in_words() == "ordinary (Serve's proxies)"
