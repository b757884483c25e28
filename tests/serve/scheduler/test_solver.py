"""Rehearsals of `auto` in another process: the results, failures and messages."""

import asyncio
import itertools
import json
import logging

import pytest

from ray_slo.core.names import import_attr
from ray_slo.core.rehearsal import Rehearsal, Rehearsed, Score
from ray_slo.serve.scheduler import solver as solver_module
from ray_slo.serve.scheduler.solver import Solver
from ray_slo.serve.scheduler.watch import Watch
from ray_slo.simulation.rehearsal import solve
from tests.serve.fakes import beat
from tests.serve.loops import in_loop, settle, until
from tests.serve.scheduler.hosted import report, running, submits

# The first guess refuses what is not served at once.
CANDIDATES = [{"policy": "deferred", "kwargs": {"margin_ms": 988.0}}, "eager"]
AUTO = {"name": "auto", "kwargs": {"candidates": CANDIDATES}}


class Kept(Watch):
    def __init__(self):
        self.rehearsals, self.settings = [], []

    def rehearsed(self, held, took_s):
        assert took_s >= 0
        self.rehearsals.append(held)

    def setting(self, before, now):
        self.settings.append((before.split()[0] if before else "", now.split()[0]))


async def load(scheduler, box, done, first=0):
    """Requests come, and batches end, until `done()`; all that were sent, and what came of them."""
    sent, granted, refused = first, [], []
    while not done():
        scheduler.heartbeat(beat())
        scheduler.hear("a", submits(*range(sent, sent + 10)))
        sent += 10
        for _ in range(4):
            await asyncio.sleep(0.01)
            for message in box.take():
                if hasattr(message, "worker"):
                    granted += message.request_ids
                    scheduler.report(report(message))
                else:
                    refused += message.request_ids
    return sent, granted, refused


@in_loop
async def test_it_rehearses_and_swaps_and_says_why():
    kept = Kept()
    async with running(AUTO, watch=kept) as (scheduler, box):
        scheduler.heartbeat(beat())
        await settle()
        assert scheduler.status()["auto"]["why"] == "first guess for this application"

        def swapped():
            return scheduler.status()["auto"]["setting"].startswith("eager")

        sent, granted, refused = await load(scheduler, box, swapped)
        seen = scheduler.status()["auto"]
        assert "value in time" in seen["why"] or "1 % bad" in seen["why"]
        assert (seen["held"], seen["failed"], seen["error"]) == (1, 0, None)
        assert json.loads(json.dumps(seen)) == seen  # as `ray-slo status --json` prints it
        (rehearsal,) = seen["rehearsals"]
        assert rehearsal["before"].startswith("deferred")
        assert rehearsal["setting"] == seen["setting"]
        assert {label.split()[0] for label in rehearsal["tried"]} == {"deferred", "eager"}
        assert 0 <= seen["for_s"] < 10 and 0 <= rehearsal["ago_s"] < 10
        await until(lambda: kept.settings == [("", "deferred"), ("deferred", "eager")])
        assert kept.rehearsals == [True]
        more = await load(
            scheduler, box, lambda: scheduler.status()["counts"]["granted"] > 100, first=sent
        )
        sent, granted, refused = more[0], granted + more[1], refused + more[2]
        # Each request is answered once, also those that waited when the policy changed.
        for _ in range(200):
            await asyncio.sleep(0.01)
            for message in box.take():
                if hasattr(message, "worker"):
                    granted += message.request_ids
                    scheduler.report(report(message))
                else:
                    refused += message.request_ids
            if len(granted) + len(refused) == sent:
                break
        assert sorted(granted + refused) == list(range(sent))
        assert len(granted) > 100


@pytest.mark.parametrize("why", ["raises", "is too slow"])
@in_loop
async def test_a_rehearsal_that_fails_changes_nothing_and_is_said(why, monkeypatch, caplog):
    monkeypatch.setattr(solver_module, "_PATIENCE_S", 0.05)
    asked = []

    async def aside(function, problem):
        assert function is solve
        asked.append(problem)
        if why == "raises":
            raise RuntimeError("Traceback of a task\n  File …\nValueError: no core left")
        await asyncio.sleep(10)

    kept = Kept()
    with caplog.at_level(logging.WARNING, logger="ray_slo"):
        async with running(AUTO, watch=kept, aside=loaded(aside)) as (scheduler, box):
            await load(scheduler, box, lambda: kept.rehearsals)
            await load(scheduler, box, iter([False] * 20 + [True]).__next__, first=100_000)
            seen = scheduler.status()["auto"]
    assert kept.rehearsals == [False]  # it is not tried again at once
    assert len(asked) == 1
    assert seen["setting"].startswith("deferred")
    assert (seen["held"], seen["failed"], seen["rehearsals"]) == (0, 1, [])
    says = "ValueError: no core left" if why == "raises" else "it was not over after 0.05 s"
    assert seen["error"] == says
    assert f"failed, and changes nothing: {says}" in caplog.text


def loaded(aside):
    """`aside`, where the solver is loaded already."""

    async def after(function, argument):
        return None if function is import_attr else await aside(function, argument)

    return after


@in_loop
async def test_the_solver_is_loaded_when_the_first_problem_comes():
    called, kept = [], Kept()

    async def aside(function, argument):
        called.append((function, argument))
        raise ValueError("it cannot be loaded")

    async with running(AUTO, watch=kept, aside=aside) as (scheduler, box):
        scheduler.heartbeat(beat())
        await asyncio.sleep(0.3)
        assert called == []
        await load(scheduler, box, lambda: kept.rehearsals)
        (function, name), (after, _) = called
        assert function(name) is after is solve
        assert scheduler.status()["auto"]["failed"] == 1


class Wants:
    """A policy that always wants a rehearsal."""

    def __init__(self):
        self.number = 0

    def wanted(self):
        self.number += 1
        return [Rehearsal(self.number, None, (), ())]


class FakeHost:
    def __init__(self):
        self.policy, self.answers = Wants(), []

    def solved(self, answers):
        self.answers += answers


@in_loop
async def test_after_failures_it_waits_twice_as_long_each_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(solver_module, "monotonic", lambda: clock[0])
    fails, tried = [True] * 4, []

    async def aside(_function, problem):
        tried.append(clock[0])
        if fails.pop(0) if fails else False:
            raise ValueError("no")
        return Rehearsed(problem.number, 0.0, 1.0, (), (), (), {"x": Score(error="TypeError: y")})

    host, solver = FakeHost(), Solver(loaded(aside), Watch())
    while len(tried) < 5:
        solver.look(host)
        await settle()
        clock[0] += 0.5
    pauses = [b - a for a, b in itertools.pairwise(tried)]
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    await settle()
    assert [answer.number for answer in host.answers] == [host.policy.number]
    assert solver.status(host, 0.0) == {}  # it does not say what is in force


@in_loop
async def test_after_a_rehearsal_it_rests_four_times_as_long(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(solver_module, "monotonic", lambda: clock[0])
    took_s, begun = [3.0, 0.25, 0.5, 0.5], []

    async def aside(_function, problem):
        begun.append(clock[0])
        clock[0] += took_s[len(begun) - 1]
        return Rehearsed(problem.number, 0.0, 1.0, (), (), (), {"x": Score(error="TypeError: y")})

    host, solver = FakeHost(), Solver(loaded(aside), Watch())
    while len(begun) < 4:
        solver.look(host)
        await settle()
        clock[0] += 0.25
    assert [b - a for a, b in itertools.pairwise(begun)] == [15.0, 1.25, 2.5]
