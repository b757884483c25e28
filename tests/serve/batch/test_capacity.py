"""What a plain deployment with `@ray_slo.batch` functions and its door tell each other."""

import asyncio
import time
from contextvars import copy_context

import pytest

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.core.quantile import FEW_SAMPLES, Quantile
from ray_slo.errors import Expired, RefusedEarly
from ray_slo.serve.batch.capacity import note_request, said
from ray_slo.serve.deadlines import ARRIVED_HEADER, PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy.modes import BINARY_ENV, HAPROXY_ENV, stamp
from tests.serve import clock


@pytest.fixture(autouse=True)
def idle_event_loop(monkeypatch):
    """What one test measured is nothing for the next."""
    after = Quantile(0.95, prior=FEW_SAMPLES)
    monkeypatch.setattr("ray_slo.serve.batch.capacity._after", after)


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

    ((rate, slo_ms, inside_ms),) = answered(one)
    assert (rate, slo_ms) == (pytest.approx(80, rel=0.01), 400)
    assert inside_ms >= 50


def test_a_request_with_several_items_counts_so_often(behind_proxies):
    same, other = batched(400, 0.05), batched(500, 0.05, most=2)

    async def several():
        await asyncio.gather(*(same(i) for i in range(4)), other(1))

    ((rate, slo_ms, _),) = answered(several)
    assert (rate, slo_ms) == (pytest.approx(20, rel=0.01), 500)


def test_more_is_said_as_long_as_larger_batches_may_be_faster(behind_proxies):
    """The requests that form them must come."""

    @ray_slo.batch(400)
    def same(items):
        time.sleep(0.05)
        return items

    async def one():
        await same(1)

    ((rate, _, _),) = answered(one)
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
        answered(one, came(0.97))
    with pytest.raises(Expired):
        answered(one, came(1.1))


def test_only_the_door_says_when_a_request_came(monkeypatch):
    for name in (PROXY_CALLBACK_ENV, HAPROXY_ENV):
        monkeypatch.delenv(name, raising=False)
    same = batched(400, 0.05)

    async def one():
        await same(1)

    answered(one, came(0.5))


def test_if_answers_wait_for_the_event_loop_batches_end_sooner(behind_proxies):
    quick, slow = batched(400, 0.01, most=10), batched(400, 0.3)

    async def busy():
        await quick(1)
        time.sleep(0.02)  # noqa: ASYNC251

    async def many():
        await asyncio.gather(*(busy() for _ in range(10)))

    async def one():
        await slow(1)

    for _ in range(4):
        answered(one)  # so its time is sure, and nothing is tried
    for _ in range(3):
        answered(many)  # the last of them gets its answer after about 180 ms
    with pytest.raises(RefusedEarly, match="would miss"):
        answered(one)


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
