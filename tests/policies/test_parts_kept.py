"""What the parts of policies answer is what they answered when this was recorded.

Events are random. Times are multiples of powers of two where ties would otherwise depend on the
machine.
"""

import math
import random
from dataclasses import replace

import pytest

from ray_slo.core import (
    Assigned,
    BatchOutcome,
    BatchStatus,
    Cluster,
    Dispatch,
    LatencyProfile,
    Model,
    Request,
    Upstream,
    Variant,
    Worker,
)
from ray_slo.core.rehearsal import Rehearsed, Score
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.policies import auto
from ray_slo.policies.auto_choice import Choice as Chosen
from ray_slo.policies.auto_choice import Evidence
from ray_slo.policies.auto_floor import Floor
from ray_slo.policies.auto_notes import Notes
from ray_slo.policies.auto_traffic import Made, Pace, Recent, Story
from ray_slo.policies.shared.choice import Choice, serving
from ray_slo.policies.shared.paths import parts_of, planned_batches
from ray_slo.policies.shared.refusals import drops
from ray_slo.policies.shared.timers import Timers, earliest
from ray_slo.policies.shared.workers import Sent, take
from tests.kept import condensed, kept

FILE = "policies/parts"
LABELS = ("one", "two", "three", "four")
TREES = (
    Tree(
        "a",
        (
            TreeTask("a", "a", None, {"a0": {"b": 2.0}, "a1": {"b": 0.5}}),
            TreeTask("b", "b", "a"),
            TreeTask("c", "c", "b"),
            TreeTask("d", "b", "a"),
        ),
        {"": 0.5, "gold": 0.25},
    ),
    Tree.of_model("c", {"": 0.125}),
)


def score_of(rng, stretches, parts):
    if rng.random() < 0.05:
        return Score(error="it fails")
    count = rng.choice([parts, parts, parts, 1])
    value = tuple(rng.uniform(0.5, 1.0) * n for n in stretches[:count])
    good = tuple(rng.randint(n // 2, n) for n in ((60, 40) if count == parts else (18, 12)))
    p50_s = None if count < parts else rng.uniform(0.01, 0.05)
    return Score(value, good, (None, 80.0), p50_s, "", rng.choice([None, 0.1, 0.6]))


def rehearsed(rng, number, at):
    stretches = (30, 30, 40)
    arrived = rng.choice([(60, 40), (60, 40), (90, 10), (0, 100)])
    scores = {label: score_of(rng, stretches, 3) for label in LABELS if rng.random() < 0.9}
    scores = {
        label: replace(s, good=tuple(map(min, s.good, arrived))) if s.good else s
        for label, s in scores.items()
    } or {"one": Score(error="it fails")}
    rate = rng.choice([100.0, 110.0, 129.0, 131.0, 300.0])
    return Rehearsed(number, at, rate, ("a", "c"), arrived, stretches, scores)


@pytest.mark.parametrize("seed", range(10))
def test_evidence(seed):
    rng, found, at = random.Random(seed), [], 0.0
    evidence = Evidence(rng.choice([0.0, 0.5, 0.9]))
    evidence.planned = seed % 3 == 0
    evidence.begin("one", ("two", "three"))
    story = Story()
    story.in_force(0.0, Chosen("one", "first"))
    found += [evidence.worth(LABELS), story.told(), story.now()]
    for number in range(1, 30):
        at += rng.choice([0.5, 2.0, 8.0])
        one = rehearsed(rng, number, at)
        found += [evidence.add(one), evidence.worth(LABELS)]
        current = rng.choice(LABELS)
        for lag_s in (0.0, 1.5):
            found.append(list(evidence.choose(current, lag_s)))
            elsewhere = evidence._elsewhere(lag_s)
            able = [label for label in LABELS if label in one.scores]
            if able and not one.scores[able[0]].error:
                found += [elsewhere, *(evidence._standing(s, able[0], elsewhere) for s in able)]
        story.good, story.bad = rng.choice([(0, 0), (150, 0), (199, 1), (200, 0), (300, 80)])
        found += [story.is_calm(), story.surprise()]
        story.add(at, one, current, evidence.choose(current))
        found += [story.told()[-2:], story.surprise()]
    kept(FILE, f"evidence {seed}", condensed(found))


def requests_of(rng, now, first, models="abc"):
    return [
        Request(
            first + i,
            rng.choice(models),
            now,
            now + rng.choice([0.0625, 0.125, 0.5]),
            rng.choice([1, 1, 2, 5]),
            upstream=rng.choice([None, None, None, Upstream("w0", "a0", 0.02)]),
        )
        for i in range(rng.randint(1, 12))
    ]


@pytest.mark.parametrize("slo_s", [0.0625, 0.25, 1.0])
def test_recent_traffic(slo_s):
    rng, found, now, first = random.Random(1), [], 64.0, 0
    recent = Recent()
    recent.slo_s = slo_s
    recent.begin(now)
    again = []
    for i in range(2000):
        burst = 6 if 700 < i < 1300 else 1
        now += rng.choice([1, 2, 4]) / (128 * burst)
        bunch = requests_of(rng, now, first)
        first += len(bunch)
        if i % 50 == 0:
            bunch += again
        again = bunch[:1]
        recent.add(now, bunch)
        if i % 20 == 19:
            surprise = rng.random() < 0.1
            chosen, before, news = recent.due(now, surprise)
            found += [len(chosen), before, news, sum(r.id for r in chosen), recent.rates(now)]
            if chosen:
                found.append(auto._traffic(chosen, before).__dict__)
                rate = len(chosen) / (now - chosen[0].arrival)
                done = Rehearsed(i, now - 0.125, rate, (), (), (), {})
                recent.rehearsed(now, done, news, rng.random() < 0.5)
    kept(FILE, f"recent {slo_s}", condensed(found))


def test_pace_and_what_requests_make():
    rng, found = random.Random(2), []
    pace, made = Pace(), Made(TREES)
    for i in range(900):
        key = rng.choice([("a0", "k"), ("a0", "l"), ("b0", "k")] if i > 20 else [("a0", "k")])
        pace.add(key, rng.choice([0.5, 1.0, 1.25, 2.0]))
        made.finished(key[0], [Request(i, "a", 0.0, 1.0)] * rng.randint(1, 3))
        child = Request(i, "b", 0.0, 1.0, upstream=Upstream("w", "a0", 0.0), task=rng.choice("bd"))
        made.arrived([child, Request(i, "a", 0.0, 1.0)])
        if i % 30 == 4:
            found += [list(pace.measured()), {str(k): v for k, v in made.factors().items()}]
    kept(FILE, "pace", condensed(found))


@pytest.mark.parametrize("least", [0.5, 0.75, 1.0])
def test_the_floor(least):
    rng, found, now = random.Random(3), [], 16.0
    floor = Floor(least)
    floor.covers([0.0625, 0.125])
    takes_s = {"a": 0.25, "b": 0.0625, "c": 0.5}
    kept_back = []
    for i in range(1500):
        now += rng.choice([1, 2, 3]) / 64
        bunch = requests_of(rng, now, 100 * i)
        stay = floor.admitted(now, bunch)
        found += [len(stay), sum(r.id for r in stay)]
        again = floor.admitted(now, stay)
        assert again == stay
        ran = [r for r in stay if r.model != "c" or rng.random() < 0.4]
        if ran:
            took_s = sum(takes_s[r.model] for r in ran) / 8
            end = now + rng.choice([0.03125, 0.25])
            status = BatchStatus.FINISHED
            floor.ran(BatchOutcome(i, ran, end - took_s, end, status))
        left = [r for r in stay if r not in ran]
        kept_back += left[:1]
        floor.ended(left[1:])
        if i % 9 == 0:
            found.append([r.id for r in floor.cancelled([*kept_back[-3:], *bunch[:2]])])
        if i % 5 == 0:
            found.append([r.id for r in floor.refused()])
            found += [dict(floor._caps), dict(floor._shares)]
    kept(FILE, f"floor {least}", condensed(found))


LINES = {
    "a0": LatencyProfile.linear(0.004, 0.02, 16),
    "a1": LatencyProfile.linear(0.002, 0.01, 8),
    "a2": LatencyProfile.linear(0.0005, 0.0025, 16),
    "b0": LatencyProfile.linear(0.003, 0.016, 16),
    "b1": LatencyProfile.linear(0.001, 0.004, 32),
    "c0": LatencyProfile.linear(0.002, 0.008, 16),
}
ACCURACIES = {"a0": 90.0, "a1": 80.0, "a2": 60.0, "b0": 85.0, "b1": 70.0, "c0": 75.0}


def cluster_of(rng, workers, assigns):
    models = []
    for m, slo_s in (("a", 0.125), ("b", 0.25), ("c", 0.0625)):
        variants = tuple(
            Variant(v, {"k": line, "l": line.scaled(1.5)}, ACCURACIES[v])
            for v, line in LINES.items()
            if v[0] == m
        )
        models.append(Model(m, slo_s, variants))
    there = []
    for i in range(workers):
        loaded = frozenset(rng.sample(list(LINES), rng.randint(2, 6)))
        parts = ()
        if assigns and rng.random() < 0.7:
            parts = tuple(
                Assigned(v, rng.choice([1, 4, 99]), rng.choice([None, 8.0, 20.0]))
                for v in rng.sample(list(LINES), rng.randint(1, 2))
            )
        there.append(Worker(f"w{i}", rng.choice("kl"), loaded, parts))
    return Cluster.of(models, there)


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_lanes(seed, assigns):
    rng, found, now = random.Random(seed), [], 32.0
    choice = Choice()
    slos_s = {"a": 0.125, "b": 0.25, "c": 0.0625}
    cluster = cluster_of(rng, 5, assigns)
    shown = serving(cluster)
    choice.change(now, replace(cluster, workers=shown), slos_s)
    for i in range(900):
        now += rng.choice([1, 2, 3]) / 512
        if i % 300 == 299:
            cluster = cluster_of(rng, 5, assigns)
            shown = serving(cluster)
            found.append({w: sorted(worker.loaded) for w, worker in shown.items()})
            choice.change(now, replace(cluster, workers=shown), slos_s)
        if i == 100 and seed % 2:
            choice.expect(now, {"a": 100.0, "b": 30.0})
        choice.look(now)
        model = rng.choice("aaabc")
        lane = choice.models[model].choose(now, rng.choice([0.0078125, 0.03125, 0.125]), 1)
        lane.waiting += rng.random() < 0.3
        choice.missed += rng.random() < 0.02
        choice.busy(f"w{rng.randint(0, 6)}", rng.choice([1, -1]))
        found += [lane.name, lane.tokens]
        if i % 100 == 99:
            found.append(choice.expected())
            for one in choice.lanes.values():
                found += [one.alone_s, one.rate, one.depth, one.speed, one.batch_s, one.reserve]
                found += [one.room, one.idle, one.waiting, one.next_s(now, 2), one.is_full(0.05)]
                one.waiting = 0
    other = Choice()
    other.learn(choice)
    found.append(other._utilisation)
    kept(FILE, f"lanes {seed}, {assigns}", condensed(found))


def test_parts_of_paths():
    rng, found = random.Random(4), []
    for _ in range(40):
        planned = {t: rng.randint(0, 8) / 64 for t in rng.sample("abcd", rng.randint(0, 4))}
        alone = {t: rng.randint(0, 8) / 256 for t in rng.sample("abcd", rng.randint(0, 4))}
        parts = parts_of(TREES, planned, alone, rng.choice([0.0, 0.015625]))
        shortest = {task: (*part[:2], part.slos_s[0]) for task, part in parts.items()}
        found += [shortest, {task: part.deadline(1.0, 1.375) for task, part in parts.items()}]
        lines = {t: LINES[v] for t, v in zip("abcd", rng.sample(list(LINES), 4), strict=True)}
        for tree in TREES:
            found.append(planned_batches(tree, lines, rng.choice([0.0, 0.01])))
    kept(FILE, "paths", condensed(found))


class Item:
    """What a timer belongs to."""

    def __init__(self, name):
        self.name, self.timer_at = name, math.inf


def test_timers_and_batches():
    rng, found, now = random.Random(5), [], 0.0
    timers, more = Timers(), Timers()
    items = [Item(i) for i in range(6)]
    flights = []
    for i in range(400):
        now += rng.choice([0.0, 0.25, 0.5])
        which = rng.choice([timers, timers, more])
        item = rng.choice(items[:4] if which is timers else items[4:])
        at = rng.choice([now + 0.25, now + 0.5, now + 2.0, math.inf])
        which.set(item, at, rng.choice([None, -i]))
        first = timers.first()
        found += [None if first is None else first.name, timers.next_at()]
        found += [earliest((timers.heap, more.heap)), [x.name for x in timers.due(now)]]
        if len(flights) < 3:
            flights.append(Sent(i, "v", now + 0.125, now + rng.choice([0.25, 1.0])))
        if rng.random() < 0.4:
            found.append(take(flights, rng.choice([s.batch_id for s in flights] + [-1]), now))
            found.append(list(flights))
        soonest = rng.choice([None, now, now + 0.25])
        bunch = [Request(j, "m", now, now + rng.choice([0.0, 0.125, 0.25])) for j in range(3)]
        for drop in drops(bunch, now, soonest, 0.0625):
            found += [[r.id for r in drop.requests], drop.reason.name, drop.finish_at]
    kept(FILE, "timers", condensed(found))


def test_notes():
    rng, found = random.Random(6), []
    notes, now = Notes(), 4.0
    cluster = cluster_of(rng, 6, False)
    for i in range(300):
        now += 0.125
        variant = rng.choice(list(LINES))
        count = rng.randint(1, 6)
        bunch = [
            Request(j, variant[0], now - rng.randint(0, 8) / 64, now + rng.randint(0, 8) / 64, 3)
            for j in range(count)
        ]
        worker = f"w{rng.randint(0, 5)}"
        if rng.random() < 0.7:
            notes.idle(now - rng.choice([0.0, 0.03125]), worker)
        d = Dispatch(i, worker, variant, bunch, now, now + rng.choice([0.0625, 1.0]))
        found.append(notes.of(now, d, cluster, idle=rng.random() < 0.8))
    assert len(set(found)) > 50
    kept(FILE, "notes", condensed(found))
