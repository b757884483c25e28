"""When a frontend takes the scheduler that it waits for as silent."""

import asyncio
from types import SimpleNamespace

import pytest

from ray_slo.serve.channels.candidate import Silence
from tests.serve import clock


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
