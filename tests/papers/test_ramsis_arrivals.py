import numpy as np
import pytest

from ray_slo.papers.ramsis import Empirical, Gamma, Poisson
from ray_slo.papers.ramsis.arrivals import arrivals_of
from ray_slo.papers.ramsis.spec import SolveSpec

SPANS = np.array([0.0, 0.3, 2.0, 7.5])


@pytest.mark.parametrize("after_arrival", [True, False])
def test_gamma_of_shape_one_is_poisson(after_arrival):
    for k_max in (0, 12):
        expected = Poisson().pmf(k_max, SPANS, after_arrival=after_arrival)
        assert Gamma(1.0).pmf(k_max, SPANS, after_arrival=after_arrival) == pytest.approx(
            expected, abs=1e-12
        )


def test_poisson_tail_is_the_sum_of_its_counts():
    counts = Poisson().pmf(60, SPANS, after_arrival=True)
    tail = Poisson().at_least(np.arange(61), SPANS[:, None], after_arrival=True)
    assert 1 - np.cumsum(counts, axis=1)[:, :-1] == pytest.approx(tail[:, 1:], abs=1e-12)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_at_any_time_the_mean_count_is_the_span(shape):
    tail = Gamma(shape).at_least(np.arange(1, 200), SPANS[:, None], after_arrival=False)
    assert tail.sum(1) == pytest.approx(SPANS, abs=1e-6)


def test_gamma_counts_are_those_of_simulated_gaps():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.gamma(0.3, 1 / 0.3, (20_000, 40)), axis=1)
    for span in (0.5, 3.0):
        for k in (1, 2, 5):
            expected = (times[:, k - 1] <= span).mean()
            got = Gamma(0.3).at_least(k, span, after_arrival=True)
            assert got == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("after_arrival", [True, False])
def test_a_record_of_poisson_arrivals_counts_like_poisson(after_arrival):
    times = np.cumsum(np.random.default_rng(1).exponential(0.01, 20_000))
    recorded = Empirical(times)
    assert recorded.shape == pytest.approx(1, rel=0.05)
    got = recorded.pmf(8, SPANS, after_arrival=after_arrival)
    assert got == pytest.approx(Poisson().pmf(8, SPANS, after_arrival=after_arrival), abs=0.03)
    assert got.sum(1).max() <= 1 + 1e-9


def test_a_record_says_what_it_is():
    times = np.arange(200.0)
    about = Empirical(times).to_json()
    assert (about["kind"], about["arrivals"]) == ("empirical", 200)
    assert about == Empirical(3 * times).to_json()  # stretched to the rate anyway
    assert about != Empirical(np.cumsum(times)).to_json()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(0), "shape must be positive, got 0"),
        (lambda: Poisson(2.0), "shape of Poisson arrivals is 1, got 2.0"),
        (lambda: Empirical(np.arange(5.0)), "at least 100 arrivals"),
        (lambda: Empirical(np.arange(200.0)[::-1]), "ascending"),
        (
            lambda: Empirical(np.arange(200.0)).at_least(1, 150.0, after_arrival=True),
            "too short: counts over spans of 150 arrivals",
        ),
    ],
)
def test_bad_arrivals_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "it has no lines"),
        (b"1\n2\n", "times_s must hold at least 100 arrivals"),
        (b"soon\n", "line 1: none of its columns ('soon') is known"),
        (b"1\nsoon\n", "line 2: 'soon' is no time; write seconds"),
        (b"1 2\n3\n", "line 1: it has 2 values without names"),
        (b"1\n\xff\n", "line 2: it is not text"),
        (b"2\n1\n" * 60, "line 2: its time is before that of the line above"),
        (b"minute,requests\n0,1\n1,2\n", "must hold the time of each request; it has 2 intervals"),
    ],
)
def test_a_file_that_holds_no_arrivals_is_named(content, said, tmp_path):
    path = tmp_path / "arrivals.txt"
    if content is not None:
        path.write_bytes(content)
    document = {
        "latency_slo_ms": 100,
        "num_workers": 2,
        "variants": {"v": {"accuracy": 90, "profile": {"alpha_ms": 1}}},
        "arrivals": {"kind": "empirical", "file": str(path)},
    }
    for read in (
        lambda: arrivals_of(document["arrivals"]),
        lambda: SolveSpec.model_validate(document).problem(tmp_path),
    ):
        with pytest.raises(ValueError) as refused:
            read()
        assert str(refused.value).startswith(f"arrivals.file: {path}: ")
        assert said in str(refused.value)
