"""No worker stays unused, whichever process dies or hangs, and whichever message is lost.

Frontends, workers, scheduler and their channels are the product's own: see `processes`. A sequence
of requests and faults is followed by quiet. Then every request has been answered once, if its
frontend lives, and every worker that lives is given work again.

`RAY_SLO_SEQUENCES=100000 pytest tests/serve/test_no_worker_lost.py` runs 100,000 sequences.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

import ray_slo
from ray_slo.errors import Expired, SLOError
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import epoch_of
from tests.serve import processes

SEQUENCES = int(os.environ.get("RAY_SLO_SEQUENCES", "0"))
QUIET_S = 25.0  # after which everything is as it was
PROBES = 4  # the first may be refused: who was slow, or hung, is believed to be so still
LATE_S = 1.1  # after its deadline a request has its answer


class Model:
    """An item is (name, seconds, what happens)."""

    ran: ClassVar = []  # (name, time when it began)
    booked: ClassVar = []  # batches of several schedulers on one worker at once

    async def __call__(self, items):
        self.ran.extend((name, time.monotonic()) for name, _, _ in items)
        for _ in range(4):
            ids = processes.here().target.batches.ids
            if len(set(map(epoch_of, ids))) > 1:
                self.booked.append(ids)
            await asyncio.sleep(max(seconds for _, seconds, _ in items) / 4)
            ray_slo.checkpoint()
        if any(what == "fails" for _, _, what in items):
            raise ValueError("it fails")
        return [name for name, _, _ in items]


POLICIES = ["deferred", "flex", "eager"]


def spec_of(policy, embedded):
    return parse_spec(
        {
            "name": "m",
            "models": {
                "m": {"callable": Model, "latency_slo_ms": 1000, "max_batch_size": 4},
                "probe": {"callable": Model, "latency_slo_ms": 4000, "max_batch_size": 1},
            },
            "policy": policy,
            "scheduler": "embedded" if embedded else "actor",
            "num_frontends": 1 if embedded else 3,
        }
    )


SPECS = {(p, e): spec_of(p, e) for p in POLICIES for e in (True, False)}
PLACES = ["f0", "f1", "f2", "w0", "w1", "s0", "s1"]
METHODS = ["execute", "report", "poll", "events", "heartbeat", "slo_heartbeat", "preempt"]
METHODS += ["lead", "news", "ping"]
STEPS = ["leaves", "arrives", "answers", "returns"]
WAITS_S = [0.003, 0.03, 0.3, 1.2, 4.0, 11.0]
LATES_S = [0.02, 0.6, 2.0, 6.0, 11.0]
ASK = st.tuples(
    st.integers(0, 3),  # the frontend, or all of them
    st.integers(1, 5),
    st.sampled_from([0.01, 0.01, 0.1, 1.0, 5.0]),
    st.sampled_from([1000, 300, 5000]),
    st.sampled_from(["", "", "", "fails"]),
)
TRAP = st.tuples(
    st.sampled_from(METHODS),
    st.sampled_from(STEPS),
    st.sampled_from(["kill", "stop", "late", "lose"]),
    st.sampled_from(LATES_S),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), ASK),
    st.tuples(st.just("ask into"), st.tuples(ASK, TRAP, st.sampled_from([0.0, *WAITS_S]))),
    st.tuples(st.just("trap"), TRAP),
    st.tuples(st.sampled_from(["kill", "stop", "go"]), st.sampled_from(PLACES)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("turns"), st.integers(1, 30)),
    st.tuples(st.just("wait"), st.sampled_from(WAITS_S)),
)


class Sequence:
    """What happens to one application."""

    def __init__(self, spec):
        self.world = processes.World(spec, 3, 2)
        self.asked = []
        Model.ran.clear()
        Model.booked.clear()

    def ask(self, place, model, seconds, slo_ms, what=""):
        process = self.world.at(place)
        if process.target is None or not process.is_ready:
            return
        name = len(self.asked)
        request = Asked(process, name, time.monotonic() + slo_ms / 1e3, what)
        self.asked.append(request)
        process.spawn(request.run(model, seconds, slo_ms))

    async def do(self, kind, about):
        world = self.world
        if kind == "ask":
            frontend, count, seconds, slo_ms, what = about
            places = world.frontends if frontend == 3 else world.frontends[frontend : frontend + 1]
            for place in places * count:
                self.ask(place, "m", seconds, slo_ms, what)
        elif kind == "ask into":
            ask, trap, seconds = about
            await self.do("trap", trap)
            await self.do("ask", ask)
            await self.do("wait", seconds)
        elif kind == "cancel":
            if about < len(self.asked):
                self.asked[-1 - about].cancel()
        elif kind == "trap":
            method, step, action, seconds = about
            world.traps.setdefault((method, step), []).append((action, seconds))
        elif kind == "turns":
            for _ in range(about):
                await asyncio.sleep(0)
        elif kind == "wait":
            await asyncio.sleep(about)
        elif about in world.places:
            process = world.at(about)
            if kind == "kill":
                world.kill(process)
            elif kind == "stop":
                process.stop()
            else:
                process.go()

    async def quiet(self):
        """Until all is as it was.

        Raises:
            AssertionError: it never is.
        """
        world = self.world
        world.traps.clear()
        for place in world.places:
            world.at(place).go()
        until = time.monotonic() + QUIET_S
        await asyncio.sleep(0.25)
        while (unwell := await self.unwell()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.25)
        assert not unwell, unwell

    async def unwell(self):
        """What is not as it should be."""
        world, scheduler = self.world, await self.world.scheduler_status()
        unwell = [a for a in self.asked if not a.answers and not a.process.is_dead]
        unwell += [p for p in world.places.values() if p.is_dead or not p.is_ready]
        if scheduler is None:
            return [*unwell, "no scheduler"]
        unwell += ["a batch is in flight"] * scheduler["in_flight"]
        unwell += [b for w in world.living_workers() if w.is_ready for b in w.target.batches.ids]
        unwell += ["a call is on its way"] * (world.delayed > 0)
        return unwell + [
            p for p in map(world.at, world.worker_places) if p.name not in scheduler["workers"]
        ]

    async def probe(self):
        """Every worker is given work: each does one of as many requests at once, which
        is the only way to have them in time."""
        world = self.world
        ran = Counter()
        for place in world.worker_places:
            process = world.at(place)
            loaded = process.target.models.loaded["probe"]

            async def call(items, process=process):
                ran[process.place] += 1
                await asyncio.sleep(2.5)
                return [name for name, _, _ in items]

            loaded.call = call
        before = len(self.asked)
        for _ in range(PROBES):
            for i, _ in enumerate(world.worker_places):
                self.ask(world.frontends[-i % len(world.frontends)], "probe", 2.5, 4000)
            await asyncio.sleep(6.0)
            if ran.keys() == set(world.worker_places):
                break
        said = [a.answers for a in self.asked[before:]]
        assert ran.keys() == set(world.worker_places), (ran, said)
        assert not any(isinstance(a, Expired) for answers in said for a in answers), said

    def check_answers(self):
        assert not Model.booked
        for asked in self.asked:
            assert len(asked.answers) == 1 or asked.process.is_dead, asked
            if asked.answers and not asked.process.was_still:
                assert asked.answered_at <= asked.deadline + LATE_S, asked
            # It may have been on its way to a worker when its client left.
            later = [at for name, at in Model.ran if name == asked.name and at > asked.left_at]
            assert len(later) <= 1, asked


class Asked:
    """A request, in its frontend."""

    def __init__(self, process, name, deadline, what):
        self.process, self.name, self.deadline, self.what = process, name, deadline, what
        self.answers, self.answered_at = [], None
        self.task, self.is_cancelled, self.left_at = None, False, math.inf

    def __repr__(self):
        return f"request {self.name} at {self.process}: {self.answers}"

    async def run(self, model, seconds, slo_ms):
        self.task = asyncio.current_task()
        item = (self.name, seconds, self.what)
        try:
            answer = await self.process.target(item, model=model, latency_slo_ms=slo_ms)
            assert answer == self.name
        except SLOError as error:
            answer = error
        except ValueError as error:
            assert str(error) == "it fails"
            answer = error
        except asyncio.CancelledError:
            assert self.is_cancelled or not self.process.place
            answer = "cancelled"
        self.answers.append(answer)
        self.answered_at = time.monotonic()

    def cancel(self):
        if self.task is not None:
            self.is_cancelled, self.left_at = True, time.monotonic()
            self.task.cancel()


async def live_through(spec, operations):
    sequence = Sequence(spec)
    world = sequence.world
    try:
        await world.start()
        for operation in operations:
            await sequence.do(*operation)
        await sequence.quiet()
        await sequence.probe()
        sequence.check_answers()
    finally:
        await world.end()


@pytest.fixture(scope="module", autouse=True)
def in_place_of_ray():
    logging.disable()  # pytest would keep every line of every sequence
    with processes.in_place_of_ray():
        yield
    logging.disable(logging.NOTSET)


REPORT_IS_LOST = ("trap", ("report", "leaves", "lose", 0.02))
ONE = ("ask", (0, 1, 0.01, 1000, ""))


@pytest.mark.slow
@pytest.mark.timeout(0 if SEQUENCES else 240)
@settings(
    max_examples=SEQUENCES or 40,
    derandomize=not SEQUENCES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(sorted(SPECS)), st.lists(OPERATIONS, min_size=5, max_size=25))
@example(("eager", False), [REPORT_IS_LOST, ONE, ("wait", 0.3)])
@example(("flex", False), [("trap", ("execute", "leaves", "kill", 0.02)), ONE, ("wait", 0.3)])
def test_no_worker_is_lost(which, operations):
    note(f"{which} {operations}")
    processes.run(live_through(SPECS[which], operations))


def test_heartbeats_that_are_lost_cost_no_report():
    async def main():
        sequence = Sequence(SPECS["eager", False])
        world = sequence.world
        try:
            await world.start()
            world.traps["heartbeat", "answers"] = [("lose", 0.0)] * 100
            for i in range(5):
                sequence.ask("f0", "m", 0.3 + 0.05 * i, 5000)
                await asyncio.sleep(0.6)
                assert sequence.asked[i].answers == [i]
                assert (await world.scheduler_status())["in_flight"] == 0
        finally:
            await world.end()

    processes.run(main())


def test_a_request_is_answered_that_came_while_the_scheduler_was_out_of_reach():
    async def main():
        sequence = Sequence(SPECS["eager", False])
        world = sequence.world
        try:
            await world.start()
            world.traps["poll", "answers"] = [("lose", 0.0)]
            for _ in range(2):
                sequence.ask("f0", "m", 0.01, 5000)
                await asyncio.sleep(0.15)
            await asyncio.sleep(2.0)
            assert [asked.answers for asked in sequence.asked] == [[0], [1]]
        finally:
            await world.end()

    processes.run(main())


def answered_when(fault, count=60):
    """Ask every 20 ms; the fault strikes the leading scheduler after 0.3 s. Return when requests
    were answered, in seconds after the fault."""

    async def main():
        sequence = Sequence(SPECS["deferred", False])
        world = sequence.world
        try:
            await world.start()
            await asyncio.sleep(2.0)
            leader = world.leader()
            struck = time.monotonic() + 0.3
            for i in range(count):
                if i == 15:
                    fault(world, leader)
                sequence.ask(f"f{i % 3}", "m", 0.01, 1000)
                await asyncio.sleep(0.02)
            await asyncio.sleep(2.0)
            assert world.leader() is not leader
            term = world.leader().target._lease.term
            leader.go()
            await asyncio.sleep(1.0)
            assert world.leader().target._lease.term == term  # it is not obeyed, and says so
            assert leader.is_dead or not leader.target._lease.term
            sequence.check_answers()
            assert all(a.answers == [a.name] for a in sequence.asked), sequence.asked
            return sorted(a.answered_at - struck for a in sequence.asked)
        finally:
            await world.end()

    return processes.run(main())


@pytest.mark.parametrize(
    ("fault", "gap_s"),
    [(lambda world, leader: world.kill(leader), 0.2), (lambda _, leader: leader.stop(), 0.5)],
    ids=["killed", "frozen"],
)
def test_a_scheduler_that_is_lost_or_frozen_costs_no_request(fault, gap_s):
    at = answered_when(fault)
    assert max(b - a for a, b in itertools.pairwise(at)) < gap_s
