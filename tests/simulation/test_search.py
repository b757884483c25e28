import pytest

from ray_slo.simulation import Constant, Times, Workload, goodput_search


@pytest.mark.slow
def test_finds_the_edge_of_capacity(greedy, make_cluster):
    # One worker, one at a time, ℓ(1) = 6 s: constant arrivals hold until 1/6 per second.
    found = goodput_search(
        lambda: greedy(max_batch=1),
        make_cluster(),
        Workload(arrivals=Constant(rate=3)),
        duration_s=6000,
        tolerance=0.005,
    )
    assert found.rate == pytest.approx(1 / 6, rel=0.02)
    assert found.report.goodput == pytest.approx(found.rate, rel=0.02)
    assert found.report.worst_bad_rate <= 0.01
    passed = [rate for rate, bad in found.probes if bad <= 0.01]
    failed = [rate for rate, bad in found.probes if bad > 0.01]
    assert found.rate == max(passed)
    assert min(failed) <= found.rate * 1.005


def test_grows_from_a_low_start_and_takes_a_function(greedy, make_cluster):
    found = goodput_search(
        lambda: greedy(max_batch=1),
        make_cluster(2),
        Workload.poisson,
        start_rate=0.01,
        duration_s=3000,
        tolerance=0.1,
    )
    assert found.probes[0][0] == 0.01
    assert 0.1 < found.rate < 2 / 6
    again = goodput_search(
        lambda: greedy(max_batch=1),
        make_cluster(2),
        Workload.poisson,
        start_rate=0.01,
        duration_s=3000,
        tolerance=0.1,
    )
    assert again.probes == found.probes


def test_nothing_holds_an_slo_below_the_execution_time(greedy, make_cluster):
    found = goodput_search(
        greedy, make_cluster(slo_s=1), Workload.poisson(1), duration_s=50, seed=1
    )
    assert (found.rate, found.report) == (0, None)
    assert all(bad == 1 for _, bad in found.probes)


def test_one_request_is_measured_and_none_is_not(greedy, make_cluster):
    def at(rate):
        return Workload(arrivals=Times(times_s=[0.0] if rate >= 1 else [50.0]))

    found = goodput_search(greedy, make_cluster(slo_s=1), at, start_rate=2.0, duration_s=10)
    assert [rate for rate, _ in found.probes] == [2.0, 1.0]
    assert (found.rate, found.report) == (0, None)


def test_says_when_no_rate_fails(greedy, make_cluster):
    with pytest.raises(ValueError, match="raise start_rate"):
        goodput_search(
            greedy, make_cluster(), Workload.poisson(0.001), duration_s=5000, max_probes=2
        )


@pytest.mark.parametrize("kwargs", [{"tolerance": 0}, {"bad_rate": 1}, {"growth": 1}])
def test_bad_arguments(greedy, make_cluster, kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        goodput_search(greedy, make_cluster(), Workload.poisson(1), duration_s=5, **kwargs)
