"""Kairos' matching: Figure 5, coefficients, late requests, learned latencies, what is skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ray_slo.core import (
    BatchOutcome,
    BatchStatus,
    Drop,
    DropReason,
    LatencyProfile,
)
from ray_slo.policies.kairos import Kairos
from ray_slo.policies.kairos_latencies import LearnedLatency
from ray_slo.simulation import Workload, simulate
from tests.policies.harness import Host
from tests.policies.pools import pool, request


def host(cluster, **kwargs):
    return Host(lambda: Kairos(**kwargs), cluster, strict=False)


def test_a_request_waits_for_a_better_worker_that_is_busy():
    h = host(pool("sw", alphas=(0.1, 1.0)))
    h.arrive([request(1, 19)])  # strong until 1.9
    h.arrive([request(2, 20)])  # weak would need 20 s: it is planned for strong
    assert h.timeline() == [(0.0, "strong0", [1])]
    h.advance(2.0)
    assert h.timeline()[1:] == [(pytest.approx(1.9), "strong0", [2])]


def test_xi_keeps_a_distance_to_the_deadline():
    h = host(pool("w"), xi=0.9)
    h.arrive([request(1, 8), request(2, 8)])  # would end at 8, more than 0.9 · 8
    assert h.dropped == dict.fromkeys((1, 2), (0.0, DropReason.WOULD_MISS))
    h = host(pool("w"), xi=0.9)
    h.arrive([request(1, 8)])  # but an idle worker may as well serve it
    assert h.timeline() == [(0.0, "weak0", [1])]
    h = host(pool("w"), xi=1.0)
    h.arrive([request(1, 8)])
    assert h.timeline() == [(0.0, "weak0", [1])]
    h = host(pool("ww"), xi=0.9)
    h.arrive([request(1, 4)])
    h.arrive([request(2, 8)])  # the other one does not wait, but runs
    assert h.timeline() == [(0.0, "weak0", [1])]
    assert h.dropped == {2: (0.0, DropReason.WOULD_MISS)}


def test_late_requests_are_dropped_or_served_where_nobody_else_wants_to():
    requests = [request(1, 18), request(2, 18), request(3, 4)]
    h = host(pool("w"))
    h.run(requests)
    assert {i: reason for i, (_, reason) in h.dropped.items()} == {
        1: DropReason.WOULD_MISS,
        2: DropReason.WOULD_MISS,
    }
    h = host(pool("w"), late="serve")
    h.run(requests)
    assert h.timeline() == [(0.0, "weak0", [3]), (4.0, "weak0", [1]), (22.0, "weak0", [2])]
    assert h.policy.serves_late
    assert not h.dropped


def test_a_request_too_large_for_every_worker_is_refused():
    h = host(pool("sw", largest=20))
    h.run([request(1, 21)])
    assert h.dropped == {1: (8.0, DropReason.NO_WORKER)}


@pytest.mark.parametrize(("pick", "first"), [("cheapest", 2), ("urgent", 1)])
def test_with_more_requests_than_workers(pick, first):
    h = host(pool("s"), pick=pick, xi=1.0)
    h.arrive([request(1, 14), request(2, 2)])  # 7 s and 1 s: the 14 has 1 s of slack
    assert h.timeline() == [(0.0, "strong0", [first])]


def test_what_few_kinds_can_do_lives_through_the_loss_of_the_others():
    # The weak workers are gone. They are too slow for the 10, which has more slack than the 4.
    for pick, first in (("urgent", 1), ("scarce", 2)):
        h = host(pool("sw"), pick=pick, xi=1.0)
        h.change(pool("s"))
        h.arrive([request(1, 4, slo=3.0), request(2, 10)])
        assert h.timeline() == [(0.0, "strong0", [first])]


def test_requests_that_cannot_make_it_push_nobody_away():
    # 1 is late everywhere but on the strong worker, which is busy. Weighted penalties would give
    # it the weak worker and leave 2 without.
    h = host(pool("sw"))
    h.arrive([request(0, 15)])  # strong until 7.5
    h.arrive([request(1, 10), request(2, 7)])
    assert h.timeline() == [(0.0, "strong0", [0]), (0.0, "weak1", [2])]


def test_a_batch_sent_ahead_that_is_lost_leaves_the_running_one_alone():
    policy = Kairos(xi=1.0)
    policy.cluster_changed(0.0, pool("s", delay=0.5))
    first, second = request(1, 4), request(2, 4)
    policy.requests_arrived(0.0, [first, second])
    (running,) = policy.decide(0.0).actions
    (ahead,) = policy.decide(2.0).actions  # the first ends at 2.5
    assert (running.finish_at, ahead.start_at) == (2.5, 2.5)
    lost = BatchOutcome(ahead.batch_id, ahead.requests, 2.2, 2.2, BatchStatus.LOST)
    policy.batch_finished(2.2, "strong0", lost)
    policy.requests_arrived(2.2, ahead.requests)
    (again,) = policy.decide(2.2).actions
    assert again.start_at == pytest.approx(2.7)


def test_batches_are_sent_ahead_by_the_delay():
    h = host(pool("s", delay=0.5))
    h.arrive([request(1, 4)])  # starts at 0.5, ends at 2.5
    h.arrive([request(2, 4)])
    h.advance(10.0)
    assert h.timeline() == [(0.0, "strong0", [1]), (2.0, "strong0", [2])]
    assert [s.finish_at for s in h.sent] == [2.5, 4.5]


def test_plans_are_made_anew_when_a_batch_is_overdue():
    h = host(pool("sw", alphas=(0.1, 1.0)), xi=1.0)
    h.arrive([request(1, 20), request(2, 7)])  # 2 costs 0.7 on weak and 0.7 on strong after 2 s
    h.arrive([request(3, 3, 0.0)])  # strong in 2 s: cost 2.3; weak in 7 s
    sent = len(h.sent)
    h.advance(7.9, ends=False)  # neither ends
    assert len(h.sent) == sent
    h.advance(8.1, ends=False)
    assert h.dropped == {3: (pytest.approx(7.7), DropReason.WOULD_MISS)}


def test_nothing_is_matched_while_all_workers_are_busy(monkeypatch):
    times, wait = [], Kairos._wait

    def counted(policy, now):
        times.append(now)
        return wait(policy, now)

    monkeypatch.setattr(Kairos, "_wait", counted)
    h = host(pool("s"))
    h.arrive([request(1, 15)])
    assert len(times) == 1
    for i in range(2, 50):
        h.arrive([request(i, 1)])
    assert len(times) == 1


def test_a_single_measurement_scales_the_line_and_many_fill_the_table():
    truth = LatencyProfile([0.01 + 0.001 * s**1.1 for s in range(1, 101)])
    learned = LearnedLatency(LatencyProfile.linear(0.004, 0.002, 100))
    learned.add(50, truth(50))
    assert learned.table[50] == pytest.approx(truth(50))
    assert learned.table[100] == pytest.approx(truth(50) * 402 / 202)
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 101, 40).tolist():
        learned.add(size, truth(size))
    error = np.abs(learned.table[1:] / np.array(truth.table) - 1)
    assert error.max() < 0.12  # the line
    for _ in range(20):
        for size in range(1, 101):
            learned.add(size, truth(size))
    error = np.abs(learned.table[1:] / np.array(truth.table) - 1)
    assert error.max() < 0.012  # the table


def test_learning_finds_the_truth_from_a_wrong_guess():
    truth = pool("sww", alphas=(0.02, 0.05), beta=0.3, largest=100)
    guess = pool("sww", alphas=(0.05, 0.05), beta=0.1, largest=100)
    sizes = {"kind": "log_normal", "median": 30, "sigma": 1.0, "max_size": 100}
    report = simulate(
        Kairos(learn=True),
        guess,
        Workload.poisson(1.0, sizes=sizes),
        duration_s=300,
        warmup_s=50,
        truth=truth,
    )
    assert report.bad_rate() < 0.02
    frame = report.batches[report.batches.started_s > 100]
    error = frame.predicted_finish_s - frame.finished_s
    assert np.abs(error).quantile(0.9) < 0.1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"xi": 0.0}, "xi must be above 0 and at most 1, got 0.0"),
        ({"late": "maybe"}, "late must be one of drop, serve, got 'maybe'"),
        ({"pick": "best"}, "pick must be one of cheapest, urgent, scarce, got 'best'"),
        ({"penalty": 1.0}, "penalty must be above 1"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Kairos(**kwargs)


def test_requests_join_where_it_costs_less_than_alone():
    # ℓ = 1 + s / 2 strong, 1 + s weak. 1 needs strong; 2 adds 1 there, alone it takes at least 2.
    h = host(pool("s", beta=1.0), batch=True, xi=1.0)
    h.arrive([request(1, 8), request(2, 2), request(3, 6)])
    assert h.timeline() == [(0.0, "strong0", [1, 2])]  # 3 would make it 9 s
    assert h.sent[0].finish_at == 6.0
    h.advance(10.0)
    assert h.dropped == {3: (pytest.approx(4.0, abs=1e-5), DropReason.WOULD_MISS)}
    h = host(pool("s", beta=0.0), batch=True, xi=1.0)
    h.arrive([request(1, 4), request(2, 4)])
    assert h.timeline() == [(0.0, "strong0", [1])]  # nothing is saved by a batch


def test_without_workers_it_waits_and_then_gives_up():
    h = host(pool(""))
    h.arrive([request(1, 1)])
    assert h.wake_at == pytest.approx(8.0)
    h.change(pool("s"))
    assert h.timeline() == [(0.0, "strong0", [1])]
    assert math.isinf(h.wake_at)


def test_cancelled_requests_are_forgotten():
    h = host(pool("s"))
    h.arrive([request(1, 4)])
    waiting = [request(2, 4), request(3, 4)]
    h.arrive(waiting)
    h.cancel([waiting[0]])
    h.advance(20.0)
    assert [ids for _, _, ids in h.timeline()] == [[1], [3]]
    assert not any(isinstance(a, Drop) for d in h.decisions for a in d.actions)
