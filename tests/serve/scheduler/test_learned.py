"""Learned profiles: the estimate, when the policy is told, and which workers get no batches."""

import numpy as np
import pytest

from ray_slo.core import BatchStatus, Dispatch, LatencyProfile
from ray_slo.core.beliefs import Belief
from ray_slo.core.recent import Recent
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import BatchReport, Heartbeat, Submit
from ray_slo.serve.scheduler.flights import Flight, OwnedRequest
from ray_slo.serve.scheduler.learned import Learned
from ray_slo.serve.scheduler.roster import Quarantine, Roster, WorkerState


def test_a_policy_hears_of_what_matters():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    assert belief.is_news()
    assert belief.tell().latency(1) == pytest.approx(0.011)
    belief.observe([(1, 0.0111)], now=1.0)
    assert not belief.is_news()  # within 2 %
    belief.observe([(1, 0.03), (1, 0.03), (99, 5.0)], now=2.0)  # the last one cannot be
    assert (belief.is_news(), belief.samples, belief.measured_at) == (True, 3, 2.0)


def test_the_status_says_by_size_how_sure_a_belief_is():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    assert (belief.status(5.0)["age_s"], belief.status(5.0)["sizes"]) == (None, [])
    for i in range(10):
        belief.observe([(1, 0.011), (3, 0.013 if i % 2 else 0.026)], now=float(i))
    belief.observe([(4, 0.014)], now=12.0)
    shown = belief.status(20.0)
    assert (shown["samples"], shown["age_s"]) == (21, 8.0)
    assert [(s["batch_size"], s["batches"], s["age_s"]) for s in shown["sizes"]] == [
        (1, 10, 11.0),
        (4, 11, 8.0),
    ]
    one, four = shown["sizes"]
    assert one["spread"] == pytest.approx(1.0, rel=0.1)
    assert four["spread"] == pytest.approx(2.0, rel=0.2)
    assert one["latency_ms"] == shown["latency_1_ms"]


def test_a_doubted_profile_is_lower_and_learned_anew():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    belief.observe([(1, 1.1)], now=1.0)
    belief.doubt(0.02, now=1.5)
    assert (belief.samples, belief.profile.latency(1)) == (0, pytest.approx(0.011))
    belief.observe([(1, 0.02)], now=2.0)
    assert belief.profile.latency(1) == pytest.approx(0.02)
    belief.forget()
    assert belief.profile.latency(1) == pytest.approx(0.011)


def test_a_belief_that_was_contradicted_is_not_sure_until_times_are_as_expected():
    belief = Belief(LatencyProfile.linear(0.001, 0.01, 8))
    usual = [(1, 0.011)]
    belief.observe(usual * 40, now=1.0)
    assert belief.is_sure(1.5)
    belief.observe([(1, 5.0)] * 2, now=1.0)  # a stall
    assert not belief.is_sure(1.5)
    assert belief.profile.latency(1) == pytest.approx(4 * 0.011)
    belief.observe([(1, 5.0)], now=1.0)  # no stall
    assert not belief.is_sure(1.5)
    assert belief.profile.latency(1) == pytest.approx(5.0)
    belief.observe(usual * 8, now=1.0)
    assert belief.is_sure(1.5)
    assert belief.profile.latency(1) == pytest.approx(0.011)


def beats(roster, learned, largest, now):
    """Workers of a kind say which batches they have memory for."""
    roster.clear()
    for worker, size in largest.items():
        beat = Heartbeat(worker, "gpu", {"m": LatencyProfile.linear(0.001, 0.01, size)}, [])
        learned.meet(beat.profiles, "gpu")
        roster.heard(worker, WorkerState.of(beat, frozenset({"m"}), now))
    return learned.cluster().models["m"].variants[0].profiles["gpu"].max_batch_size


def test_a_batch_is_no_larger_than_all_workers_have_memory_for():
    roster = Roster()
    spec = parse_spec({"models": {"m": {"callable": "a:B", "latency_slo_ms": 100}}})
    learned = Learned(spec, roster)
    assert beats(roster, learned, {"w0": 4}, 1.0) == 4
    assert beats(roster, learned, {"w0": 4, "w1": 16}, 2.0) == 4
    assert beats(roster, learned, {"w1": 16}, 3.0) == 16  # the one with less is gone
    assert beats(roster, learned, {"w1": 16, "w2": 8}, 4.0) == 8
    assert not learned.take_news(5.0)
    (belief,) = learned.beliefs.values()
    belief.observe([(16, 0.5)], now=6.0)  # one that was on its way
    assert belief.profile.max_batch_size == 8
    assert belief.measured_to == belief.profile.measured_to == 8
    assert beats(roster, learned, {"w1": 16, "w2": 16}, 7.0) == 16
    assert belief.measured_to == belief.profile.measured_to == 16


def test_the_capacity_is_of_what_was_measured():
    """A variant that nobody ran yet does not open the door for all."""
    roster = Roster()
    variants = {v: {"load": "a:load", "accuracy": 90} for v in ("small", "large")}
    model = {"callable": "a:B", "latency_slo_ms": 100, "variants": variants}
    learned = Learned(parse_spec({"models": {"m": model}}), roster)
    guess = LatencyProfile([0.01] * 8, measured_to=0)

    def capacity(**profiles):
        learned.beliefs.clear()
        for worker in ("w0", "w1"):
            beat = Heartbeat(worker, "gpu", profiles, [])
            learned.meet(beat.profiles, "gpu")
            roster.heard(worker, WorkerState.of(beat, frozenset(profiles), 1.0))
        return learned.capacity()["m"].rate

    small = LatencyProfile([0.04, 0.05, 0.06])
    assert capacity(small=small, large=guess) == pytest.approx(2 * 3 / 0.06)
    assert capacity(small=guess, large=guess) == np.inf


def test_the_time_to_stop_a_batch_is_the_workers_own_until_it_was_measured():
    roster = Roster()
    spec = parse_spec({"models": {"m": {"callable": "a:B", "latency_slo_ms": 100}}})
    learned = Learned(spec, roster)
    usual_s = learned.cluster().preempt_delay_s  # there and back
    beat = Heartbeat("w", "gpu", {"m": LatencyProfile([0.01])}, [], preempt_delay_s=0.03)
    roster.heard("w", WorkerState.of(beat, frozenset({"m"}), 1.0))
    assert learned.cluster().preempt_delay_s == pytest.approx(usual_s + 0.03)
    for _ in range(30):
        learned.preempted(0.005)
    assert learned.cluster().preempt_delay_s == pytest.approx(0.005)


def test_less_memory_is_news_to_a_policy():
    roster, changes = Roster(), []
    for size in (8, 8, 4, 4, 8):
        beat = Heartbeat("w", "gpu", {"m": LatencyProfile.linear(0.001, 0.01, size)}, [])
        changes.append(roster.heard("w", WorkerState.of(beat, frozenset({"m"}), 1.0)))
    assert changes == [True, False, True, False, True]


def test_a_worker_is_left_alone_for_longer_each_time_until_it_is_reached():
    quarantine, now, lasted = Quarantine(), 0.0, []
    for _ in range(5):
        quarantine.add("w", now)
        since = now
        while quarantine.holds("w", now):
            now += 0.25
        lasted.append(now - since)
    assert lasted == [0.5, 1, 2, 4, 5]
    quarantine.reached("w")
    quarantine.add("w", now)
    assert not quarantine.holds("w", now + 0.5)
    quarantine.forget(now + 10)
    quarantine.add("w", now)
    assert not quarantine.holds("w", now + 0.5)


def test_only_the_newest_entries_are_kept():
    recent = Recent(2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    recent["c"] = 4
    assert recent == {"a": 3, "c": 4}


def there_and_back(learned, size, way_s):
    """A batch ran for 20 ms, and took this long to get there, and as long back."""
    done = BatchReport("b", "w0", "m", BatchStatus.FINISHED, size, 0.02, 0.02)
    return learned.returned(
        done, Flight("b", Dispatch(0, "w0", "m", [], 0.0, 0.0), 0.0), 0.02 + 2 * way_s
    )


def test_answers_in_time_make_predictions_less_cautious():
    """Until some are late."""
    spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 500}}})
    learned = Learned(spec, Roster())
    learned.meet({"m": LatencyProfile([0.01])}, "cpu")
    belief = learned.beliefs["m", "cpu"]
    belief.observe([(1, s) for s in [0.01, 0.01, 0.012, 0.02] * 4], 0.0)

    def expected_after(count, took_s):
        submit = Submit(0, "m", 0.5)
        for i in range(count):
            requests = [OwnedRequest(i, submit, 0.0, "frontend", "")]
            done = BatchReport("b", "w0", "m", BatchStatus.FINISHED, 1, took_s, took_s)
            flight = Flight("b", Dispatch(i, "w0", "m", requests, 0.0, took_s), 0.0)
            learned.returned(done, flight, took_s)
        return belief.profile.latency(1)

    assert expected_after(0, 0.01) == pytest.approx(0.02)
    assert expected_after(1000, 0.01) == pytest.approx(0.01)
    assert expected_after(5, 0.6) == pytest.approx(0.02)


def test_the_dispatch_delay_grows_with_the_batch_and_is_a_high_quantile():
    spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 500}}})
    learned, rng, ways = Learned(spec, Roster()), np.random.default_rng(0), []
    assert (learned.dispatch_delay(1), learned.cluster().delay(32)) == (0.005, 0.005)
    for i in range(256):
        size = int(rng.integers(1, 17))
        way_s = 0.003 + 0.001 * size + rng.exponential(0.001) + (2.0 if i % 50 == 7 else 0.0)
        ways.append((size, way_s))
        assert there_and_back(learned, size, way_s) == pytest.approx(way_s)
    delay = learned.cluster().delay
    assert delay.per_request_s == pytest.approx(0.001, rel=0.3)
    kept = np.mean([way_s <= delay(size) for size, way_s in ways])
    assert kept == pytest.approx(0.95, abs=0.01)
    assert delay(16) < 0.03  # a fiftieth that took 2 s do not count
    shown = learned.status(now=0.0)
    assert shown["dispatch_delay_ms"] == pytest.approx(1e3 * delay(1))
    assert shown["dispatch_per_request_ms"] == pytest.approx(1e3 * delay.per_request_s)


def test_a_policy_hears_of_delays_that_moved():
    spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 500}}})
    learned = Learned(spec, Roster())
    for _ in range(300):
        there_and_back(learned, 4, 0.005)
    learned.ended(BatchReport("b", "w0", "m", BatchStatus.FINISHED, 4, 0.02, 0.02), "cpu", 0.0)
    learned.cluster()
    for way_s, news in ((0.005, False), (0.009, True)):
        for _ in range(300):
            there_and_back(learned, 4, way_s)
            learned._changed = True
        assert learned.take_news(1.0) == news
