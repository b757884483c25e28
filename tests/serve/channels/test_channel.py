"""A frontend's channel to a scheduler actor, without Ray."""

import asyncio
from types import SimpleNamespace

from ray_slo.serve.channels import candidate
from ray_slo.serve.channels.channel import ActorChannel
from ray_slo.serve.config.resolve import parse_spec
from tests.serve.fakes import beat
from tests.serve.loops import in_loop


class Actor:
    """Notes what is called."""

    def __init__(self):
        self.calls, self.there = [], asyncio.Event()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._call(name)))

    async def _call(self, name):
        self.calls.append(name)
        if name == "poll":
            await self.there.wait()
            await asyncio.sleep(0.01)
            return "epoch", 2, 0, []
        return ("node", "") if name == "where" else None


@in_loop
async def test_a_worker_registers_itself_with_a_scheduler_that_is_an_actor(monkeypatch):
    actor = Actor()
    monkeypatch.setattr(candidate, "get_or_create_scheduler", lambda *args: actor)
    monkeypatch.setattr(candidate, "find_actor", lambda name: actor)
    monkeypatch.setattr(candidate, "this_node", lambda: "")
    spec = parse_spec({"models": {"m": {"callable": "a:B", "latency_slo_ms": 100}}})
    link = ActorChannel(spec, "app#m", "client", lambda messages: None, lambda: None)
    joining = asyncio.ensure_future(link.join(beat()))
    await asyncio.sleep(0.1)
    assert not joining.done()  # there is no scheduler yet
    actor.there.set()
    await asyncio.wait_for(joining, 1.0)
    assert "poll" in actor.calls and "heartbeat" not in actor.calls
    link.close()
    await asyncio.sleep(0.1)
