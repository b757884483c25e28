"""A frontend that notices that the leader is silent."""

import asyncio

import pytest
import ray

from ray_slo.serve.channels.candidate import Silence
from tests.serve import clock


class Leader:
    """Answers pings after some seconds; infinite: never."""

    def __init__(self, answers_s, *, is_running=False):
        self.is_running = is_running
        self.answers, self.is_silent, self.pings, self.answers_s = 0, False, 0, answers_s

    async def ping(self):
        self.pings += 1
        if self.answers_s is None:
            raise ray.exceptions.RayActorError
        await asyncio.sleep(self.answers_s)
        self.answers += 1


def silent_after(leader, *, stall_s=0.0, for_s=30.0):
    """When the leader is called silent, in seconds; None if it never is."""

    async def main():
        loop, found = asyncio.get_running_loop(), []
        silence = Silence(lambda: leader, lambda who: found.append((who, loop.time())))
        since = loop.time()
        silence.watch()
        if stall_s:
            await asyncio.sleep(0.12)
            loop.now += stall_s  # this event loop does not run
        await asyncio.sleep(for_s)
        silence.close()
        return found[0][1] - since if found else None

    return clock.run(main())


def test_one_that_answers_no_ping_is_silent_after_a_moment():
    leader = Leader(1e9)
    assert 0.2 < silent_after(leader) < 0.4
    assert leader.is_silent


def test_one_that_runs_on_this_machine_has_two_seconds():
    assert 1.9 < silent_after(Leader(1e9, is_running=True)) < 2.5


def test_one_that_answers_is_not():
    leader = Leader(0.002)
    assert silent_after(leader) is None
    assert leader.pings > 10


@pytest.mark.parametrize("stall_s", [0.5, 5.0])
def test_time_in_which_the_frontend_did_not_run_does_not_count(stall_s):
    assert silent_after(Leader(0.002), stall_s=stall_s, for_s=2.0) is None


def test_the_patience_is_learned():
    assert silent_after(Leader(0.1), for_s=10.0) is None  # every answer takes that long


def test_a_leader_that_was_only_slow_is_given_more_time_for_a_while():
    async def main():
        loop, leader, found = asyncio.get_running_loop(), Leader(1e9), asyncio.Queue()
        waiting = []
        silence = Silence(lambda: waiting[0] if waiting else None, found.put_nowait)
        for pause_s in (0.5, 0.5, 70.0, 0.0):  # after a minute, it is forgotten
            waiting.append(leader)
            since = loop.time()
            silence.watch()
            await found.get()
            waiting.clear()
            noticed_s.append(loop.time() - since)
            silence.was_wrong()
            await asyncio.sleep(pause_s)
        silence.close()

    noticed_s = []
    clock.run(main())
    first, second, third, later = noticed_s
    assert first < second < third
    assert later == pytest.approx(first, abs=0.1)


def test_nothing_is_asked_while_no_request_waits():
    async def main():
        leaders = [Leader(1e9)]
        silence = Silence(lambda: None, leaders.append)
        silence.watch()
        await asyncio.sleep(5.0)
        assert leaders[1:] == [] and leaders[0].pings == 0

    clock.run(main())


def test_a_ping_that_fails_is_left_to_the_poll():
    assert silent_after(Leader(None), for_s=0.2) is None
