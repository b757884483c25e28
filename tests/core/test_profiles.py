"""Latency profiles: monotone, invertible, saved and loaded, learned online."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from ray_slo.core import LatencyProfile, OnlineProfile
from ray_slo.core.profiles import doubling_sizes, load_profiles, save_profiles

latencies = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40)


@given(latencies)
def test_repaired_tables_do_not_decrease(table):
    profile = LatencyProfile(table)
    assert profile.max_batch_size == len(table)
    repaired = profile.table
    assert repaired == sorted(repaired)
    assert sum(repaired) == pytest.approx(sum(table))  # least squares keeps the mean
    if table == sorted(table):
        assert repaired == table


@given(latencies | st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_a_repair_is_scipys_isotonic_regression(table):
    decreases = table != sorted(table)
    repaired = isotonic_regression(table).x.tolist() if decreases else table
    assert LatencyProfile(table).table == repaired
    assert LatencyProfile.from_points(dict(enumerate(table, 1))).table == repaired


@given(latencies, st.floats(0.0, 12.0))
def test_inverse_lookup(table, time):
    profile = LatencyProfile(table)
    b = profile.max_batch_within(time)
    assert profile(b) <= time
    assert profile(b + 1) > time


@given(latencies)
def test_inverse_of_its_own_entries(table):
    profile = LatencyProfile(table)
    for b in range(1, len(table) + 1):
        assert profile.max_batch_within(profile(b)) >= b


def test_outside_the_table():
    profile = LatencyProfile([1.0, 2.0])
    assert (profile(0), profile(1), profile(2), profile(3)) == (0.0, 1.0, 2.0, math.inf)


def test_linear():
    profile = LatencyProfile.linear(0.002, 0.01, 5)
    assert profile.table == pytest.approx([0.012, 0.014, 0.016, 0.018, 0.02])
    assert profile.fit_linear() == pytest.approx((0.002, 0.01))
    assert profile.throughput(5) == pytest.approx(250)
    assert LatencyProfile([0.3]).fit_linear() == (0.3, 0.0)


def test_from_points_interpolates_and_extends_along_the_line():
    profile = LatencyProfile.from_points({2: 0.2, 4: 0.4}, max_batch_size=6)
    assert profile.table == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert LatencyProfile.from_points({1: 0.3, 2: 0.1, 3: 0.5}).table == pytest.approx(
        [0.2, 0.2, 0.5]
    )


def test_one_measured_size_is_extended_as_if_batching_gained_nothing():
    profile = LatencyProfile.from_points({3: 0.3}, max_batch_size=6)
    assert profile.table == pytest.approx([0.3, 0.3, 0.3, 0.4, 0.5, 0.6])
    assert profile.measured_to == 3
    # 0.2 s per item, and only a batch of one was measured.
    assert LatencyProfile.from_points({1: 0.2}, 16)(16) == pytest.approx(3.2)


def test_two_sizes_that_look_alike_do_not_make_a_flat_profile():
    assert LatencyProfile.from_points({1: 0.6, 2: 0.6}, 8)(8) == pytest.approx(1.2)
    assert LatencyProfile.from_points({1: 0.7, 2: 0.5}, 8)(8) == pytest.approx(1.2)


affine = st.tuples(st.floats(1e-4, 1.0), st.floats(0.0, 10.0))  # seconds per item and per batch
some_sizes = st.sets(st.integers(1, 64), min_size=1)


@given(affine, some_sizes)
def test_an_assumed_latency_errs_on_the_slow_side(line, sizes):
    truth = LatencyProfile.linear(*line, 64)
    profile = LatencyProfile.from_points({b: truth(b) for b in sizes}, 64)
    assert profile.measured_to == max(sizes)
    for b in range(min(sizes), 65):
        each = truth(profile.measured_to) * max(b / profile.measured_to, 1.0)
        assert truth(b) * (1 - 1e-9) <= profile(b) <= each * (1 + 1e-9)


def test_scaled_and_truncated():
    profile = LatencyProfile([1.0, 2.0, 3.0], measured_to=2)
    assert profile.scaled(2.0) == LatencyProfile([2.0, 4.0, 6.0], measured_to=2)
    assert profile.truncated(2) == LatencyProfile([1.0, 2.0])
    assert profile.truncated(9) == profile
    assert profile.truncated(1) == LatencyProfile([1.0])


def test_a_plan_is_for_measured_sizes():
    assert LatencyProfile([1.0, 2.0, 3.0], measured_to=2).measured.table == [1.0, 2.0]
    assert LatencyProfile([1.0, 2.0, 3.0]).measured.table == [1.0, 2.0, 3.0]
    assert LatencyProfile([1.0, 2.0, 3.0], measured_to=0).measured.table == [1.0]


def test_what_was_measured_makes_a_difference():
    measured, assumed = LatencyProfile([1.0, 2.0]), LatencyProfile([1.0, 2.0], measured_to=1)
    assert measured != assumed
    assert measured.differs(assumed, by=0.5)
    assert measured.hash == assumed.hash


def test_equality_and_digest():
    a, b = LatencyProfile([0.1, 0.2]), LatencyProfile([0.1, 0.2 + 1e-9])
    assert a == LatencyProfile([0.1, 0.2])
    assert hash(a) == hash(LatencyProfile([0.1, 0.2]))
    assert a != b
    assert a.hash == b.hash  # at 1 µs
    assert a.hash != LatencyProfile([0.1, 0.201]).hash
    assert "ℓ(1)=100 ms" in repr(a)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatencyProfile([]), "non-empty list"),
        (lambda: LatencyProfile([0.1, 0.0]), "positive and finite"),
        (lambda: LatencyProfile([0.1, math.nan]), "positive and finite"),
        (lambda: LatencyProfile([1.0], measured_to=2), "measured_to must be 0 … 1, got 2"),
        (lambda: LatencyProfile([1.0], measured_to=-1), "measured_to must be 0 … 1, got -1"),
        (
            lambda: LatencyProfile.from_json({"latency_ms": [1.0], "measured_to": "all"}),
            "measured_to must be a whole number, got 'all'",
        ),
        (lambda: LatencyProfile.linear(1, 1, 0), "max_batch_size must be at least 1, got 0"),
        (lambda: LatencyProfile([1.0]).truncated(0), "max_batch_size must be at least 1, got 0"),
        (lambda: LatencyProfile.from_points({}), "at least one measured batch size"),
        (lambda: LatencyProfile.from_points({0: 1.0}), "batch sizes are at least 1, got 0"),
        (lambda: LatencyProfile.from_json({"alpha_ms": 1}), r"got the keys \['alpha_ms'\]"),
    ],
)
def test_bad_profiles(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
@given(latencies)
def test_json_round_trip(table):
    profile = LatencyProfile(table)
    again = LatencyProfile.from_json(json.loads(json.dumps(profile.to_json())))
    assert again.table == pytest.approx(profile.table, abs=1e-9)
    assert "measured_to" not in profile.to_json()


def test_json_says_which_sizes_are_assumed():
    profile = LatencyProfile.from_points({1: 0.1, 2: 0.125}, 4)
    assert profile.to_json() == {"latency_ms": [100, 125, 150, 175], "measured_to": 2}
    assert LatencyProfile.from_json(profile.to_json()) == profile


def test_json_linear():
    profile = LatencyProfile.from_json({"alpha_ms": 1, "beta_ms": 5, "max_batch_size": 3})
    assert profile.table == pytest.approx([0.006, 0.007, 0.008])


def test_sizes_that_double_end_with_the_largest():
    assert [doubling_sizes(n) for n in (0, 1, 2, 5, 8)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 4, 5],
        [1, 2, 4, 8],
    ]


def test_few_samples_have_a_lower_quantile():
    online = OnlineProfile(LatencyProfile.linear(0.0, 0.010, 4), quantile=0.99)
    for duration_ms in (13, 11, 15, 12, 14):
        online.observe(1, duration_ms / 1e3)
    # The quantile is 5/6: the fourth of five.
    assert online.profile.latency(1) == pytest.approx(0.014)


def test_files(tmp_path):
    path = tmp_path / "profiles.json"
    save_profiles(path, {"small": LatencyProfile([0.1, 0.2])}, hardware="cpu")
    assert json.loads(path.read_text())["hardware"] == "cpu"
    assert load_profiles(path) == {"small": LatencyProfile([0.1, 0.2])}
    with pytest.raises(FileNotFoundError):
        load_profiles(tmp_path / "none.json")
    path.write_text("{")
    with pytest.raises(ValueError, match="not a latency-profile file"):
        load_profiles(path)
    path.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="got 'other'"):
        load_profiles(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="got a list"):
        load_profiles(path)


class TestOnline:
    prior = LatencyProfile.linear(0.001, 0.01, 32)

    def test_starts_as_the_prior(self):
        assert OnlineProfile(self.prior).profile is self.prior

    def test_one_ratio_scales_the_prior(self):
        online = OnlineProfile(self.prior)
        for _ in range(100):
            online.observe(4, 2 * self.prior(4))
        assert online.samples == 100
        assert online.profile.table == pytest.approx(self.prior.scaled(2.0).table)

    def test_a_size_that_was_not_measured_for_long_is_measured_anew(self, monkeypatch):
        monkeypatch.setattr("ray_slo.core.online._STALE_AFTER", 8)
        online = OnlineProfile(self.prior)
        for _ in range(4):
            online.observe(16, 50 * self.prior(16))
        for _ in range(10):
            online.observe(1, self.prior(1))
        online.observe(16, self.prior(16))
        assert online.profile(16) == pytest.approx(self.prior(16))

    @settings(max_examples=25)
    @given(st.floats(0.0005, 0.004), st.floats(0.001, 0.03))
    def test_corrects_a_wrong_shape(self, alpha, beta):
        truth = LatencyProfile.linear(alpha, beta, 32)
        online = OnlineProfile(self.prior)
        for b in (1, 2, 4, 8, 16, 32):
            for _ in range(20):
                online.observe(b, truth(b))
        for b in (1, 2, 4, 8, 16, 32):
            assert online.profile(b) == pytest.approx(truth(b), rel=0.03)

    def test_few_batches_of_a_slow_moment_do_not_last(self):
        """Large ones were measured while the machine was slow; now only small ones run."""
        online = OnlineProfile(self.prior)
        for size, times in ((1, 1), (8, 1), (16, 3), (16, 3), (16, 3), (16, 3)):
            online.observe(size, times * self.prior(size))
        assert online.profile(16) > 2 * self.prior(16)
        for _ in range(40):
            online.observe(8, self.prior(8))
        assert online.profile(16) < 1.5 * self.prior(16)

    def test_one_measured_size_is_extended_as_if_batching_gained_nothing(self):
        guess = LatencyProfile.linear(0.001, 0.004, 64, measured_to=0)
        online = OnlineProfile(guess)
        online.observe(1, 0.1)
        assert online.profile(2) == pytest.approx(0.1 + 0.1 / 5)
        assert online.profile(64) == pytest.approx(online.profile(2) + 6.2)
        assert online.profile.measured_to == 1
        online.observe(4, 0.13)  # the line from here on, but never flatter than 0.13 / (4 + 4)
        assert online.profile(64) == pytest.approx(0.13 + 60 * 0.13 / 8)
        online.observe(16, 0.4)
        assert 0.35 < online.profile(16) < 0.4  # the first one of its octave says little
        for _ in range(9):
            online.observe(16, 0.4)
        assert online.profile(16) == pytest.approx(0.4, rel=0.01)
        slope = (0.4 - online.profile(8)) / 8
        assert slope == pytest.approx(0.27 / 12, rel=0.15)
        # The next step is hoped for.
        assert online.profile(24) == pytest.approx(0.4 + 8 * 0.4 / 20, rel=0.01)
        assert online.profile(64) == pytest.approx(online.profile(24) + 40 * slope, rel=0.01)
        assert online.profile.measured_to == 16

    @given(affine, st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(0, 64))
    def test_what_it_assumes_errs_on_the_slow_side(self, line, sizes, measured_to):
        truth = LatencyProfile.linear(*line, 64)
        prior = LatencyProfile.linear(0.001, 0.004, 64, measured_to=0)
        if measured_to:
            points = {b: truth(b) for b in doubling_sizes(measured_to)}
            prior = LatencyProfile.from_points(points, 64)
        online = OnlineProfile(prior)
        for b in sizes:
            online.observe(b, truth(b))
        known = online.measured_to  # without an estimate
        profile = online.profile
        assert known == profile.measured_to == max(measured_to, *sizes)
        assert profile(known) >= truth(known) * 0.85  # a guess tells apart sizes of an octave
        step = known + max(known // 2, 1)
        for b in range(step, 64):  # the next step is rather too fast, and all beyond too slow
            assert profile(b + 1) - profile(b) >= (truth(b + 1) - truth(b)) * 0.85

    def test_a_slow_batch_of_a_new_size_does_not_stop_larger_ones(self):
        truth = LatencyProfile.linear(0.03, 0.1, 64)
        online = OnlineProfile(LatencyProfile.linear(0.02, 0.08, 64, measured_to=0))
        for b in range(1, 9):
            online.observe(b, truth(b))
        for factor in (1.5, 1.0):
            online.observe(9, factor * truth(9))
        profile = online.profile
        assert profile(9) == pytest.approx(truth(9), rel=0.01)
        assert 0.95 * truth(18) <= profile(18) <= 1.1 * truth(18)

    @pytest.mark.slow
    def test_batches_grow_to_the_best_size_although_times_scatter(self):
        """An overloaded policy runs the smallest batch that seems to serve most, within 0.5 s. 95 %
        of batches of 13 take less."""
        found = [self.grown(seed) for seed in range(8)]
        assert np.median(found) > 12
        assert min(found) >= 11
        assert max(found) <= 20

    @staticmethod
    def grown(seed):
        rng = np.random.default_rng(seed)
        truth = LatencyProfile.linear(0.02, 0.1, 64)  # 20 items in 0.5 s
        online = OnlineProfile(LatencyProfile.linear(0.02, 0.08, 64, measured_to=0))
        sizes = [1, 2, 3, 1, 2]
        while len(sizes) < 200:
            online.observe(sizes[-1], truth(sizes[-1]) * rng.lognormal(0.0, 0.2))
            profile = online.profile
            most = max(profile.max_batch_within(0.5), 1)
            sizes.append(int(np.argmax([profile.throughput(b) for b in range(1, most + 1)])) + 1)
        return np.mean(sizes[100:])

    def test_a_slow_start_is_forgotten_for_larger_sizes_too(self):
        truth = LatencyProfile.linear(0.01, 0.05, 64)
        online = OnlineProfile(LatencyProfile.linear(0.001, 0.004, 64, measured_to=0))
        online.observe(1, 5.0)
        for _ in range(3):
            for b in (1, 2, 4, 8):
                online.observe(b, truth(b))
        assert truth(8) <= online.profile(8) <= 1.01 * truth(8)
        assert truth(64) <= online.profile(64) <= 8 * truth(8)

    def test_quantile_of_noisy_batches(self, monkeypatch):
        monkeypatch.setattr("ray_slo.core.online._WINDOW", 500)
        rng = np.random.default_rng(0)
        online = OnlineProfile(self.prior, quantile=0.9)
        for factor in rng.uniform(1.0, 2.0, 500):
            online.observe(8, factor * self.prior(8))
        assert online.profile(8) == pytest.approx(1.9 * self.prior(8), rel=0.03)

    def test_one_outlier_at_the_start_does_not_rule(self):
        online = OnlineProfile(self.prior)
        for duration in (1.0, 1.0, 1.0, 50.0):
            online.observe(4, duration * self.prior(4))
        assert online.profile(4) < 25 * self.prior(4)
        for _ in range(100):
            online.observe(4, self.prior(4))
        assert online.profile(4) == pytest.approx(self.prior(4))

    @pytest.mark.parametrize("factor", [0.25, 0.6, 1.5, 4.0])
    def test_times_that_change_are_followed_within_three_batches(self, factor):
        online = OnlineProfile(self.prior)
        for i in range(200):
            online.observe([1, 4, 16][i % 3], self.prior(i % 3 + 1))
        shape = online.profile
        for _ in range(3):
            online.observe(4, factor * shape(4))
        for b in (1, 4, 16):  # also for sizes that did not run
            assert online.profile(b) == pytest.approx(factor * shape(b), rel=0.05)

    def test_two_late_batches_in_a_row_raise_all_sizes_until_others_are_in_time(self):
        online = OnlineProfile(self.prior)
        for i in range(40):
            online.observe([4, 16][i % 2], self.prior([4, 16][i % 2]))
        online.observe(4, 1.5 * self.prior(4))
        assert online.margin == 1.0
        online.observe(16, 1.4 * self.prior(16))
        assert online.margin == pytest.approx(1.4)
        assert online.profile(1) == pytest.approx(1.4 * self.prior(1))
        for _ in range(4):
            online.observe(4, self.prior(4))
        assert online.margin == 1.0

    @example([1.0] * 19 + [4.0] * 2, 0.95)  # both in the quantile and in a row
    @given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=80), st.floats(0.5, 0.99))
    def test_an_estimate_is_never_longer_than_all_batches(self, durations, quantile):
        online = OnlineProfile(self.prior, quantile=quantile)
        for i, duration in enumerate(durations, 1):
            online.observe(4, duration)
            assert min(durations[:i]) <= online.profile(4) * (1 + 1e-9)
            assert online.profile(4) <= max(durations[:i]) * (1 + 1e-9)

    @pytest.mark.parametrize("since", [3, 60])
    @pytest.mark.parametrize("stalled", range(1, 6))
    @pytest.mark.parametrize("sigma", [0.0, 0.2])
    def test_a_stall_is_forgotten(self, since, stalled, sigma):
        rng, settled = np.random.default_rng(0), 0
        online = OnlineProfile(self.prior)
        for i in range(200):
            factor = 12 if since <= i < since + stalled else rng.lognormal(0, sigma)
            online.observe(4, factor * self.prior(4))
            settled += i >= 70 and online.is_settled
        assert settled > 120
        assert online.profile(4) == pytest.approx(np.exp(1.645 * sigma) * self.prior(4), rel=0.25)

    def test_chance_is_no_change(self):
        rng, worst = np.random.default_rng(0), 0.0
        online = OnlineProfile(self.prior)
        for i in range(2000):
            online.observe(8, self.prior(8) * rng.lognormal(0.0, 0.2))
            if i > 100:
                worst = max(worst, online.profile(8) / self.prior(8))
        assert 1.2 < online.profile(8) / self.prior(8) < 1.7  # exp(1.645 · 0.2) = 1.39
        assert worst < 2.0

    def test_old_samples_are_forgotten(self, monkeypatch):
        monkeypatch.setattr("ray_slo.core.online._WINDOW", 10)
        online = OnlineProfile(self.prior)
        for _ in range(10):
            online.observe(4, 5 * self.prior(4))
        for _ in range(10):
            online.observe(4, self.prior(4))
        assert online.profile.table == pytest.approx(self.prior.table)

    @given(st.lists(st.tuples(st.integers(1, 32), st.floats(1e-4, 1.0)), max_size=60))
    def test_always_a_valid_profile(self, samples):
        online = OnlineProfile(self.prior)
        for b, duration in samples:
            online.observe(b, duration)
        table = online.profile.table
        assert len(table) == 32
        assert table[0] > 0
        assert table == sorted(table)

    @pytest.mark.parametrize(
        ("batch_size", "duration_s", "message"),
        [
            (0, 1.0, "batch_size must be 1 … 32, got 0"),
            (33, 1.0, "batch_size must be 1 … 32, got 33"),
            (1, 0.0, "duration_s must be positive and finite, got 0.0"),
            (1, math.nan, "duration_s must be positive and finite, got nan"),
        ],
    )
    def test_bad_samples(self, batch_size, duration_s, message):
        with pytest.raises(ValueError, match=message):
            OnlineProfile(self.prior).observe(batch_size, duration_s)

    def test_a_bad_quantile(self):
        with pytest.raises(ValueError, match="quantile must lie"):
            OnlineProfile(self.prior, quantile=1.0)
