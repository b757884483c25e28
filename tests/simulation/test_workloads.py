import numpy as np
import pytest
from pydantic import ValidationError

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.simulation import (
    Burst,
    Constant,
    Gamma,
    Gaussian,
    LogNormal,
    Mmpp,
    Poisson,
    Population,
    SloShare,
    Times,
    Trace,
    Workload,
    Zipf,
)
from ray_slo.simulation.arrivals import at_rate


def rng(seed=0):
    return np.random.default_rng(seed)


def test_constant_arrives_at_equal_gaps_before_the_end():
    assert Constant(rate=4).times(1.0, rng()).tolist() == [0, 0.25, 0.5, 0.75]
    assert Constant(rate=4, start_s=0.5).times(1.0, rng()).tolist() == [0.5, 0.75]
    assert Constant(rate=10).times(3.0, rng()).size == 30


@pytest.mark.parametrize(
    ("process", "variation"),
    [(Poisson(rate=200), 1.0), (Gamma(rate=200, shape=4), 0.5), (Gamma(rate=200, shape=0.25), 2.0)],
)
def test_rate_and_burstiness(process, variation):
    times = process.times(500.0, rng())
    assert len(times) / 500 == pytest.approx(200, rel=0.03)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times[0] >= 0
    assert times[-1] < 500


def test_gamma_of_shape_one_is_poisson():
    assert np.array_equal(Gamma(rate=7, shape=1).times(50, rng()), Poisson(rate=7).times(50, rng()))


def test_same_seed_at_another_rate_is_the_same_pattern_stretched():
    slow, fast = Poisson(rate=10).times(100, rng(3)), Poisson(rate=25).times(40, rng(3))
    assert np.allclose(slow, fast * 2.5)


def test_trace_follows_its_rates_and_ends():
    trace = Trace(rates=[100, 0, 300], interval_s=10)
    times = trace.times(1000.0, rng())
    counts = np.histogram(times, [0, 10, 20, 30])[0]
    assert counts[0] == pytest.approx(1000, abs=150)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(3000, abs=250)
    assert counts.sum() == len(times)
    assert trace.length_s == 30
    assert trace.times(5.0, rng()).max() < 5


def test_explicit_times_are_sorted_and_cut():
    assert Times(times_s=[3, 1, 2]).times(2.5, rng()).tolist() == [1, 2]
    assert Times(times_s=[3, 1, 2]).rate == pytest.approx(1.0)


def test_at_rate_scales_what_has_a_rate():
    assert at_rate(Gamma(rate=1, shape=0.5), 8) == Gamma(rate=8, shape=0.5)
    assert at_rate(Trace(rates=[1, 3]), 4) == Trace(rates=[2, 6])
    with pytest.raises(ValueError, match="times_s"):
        at_rate(Times(times_s=[1]), 3)
    with pytest.raises(ValueError, match="all 0"):
        at_rate(Trace(rates=[0]), 3)


def test_popularity(make_cluster):
    models = ["a", "b", "c"]
    assert Workload.poisson(1).shares(models).tolist() == pytest.approx([1 / 3] * 3)
    zipf = Workload.poisson(1, popularity=Zipf(zipf=1)).shares(models)
    assert zipf.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    given = Workload.poisson(300, popularity={"c": 3, "a": 1})
    drawn = given.generate(make_cluster(models=models), 100, rng())
    assert np.bincount(drawn.model, minlength=3) / len(drawn) == pytest.approx(
        [0.25, 0, 0.75], abs=0.02
    )
    with pytest.raises(ValueError, match=r"popularity\.d: no such model; the cluster has a, b, c"):
        Workload.poisson(1, popularity={"d": 1}).shares(models)


def test_generated_requests_are_in_order_with_their_models_deadline(make_cluster):
    cluster = make_cluster(models=["a", "b"], slo_s=7)
    drawn = Workload(arrivals={"b": Constant(rate=1)}).generate(cluster, 3, rng())
    assert drawn.arrival.tolist() == [0, 1, 2]
    assert drawn.model.tolist() == [1, 1, 1]
    assert drawn.deadline.tolist() == [7, 8, 9]
    both = Workload.poisson(50).generate(cluster, 10, rng())
    assert np.all(np.diff(both.arrival) >= 0)
    assert set(both.model.tolist()) == {0, 1}


def test_models_take_turns_in_constant_arrivals(make_cluster):
    workload = Workload(arrivals=Constant(rate=2))
    drawn = workload.generate(make_cluster(models=["a", "b"]), 2, rng())
    assert drawn.arrival.tolist() == [0, 0.5, 1, 1.5]
    assert drawn.model.tolist() == [0, 1, 0, 1]


def test_explicit_times_are_dealt_out_by_popularity(make_cluster):
    times = np.linspace(0, 10, 2000).tolist()
    workload = Workload(arrivals=Times(times_s=times), popularity={"a": 0.2, "b": 0.8})
    drawn = workload.generate(make_cluster(models=["a", "b"]), workload.length_s, rng())
    assert drawn.arrival.tolist() == pytest.approx(times)
    assert drawn.model.mean() == pytest.approx(0.8, abs=0.03)


def test_slo_mix_replaces_the_models_slo(make_cluster):
    mix = [SloShare(slo_ms=1000, share=1), SloShare(slo_ms=5000, share=3)]
    drawn = Workload.poisson(100, slo_mix=mix).generate(make_cluster(), 50, rng())
    budgets = drawn.deadline - drawn.arrival
    assert sorted(set(budgets.round(6).tolist())) == [1, 5]
    assert (budgets > 3).mean() == pytest.approx(0.75, abs=0.03)


def test_rate_and_length():
    per_model = Workload(arrivals={"a": Constant(rate=2), "b": Poisson(rate=4)})
    assert per_model.rate == 6
    assert per_model.length_s is None
    doubled = per_model.at_rate(12)
    assert doubled.arrivals == {"a": Constant(rate=4), "b": Poisson(rate=8)}
    assert Workload(arrivals=Trace(rates=[1, 2, 3], interval_s=2)).length_s == 6


def test_reads_from_plain_data():
    workload = Workload.model_validate(
        {
            "arrivals": {"kind": "gamma", "rate": 500, "shape": 0.05},
            "popularity": {"zipf": 0.9},
            "slo_mix": [{"slo_ms": 50, "share": 1}],
        }
    )
    assert workload.arrivals == Gamma(rate=500, shape=0.05)
    assert workload.popularity == Zipf(zipf=0.9)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"arrivals": {"kind": "poisson", "rate": -1}}, "rate"),
        ({"arrivals": {"kind": "gamma", "rate": 1}}, "shape"),
        ({"arrivals": {"kind": "poisson", "rate": 1, "speed": 2}}, "speed"),
        ({"arrivals": {"kind": "weekly", "rate": 1}}, "weekly"),
        ({"arrivals": {}}, "arrivals"),
        (
            {
                "arrivals": {
                    "kind": "mmpp",
                    "rate": 1,
                    "burst": {"peak": 5, "burst_s": 1, "calm_s": 3},
                }
            },
            "peak must be at most",
        ),
        ({"arrivals": {"kind": "population", "rate": 1}, "popularity": {"zipf": 1}}, "popularity"),
        ({"arrivals": {"kind": "poisson", "rate": 1}, "popularity": {"a": 0}}, "popularity"),
        (
            {"arrivals": {"a": {"kind": "poisson", "rate": 1}}, "popularity": {"a": 1}},
            "popularity",
        ),
    ],
)
def test_bad_specs_are_refused_with_the_field(data, field):
    with pytest.raises(ValidationError, match=field):
        Workload.model_validate(data)


BURST = Burst(peak=4, burst_s=0.5, calm_s=2.0)


def test_mmpp_keeps_the_mean_rate_and_comes_in_bursts():
    times = Mmpp(rate=200, burst=BURST).times(2000.0, rng())
    assert len(times) / 2000 == pytest.approx(200, rel=0.05)
    assert np.all(np.diff(times) >= 0)
    assert times[-1] < 2000
    per_window = np.histogram(times, np.arange(0, 2000.1, 0.1))[0]
    # 800/s for a fifth of the time, 50/s for the rest; windows with a switch lie between.
    assert np.mean(per_window > 50) == pytest.approx(0.2, abs=0.03)
    assert np.median(per_window) == pytest.approx(5, abs=1)


def test_a_burst_may_be_all_there_is():
    burst = Burst(peak=5, burst_s=1, calm_s=4)
    assert burst.calm == 0
    times = Mmpp(rate=100, burst=burst).times(500.0, rng(1))
    empty = np.histogram(times, np.arange(0, 500.1, 0.1))[0] == 0
    assert empty.mean() == pytest.approx(0.8, abs=0.1)


def test_a_trace_can_be_bursty_inside_its_intervals():
    stable = Trace(rates=[100, 0, 300], interval_s=200)
    bursty = stable.model_copy(update={"burst": BURST})
    counts = np.histogram(bursty.times(600.0, rng(2)), [0, 200, 400, 600])[0]
    assert counts == pytest.approx([20_000, 0, 60_000], rel=0.2, abs=1)

    def variation(trace):
        per_window = np.histogram(trace.times(200.0, rng(3)), np.arange(0, 200, 0.25))[0]
        return per_window.std() / per_window.mean()

    assert variation(bursty) > 4 * variation(stable)


@pytest.mark.parametrize("burst", [None, BURST], ids=["stable", "bursty"])
def test_population_of_streams(burst, make_cluster):
    population = Population(rate=500, streams=20_000, interval_s=10, burst=burst)
    rates = np.sort(population.stream_rates())[::-1]
    assert rates.sum() == pytest.approx(500)
    assert rates[:200].sum() > 0.3 * 500  # 1 % of the streams make a third of the requests
    times, streams = population.draw(25.0, rng())
    expected = sum(population.interval_rates(i) * s for i, s in ((0, 10), (1, 10), (2, 5)))
    assert len(times) == pytest.approx(expected.sum(), rel=0.1)
    assert times.min() >= 0
    assert times.max() < 25
    big = int(expected.argmax())
    assert np.mean(streams == big) == pytest.approx(expected[big] / expected.sum(), rel=0.6)

    cluster = make_cluster()
    drawn = Workload(arrivals=population).generate(cluster, 25.0, rng())
    assert np.array_equal(drawn.arrival, np.sort(times))
    by_model = np.bincount(streams % len(cluster.models))
    assert np.bincount(drawn.model).tolist() == by_model.tolist()


def test_a_population_is_the_same_whatever_the_seed_of_the_run():
    one, two = Population(rate=10), Population(rate=20)
    assert np.allclose(2 * one.interval_rates(3), two.interval_rates(3))
    other = Population(rate=10, population_seed=1)
    assert not np.allclose(one.stream_rates(), other.stream_rates())
    assert Workload(arrivals=one).at_rate(20) == Workload(arrivals=two)


@pytest.mark.slow
def test_streams_of_a_bursty_population_burst():
    burst = Burst(peak=10, burst_s=0.1, calm_s=0.9)
    population = Population(rate=400, streams=4, sigma=0, variation=0, interval_s=1000, burst=burst)
    times, streams = population.draw(1000.0, rng())
    gaps = np.diff(np.sort(times[streams == 0]))
    assert gaps.std() / gaps.mean() > 5  # 1 for Poisson
    assert len(times) == pytest.approx(400_000, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "median"),
    [
        (LogNormal(median=80, sigma=1.2), 77),  # the cut takes the upper 1.8 %
        (Gaussian(mean=500, std=200), 500),
        (LogNormal(median=900, sigma=2), 250),  # the 26th percentile without the cut
    ],
)
def test_sizes_are_cut_not_clipped(sizes, median):
    drawn = sizes.draw(20_000, np.random.default_rng(0))
    assert drawn.min() >= 1
    assert drawn.max() <= 1000
    assert np.median(drawn) == pytest.approx(median, rel=0.04)
    assert np.mean(drawn == 1000) < 0.002
    assert (drawn[:50] == sizes.draw(50, np.random.default_rng(0))).all()


def test_sizes_leave_the_arrivals_as_they_were():
    cluster = Cluster.uniform(
        [Model("m", 0.1, (Variant("v", {"default": LatencyProfile.linear(1e-3, 0, 1000)}),))], 1
    )
    plain = Workload.poisson(100)
    sized = Workload.poisson(100, sizes={"kind": "gaussian", "mean": 50, "std": 10})
    a, b = (w.generate(cluster, 5.0, np.random.default_rng(3)) for w in (plain, sized))
    assert (a.arrival == b.arrival).all()
    assert a.size is None
    assert b.size.mean() == pytest.approx(50, abs=2)
