"""What a plain deployment with `@ray_slo.batch` functions and its door tell each other."""

import asyncio
import time
from contextvars import copy_context

import pytest

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.errors import Expired, RefusedEarly
from ray_slo.serve.batch.capacity import note_request, said
from ray_slo.serve.deadlines import ARRIVED_HEADER, PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy.modes import BINARY_ENV, HAPROXY_ENV, stamp
from tests.serve import clock


@pytest.fixture
def behind_proxies(monkeypatch):
    monkeypatch.setenv(PROXY_CALLBACK_ENV, PROXY_CALLBACK)
    monkeypatch.delenv(HAPROXY_ENV, raising=False)


def batched(slo_ms, batch_s, most=4):
    @ray_slo.batch(slo_ms, profile=LatencyProfile([batch_s] * most), max_batch_size=most)
    def same(items):
        time.sleep(batch_s)
        return items

    return same


def answered(user, *headers):
    """The numbers in the header of an answer, when `user` has run for its request."""

    async def request():
        note_request(headers)
        await user()
        return said()

    found = copy_context().run(clock.run, request())
    return [[float(number) for number in value.split(b";")[1:]] for _, value in found]


def test_an_answer_says_what_the_function_can_do(behind_proxies):
    same = batched(400, 0.05)

    async def one():
        await same(1)

    assert answered(one) == [[pytest.approx(80, rel=0.01), 400]]


def test_a_request_may_take_longer_if_it_does_other_things_too(behind_proxies):
    same, other = batched(400, 0.05), batched(500, 0.1, most=8)

    async def several():
        await asyncio.sleep(1)
        await asyncio.gather(same(1), other(1))
        await asyncio.sleep(1)
        await same(2)

    assert answered(several) == [[pytest.approx(40, rel=0.01), 2000 + 500 + 400]]


def test_a_request_with_several_items_counts_so_often(behind_proxies):
    same, other = batched(400, 0.05), batched(500, 0.05, most=2)

    async def several():
        await asyncio.gather(*(same(i) for i in range(4)), other(1))

    assert answered(several) == [[pytest.approx(20, rel=0.01), 500]]


def test_more_is_said_as_long_as_larger_batches_may_be_faster(behind_proxies):
    """The requests that form them must come."""

    @ray_slo.batch(400)
    def same(items):
        time.sleep(0.05)
        return items

    async def one():
        await same(1)

    ((rate, _),) = answered(one)
    assert 2 * 20 <= rate <= 2 * 25  # larger batches are assumed to save little time


def came(ago_s):
    """The header of a request that came to the door so long ago."""
    return ARRIVED_HEADER.encode(), stamp(ago_s).encode()


def test_the_time_since_the_door_counts_until_the_first_answer(behind_proxies):
    same = batched(1000, 0.1)

    async def one():
        await same(1)

    async def several():
        await asyncio.gather(same(1), same(2))
        await same(3)

    answered(one)  # the first batch, which is tried in any case, is known now
    answered(several, came(0.4))
    with pytest.raises(RefusedEarly, match="would miss"):
        answered(one, came(0.87))
    with pytest.raises(Expired):
        answered(one, came(1.1))


def test_only_the_door_says_when_a_request_came(monkeypatch):
    for name in (PROXY_CALLBACK_ENV, HAPROXY_ENV):
        monkeypatch.delenv(name, raising=False)
    same = batched(400, 0.05)

    async def one():
        await same(1)

    answered(one, came(0.5))


def test_a_function_that_calls_another_is_no_part_of_the_request_that_came_first(behind_proxies):
    inner = batched(400, 0.05)

    @ray_slo.batch(1000)
    async def outer(items):
        return [await inner(item) for item in items]

    async def both():
        note_request([came(0.5)])
        await outer(1)
        note_request([])
        await outer(1)

    copy_context().run(clock.run, both())


def test_if_answers_wait_for_the_event_loop_batches_end_sooner(behind_proxies):
    @ray_slo.batch(400)
    def same(items):
        time.sleep(seconds)
        return items

    async def busy():
        await same(1)
        time.sleep(0.05)  # noqa: ASYNC251

    async def many():
        await asyncio.gather(*(busy() for _ in range(4)))

    async def main():
        nonlocal seconds
        for _ in range(20):
            await many()  # the last of them goes on after 150 ms, of which 100 ms are kept
        seconds = 0.2
        for _ in range(4):
            await same(1)
        seconds = 0.29
        with pytest.raises(RefusedEarly, match="would miss"):
            for _ in range(20):
                await same(1)

    seconds = 0.01
    clock.run(main())


def test_a_long_wait_for_the_event_loop_does_not_refuse_for_ever(behind_proxies):
    same = batched(400, 0.05)

    async def busy():
        await same(1)
        time.sleep(2.0)  # noqa: ASYNC251

    async def main():
        for _ in range(30):
            await asyncio.gather(busy(), busy())  # the second one goes on after 2 s
        for _ in range(5):
            await same(1)

    clock.run(main())


def test_an_answer_without_them_says_nothing(behind_proxies):
    async def nothing():
        await asyncio.sleep(0)

    assert answered(nothing) == []


@pytest.mark.parametrize("variables", [{}, {PROXY_CALLBACK_ENV: PROXY_CALLBACK, HAPROXY_ENV: "1"}])
def test_without_a_door_that_reads_it_nothing_is_said(monkeypatch, variables):
    for name in (PROXY_CALLBACK_ENV, HAPROXY_ENV, BINARY_ENV):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    same = batched(400, 0.05)

    async def one():
        await same(1)

    assert answered(one) == []
