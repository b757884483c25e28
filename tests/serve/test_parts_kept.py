"""What pure parts of serving answer to random input is what they answered when recorded."""

import math
import random
from functools import partial

import pytest

from ray_slo.core import BatchStatus, Drop, DropReason, LatencyProfile, Request
from ray_slo.errors import RefusedEarly
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.deadlines import (
    HEADERS,
    TimeLimits,
    left_ms,
    positive,
    slo_class_of,
    spent,
    tightest,
    without,
)
from ray_slo.serve.frontend.answer import Answer
from ray_slo.serve.frontend.congestion import Congestion
from ray_slo.serve.messages import BatchReport, Heartbeat
from ray_slo.serve.proxy.gate import Gate, Known, Rank
from ray_slo.serve.scheduler.learned import Learned
from ray_slo.serve.scheduler.roster import Quarantine, Roster, WorkerState
from ray_slo.serve.watch.lately import Lately, Seen, together
from ray_slo.serve.watch.screen import screen
from tests.kept import condensed, kept
from tests.serve.watch.states import state

FILE = "serve/parts"
LINE = LatencyProfile.linear(0.001, 0.01, 8)


@pytest.mark.parametrize("as_text", [True, False])
def test_time_limits_of_headers(as_text):
    rng, found = random.Random(1), []
    names = [name for name, header in HEADERS.items() if header.said_by != "mark"]
    values = ["", "0", "1", "250", "0.5", "-1", "nan", "inf", "1e3", "1_0", "x", "9" * 40, "1e12"]
    for _ in range(400):
        drawn = [(rng.choice([*names, "accept"]), rng.choice(values)) for _ in range(3)]
        headers = drawn if as_text else [(k.encode(), v.encode()) for k, v in drawn]
        for proxied in (True, False):
            limits = TimeLimits(headers, proxied=proxied)
            found += [limits.own_s(), limits.timeout_s(), limits.named_s()]
            found += [limits.budget_s(0.25), limits.budget_s(None)]
        strict = TimeLimits(headers, strict=True)
        for read in (strict.own_s, strict.timeout_s, partial(slo_class_of, headers, strict=True)):
            try:
                found.append(read())
            except Exception as said:
                found.append(str(said))
        found += [slo_class_of(headers), without(headers, "door"), without(headers, "failover")]
        found += [spent(headers, rng.choice([0.0, 0.125])), spent(headers, 0.25, 0.75)]
    found += [left_ms(100.0, 0.0625), left_ms(1.0, 2.0), tightest(None, 2.0, 1.0), tightest()]
    found += [positive(value) for value in (None, "", "0", "2", -1, math.inf, "x", [1], 1e-9)]
    kept(FILE, f"headers {as_text}", condensed(found))


@pytest.mark.parametrize("slo_s", [0.0625, 0.5])
def test_congestion(slo_s):
    rng, found, now = random.Random(2), [], 4.0
    congestion = Congestion()
    for i in range(2000):
        slow = 300 < i < 900 or 1200 < i < 1230
        now += rng.choice([1, 2]) / 128 * (20 if i % 500 == 499 else 1)
        congestion.answered(now, 0.03125 if slow else 0.00390625, slo_s)
        found.append(congestion.limit)
    assert min(found) < math.inf
    kept(FILE, f"congestion {slo_s}", condensed(found))


@pytest.mark.parametrize("window", [math.inf, 2])
@pytest.mark.parametrize("most", [1000, 4])
def test_the_gate(window, most):
    rng, found, now = random.Random(3), [], 8.0
    gate, inside, waits = Gate(most), [], []
    gate.window = window

    def told(error):
        found.append("on" if error is None else [str(error), error.reason, error.retry_after_s])

    for _ in range(1500):
        now += rng.choice([0, 1, 2]) / 64
        known = Known(
            rng.choice([None, 2.0, 64.0]), rng.choice([None, 3, 20]), rng.choice([0.0, 0.125])
        )
        deadline = now + rng.choice([0.0, 0.125, 0.25, 1.0])
        rank = Rank.KNOWN if rng.random() < 0.8 else rng.choice(list(Rank))
        kind = rng.random()
        if kind < 0.3:
            try:
                ticket = gate.walk_in(now, deadline, known, rank)
            except RefusedEarly as said:
                ticket = told(said)
            if ticket is not None:
                inside.append(ticket)
        elif kind < 0.6:
            ticket = gate.arrive(now, deadline, told, known, rank)
            if ticket is not None:
                waits.append(ticket)
        elif kind < 0.8:
            found += [gate.can_turn, gate.turn(now)]
        elif kind < 0.85:
            refused = gate.hopeless(now, deadline, known)
            found.append(refused and str(refused))
        elif places := rng.choice([inside, waits]):
            gate.leave(places.pop(rng.randrange(len(places))))
        inside += [ticket for ticket in waits if ticket.inside]
        waits = [ticket for ticket in waits if not ticket.inside]
        found += [gate.waiting, gate.inside]
    found.append(str(gate.too_late()))
    kept(FILE, f"gate {window}, {most}", condensed(found))


def test_what_happened_lately():
    rng, found, now = random.Random(4), [], 100.0
    many = [Lately(), Lately()]
    for i in range(900):
        now += rng.choice([1, 2, 8]) / 64
        one = rng.choice(many)
        latency_ms = rng.choice([0.001, 5.0, 90.0, 120.0, 400.0])
        if rng.random() < 0.6:
            figures = rng.choice("vw"), 80.0, rng.choice([0, 1, 8]), 2.0, 5.0, latency_ms, 120.0
            name = rng.choice(["a", "b"])
            answer = Answer(None, name, *figures, slo_class=rng.choice(["", "gold"]))
            one.answered(now, [answer])
        elif rng.random() < 0.5:
            stream = rng.choice(["a", "a@gold", "b"])
            one.unanswered(now, stream, "dropped", f"reason {i % 40}", rng.randint(1, 3))
        else:
            one.predicted(now, "a", rng.choice("vw"), 10.0, rng.choice([8.0, 16.0]))
        if i % 25 == 0:
            seen = [
                Seen(
                    k + 2,
                    {"a": 3.0 * k, "b": 1.0},
                    {"a": 80.0 + k, "b": 70.0},
                    {"a": (9, k), "b": (0, 0)},
                    each.counts(now),
                    each.refused(now),
                )
                for k, each in enumerate(many)
            ]
            found += [together(seen), together([])]
    kept(FILE, "lately", condensed(found))


def test_what_a_scheduler_learns():
    rng, found, now = random.Random(5), [], 10.0
    roster, quarantine = Roster(), Quarantine()
    variants = {v: {"load": "a:B", "accuracy": 80 + i} for i, v in enumerate(("x", "y"))}
    spec = parse_spec(
        {
            "models": {
                "m": {"callable": "a:B", "latency_slo_ms": 100, "variants": variants},
                "n": {"callable": "a:B", "latency_slo_ms": 300},
            }
        }
    )
    learned = Learned(spec, roster)
    names = list(spec.variants())
    for i in range(400):
        now += rng.choice([0.125, 0.5, 20.0 if i % 50 == 0 else 0.25])
        worker, kind = rng.choice([("w0", "gpu"), ("w1", "gpu"), ("w2", "cpu")])
        has = {v: LINE.truncated(rng.choice([4, 8])) for v in rng.sample(names, 2)}
        beat = Heartbeat(worker, kind, has, [], preempt_delay_s=rng.choice([0.0, 0.015625]))
        found.append(learned.meet(beat.profiles, kind))
        found.append(roster.heard(worker, WorkerState.of(beat, frozenset(has), now)))
        status = rng.choice([BatchStatus.FINISHED, BatchStatus.FAILED, BatchStatus.PREEMPTED])
        size = rng.randint(1, 9)
        took_s = rng.choice([0.015625, 0.0625, 0.5])
        variant = rng.choice(names)
        report = BatchReport(
            str(i), worker, variant, status, size, took_s, took_s, [(size, took_s)]
        )
        learned.ended(report, kind, now)
        found.append(learned.returned(report, took_s + rng.choice([0.0, 0.03125]), -0.015625))
        if i % 7 == 0:
            learned.preempted(rng.choice([0.0078125, 0.03125]))
            quarantine.add(worker, now)
        found += [quarantine.holds("w0", now + 0.25), learned.take_news(now)]
        if i % 20 == 0:
            refused = Request(i, "m", now - 1, now - 1 + rng.choice([0.03125, 0.09375]))
            found.append(learned.tries(Drop([refused], DropReason.WOULD_MISS), [], now))
            cluster = learned.cluster()
            found += [cluster.workers, cluster.delay, cluster.preempt_delay_s]
            found += [
                [m.latency_slo_s, [v.accuracy for v in m.variants]] for m in cluster.models.values()
            ]
            found += [{k: c.rate for k, c in learned.capacity().items()}, learned.status(0.0)]
            found += [roster.silent(now - 1), roster.status(now, {}), roster.largest("n", "gpu")]
    kept(FILE, "learned", condensed(found))


STATES = {
    "usual": {},
    "alone": {"frontends": 1, "num_frontends": 1, "mode": "fast", "plan": None},
    "starting": {
        "starting": {
            "models": ["find"],
            "workers": {"w": {"kind": "gpu", "state": "loads f"}},
            "deployments": {"gpu": {"running": 1, "message": "waits for a GPU"}},
        }
    },
    "groups": {
        "groups": {
            "g": {
                "models": ["find"],
                "wanted_models": ["find", "spell"],
                "draining": ["join"],
                "workers": ["w0", "w1"],
                "queued": {"find": 3, "join": 1},
                "counts": {"granted": 7},
            }
        }
    },
    "auto": {
        "auto": {
            "setting": "price",
            "why": "most value in time",
            "for_s": 12.4,
            "held": 3,
            "failed": 1,
            "error": "it broke",
            "rehearsals": [
                {
                    "ago_s": 30.0 - 10 * i,
                    "setting": "price",
                    "requests": 400 + i,
                    "predicted_bad": 0.0123,
                    "measured_bad": None if i else 0.0456,
                    "tried": {
                        "price": {"value": 0.8123, "bad": 0.0123, "p50_ms": 21.25, "whole": True},
                        "eager": {"value": 0.5, "bad": 0.25, "p50_ms": None, "whole": False},
                        "flex": {"error": "it has no profile"},
                    },
                }
                for i in range(2)
            ],
        }
    },
    "memory": {
        "workers": {
            "w": {
                "kind": "gpu",
                "variants": ["f", "find/s"],
                "batches_in_flight": 2,
                "running": [],
                "assigned": [{"variant": "f", "batch_size": 8, "load": 1.0}],
                "last_heartbeat_s": 5.0,
                "memory": {
                    "variants": {
                        "f": {"load_mb": 120.0, "batch_mb": 30.0},
                        "s": {"load_mb": 60.0, "batch_mb": 45.0},
                    },
                    "room_mb": 400.0,
                    "device": "gpu 0",
                    "largest_batch": {"f": 4},
                    "left_out": {"x": "too large"},
                },
            }
        }
    },
    "profiles": {
        "profiles": {
            "find/f@gpu": {
                "latency_1_ms": 10.25,
                "latency_max_ms": 90.5,
                "max_batch_size": 16,
                "measured_to": 8,
                "samples": 12,
            }
        }
    },
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("model", [None, "find", "read"])
def test_screens(name, model):
    given = {key: value for key, value in state(**STATES[name]).items() if value is not None}
    kept(FILE, f"screen {name}, {model}", condensed(screen("app", given, model).to_json()))
