"""`ray-slo replay` on logs of simulated runs."""

import json

import pytest
from typer.testing import CliRunner

from ray_slo.cli import app
from ray_slo.core import Cluster, Decision, Dispatch, LatencyProfile, Model, Request, Variant
from ray_slo.policies import make_policy
from ray_slo.record.encode import Lines
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation import simulate
from ray_slo.simulation.workloads import Workload

CLUSTER = Cluster.uniform(
    [Model("m", 0.1, (Variant("v", {"default": LatencyProfile.linear(0.001, 0.01, 16)}),))], 2
)


def run(*args):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    for policy in ("deferred", "eager"):
        lines = Lines(folder, f"20260101-{policy}", Start.of(policy, {}, wall_at=1e9))
        recording = Recording(make_policy(policy), lines)
        simulate(recording, CLUSTER, Workload.poisson(100), duration_s=1.0)
        lines.close()
    return folder


def test_the_same_policy(log):
    shown = run(log)
    assert shown.exit_code == 0
    first, second = shown.stdout.splitlines()
    assert first.startswith("20260101-deferred (deferred): ")
    assert second.endswith("actions, all the same")
    (one,) = json.loads(run(log, "--run", "eager", "--json").stdout)
    assert (one["scheduler"], one["identical"], one["difference"]) == (
        *("20260101-eager", True, None),
    )
    assert one["rounds"] > one["actions"] > 0


def test_what_if(log):
    shown = run(log, "--run", "deferred", "--policy", "eager", "--policy", "kairos")
    assert shown.exit_code == 0, shown.output
    for row in ("recorded", "deferred, simulated", "what if eager", "what if kairos"):
        assert row in shown.stdout
    assert "2001-09-09 01:46 UTC" in shown.stdout
    found = json.loads(
        run(
            *(log, "--policy", "timeout", "--policy-arg", "timeout_ms=20", "--warmup-s", "0.2"),
            "--json",
        ).stdout
    )
    assert found["scheduler"] == "20260101-eager"  # the newest
    assert found["recorded"]["requests"] == found["what if timeout"]["requests"]
    assert found["what if timeout"]["latency_p50_ms"] > found["recorded"]["latency_p50_ms"]
    assert found["recorded"]["latency_p50_ms"] == pytest.approx(
        found["eager, simulated"]["latency_p50_ms"]
    )


class Shaky:
    """Counts across its lives, which no policy should."""

    serves_late = True
    lives = 0

    def __init__(self):
        Shaky.lives += 1

    def cluster_changed(self, now, cluster): ...
    def requests_cancelled(self, now, requests): ...
    def batch_finished(self, now, worker, outcome): ...
    def requests_arrived(self, now, requests):
        self.requests = requests

    def decide(self, now):
        return Decision([Dispatch(Shaky.lives, "w0", "v", self.requests, now, now)])


def test_a_difference_is_an_error(tmp_path):
    lines = Lines(tmp_path, "shaky", Start.of(Shaky, {}))
    recording = Recording(Shaky(), lines)
    recording.cluster_changed(0.0, CLUSTER)
    recording.requests_arrived(0.0, [Request(7, "m", 0.0, 1.0)])
    recording.decide(0.0)
    lines.close()
    shown = run(tmp_path)
    assert shown.exit_code == 1
    assert "NOT the same from decision 0 on, at 0.0" in shown.stdout
    assert "recorded: dispatch batch 1 of v to w0: requests [7]" in shown.stdout
    assert "replayed: dispatch batch " in shown.stdout


def test_mistakes_are_named(log, tmp_path):
    for args, said in (
        ((tmp_path / "none",), "No such decision log"),
        ((tmp_path,), "no decision log here"),
        ((log, "--run", "loki"), "there are 20260101-deferred, 20260101-eager"),
        ((log, "--policy", "egaer"), "policy 'egaer' is unknown"),
        ((log, "--policy-arg", "a=1"), "--policy-arg needs --policy"),
        ((log, "--policy", "eager", "--policy", "flex", "--policy-arg", "a=1"), "one --policy"),
        ((log, "--policy", "eager", "--warmup-s", "9"), "warmup_s must be"),
    ):
        shown = run(*args)
        assert shown.exit_code == 2, shown.output
        assert said.lower() in shown.output.lower()
