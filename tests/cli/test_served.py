"""`ray-slo simulate` of a config as it is served."""

import json
from pathlib import Path

import pytest
import yaml

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.serve.config.resolve import parse_spec

CONFIGS = Path(__file__).parents[2] / "configs"
ROOTS = {
    "digits-two-models": {"fast", "precise"},
    "pipeline-faces": {"faces"},
    "recommender-kairos": {"recommender"},
    "showcase": {"digit", "digit@gold", "rank", "sheet"},
}


@pytest.fixture
def profiles(tmp_path):
    def write(config):
        (application,) = yaml.safe_load(config.read_text())["applications"]
        names = parse_spec(application["args"]).variants()
        path = tmp_path / "profiles.json"
        save_profiles(path, dict.fromkeys(names, LatencyProfile.linear(0.002, 0.004, 64)))
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ROOTS)
def test_a_config_is_simulated_as_it_is(run, profiles, tmp_path, name):
    config = CONFIGS / f"{name}.yaml"
    options = ("--profiles", profiles(config), "--duration-s", 4, "--log", tmp_path / "log")
    code, out, err = run("simulate", config, "--rate", 40, *options, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {stream["stream"] for stream in told["streams"]} == ROOTS[name]
    rates = [s["rate"] for s in told["streams"] if "@" not in s["stream"]]
    assert rates == pytest.approx([40 / len(rates)] * len(rates), rel=0.4)
    assert told["bad_rate"] < 0.1
    assert any((tmp_path / "log").iterdir())


@pytest.mark.slow
def test_what_has_no_profile_is_measured(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(
        "class Toy:\n"
        "    @staticmethod\n"
        "    def example_input():\n"
        "        return 1\n"
        "    def __call__(self, items):\n"
        "        return items\n"
    )
    args = {"models": {"toy": {"callable": "toy:Toy", "latency_slo_ms": 500}}}
    args["profile_seconds"] = 0.2
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(args))
    code, out, err = run("simulate", tmp_path / "args.yaml", "--rate", 20, "--duration-s", 2)
    assert code == 0, err
    assert "measured here, with 1 thread: toy" in err
    assert "toy" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--rate is required"),
        (("--rate", 5, "--workers", 3), "--workers cannot be used with a `serve run` config"),
        (("--rate", 5, "--profiles", "gone.json"), "--profiles: cannot read gone.json"),
        (("--rate", 5, "--policy", "none"), "policy"),
        (("--rate", 5, "--policy-arg", "a=1"), "--policy-arg needs --policy"),
    ],
)
def test_what_cannot_be_is_said(run, options, said):
    code, _, err = run("simulate", CONFIGS / "digits.yaml", *options)
    assert code == 2
    assert said in err


def test_what_serves_otherwise_than_its_args_say_is_refused(run, tmp_path):
    config = yaml.safe_load((CONFIGS / "digits.yaml").read_text())
    config["applications"][0]["deployments"] = [{"name": "digits-cpu-worker", "num_replicas": 9}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = run("simulate", tmp_path / "config.yaml", "--rate", 5)
    assert code == 2
    assert "deployments: what they change is not simulated" in err


def test_groups_that_a_planner_makes_are_refused(run):
    code, _, err = run("simulate", CONFIGS / "groups-herd.yaml", "--rate", 5)
    assert code == 2
    assert "'herd' makes groups, and is not simulated" in err
