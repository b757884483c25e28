"""The stream that every system gets, and the sums over its stretches."""

import numpy as np
import pytest

from ray_slo.demo.stream import (
    AFTER,
    BURST,
    CALM,
    GIVEN_UP_S,
    PARTS,
    RISE,
    STORY,
    WHOLE,
    over_time,
    record,
    shortened,
    starts,
    sums,
)
from tests.demo.made_up import HELD, PAYLOADS, run


def rates(workload, begins):
    return np.histogram(workload.times_s, begins)[0] / np.diff(begins)


def test_the_story_is_the_one_that_was_asked_for():
    loads = {stretch.name: stretch.load for stretch in STORY}
    assert loads[RISE] == 1.3 and loads[BURST] == 2 * loads[RISE]
    assert loads[CALM] == loads[AFTER] < 1
    whole_s = sum(stretch.length_s for stretch in STORY)
    (calm,) = (stretch for stretch in STORY if stretch.name == CALM)
    assert calm.length_s > whole_s / 3


def test_a_stream_has_the_rates_of_its_stretches_and_is_the_same_again():
    workload = record(STORY, 1000.0, PAYLOADS, warm_up_s=4.0, seed=7)
    begins = starts(STORY, 4.0)
    expected = [1000 * stretch.load for stretch in STORY]
    assert rates(workload, begins) == pytest.approx(expected, rel=0.05)
    assert rates(workload, [0.0, 4.0]) == pytest.approx(expected[:1], rel=0.1)
    assert workload.duration_s == begins[-1] == 4.0 + sum(s.length_s for s in STORY)
    assert workload.warmup_s == 4.0
    again = record(STORY, 1000.0, PAYLOADS, warm_up_s=4.0, seed=7)
    np.testing.assert_array_equal(workload.times_s, again.times_s)
    other = record(STORY, 1000.0, PAYLOADS, warm_up_s=4.0, seed=8)
    assert len(other) != len(workload) or (other.times_s != workload.times_s).any()


def test_a_shorter_story_has_the_same_shape():
    short = shortened(STORY, 9.2)
    assert sum(stretch.length_s for stretch in short) == pytest.approx(9.2)
    assert [s.length_s / 9.2 for s in short] == pytest.approx(
        [s.length_s / sum(t.length_s for t in STORY) for s in STORY]
    )
    assert [(s.name, s.load) for s in short] == [(s.name, s.load) for s in STORY]
    assert len(record(short, HELD, PAYLOADS, warm_up_s=0.0, seed=0)) > 0


def test_sums_by_stretch():
    begins = starts(STORY, 2.0)  # of the calm stretch, the rise, the burst, the calm afterwards

    def latency_s(at):
        if at < begins[0]:
            return 9.0  # while warming up: counts nowhere
        if at < begins[1]:
            return 0.1
        if at < begins[2]:
            return 0.7  # too late
        return None if at < begins[3] else 0.2

    result = run(latency_s)
    found = sums(result, STORY)
    assert list(found) == list(PARTS)
    calm, overload, after, whole = (found[part] for part in (CALM, "overload", AFTER, WHOLE))
    assert (calm.bad, overload.bad, after.bad) == (0.0, 1.0, 0.0)
    assert calm.goodput == calm.offered == pytest.approx(HELD * 0.5, rel=0.3)
    assert (calm.p50_ms, calm.p99_ms) == pytest.approx((100, 100))
    assert overload.goodput == 0 and overload.accuracy is None
    assert overload.p50_ms == pytest.approx(700)  # refusals have no latency
    assert calm.accuracy == 1.0
    assert whole.seconds == pytest.approx(sum(part.seconds for part in (calm, overload, after)))
    assert whole.goodput * whole.seconds == pytest.approx(
        sum(part.goodput * part.seconds for part in (calm, after))
    )
    assert whole.offered == pytest.approx(result.summary["offered_rate"])
    assert whole.goodput == pytest.approx(result.summary["goodput"])
    assert whole.bad == pytest.approx(result.summary["bad_rate"])


def test_a_request_that_was_given_up_counts_as_late():
    result = run(lambda at: GIVEN_UP_S)
    result.requests["status"] = "timeout"
    assert sums(result, STORY)[WHOLE].p50_ms == pytest.approx(1e3 * GIVEN_UP_S)


def test_second_by_second():
    rise = starts(STORY, 2.0)[1]
    result = run(lambda at: 0.1 if at < rise else 3.0, lambda at: 99.0 if at < 10 else 95.0)
    times = over_time(result)
    whole_s = sum(stretch.length_s for stretch in STORY)
    assert len(times.at_s) == whole_s and times.at_s[0] == 0.5
    assert times.offered.sum() == result.summary["requests"]
    calm = times.at_s < rise - 2.0
    np.testing.assert_array_equal(times.goodput[calm], times.offered[calm])
    assert (times.goodput[~calm] == 0).all()
    assert np.nanmax(times.p99_ms[calm]) == pytest.approx(100)
    assert np.nanmin(times.p99_ms[~calm]) == pytest.approx(3000)
    # Accuracy is that of answers in time: none after the rise.
    assert set(times.accuracy[calm][~np.isnan(times.accuracy[calm])]) == {99.0, 95.0}
    assert np.isnan(times.accuracy[~calm]).all()


def test_without_accuracies_there_are_none():
    assert np.isnan(over_time(run(lambda at: 0.1)).accuracy).all()
