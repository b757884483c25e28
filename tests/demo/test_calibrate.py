"""The search for the best way to batch, and what plain Serve holds with it."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ray_slo.demo.calibrate import FINE, FIRST, FULL, QUICK, STEP, Climb, race, round_up, ways
from ray_slo.demo.systems import DEFAULT_WAIT_S, Way

WAYS = ways(0.2)


def probe_of(holds, rng, disturbed=lambda i: False):
    """Bad rates of ways that hold `holds[way]`, with noise, and the probes that were made."""
    probes = []

    def probe(way, rate):
        probes.append(way)
        if disturbed(len(probes)):
            return 0.5
        over = rate / (holds[way] * rng.normal(1.0, 0.03)) - 1
        return 0.0 if over <= 0 else FINE + over

    return probe, probes


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_best_way_wins_at_about_what_it_holds(seed, best):
    holds = {way: 80.0 if i == best else 55.0 for i, way in enumerate(WAYS)}
    probe, probes = probe_of(holds, np.random.default_rng(seed))
    found, climbs = race(WAYS, 100.0, probe, FULL.alive)
    assert found.way == WAYS[best]
    assert found.held == pytest.approx(80.0, rel=STEP**1.5 - 1)
    assert [climb.way for climb in climbs] == WAYS
    assert len(probes) == sum(FULL.alive) == sum(len(climb.tried) for climb in climbs)


@pytest.mark.parametrize("seed", range(8))
def test_one_disturbed_probe_does_not_spoil_it(seed):
    holds = {way: 80.0 if i == 2 else 40.0 for i, way in enumerate(WAYS)}
    rng = np.random.default_rng(seed)
    when = 1 + rng.integers(sum(FULL.alive))
    probe, _ = probe_of(holds, rng, disturbed=lambda i: i == when)
    found, _ = race(WAYS, 100.0, probe, FULL.alive)
    assert found.way == WAYS[2]
    assert found.held == pytest.approx(80.0, rel=STEP**2 - 1)


def test_ways_take_turns():
    probe, probes = probe_of(dict.fromkeys(WAYS, 50.0), np.random.default_rng(0))
    race(WAYS, 100.0, probe, FULL.alive)
    assert probes[: len(WAYS)] == WAYS
    last = probes[-2 * FULL.alive.count(2) :]
    rounds = [set(last[i : i + 2]) for i in range(0, len(last), 2)]
    assert all(len(ways) == 2 for ways in rounds)


def test_a_rate_goes_up_where_it_is_held_and_down_where_it_is_not():
    climb = Climb(WAYS[0], 100.0, (30.0, 160.0))
    climb.told(FINE)
    assert climb.rate == pytest.approx(100 * STEP)
    climb.told(0.5)
    climb.told(0.5)
    assert climb.rate == pytest.approx(100 / STEP)
    assert climb.held == pytest.approx(100.0)
    for _ in range(30):
        climb.told(1.0)
    assert climb.rate == climb.held == 30.0
    for _ in range(30):
        climb.told(0.0)
    assert climb.held == 160.0


def test_the_first_rate_is_below_the_capacity():
    found, _ = race(WAYS[:1], 200.0, lambda way, rate: 0.0, (1,))
    assert found.tried == [(FIRST * 200.0, 0.0)]
    assert FIRST < 1


def test_default_and_blocking_are_among_the_ways():
    assert Way(DEFAULT_WAIT_S) in WAYS and Way(DEFAULT_WAIT_S, off_loop=False) in WAYS
    assert len(WAYS) == FULL.alive[0] > QUICK.alive[0]
    names = [way.name for way in WAYS]
    assert len(set(names)) == len(names)
    assert "the default, 10 ms" in names[0] and "blocks" in names[-1]


def test_an_slo_is_rounded_up_to_two_digits():
    assert [round_up(s) for s in (0.1234, 0.6, 1.01)] == pytest.approx([0.13, 0.6, 1.1])


def test_a_request_says_how_to_batch(monkeypatch):
    from ray_slo.demo.digits import plain

    told = []
    monkeypatch.setattr(plain.PlainDigits, "reconfigure", lambda self, config: told.append(config))

    async def answer(self, request):
        return "answer"

    monkeypatch.setattr(plain.DigitsOverHttp, "__call__", answer)
    digits = object.__new__(plain.TunableDigits)
    long, blocking = Way(0.2), Way(DEFAULT_WAIT_S, off_loop=False)
    for headers in (long.header, long.header, {}, blocking.header):
        request = SimpleNamespace(headers=headers)
        assert asyncio.run(digits(request)) == "answer"
    assert told == [
        {"batch_wait_s": 0.2, "off_loop": True},
        {"batch_wait_s": DEFAULT_WAIT_S, "off_loop": False},
    ]
