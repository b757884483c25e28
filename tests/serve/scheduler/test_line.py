"""Calls of a scheduler actor: over its socket if it is on this machine, otherwise through Ray."""

import asyncio
from types import SimpleNamespace

import pytest

from ray_slo.serve.direct import Disconnected, Listener
from ray_slo.serve.scheduler.line import SchedulerLine
from tests.serve.loops import in_loop, until


class Actor:
    """An actor with a socket, or without; notes the way of every call."""

    def __init__(self, has_socket):
        self.came, self._has_socket = [], has_socket
        self.listener = Listener(self._answer)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._call(name, *args)))

    async def _call(self, name, *args):
        if name == "where":
            if self._has_socket:
                await self.listener.begin()
            return "node", self.listener.address
        self.came.append(("ray", name, *args))
        return "by ray"

    async def _answer(self, asked):
        self.came.append(("socket", *asked))
        if asked[0] == "poll":
            await asyncio.sleep(60 if asked[1] == "forever" else 0)
        return "by socket"


@in_loop
async def test_calls_go_over_the_socket_in_order():
    actor = Actor(has_socket=True)
    line = SchedulerLine(actor)
    await line.connect()
    assert line.node == "node"
    line.tell("events", 1)
    line.tell("events", 2)
    assert await line.ask("poll", 3) == "by socket"
    assert actor.came == [("socket", "events", 1), ("socket", "events", 2), ("socket", "poll", 3)]
    waiting = asyncio.ensure_future(line.ask("poll", "forever"))
    await until(lambda: len(actor.came) == 4)
    actor.listener.close()  # the actor dies
    with pytest.raises(Disconnected):
        await waiting


@in_loop
async def test_calls_go_through_ray_where_there_is_no_socket():
    actor = Actor(has_socket=False)
    line = SchedulerLine(actor)
    await line.connect()
    line.tell("report", 1)
    assert await line.ask("poll", 2) == "by ray"
    assert actor.came == [("ray", "report", 1), ("ray", "poll", 2)]
    line.close()


@in_loop
async def test_what_a_socket_cannot_carry_goes_through_ray():
    actor = Actor(has_socket=True)
    line = SchedulerLine(actor)
    await line.connect()
    line.tell("report", lambda: 1)  # plain pickle cannot take it
    await until(lambda: actor.came)
    assert actor.came[0][:2] == ("ray", "report")
    line.close()
    actor.listener.close()
    await until(lambda: not actor.listener.is_heard)
