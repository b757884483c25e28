"""What parts of the core answer to random input is what they answered when this was recorded.

Times are multiples of powers of two, so that ties are ties on every machine.
"""

import math
import random

import numpy as np
import pytest

from ray_slo.core import LatencyProfile, Request
from ray_slo.core.demand import Demand, Factors, Holt, Rate, changed
from ray_slo.core.load import Dispersion, LoadMonitor, Ticks
from ray_slo.core.online import OnlineProfile
from ray_slo.core.profiles import (
    _isotonic,
    doubling_sizes,
    median_profile,
    profile_of,
)
from ray_slo.core.quantile import Quantile, QuantileLine, quantile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.trees import Tree, TreeTask
from tests.kept import condensed, kept

FILE = "core/parts"


def figures(profile):
    return [profile.table, profile.max_batch_size, profile.measured_to]


def test_profiles():
    rng, found = random.Random(1), []
    # No latency equals a limit, or half a microsecond: there, processors differ.
    unit = 1.0001237 / 64
    for _ in range(60):
        sizes = rng.sample(range(1, 40), rng.randint(1, 5))
        points = {b: (b + rng.randint(0, 12)) * unit for b in sizes}
        one = LatencyProfile.from_points(points, rng.choice([None, 5, 48]))
        other = LatencyProfile([rng.randint(1, 20) / 64 for _ in range(rng.randint(1, 9))], 1)
        found += [figures(one), figures(other), figures(one.measured), one.fit_linear()]
        found += [other.fit_linear(), figures(other.scaled(1.5)), figures(one.truncated(3))]
        found += [[one.max_batch_within(k / 64) for k in range(0, 40, 3)], one.throughput(1)]
        found += [other.latency(0), other.latency(99), one.to_json(), one.hash]
        near = other.scaled(1.125)
        found += [near.differs(other, by) for by in (0.0625, 0.125, 0.25)]
        found += [other.differs(LatencyProfile(other.table), 1.0), one.differs(other, 9.0)]
        found += [figures(median_profile([one, other, near])), doubling_sizes(rng.randint(0, 40))]
        found.append(_isotonic([rng.randint(0, 8) / 4 for _ in range(rng.randint(1, 12))]))
    known = {"v": 1, "m/w": 2}
    found += [profile_of(known, v, "m") for v in ("v", "w", "x")]
    found += [profile_of({"a": 3}, "x", "m", alone=alone) for alone in (True, False)]
    kept(FILE, "profiles", condensed(found))


@pytest.mark.parametrize("measured_to", [0, 4, 32])
@pytest.mark.parametrize("quantile_", [0.5, 0.95])
def test_profiles_that_learn(measured_to, quantile_):
    rng, found = random.Random(2), []
    prior = LatencyProfile.linear(1 / 256, 1 / 64, 32, measured_to)
    learned = OnlineProfile(prior, quantile=quantile_, window=8, stale_after=20)
    for i in range(240):
        size = rng.choice([1, 1, 2, 3, 4] if i < 60 else [1, 2, 7, 8, 16] if i < 160 else [1, 30])
        learned.observe(size, prior.latency(size) * rng.choice([0.75, 1.0, 1.25, 3.0]))
        if i % 4 == 0:
            found += [figures(learned.profile), learned.samples]
    kept(FILE, f"learned {measured_to}, {quantile_}", condensed(found))


def test_quantiles():
    rng, found = random.Random(3), []
    for prior in (0, 6):
        one, line = Quantile(0.9, 16, prior), QuantileLine(0.75, 40, prior)
        for i in range(160):
            found += [one.value(0.5), line.line(0.5)]
            size = rng.randint(1, 32)
            one.add(rng.randint(0, 64) / 64)
            line.add(size, (size * (i % 70 > 20) + rng.randint(0, 6)) / 64)
            if i == 120:
                one.forget()
                line.forget()
    found += [quantile([3.0, 1.0, 2.0, 8.0], q) for q in (0.0, 0.1, 0.25, 0.5, 0.8, 1.0)]
    kept(FILE, "quantiles", condensed(found))


@pytest.mark.parametrize("kind", ["mean", "ewma", "peak"])
def test_load(kind):
    rng, found, now = random.Random(4), [], 8.0
    monitor = LoadMonitor(kind, 0.5, min_arrivals=6, hold_windows=3)
    found.append(monitor.rate(now))
    for i in range(600):
        now += rng.choice([0.0, 0.03125, 0.0625]) * (4 if 200 < i < 260 else 1)
        monitor.arrived(now, rng.randint(1, 3))
        if i % 3 == 0:
            found.append(monitor.rate(now + rng.choice([0.0, 0.125, 2.0])))
    kept(FILE, f"load {kind}", condensed(found))


def test_ticks_and_dispersion():
    rng, found, now = random.Random(5), [], 8.0
    ticks, burst = Ticks(now, 0.25), Dispersion(0.25, 32)
    counted = Dispersion(1.0, 6)
    for i in range(3000):
        slow = 800 < i < 1000
        now += rng.choice([1, 2, 3]) / (8 if slow else 512 if i > 2000 else 64)
        burst.arrived(now, rng.choice([1, 1, 5]))
        counted.counted(rng.randint(0, 9))
        if i % 10 == 0:
            found += [burst.value, burst.error, burst.windows, ticks.passed(now), ticks.next_at]
            found += [counted.value, counted.windows]
    kept(FILE, "dispersion", condensed(found))


@pytest.mark.parametrize("kind", ["ewma", "peak", "holt"])
@pytest.mark.parametrize("enough", [4, 300])
def test_rates(kind, enough):
    rng, found, now = random.Random(6), [], 4.0
    rate = Rate(kind, 5.0, enough=enough)
    demand = Demand(kind, 2.0, hold_windows=3, horizon_s=4.0)
    for i in range(300):
        over_s = rng.choice([0.25, 0.5, 1.0])
        now += over_s
        level = 1 if i < 100 else 6 if i < 150 else 0 if i < 170 else 3
        count = level * rng.randint(0, 9)
        rate.counted(now, over_s, count)
        demand.arrived(now, count)
        found += [rate.value(now), rate.value(now + 2.5), rate.value(now, 4.0), rate.seen]
        found += [rate.differs(now, planned) for planned in (0.0, 5.0, 9.0, 40.0)]
        found += [demand.rate(now), demand.rate(now + 0.5)]
    kept(FILE, f"rate {kind}, {enough}", condensed(found))


def test_changes_trends_and_factors():
    rng, found, now = random.Random(7), [], 2.0
    for planned in (0.0, 4.0, 25.0, 100.0, 400.0):
        found += [changed(planned, n, 2.0) for n in range(0, 1000, 7)]
        found += [changed(planned, n, 0.5, 0.25, 1.0) for n in range(0, 200, 3)]
    holt = Holt(0.5, 0.25, 0.125)
    found.append(holt.rate(now))
    for i in range(200):
        now += rng.choice([0.125, 0.25, 1.5])
        holt.arrived(now, i % 9)
        found += [holt.rate(now), holt.rate(now, 4.0)]
    prior = {"d": {"a": 2.0, "b": 0.0}, "e": {"a": 1.0}, "f": {}}
    for siblings in (True, False):
        factors = Factors(prior, prior_requests=16, memory_requests=500, siblings=siblings)
        for _ in range(60):
            factors.observe("d", rng.randint(0, 40), {"a": rng.randint(0, 90), "b": 3})
            if rng.random() < 0.3:
                factors.observe("e", 5, {"a": rng.randint(0, 9)})
            found += [factors.of(variant) for variant in prior]
    kept(FILE, "changes", condensed(found))


@pytest.mark.parametrize("seed", range(4))
def test_queues_keep_the_order_of_deadlines(seed):
    """Compared with a list that is sorted again after each step. Equal deadlines are frequent."""
    rng, queue, there = random.Random(seed), DeadlineQueue(), []
    for i in range(1500):
        if rng.random() < 0.55 or not there:
            r = Request(i, "m", 0.0, rng.randint(0, 12) / 4, rng.randint(1, 3))
            queue.push(r)
            there.append(r)
            there.sort(key=lambda r: r.deadline)  # stable: equal ones in the order of arrival
        elif rng.random() < 0.4:
            gone = rng.choice(there)
            queue.remove(gone)
            there.remove(gone)
        elif rng.random() < 0.5:
            assert queue.pop() is there.pop(0)
        else:
            count = rng.randint(1, len(there))
            assert [r.id for r in queue.take(count)] == [r.id for r in there[:count]]
            del there[:count]
        assert len(queue) == len(there)
        assert [r.id for r in queue] == [r.id for r in there]
        if there:
            assert queue.head is there[0]


def test_trees():
    tasks = (
        TreeTask("a", "m", None, {"v": {"b": 2.0}}),
        TreeTask("b", "n", "a"),
        TreeTask("c", "m", "b"),
        TreeTask("d", "o", "a"),
    )
    tree = Tree("t", tasks, {"": 0.5, "gold": 0.25}, {("v", "w"): 80.0})
    found = [tree.root, tree.models, tree.parents, [t.name for t in tree.order]]
    found += [[tree.children(t), tree.path(t), t in tree] for t in "abcd"]
    found += [list(tree.streams()), tree.to_json(), Tree.from_json(tree.to_json()) == tree]
    found += [tree["a"].factor("v", "b"), tree["a"].factor("v", "d"), tree["b"].factor("x", "c")]
    kept(FILE, "trees", condensed(found))
    assert not np.isnan(condensed([math.nan])[1])
