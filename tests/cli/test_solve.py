import json
import re

import pytest

from ray_slo.core.profiles import LatencyProfile, save_profiles
from ray_slo.papers.ramsis import PolicySet

SPEC = """
latency_slo_ms: 150
num_workers: 3
num_slacks: 30
variants:
  fast: {accuracy: 60, profile: {alpha_ms: 6, beta_ms: 12, max_batch_size: 8}}
  slow: {accuracy: 81, profile: {alpha_ms: 30, beta_ms: 50, max_batch_size: 8}}
loads: {low: 10, high: 200, step_accuracy: 4}
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


def test_solves_saves_and_adds(run, spec):
    code, out, _ = run("solve", spec, "--json")
    assert code == 0
    found = json.loads(out)
    tables = PolicySet.load(spec.with_suffix(".npz"))
    assert tables.profile_hash == found["profile_hash"]
    assert found["variants"] == {"fast": 60, "slow": 81}
    assert [t["rate"] for t in found["tables"]] == list(tables.rates)
    assert (tables.rates[0], tables.rates[-1]) == (10, 200)
    assert found["solved"] == len(tables) > 2
    assert found["tables"][0]["variant_mix"]["slow"] > 0.9

    # Once more: all is there. A wider range: only what is missing.
    assert json.loads(run("solve", spec, "--json")[1])["solved"] == 0
    assert json.loads(run("solve", spec, "--json", "--fresh")[1])["solved"] == len(tables)
    spec.write_text(SPEC.replace("high: 200", "high: 210"))
    again = json.loads(run("solve", spec, "--json")[1])
    assert 0 < again["solved"] < len(tables)
    assert len(again["tables"]) == len(tables) + again["solved"]


def test_prints_a_table(run, spec, tmp_path):
    code, out, _ = run("solve", spec, "--out", tmp_path / "sub" / "x.npz")
    assert code == 0
    assert "requests/s" in out
    assert "slow" in out
    assert (tmp_path / "sub" / "x.npz").exists()


def test_profiles_come_from_a_file_and_arrivals_from_a_record(run, tmp_path):
    save_profiles(tmp_path / "p.json", {"v": LatencyProfile.linear(0.01, 0.02, 4)})
    (tmp_path / "times.txt").write_text("\n".join(str(i * 0.1) for i in range(4000)))
    spec = tmp_path / "s.yaml"
    spec.write_text(
        "latency_slo_ms: 100\nnum_workers: 1\nnum_slacks: 10\nloads: {rates: [12, 20]}\n"
        "variants: {v: {accuracy: 50, profile: {file: p.json}}}\n"
        "arrivals: {kind: empirical, file: times.txt}\n"
    )
    code, out, err = run("solve", spec, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["options"]["arrivals"]["kind"] == "empirical"
    # Evenly spaced requests, each answered before the next: never late.
    assert [t["violation_rate"] for t in found["tables"]] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_workers: 3", "num_workers: 0", "num_workers"),
        (
            "num_workers: 3",
            "num_worker: 3",
            "num_worker: unknown key (did you mean 'num_workers'?)",
        ),
        ("accuracy: 60", "accuracy: 160", "variants.fast.accuracy"),
        (
            "latency_slo_ms: 150",
            "latency_slo_ms: 15",
            "latency_slo_ms: no variant answers in time; the fastest takes 18 ms, got 15",
        ),
        (
            "low: 10, high: 200",
            "low: 300, high: 200",
            "loads.low: must be below high, which is 200, got 300",
        ),
        ("num_slacks: 30", "batching: all", "batching: must be one of maximal, variable"),
        ("num_slacks: 30", "arrivals: {kind: weird}", "must be one of poisson, gamma, empirical"),
    ],
)
def test_a_bad_spec_is_explained(run, spec, old, new, message):
    spec.write_text(SPEC.replace(old, new))
    code, _, err = run("solve", spec)
    assert code == 2
    assert message in re.sub(r"\s+", " ", err)


def test_tables_of_something_else_are_not_overwritten(run, spec):
    run("solve", spec)
    before = spec.with_suffix(".npz").read_bytes()
    spec.write_text(SPEC.replace("accuracy: 60", "accuracy: 61"))
    code, _, err = run("solve", spec)
    assert code == 2
    assert "--fresh" in err
    assert spec.with_suffix(".npz").read_bytes() == before


@pytest.mark.slow
def test_shows_and_compares(run, spec, tmp_path):
    run("solve", spec)
    first, second = spec.with_suffix(".npz"), tmp_path / "four.npz"
    code, out, _ = run("policy", "show", first, "--rate", 60, "--plot", tmp_path / "p" / "one.png")
    assert code == 0
    assert "SLO 150 ms, 3 workers" in out
    assert re.search(r"^ +1 a+b+$", out, re.MULTILINE)  # n = 1: fast if urgent, slow if not
    assert "a fast 60 %" in out
    assert (tmp_path / "p" / "one.png").stat().st_size > 5000

    spec.write_text(SPEC.replace("num_workers: 3", "num_workers: 4"))
    run("solve", spec, "--out", second)
    code, out, _ = run(
        *("policy", "show", first, "--compare", second, "--plot", tmp_path / "two.png", "--json")
    )
    found = json.loads(out)
    assert code == 0
    assert found["compare"]["options"]["num_workers"] == 4
    assert 0 < found["different_decisions"] < 1
    assert (tmp_path / "two.png").stat().st_size > (tmp_path / "p" / "one.png").stat().st_size
    assert "other decisions in" in run("policy", "show", first, "--compare", second)[1]
    assert "other decisions in 0.0 %" in run("policy", "show", first, "--compare", first)[1]


def test_show_explains_what_is_no_table(run, spec, tmp_path):
    assert run("policy", "show", tmp_path / "none.npz")[0] == 2
    code, _, err = run("policy", "show", spec)
    assert code == 2
    assert "not a file of RAMSIS tables" in re.sub(r"\s+", " ", err)
    run("solve", spec)
    code, _, err = run("policy", "show", spec.with_suffix(".npz"), "--rate", 0)
    assert (code, "--rate must be positive" in err) == (2, True)
