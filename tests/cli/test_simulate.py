import json
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = ["--rate", "1000", "--duration-s", "1", "--warmup-s", "0.2"]


def test_prints_a_table(run):
    code, out, err = run("simulate", "--policy", "eager", *QUICK)
    assert (code, err) == (0, "")
    assert "resnet50" in out
    assert "Eager" in out


def test_json_and_flags(run):
    code, out, _ = run(
        *("simulate", "--policy", "timeout", "--policy-arg", "timeout_ms=2", *QUICK, "--json"),
        *("--workers", 3, "--slo-ms", 50, "--alpha-ms", 2, "--seed", 4),
        *("--arrivals", "gamma", "--shape", 0.5, "--latency-noise", 0.01),
    )
    summary = json.loads(out)
    assert code == 0
    assert summary["policy"] == "Timeout"
    assert summary["seed"] == 4
    assert len(summary["utilisation"]) == 3
    assert summary["models"]["resnet50"]["slo_ms"] == 50
    assert summary["offered_per_s"] == pytest.approx(1000, rel=0.2)


@pytest.mark.slow
def test_reads_a_spec_and_writes_a_report(run, tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text(
        "policy: {name: eager}\n"
        "cluster: {workers: 2, models: {a.b: {latency_slo_ms: 9, profile: {alpha_ms: 1}}}}\n"
        "workload: {arrivals: {kind: constant, rate: 100}}\n"
        "duration_s: 1\n"
    )
    code, out, _ = run("simulate", spec, "--slo-ms", 30, "--report", tmp_path / "out")
    assert code == 0
    assert "a.b" in out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["requests"] == 100
    assert summary["models"]["a.b"]["slo_ms"] == 30
    assert (tmp_path / "out" / "latency.png").stat().st_size > 0


def test_the_start_that_is_not_counted_follows_a_short_duration(run):
    code, out, _ = run("simulate", "--policy", "eager", "--duration-s", "1", "--json")
    assert code == 0
    assert json.loads(out)["duration_s"] == 1


@pytest.mark.slow
def test_goodput_search(run):
    code, out, _ = run("simulate", "--policy", "eager", *QUICK, "--goodput", "--json")
    assert code == 0
    assert json.loads(out)["goodput_search_rate"] > 2000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "eagre"], "policy 'eagre' is unknown; choose one of auto, deferred"),
        (["--policy-arg", "objective"], "wants KEY=VALUE"),
        (
            ["--goodput", "--slo-ms", "3600000", "--duration-s", "10"],
            "duration_s must be longer than the shortest SLO, 3600 s, got 10: ",
        ),
        (["--policy", "eager", "--policy-arg", "nap=3"], "no argument nap"),
        (["--slo-ms", "-1"], "latency_slo_ms: must be above 0 and at most 86400000, got -1.0"),
        (["--rate", "0"], "--rate must be positive and finite, got 0"),
        (["--arrivals", "weekly"], "--arrivals must be constant, poisson, gamma or a file"),
        (["--arrivals", "gamma"], "needs --shape"),
        (["--shape", "2"], "--shape goes with --arrivals gamma"),
        (["--rate", "inf"], "--rate must be positive and finite, got inf"),
        (["--rate", "1e15"], "2e+16 requests are more than a run may have"),
        (
            ["--workers", "-1"],
            "cluster.workers: must be from 1 to 100000, got -1",
        ),
        (["--policy", "timeout"], "policy 'timeout' needs the argument timeout_ms"),
        (["--policy", "Eager"], "(did you mean 'eager'?)"),
        (["--policy-arg", "fairness=x"], "fairness must be a number, got 'x'"),
        (["--report", "/dev/null/x"], "--report: cannot write '/dev/null/x': Not a directory"),
        (["configs/plan-pool.yaml"], "wanted a file like configs/simulate-resnet50.yaml"),
        (["--warmup-s", "99"], "warmup_s must be"),
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_mistakes_get_a_short_message_and_code_2(run, args, message):
    code, out, err = run("simulate", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_no_arguments_shows_the_commands(run):
    _, out, err = run()
    assert "simulate" in out + err


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from ray_slo.cli import app; "
        "print([m for m in ('ray', 'torch', 'pandas', 'scipy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_an_application(run):
    spec = Path(__file__).parents[2] / "configs" / "simulate-application.yaml"
    code, out, err = run("simulate", spec, "--duration-s", 4, "--policy", "eager")
    assert (code, err) == (0, "")
    assert "faces@gold" in out and "worker-hours" in out
    code, out, _ = run("simulate", spec, "--duration-s", 4, "--seed", 2, "--json")
    summary = json.loads(out)
    assert (summary["seed"], len(summary["streams"])) == (2, 3)
    code, _, err = run("simulate", spec, "--workers", 4)
    assert code == 2
    assert "--workers cannot be used with an application" in err


@pytest.mark.slow
def test_an_application_is_logged(run, tmp_path):
    spec = Path(__file__).parents[2] / "configs" / "simulate-application.yaml"
    assert run("simulate", spec, "--duration-s", 3, "--log", tmp_path / "log")[0] == 0
    code, out, _ = run("replay", tmp_path / "log")
    assert code == 0
    assert "all the same" in out
    code, _, err = run("simulate", "--log", tmp_path / "log")
    assert code == 2
    assert "--log needs an application" in err


DAY = "minute,requests\n" + "".join(f"{i},{60 * (i % 2)}\n" for i in range(600))


def test_arrivals_of_a_file_and_how_much_of_it_is_run_are_said(run, tmp_path):
    trace = tmp_path / "day.csv"
    trace.write_text(DAY)
    code, out, err = run("simulate", "--arrivals", trace, "--duration-s", 120, "--json")
    assert code == 0
    assert json.loads(out)["offered_per_s"] == pytest.approx(0.5, abs=0.2)
    assert err == (
        f"{trace}: 600 intervals of 60 s, 0.5 requests/s on average (from 'minute' and "
        "'requests'); the run takes the first 120 s of 36000 s\n"
    )


def test_a_document_names_a_file_of_arrivals_beside_it(run, tmp_path):
    (tmp_path / "times.csv").write_text(
        "timestamp,tokens\n2024-05-10 00:00:00,7\n"
        + "".join(f"2024-05-10 00:00:{i:02}.{i * i % 97:02},7\n" for i in range(1, 60))
    )
    spec = tmp_path / "spec.yaml"

    def simulate(arrivals):
        document = "cluster: {models: {a: {latency_slo_ms: 25, profile: {alpha_ms: 1}}}}\n"
        spec.write_text(f"{document}workload: {{arrivals: {arrivals}}}\n")
        return run("simulate", spec, "--json")

    code, out, err = simulate("{kind: times, file: times.csv}")
    assert (code, json.loads(out)["requests"]) == (0, 60)
    assert err.startswith(f"{tmp_path / 'times.csv'}: 60 requests in 59.86 s, 1 requests/s")
    for arrivals, said in (
        ("{kind: trace, file: times.csv}", "holds the time of each request; write kind: times"),
        ("{kind: times, file: no.csv}", f"arrivals.file: {tmp_path / 'no.csv'}: No such file"),
        ("{kind: times, file: spec.yaml}", f"arrivals.file: {spec}: line 1: none of its columns"),
        ("{kind: times, file: times.csv, times_s: [1]}", "it holds the times_s; leave out one"),
        ("{kind: trace, file: times.csv, interval_s: 0}", "interval_s: must be above 0, got 0"),
    ):
        code, _, err = simulate(arrivals)
        assert code == 2 and said in err.replace("\n", " "), err
