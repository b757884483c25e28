"""A frontend's channel to the schedulers of several groups."""

import asyncio
import math

from ray_slo.planning.brains.brain import Routing
from ray_slo.serve.channels.channel import Channel
from ray_slo.serve.channels.group_channel import GroupedChannel
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import Capacity, Grant, Refusal, Submit
from tests.serve import clock

MODEL = {"callable": "apps:Tasks", "latency_slo_ms": 500}
BOTH = Routing(1, {"l": "a", "m": "b"}, ("a", "b"), True)


class Scheduler(Channel):
    """Keeps what it is told, and says what a test wants it to say."""

    def __init__(self, spec, app_key, client, on_messages, on_reset):
        self.name, self.policy = app_key.rpartition("#")[2], spec.policy.name
        self.say, self.reset = on_messages, on_reset
        self.told = []

    def _say(self, event):
        self.told.append(event)

    async def join(self, beat):
        raise AssertionError("workers of groups find their schedulers themselves")

    async def capacity(self):
        return {model: Capacity(10.0, frozenset(self.name)) for model in "lm"}

    async def clocks(self):
        return {f"of {self.name}": 1.0}

    async def status(self):
        if self.name == "b":
            raise ConnectionError("it restarts")
        return {"queued": {"l": 2}, "overhead_ms": -3.0, "policy": self.policy}

    def close(self):
        self.told.append("bye")


class World:
    """A channel, the schedulers that it reaches, and what its frontend hears."""

    def __init__(self):
        self.schedulers, self.heard, self.again = {}, [], []
        groups = {"a": {"models": ["l"], "policy": "eager"}, "b": {"models": ["m"]}}
        spec = parse_spec({"models": {"l": MODEL, "m": MODEL}, "groups": groups})
        self.channel = GroupedChannel(
            spec, "app#front", "f", self.heard.extend, self.again.extend, self.connect
        )

    def connect(self, *args):
        scheduler = Scheduler(*args)
        self.schedulers[scheduler.name] = scheduler
        return scheduler


def grant(request_id, model):
    return Grant("batch", "w", "cpu", model, model, (request_id,), 0, 1, 1, 0.0, 0.1, 0.2)


def test_requests_go_where_their_model_is_served_and_are_counted_until_they_are_granted():
    async def scenario():
        world = World()
        world.channel.route(BOTH)
        for i, model in enumerate("lml"):
            world.channel.submit(Submit(i + 1, model, 0.5))
        a, b = world.schedulers["a"], world.schedulers["b"]
        assert [[s.request_id for s in scheduler.told] for scheduler in (a, b)] == [[1, 3], [2]]
        assert world.channel.queued == {("l", "a"): 2, ("m", "b"): 1}
        a.say([grant(1, "l")])
        world.channel.cancel(2)
        assert world.channel.queued == {("l", "a"): 1}
        world.channel.worker_lost("w")  # of the group that granted it
        assert (len(a.told), len(b.told)) == (3, 2)
        a.reset()
        assert world.again == [3]
        assert not world.channel.queued  # until it is sent again, which may be too late
        world.channel.close()
        assert a.told[-1] == b.told[-1] == "bye"

    clock.run(scenario())


def test_requests_wait_for_a_route_until_it_is_too_late():
    async def scenario():
        world = World()
        for i, (model, budget_s) in enumerate([("l", 0.5), ("l", 5.0), ("m", 5.0), ("l", 5.0)]):
            world.channel.submit(Submit(i, model, budget_s))
        await asyncio.sleep(0.4)
        assert world.heard == world.again == []
        await asyncio.sleep(0.2)
        assert [(m.request_ids, m.reason) for m in world.heard] == [((0,), "no_worker")]
        world.channel.cancel(3)
        world.channel.route(BOTH._replace(routes={"l": "a"}, complete=False))
        assert world.again == [1]
        world.channel.submit(Submit(1, "l", 4.0))  # with what is left of its time
        assert world.schedulers["a"].told == [Submit(1, "l", 4.0)]
        await asyncio.sleep(10.0)
        assert [m.request_ids for m in world.heard] == [(0,), (2,)]

    clock.run(scenario())


def test_a_request_whose_client_left_before_there_was_a_route_leaves_nothing():
    """Its deadline may be a day ahead."""

    async def scenario():
        world, loop = World(), asyncio.get_running_loop()
        before = sum(not timer.cancelled() for timer in loop._scheduled)
        for number in range(10):
            for _ in range(2):  # a new planner's first word has it submitted again
                world.channel.submit(Submit(number, "l", 86_400.0))
            world.channel.cancel(number)
        assert sum(not timer.cancelled() for timer in loop._scheduled) == before
        world.channel.route(BOTH)
        assert not world.again and not world.heard

    clock.run(scenario())


def test_a_planner_that_is_new_and_knows_of_no_routes_takes_none_away():
    async def scenario():
        world = World()
        world.channel.route(BOTH)
        world.channel.route(BOTH._replace(routes={}, complete=False))
        world.channel.submit(Submit(1, "l", 0.5))
        await asyncio.sleep(0)
        assert world.heard == []
        assert world.schedulers["a"].told == [Submit(1, "l", 0.5)]
        assert world.channel.routes == BOTH.routes  # from which the planner learns them
        world.channel.route(BOTH._replace(routes={"l": "b"}))
        assert world.channel.routes == {"l": "b", "m": "b"}

    clock.run(scenario())


def test_a_refusal_for_want_of_workers_after_a_move_is_no_refusal():
    async def scenario():
        world = World()
        world.channel.route(BOTH)
        world.channel.submit(Submit(1, "l", 0.5))
        world.channel.submit(Submit(2, "l", 0.5))
        a = world.schedulers["a"]
        a.say([Refusal((1,), "would_miss", math.nan)])
        world.channel.route(Routing(2, {"l": "b", "m": "b"}, ("a", "b"), True))
        a.say([Refusal((2,), "no_worker", math.nan)])
        assert [m.request_ids for m in world.heard] == [(1,), ()]
        assert world.again == [2]
        world.channel.submit(Submit(2, "l", 0.5))
        assert world.channel.queued == {("l", "b"): 1}

    clock.run(scenario())


def test_what_groups_say_of_themselves_is_put_together():
    async def scenario():
        world = World()
        joining = asyncio.ensure_future(world.channel.join(None))
        await asyncio.sleep(1)
        assert not joining.done()  # there are no routes yet
        world.channel.route(BOTH)
        assert {n: s.policy for n, s in world.schedulers.items()} == {"a": "eager", "b": "auto"}
        await joining
        assert await world.channel.clocks() == {"of a": 1.0, "of b": 1.0}
        capacity = await world.channel.capacity()
        assert {model: c.workers for model, c in capacity.items()} == {"l": {"a"}, "m": {"b"}}
        status = await world.channel.status()
        assert (status["queued"], status["overhead_ms"], status["policy"]) == (
            {"l": 2},
            -3.0,
            "eager",
        )
        assert status["groups"]["a"]["models"] == ["l"]
        assert status["groups"]["b"]["state"] == "unreachable"

    clock.run(scenario())
