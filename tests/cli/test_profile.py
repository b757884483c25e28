from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import ray_slo
from ray_slo import Variant
from ray_slo.cli import app
from ray_slo.core.profiles import load_profiles
from ray_slo.models.preemption_profile import load_preemption
from ray_slo.models.profiling import (
    ProfilingError,
    Target,
    doubling_sizes,
    profile_callable,
    profile_class,
    to_profile,
)
from tests.cli import toys

run = CliRunner()
TOY = "tests.cli.toys:Toy"


Choosy = ray_slo.deployment(
    latency_slo_ms=500,
    variants=[
        Variant("quick", accuracy=50, load=toys.network, args=(1.0,)),
        Variant("deep", accuracy=60, load="tests.cli.toys:network", args=(5.0,)),
    ],
)(toys.Choosy)


class Clock:
    """Virtual time: a call of `batch` takes 10 + b ms, its first call for a size 100 ms more."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[int] = []

    def __call__(self) -> float:
        return self.now

    def batch(self, items: list[int]) -> list[int]:
        first = len(items) not in self.calls
        self.calls.append(len(items))
        self.now += 0.010 + 0.001 * len(items) + (0.1 if first else 0.0)
        return items


def test_first_calls_do_not_count_and_rounds_are_interleaved() -> None:
    clock = Clock()
    samples = profile_callable(clock.batch, 0, (1, 2, 4), budget_s=10, repeats=3, clock=clock)
    assert {b: pytest.approx([0.010 + 0.001 * b] * 3) for b in (1, 2, 4)} == samples
    assert clock.calls[-9:] == [1, 2, 4] * 3


def test_budget_and_bound_end_the_sweep() -> None:
    clock = Clock()
    profile_callable(clock.batch, 0, doubling_sizes(64), budget_s=0.5, clock=clock)
    assert clock.now < 0.5 + 0.11 + 0.064
    clock = Clock()
    samples = profile_callable(
        clock.batch, 0, doubling_sizes(64), budget_s=60, bound_s=0.020, repeats=2, clock=clock
    )
    assert list(samples) == [1, 2, 4, 8, 16]  # 16 is the first above 20 ms; 32 is not tried


def test_without_time_size_one_is_measured() -> None:
    clock = Clock()
    assert list(profile_callable(clock.batch, 0, (1, 2), budget_s=0, clock=clock)) == [1]


def test_async_methods_are_run_to_their_end() -> None:
    clock = Clock()

    async def batch(items: list[int]) -> list[int]:
        return clock.batch(items)

    samples = profile_callable(batch, 0, (1, 3), budget_s=10, repeats=2, clock=clock)
    assert samples[3] == pytest.approx([0.013, 0.013])


def test_sizes() -> None:
    assert doubling_sizes(1) == [1]
    assert doubling_sizes(8) == [1, 2, 4, 8]
    assert doubling_sizes(11) == [1, 2, 4, 8, 11]
    with pytest.raises(ValueError, match="at least one number"):
        profile_callable(lambda items: items, 0, (0, 1))


def test_quantile_and_interpolation() -> None:
    profile = to_profile({1: [0.01, 0.02, 0.03], 3: [0.06]}, quantile=0.5)
    assert profile.table == pytest.approx([0.02, 0.04, 0.06])


def test_a_class_is_measured_in_a_process_of_its_own() -> None:
    shares: list[float] = []
    samples = profile_class(
        Target(TOY, {"base_ms": 10}), max_batch_size=8, budget_s=1, progress=shares.append
    )
    assert list(samples) == [1, 2, 4, 8]
    assert samples[8] == pytest.approx([0.018] * len(samples[8]))
    assert shares == sorted(shares)
    assert len(shares) > 2


def test_a_profile_says_how_a_network_runs_and_what_it_takes(tmp_path) -> None:
    out = tmp_path / "weighty.json"
    weighty = "tests.cli.toys:Weighty"
    flags = ["--arg", "base_ms=1", "--max-batch", "1", "--seconds", "0.1", "--out", str(out)]
    result = run.invoke(app, ["profile", weighty, *flags])
    assert result.exit_code == 0, result.output
    about = json.loads(out.read_text())["variants"]["Weighty"]
    assert about["memory_of"] == "host" and 60 < about["memory_mb"] < 200
    assert about["runs"] == "bfloat16, graph: 1 ms at batch size 1"
    assert f"runs in {about['runs']}" in result.stdout and "MB of the host" in result.stdout
    assert load_profiles(out)["Weighty"].max_batch_size == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.cli.toys:NoExample", "example_input"),
        ("tests.cli.toys:Absent", "Absent"),
    ],
)
def test_errors_of_the_class_arrive(target: str, message: str) -> None:
    with pytest.raises(ProfilingError, match=message):
        profile_class(Target(target), budget_s=0.1)


@pytest.mark.slow
def test_command_writes_a_profile_file_and_a_plot(tmp_path) -> None:
    out, plot = tmp_path / "new" / "toy.json", tmp_path / "toy.svg"
    result = run.invoke(
        app,
        [
            "profile",
            TOY,
            "--variant",
            "small",
            "--variant",
            "large",
            "--arg",
            "base_ms=8",
            "--max-batch",
            "4",
            "--seconds",
            "0.5",
            "--out",
            str(out),
            "--plot",
            str(plot),
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["profiles"]["small"]["latency_ms"][3] == pytest.approx(12)
    profiles = load_profiles(out)
    assert profiles["large"].latency(1) == pytest.approx(0.017)
    assert json.loads(out.read_text())["threads"] == 1
    assert plot.read_text().lstrip().startswith("<?xml")


def test_command_with_an_input_file_prints_a_table(tmp_path) -> None:
    item = tmp_path / "item.txt"
    item.write_bytes(b" x ")
    result = run.invoke(
        app,
        [
            "profile",
            "tests.cli.toys:NoExample",
            "--input",
            str(item),
            "--seconds",
            "0.2",
            "--max-batch",
            "2",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "NoExample" in result.stdout
    assert "items/s" in result.stdout


@pytest.mark.slow
def test_preemption_is_measured_saved_and_plotted(tmp_path) -> None:
    pytest.importorskip("torch")
    out, plot = tmp_path / "layers.json", tmp_path / "layers.svg"
    command = ["profile", "tests.cli.toys:Layers", "--max-batch", "2", "--seconds", "0.3"]
    command += ["--preemption", "--exit-points", "0", "--exit-points", "11"]
    result = run.invoke(app, [*command, "--out", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "delay p95" in result.stdout
    saved = load_preemption(out)["Layers"]
    assert (saved.chosen, len(saved.exit_points)) == (11, 11)
    assert {(p.exit_points, p.batch_size) for p in saved.points} == {
        (0, 1),
        (0, 2),
        (11, 1),
        (11, 2),
    }
    slow, quick = (min(p.delay for p in saved.points if p.exit_points == n) for n in (0, 11))
    assert quick < slow
    assert load_profiles(out)["Layers"].latency(1) == pytest.approx(0.012)
    assert (tmp_path / "layers-preemption.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_what_cannot_be_preempted_is_said() -> None:
    pytest.importorskip("torch")
    none = run.invoke(app, ["profile", TOY, "--seconds", "0.1", "--max-batch", "1", "--preemption"])
    assert none.exit_code == 2
    assert "Toy must have exactly one attribute that is a torch.nn.Module" in " ".join(
        none.output.replace("│", " ").split()
    )
    alone = run.invoke(app, ["profile", TOY, "--exit-points", "4"])
    assert alone.exit_code == 2
    assert "is for --preemption" in alone.output


def test_command_errors() -> None:
    broken = run.invoke(app, ["profile", "tests.cli.toys:Broken", "--seconds", "0.1"])
    assert broken.exit_code == 2
    assert "out of order" in broken.output
    assert run.invoke(app, ["profile", TOY, "--quantile", "2"]).exit_code == 2
    assert "KEY=VALUE" in run.invoke(app, ["profile", TOY, "--arg", "x"]).output


def measure(*args: str) -> dict[str, list[float]]:
    result = run.invoke(app, ["profile", *args, "--seconds", "0.4", "--max-batch", "2", "--json"])
    assert result.exit_code == 0, result.output
    return {v: p["latency_ms"] for v, p in json.loads(result.stdout)["profiles"].items()}


@pytest.mark.slow
def test_every_variant_of_a_deployment_or_a_config_is_measured(tmp_path) -> None:
    choosy = "tests.cli.test_profile:Choosy"
    found = measure(choosy)
    assert set(found) == {"quick", "deep"}
    assert (found["quick"][0], found["deep"][0]) == pytest.approx((5, 25))
    wrong = run.invoke(app, ["profile", choosy, "--variant", "depe"])
    assert wrong.exit_code == 2
    assert "has no depe; it has deep, quick" in wrong.output
    config = tmp_path / "app.yaml"
    network = {"load": "tests.cli.toys:network", "accuracy": 50}
    variants = {"b": {**network, "kwargs": {"factor": 4}}}
    models = {
        "chosen": {
            "callable": "tests.cli.toys:Choosy",
            "latency_slo_ms": 500,
            "variants": variants,
        },
        "plain": {"callable": TOY, "kwargs": {"base_ms": 30}, "latency_slo_ms": 500},
    }
    config.write_text(json.dumps({"applications": [{"args": {"models": models}}]}))
    found = measure(str(config))
    assert set(found) == {"b", "plain"}
    assert (found["b"][0], found["plain"][0]) == pytest.approx((20, 31))


@pytest.mark.slow
def test_a_configs_environment_is_that_of_the_measured_class(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TOY_BASE_MS", "7")  # the file's own wins
    config = tmp_path / "app.yaml"
    models = {"m": {"callable": "tests.cli.toys:FromEnvironment", "latency_slo_ms": 500}}

    def write(runtime_env) -> None:
        application = {"args": {"models": models}, "runtime_env": runtime_env}
        config.write_text(json.dumps({"applications": [application]}))

    write({"env_vars": {"TOY_BASE_MS": "40"}})
    assert measure(str(config))["m"][0] == pytest.approx(41)
    write({"working_dir": "."})
    assert measure(str(config))["m"][0] == pytest.approx(8)
    for wrong in ({"env_vars": {"TOY_BASE_MS": 40}}, {"env_vars": ["TOY_BASE_MS"]}, "none"):
        write(wrong)
        result = run.invoke(app, ["profile", str(config)])
        assert result.exit_code == 2
        assert "runtime_env: got" in result.output
