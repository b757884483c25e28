"""How a frontend finds the two schedulers, and when it takes the one that leads as silent."""

import asyncio
from types import SimpleNamespace

import pytest

from ray_slo.serve.channels import candidate
from ray_slo.serve.channels.candidate import Candidate, Silence
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
    ("is_running", "noticed_s"),
    [
        pytest.param(False, 0.35, id="elsewhere, or stopped"),
        pytest.param(True, 2.2, id="a process of this machine that runs: the machine is busy"),
    ],
)
def test_silence_is_noticed(is_running, noticed_s):
    async def main():
        async def never():
            await asyncio.sleep(60)

        leader = SimpleNamespace(answers=0, is_silent=False, is_running=is_running, ping=never)
        loop, noticed = asyncio.get_running_loop(), asyncio.Event()
        silence = Silence(lambda: leader, lambda _: noticed.set())
        since = loop.time()
        silence.watch()
        await noticed.wait()
        silence.close()
        assert leader.is_silent
        return loop.time() - since

    assert clock.run(main()) == pytest.approx(noticed_s, abs=0.06)
