"""The users' code at a frontend: whose code does not end gets an answer all the same."""

import asyncio
import threading
import time

import pytest

from ray_slo.errors import Expired
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.hooks import Hooks
from ray_slo.serve.frontend.ledger import Asked

go = threading.Event()


class Hangs:
    @staticmethod
    def preprocess(item):
        go.wait(60)
        return item

    def __call__(self, items):
        return items


class HangsAsync(Hangs):
    @staticmethod
    async def preprocess(item):
        await asyncio.sleep(60)


async def ask(hooks, is_async):
    asked = Asked("m", time.monotonic(), 0.01)
    with pytest.raises(Expired, match="the application's own code at the frontend"):
        await asyncio.wait_for(hooks.preprocessed("m", asked, 1, is_own=True), 30)
    go.set()
    if not is_async:  # the thread is free again
        later = Asked("m", time.monotonic(), 60.0)
        assert await hooks.preprocessed("m", later, 2, is_own=True) == 2


@pytest.mark.parametrize("hangs", [Hangs, HangsAsync])
def test_a_hook_that_hangs_ends_its_request_after_the_deadline(hangs):
    go.clear()
    model = {"callable": f"{__name__}:{hangs.__name__}", "latency_slo_ms": 10}
    hooks = Hooks(parse_spec({"name": "app", "models": {"m": model}}))
    try:
        asyncio.run(ask(hooks, hangs is HangsAsync))
    finally:
        go.set()
        hooks.close()
