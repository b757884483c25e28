"""Models whose items have sizes: profiles by the sum of sizes, requests with their sizes,
and requests that are too large."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from ray_slo.core import Decision, Dispatch
from ray_slo.errors import BadInput
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.frontend import Frontend
from ray_slo.serve.worker import batches, registration
from ray_slo.serve.worker import worker as worker_module
from ray_slo.serve.worker.worker import Worker
from tests.serve.fakes import Silent, Wire, surroundings
from tests.serve.loops import in_loop

LARGEST = 16


class Rank:
    """An item is a list; the answer is its length."""

    calls: list[list[int]] = []  # noqa: RUF012 - of the process

    @staticmethod
    def preprocess(item):
        return item if item == "no list" else list(item)

    @staticmethod
    def size(item):
        return len(item) if isinstance(item, list) else item.size

    @staticmethod
    def example_input(size=1):
        return [0] * size

    def __call__(self, items):
        Rank.calls.append(sizes := [len(item) for item in items])
        time.sleep(0.0005 * sum(sizes))
        return sizes


class Loop(Rank):
    async def __call__(self, items):
        return super().__call__(items)


class OneByOne:
    """A policy that notes the sizes of requests, and what it is told of batches."""

    serves_late = True

    def __init__(self):
        self.queue, self.sizes, self.busy, self.count = [], [], False, 0

    def requests_arrived(self, now, requests):
        self.queue += requests
        self.sizes += [r.size for r in requests]

    def requests_cancelled(self, now, requests):
        self.queue = [r for r in self.queue if r not in requests]

    def batch_finished(self, now, worker, outcome):
        self.busy = False

    def cluster_changed(self, now, cluster):
        OneByOne.newest = self
        self.worker = next(iter(cluster.workers), None)

    def decide(self, now):
        if self.busy or not self.queue or self.worker is None:
            return Decision([])
        self.busy, self.count = True, self.count + 1
        return Decision([Dispatch(self.count, "w0", "m", [self.queue.pop(0)], now, now + 0.1)])


@pytest.fixture
def running(monkeypatch):
    context = SimpleNamespace(app_name="app", deployment="m-worker", replica_tag="w0", rank=0)
    fake = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(worker_module, "serve", fake)
    monkeypatch.setattr(batches, "WorkerMetrics", Silent)
    link = SimpleNamespace(
        report=lambda report: None, heartbeat=lambda beat: asyncio.sleep(0), close=lambda: None
    )
    monkeypatch.setattr(registration, "WorkerLink", lambda *args: link)

    async def run(scenario, user_class=Rank):
        model = {"callable": user_class, "latency_slo_ms": 5000, "max_batch_size": LARGEST}
        spec = parse_spec(
            {"models": {"m": model}, "policy": OneByOne, "name": "m", "profile_seconds": 0.2}
        )
        Rank.calls.clear()
        worker = Worker.__new__(Worker)
        await worker.__init__(spec, "default", "m")
        front = Frontend.__new__(Frontend)
        await front.__init__(spec, {"default": Wire(worker)}, surroundings("m"))
        try:
            await scenario(front, worker)
        finally:
            front.__del__()
            worker.__del__()

    return run


@in_loop
@pytest.mark.parametrize("user_class", [Rank, Loop])
async def test_a_worker_measures_one_item_of_each_size(running, user_class):
    async def scenario(front, worker):
        *measured, pair = Rank.calls
        assert {len(sizes) for sizes in measured} == {1} and pair == [1, 1]
        assert {1, 4, LARGEST} <= {sizes[0] for sizes in measured}
        (profile,) = worker.profiles.values()
        assert (profile.max_batch_size, profile.measured_to) == (LARGEST, LARGEST)
        assert profile(LARGEST) > profile(1)

    await running(scenario, user_class)


@in_loop
async def test_requests_carry_their_sizes_and_profiles_learn_by_them(running):
    async def scenario(front, worker):
        profile = worker.models.loaded["m"].profile
        answers = await asyncio.gather(*(front([0] * size) for size in (3, 1, 12)))
        assert answers == [3, 1, 12]
        assert sorted(OneByOne.newest.sizes) == [1, 3, 12]
        octaves = {octave for octave, seen in profile._octaves.items() if seen}
        assert octaves == {0, 2, 4}  # sizes 1, 3–4 and 9–16

    await running(scenario)


@in_loop
async def test_what_is_too_large_or_has_no_size_is_bad_input(running):
    async def scenario(front, worker):
        with pytest.raises(BadInput, match=r"the item's size is 17; 1 to 16 can be served") as bad:
            await front([0] * 17)
        assert bad.value.field == "item"
        with pytest.raises(BadInput, match="the item's size is 0"):
            await front([])
        with pytest.raises(BadInput, match="the item has no size: 'str' object has no attribute"):
            await front("no list")
        assert OneByOne.newest.sizes == []

    await running(scenario)


def test_a_size_that_is_no_static_method_is_refused():
    class Wrong:
        def size(self, item):
            return 1

        def __call__(self, items):
            return items

    spec = parse_spec({"models": {"m": {"callable": Wrong, "latency_slo_ms": 100}}})
    with pytest.raises(ValueError, match=r"Wrong.size must be a @staticmethod"):
        spec.models["m"].load()


@pytest.mark.parametrize("policy", ["ramsis"])
def test_a_policy_that_counts_requests_is_refused_where_they_have_sizes(policy):
    model = {"callable": Rank, "latency_slo_ms": 100}
    spec = parse_spec({"models": {"m": model}, "policy": policy})
    says = f"models.m.callable: Rank.size: policy '{policy}' counts requests, not the items in them"
    with pytest.raises(ValueError, match=says):
        build_app_from_spec(spec)
