"""How a frontend finds the two schedulers."""

import asyncio
from types import SimpleNamespace

import pytest

from ray_slo.serve.channels import candidate
from ray_slo.serve.channels.candidate import Candidate
from tests.serve import clock


@pytest.mark.parametrize(
    ("first_after_s", "is_there", "made", "after_s"),
    [
        pytest.param(20.0, False, [(1, "n0")], 20.0, id="apart from a slow first one"),
        pytest.param(99.0, False, [(1, "")], 30.0, id="there is no first"),
        pytest.param(99.0, True, [], 0.0, id="another frontend has made it"),
    ],
)
def test_the_spare_is_made_on_another_node(monkeypatch, first_after_s, is_there, made, after_s):
    calls = []

    def find(name):
        if not is_there:
            raise ValueError(name)

    monkeypatch.setattr(candidate, "this_node", lambda: "n1")
    monkeypatch.setattr(candidate, "find_actor", find)
    monkeypatch.setattr(
        candidate, "get_or_create_scheduler", lambda spec, app, *about: calls.append(about)
    )

    async def main():
        loop, first = asyncio.get_running_loop(), SimpleNamespace(node="", found=asyncio.Event())

        def is_found():
            first.node = "n0"
            first.found.set()

        timer = loop.call_later(first_after_s, is_found)
        channel = SimpleNamespace(other_than=lambda spare: first)
        spare = Candidate(None, "app#m", "client", 1, channel)
        spare._poller.cancel()
        since = loop.time()
        await spare._find()
        timer.cancel()
        return loop.time() - since

    assert clock.run(main()) == pytest.approx(after_s, abs=0.01)
    assert calls == made


@pytest.mark.parametrize(
    ("at", "nodes", "ends"),
    [
        pytest.param("n0", ["n0", "n1"], 1, id="beside the leader: once"),
        pytest.param("n1", ["n0", "n1"], 0, id="apart already"),
        pytest.param("n0", ["n0"], 0, id="there is one node"),
    ],
)
def test_a_spare_beside_the_leader_ends_if_there_is_another_node(monkeypatch, at, nodes, ends):
    killed = []
    monkeypatch.setattr(candidate, "this_node", lambda: "n1")
    monkeypatch.setattr(candidate, "usable_nodes", lambda: nodes)
    monkeypatch.setattr(candidate.ray, "kill", killed.append)

    async def main():
        channel = SimpleNamespace(other_than=lambda spare: SimpleNamespace(node="n0"))
        spare = Candidate(None, "app#m", "client", 1, channel)
        spare._poller.cancel()
        spare._line, spare.actor = SimpleNamespace(node=at), "actor"
        for _ in range(5):
            await spare._keep_apart()

    clock.run(main())
    assert killed == ["actor"] * ends
