import numpy as np
import pytest
from pydantic import ValidationError

from ray_slo.simulation import (
    Constant,
    Gamma,
    Poisson,
    SloShare,
    Times,
    Trace,
    Workload,
    Zipf,
)
from ray_slo.simulation.workloads import at_rate


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
    with pytest.raises(ValueError, match="unknown models d; the cluster has a, b, c"):
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
