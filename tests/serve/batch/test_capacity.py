"""What answers of a plain deployment say of its `@ray_slo.batch` functions."""

import asyncio
import time
from contextvars import copy_context

import pytest

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.serve.batch.capacity import note_request, said
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy.modes import BINARY_ENV, HAPROXY_ENV


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


def answered(user):
    """The numbers in the header of an answer, when `user` has run for its request."""

    async def request():
        note_request([])
        await user()
        return said()

    found = copy_context().run(asyncio.run, request())
    return [[float(number) for number in value.split(b";")[1:]] for _, value in found]


def test_an_answer_says_what_the_function_can_do(behind_proxies):
    same = batched(400, 0.05)

    async def one():
        await same(1)

    ((rate, slo_ms, inside_ms),) = answered(one)
    assert (rate, slo_ms) == (pytest.approx(80, rel=0.3), 400)
    assert inside_ms >= 50


def test_a_request_with_several_items_counts_so_often(behind_proxies):
    same, other = batched(400, 0.05), batched(500, 0.05, most=2)

    async def several():
        await asyncio.gather(*(same(i) for i in range(4)), other(1))

    ((rate, slo_ms, _),) = answered(several)
    assert (rate, slo_ms) == (pytest.approx(20, rel=0.3), 500)


def test_more_is_said_as_long_as_larger_batches_may_be_faster(behind_proxies):
    """The requests that form them must come."""

    @ray_slo.batch(400)
    def same(items):
        time.sleep(0.05)
        return items

    async def one():
        await same(1)

    ((rate, _, _),) = answered(one)  # so far, larger batches save no time
    assert rate == pytest.approx(2 * 20, rel=0.3)


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
