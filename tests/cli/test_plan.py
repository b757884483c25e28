import io
import json
from functools import partial

import pytest
from rich.console import Console

from ray_slo.cli.plan import print_dry_run

SPEC = """
cluster: {models: {a.b: {latency_slo_ms: 25, profile: {alpha_ms: 1, beta_ms: 5}}}}
workload: {arrivals: {kind: constant, rate: 1000}}
duration_s: 0.5
"""


@pytest.fixture
def run(run, monkeypatch):
    """Run `ray-slo plan ARGS`: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")
    return partial(run, "plan")


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.slow
def test_tables(run, spec):
    code, out, _ = run(
        *(spec, "--policy", "deferred", "--what-if", "load=+50%", "--what-if", "slo=5ms")
    )
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert "1000 requests/s, at most 1.0 % bad" in out
    cells = [cell.strip() for cell in rows["deferred"].split("│")[2:-1]]
    assert [cell.split(" · ")[0] for cell in cells] == ["2", "3", "none"]


def test_json(run, spec):
    policies = ("--policy", "deferred", "--policy", "eager")
    code, out, _ = run(spec, *policies, "--what-if", "load=+500%", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["load_per_s"], told["bad_rate"]) == (1000, 0.01)
    assert [a["name"] for a in told["answers"]] == ["deferred", "eager"]
    answer, more = told["answers"][0], told["what_if"]["load=+500%"][0]
    assert answer["workers"] == 2 < more["workers"]
    assert answer["bad_rate"] <= 0.01
    assert 6 <= answer["p99_ms"] <= 25
    assert answer["models"]["a.b"]["p99_ms"] == answer["p99_ms"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either a SPEC or --live APP"),
        (["SPEC", "--live", "app"], "give either a SPEC or --live APP"),
        (["--live", "app", "--what-if", "load=2x"], "--what-if and --policy go with a SPEC"),
        (["SPEC", "--what-if", "cost=3"], "'cost' must be one of load, slo, latency, budget"),
        (["SPEC", "--policy", "eagre"], "policy 'eagre' is unknown; choose one of"),
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_mistakes_get_a_short_message_and_code_2(run, spec, args, message):
    code, out, err = run(*(spec if a == "SPEC" else a for a in args))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("[eagre]", "policies.0: policy 'eagre' is unknown; choose one of"),
        ("[{name: deferred, kwargs: {patience: 1}}]", "policies.0: policy 'deferred' has no"),
    ],
)
def test_mistakes_about_policies_name_the_file(run, spec, policies, message):
    spec.write_text(f"{SPEC}policies: {policies}\n")
    code, out, err = run(spec)
    assert (code, out) == (2, "")
    assert f"{spec}: {message}" in err


def test_a_dry_run_is_shown_beside_what_runs():
    one = {"variant": "large", "batch_size": 4, "load": None}
    found = {
        "planner": "loki",
        "why": "Accuracy scaling: [now].",
        "why_in_force": "Hardware scaling.",
        "took_s": 0.1,
        "replicas": {"gpu": {"running": 2, "target": 2, "would": 3}},
        "workers": {
            "w1": {"kind": "gpu", "does": [one], "would": [{**one, "load": 3.0}], "load": []},
            "w2": {"kind": "gpu", "does": [], "would": [one], "load": ["large"]},
        },
        "plan": {"demand": 12.5},
    }

    def printed():
        file = io.StringIO()
        print_dry_run(Console(file=file, width=120), "app", found)
        return file.getvalue()

    text = printed()
    assert "app: loki would plan for 12.5/s now" in text
    assert "why: Accuracy scaling: [now]." in text
    assert "in force: Hardware scaling." in text
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["gpu", "2", "2", "3"] in rows
    assert ["w2", "gpu", "all requests", "large, batches of 4", "large"] in rows
    assert "w1" not in text
    found["workers"].pop("w2")
    found["replicas"]["gpu"]["target"] = None
    assert "no present worker would change" in printed()
    assert "as many as there are" in printed()


# -- an application -----------------------------------------------------------------------------

APPLICATION = """
workers:
  gpu: {min_replicas: 1, max_replicas: 6, price_per_hour: 3.0}
models:
  read:
    latency_slo_ms: 400
    slo_classes: {gold: 200}
    variants:
      large: {accuracy: 90, profile: {alpha_ms: 10, beta_ms: 30, max_batch_size: 16}}
      small: {accuracy: 80, profile: {alpha_ms: 4, beta_ms: 10, max_batch_size: 16}}
workloads:
  read: {arrivals: {kind: trace, rates: [5, 60], interval_s: 20}}
  read@gold: {arrivals: {kind: poisson, rate: 20}, sizes: {kind: measured, values: [2]}}
"""


@pytest.fixture
def application(tmp_path):
    path = tmp_path / "application.yaml"
    path.write_text(APPLICATION)
    return path


def test_the_plan_of_an_application(run, application):
    code, out, err = run(application)
    assert (code, err) == (0, "")
    rows = {}
    for line in out.splitlines():
        if "│" in line:
            name, *cells = (cell.strip() for cell in line.split("│")[1:-1])
            rows.setdefault(name, []).append(cells)
    assert rows["gpu"][0][0].endswith(" of 1–6")
    assert rows["large"][0][:2] == ["read", "gpu"]
    assert [cells[0] for cells in rows["read"]] == ["60.0/s", "90.00 %"]
    assert rows["read@gold"][0][0] == "20.0/s"
    assert "The most accurate variants suffice" in out


def test_the_plan_of_an_application_as_json(run, application):
    told = json.loads(run(application, "--json")[1])
    assert told["demand"]["read"]["rate"] == 60  # a trace's largest
    assert told["demand"]["read@gold"] == {"rate": 20, "dispersion": 1.0}
    assert told["cost_per_hour"] == 3 * told["workers"]["gpu"]
    assert sum(row["share"] for row in told["assignments"]) == pytest.approx(1)
    assert told["expected"]["read"]["accuracy"] == pytest.approx(90)
    assert told["shortfall"] is None
    # Under a budget of one worker it does what it can, and says what is missing.
    application.write_text(APPLICATION + "budget_per_hour: 3\n")
    told = json.loads(run(application, "--json")[1])
    assert told["workers"] == {"gpu": 1}
    assert told["expected"]["read"]["accuracy"] < 90


@pytest.mark.parametrize(
    ("more", "args", "message"),
    [
        ("", ["--what-if", "load=2x"], "--what-if and --policy go with a spec of one cluster"),
        ("planner: null\n", [], "planner: null runs all workers"),
        (
            "  write: {arrivals: {kind: poisson, rate: 1}}\n",
            [],
            "workloads.write: no such stream; they are",
        ),
        ("budget: 3\n", [], "budget"),
    ],
)
def test_mistakes_in_an_application(run, application, more, args, message):
    application.write_text(APPLICATION + more)
    code, _, err = run(application, *args)
    assert code == 2
    assert message in err
