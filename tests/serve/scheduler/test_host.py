"""The asyncio host of a policy: the events it passes on, their order, and how often it decides."""

import asyncio
import contextvars
import logging
import math

import pytest

from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    Preempt,
    Request,
    Variant,
)
from ray_slo.serve.scheduler.host import PolicyHost
from tests.serve import clock


def cluster(workers=1):
    model = Model("m", 1.0, (Variant("v", {"default": LatencyProfile([0.1])}),))
    return Cluster.uniform([model], workers)


class Script:
    """Logs its events; answers `decide` from a list of functions of `now`."""

    serves_late = True

    def __init__(self, *decisions):
        self.log = []
        self.decisions = list(decisions)

    def requests_arrived(self, now, requests):
        self.log.append(("arrived", [r.id for r in requests]))

    def requests_cancelled(self, now, requests):
        self.log.append(("cancelled", [r.id for r in requests]))

    def batch_finished(self, now, worker, outcome):
        self.log.append(("finished", worker))

    def cluster_changed(self, now, cluster):
        self.log.append(("cluster", len(cluster.workers)))

    def decide(self, now):
        self.log.append("decide")
        return self.decisions.pop(0)(now) if self.decisions else Decision()


def nothing(now):
    return Decision()


def request(i, now=0.0):
    return Request(i, "m", now, now + 1)


def run(policy, events, **kwargs):
    """Host `policy`, call `events(host)` once the first round is over, and let it settle."""

    async def main():
        arguments = {"on_dispatch": lambda d: None, "on_drop": lambda d: None, **kwargs}
        host = PolicyHost(policy, cluster(), **arguments)
        await asyncio.sleep(0.001)
        policy.log.clear()
        events(host)
        await asyncio.sleep(0.05)
        host.close()
        return host

    return clock.run(main())


OUTCOME = BatchOutcome(1, [], 0.0, 1.0)


def test_the_cluster_comes_first():
    policy = Script()

    async def main():
        PolicyHost(policy, cluster(2), on_dispatch=print, on_drop=print).submit(request(1))
        await asyncio.sleep(0.001)

    clock.run(main())
    assert policy.log == [("cluster", 2), ("arrived", [1]), "decide"]


def test_one_round_per_turn_in_a_fixed_order():
    policy = Script()
    one, two = request(1), request(2)

    def events(host):
        host.submit(one)
        host.cancel(one)
        host.set_cluster(cluster(3))
        host.finished("w0", OUTCOME)
        host.submit(two)

    run(policy, events)
    assert policy.log == [
        ("finished", "w0"),
        ("cluster", 3),
        ("arrived", [1, 2]),
        ("cancelled", [1]),
        "decide",
    ]


def test_what_finishes_on_a_worker_that_left_is_ignored():
    policy = Script()
    run(policy, lambda host: host.finished("gone", OUTCOME))
    assert policy.log == ["decide"]


def test_wakes_once_at_wake_at_and_not_after_close():
    times = []

    def soon(now):
        times.append(now)
        return Decision(wake_at=now + 0.01)

    policy = Script(nothing, soon, lambda now: times.append(now) or Decision())
    run(policy, lambda host: host.submit(request(1)))
    assert len(times) == 2
    assert times[1] >= times[0] + 0.009

    policy = Script(nothing, soon)

    def submit_and_close(host):
        host.submit(request(1))
        host.close()
        host.submit(request(2))

    run(policy, submit_and_close)
    assert policy.log == []


def test_an_event_replaces_the_timer():
    policy = Script(nothing, lambda now: Decision(wake_at=now + 0.02))

    def events(host):
        host.submit(request(1))
        asyncio.get_running_loop().call_later(0.005, host.submit, request(2))

    run(policy, events)
    assert policy.log.count("decide") == 2


def test_a_policy_that_wants_to_be_woken_at_once_does_not_starve_the_loop():
    policy = Script(*[lambda now: Decision(wake_at=now)] * 100_000)
    run(policy, lambda host: None)
    assert 2 <= policy.log.count("decide") < 1000


def test_settle_turns_collect_more_events():
    policy = Script()

    def events(host):
        host.submit(request(1))
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, host.submit, request(2))

    run(policy, events, settle_turns=3)
    assert policy.log == [("arrived", [1, 2]), "decide"]


def test_actions_are_carried_out_in_order_even_if_one_raises(caplog):
    one, two = request(1), request(2)
    dispatch = Dispatch(1, "w0", "v", [one], 0.0, 0.1)
    drop = Drop([two], DropReason.SHED)
    policy = Script(nothing, lambda now: Decision([dispatch, Preempt("w0", "x"), drop]))
    seen = []

    def fail(action):
        raise OSError("cannot send")

    with caplog.at_level(logging.ERROR):
        run(
            policy,
            lambda host: host.submit(one),
            on_dispatch=fail,
            on_drop=seen.append,
            on_preempt=seen.append,
        )
    assert seen == [Preempt("w0", "x"), drop]
    assert "cannot send" in caplog.text


def test_callbacks_may_call_the_host():
    async def main():
        one = request(1)
        policy = Script(
            lambda now: Decision([Drop([one], DropReason.SHED)]),
        )
        host = PolicyHost(
            policy, cluster(), on_dispatch=print, on_drop=lambda d: host.submit(d.requests[0])
        )
        await asyncio.sleep(0.01)
        return policy.log

    assert clock.run(main()) == [("cluster", 1), "decide", ("arrived", [1]), "decide"]


def test_a_policy_that_raises_is_reported_and_asked_again(caplog):
    def broken(now):
        raise ArithmeticError("no idea")

    errors = []
    policy = Script(nothing, broken)

    def events(host):
        host.submit(request(1))
        asyncio.get_running_loop().call_later(0.005, host.submit, request(2))

    run(policy, events, on_error=errors.append)
    assert [str(e) for e in errors] == ["no idea"]
    assert policy.log[-2:] == [("arrived", [2]), "decide"]


def test_time_never_goes_back():
    clock = iter([5.0, 4.0, 6.0, *[6.0] * 100])
    seen = []
    policy = Script(*[lambda now: seen.append(now) or Decision()] * 3)

    def events(host):
        host.submit(request(1))
        asyncio.get_running_loop().call_later(0.005, host.submit, request(2))

    run(policy, events, clock=lambda: next(clock))
    assert seen == [5.0, 5.0, 6.0]


@pytest.mark.parametrize("own", [False, True])
def test_callbacks_do_not_see_the_context_of_a_caller(own):
    who = contextvars.ContextVar("who", default="nobody")
    context = contextvars.Context()
    context.run(who.set, "owner")
    seen = []
    policy = Script(nothing, lambda now: Decision([Drop([], DropReason.SHED)], math.inf))

    def events(host):
        who.set("caller")
        host.submit(request(1))

    run(policy, events, on_drop=lambda d: seen.append(who.get()), context=context if own else None)
    assert seen == ["owner" if own else "nobody"]
