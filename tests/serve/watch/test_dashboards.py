"""Metrics are documented and shown. Prometheus' promtool checks when alerts fire."""

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ray_slo.serve.watch import metrics
from ray_slo.serve.watch.dashboards import PREFIX, dashboard, rules

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
PROMTOOL = shutil.which("promtool")
# By Serve and Ray, to every metric; `le` of histograms.
OTHER_TAGS = {"application", "deployment", "replica", "SessionName", "ray_io_cluster", "le"}


@pytest.fixture
def declared(monkeypatch):
    """Kind and tags of each metric, by name, as the classes in `serve/metrics.py` make them."""
    made = {}

    def kind(what):
        def make(name, description, boundaries=(), *, tag_keys):
            assert description.endswith(".")
            made[name] = (what, tag_keys)

        return make

    kinds = {what: kind(what) for what in ("Counter", "Gauge", "Histogram")}
    monkeypatch.setattr(metrics, "metrics", SimpleNamespace(**kinds))
    for name, cls in inspect.getmembers(metrics, inspect.isclass):
        if name.endswith("Metrics"):
            cls()
    assert len(made) > 15
    return made


def exported(name, kind):
    """Names of a metric's series in Prometheus."""
    if kind == "Histogram":
        return {f"ray_{name}_{part}" for part in ("bucket", "sum", "count")}
    return {f"ray_{name.removesuffix('_total')}_total" if kind == "Counter" else f"ray_{name}"}


def queries():
    """Every query of the dashboard, by panel, and of the rules."""
    for panel in json.loads(dashboard())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load(rules())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def test_every_metric_is_documented(declared):
    sections = re.split(r"^### ", DOCS.read_text("utf-8"), flags=re.M)[1:]
    documented = {}
    for section in sections:
        name, first, meaning, *rest = section.split("\n\n")
        kind, unit, tags = re.fullmatch(r"(\w+) of ([\w ]+?)(?:, by (.+))?\.", first).groups()
        documented[name] = (kind, tuple((tags or "").replace("`", "").split(", ")) if tags else ())
        for suffix, says in (("_ms", "milliseconds"), ("_s", "seconds")):
            assert name.endswith(suffix) == (unit == says), name
        assert meaning.strip()
        assert rest[0].startswith("**When it moves.** "), name
    assert documented == declared


def test_every_alert_is_documented():
    alerts = [name for name, _ in queries() if name.startswith("RaySLO")]
    text = DOCS.read_text("utf-8").partition("## Alerts")[2]
    assert re.findall(r"^\| `(\w+)`", text, flags=re.M) == alerts


def test_queries_ask_for_what_there_is_and_all_of_it(declared):
    tags = {s: set(tags) for n, (kind, tags) in declared.items() for s in exported(n, kind)}
    shown = set()
    for title, query in queries():
        asked = re.findall(rf"\b({PREFIX}\w+)(?:{{([^}}]*)}})?", query)
        groupings = re.findall(r"\bby \(([^)]*)\)", query)
        assert asked or "ray_slo:bad_share" in query, title
        having = set(OTHER_TAGS)
        for series, matchers in asked:
            assert series in tags, title
            matched = set(re.findall(r"(\w+)[=!]", matchers))
            assert matched <= tags[series] | OTHER_TAGS, (title, series)
            having |= tags[series]
        for grouping in groupings:
            assert set(grouping.split(", ")) <= having, title
        shown |= {series for series, _ in asked}
    for name, (kind, _) in declared.items():
        assert exported(name, kind) & shown, f"{name} is in no panel"


def test_the_dashboard_is_in_the_form_of_rays(monkeypatch):
    monkeypatch.setenv("RAY_GRAFANA_SERVE_SLO_DASHBOARD_GLOBAL_FILTERS", 'team="a"')
    monkeypatch.setenv("RAY_GRAFANA_SERVE_SLO_DASHBOARD_UID", "ours")
    made = json.loads(dashboard())
    assert made["uid"] == "ours"
    variables = {v["name"]: v for v in made["templating"]["list"]}
    assert list(variables) == (
        ["datasource", "SessionName", "Application", "Deployment", "Replica", "Model", "Cluster"]
    )
    for name, variable in variables.items():
        if name != "datasource":
            assert 'team="a"' in variable["definition"]
            assert variable["query"]["query"] == variable["definition"]
    panels = [p for p in made["panels"] if p["type"] != "row"]
    ids = [p["id"] for p in made["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        assert panel["datasource"] == "${datasource}"
        for target in panel["targets"]:
            for name in ("SessionName", "Application", "Deployment", "Replica", "Cluster"):
                assert f'=~"${name}"' in target["expr"]
            assert 'team="a"' in target["expr"]


@pytest.mark.parametrize("objective", [0.9, 0.93, 1.0, 99.0, float("nan")])
def test_objectives_that_cannot_be(objective):
    for make in (dashboard, rules):
        with pytest.raises(ValueError, match=r"objective must be a share above 0\.9306"):
            make(objective)


def test_a_plan_of_no_age():
    with pytest.raises(ValueError, match="max_plan_age_s must be positive, got 0"):
        rules(max_plan_age_s=0)


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_a_number_of_requests_that_cannot_be(number):
    with pytest.raises(ValueError, match="min_requests must be a number of requests, got"):
        rules(min_requests=number)


# -- alerts, on made-up counters, a value a minute -----------------------------------------

_AT = 'application="a",model="m"'


def outcomes(**patterns):
    return {f'{PREFIX}requests_total{{{_AT},outcome="{o}"}}': how for o, how in patterns.items()}


def preemptions(preempted, finished):
    name = f'{PREFIX}preemptions_total{{{_AT},deployment="d",variant="v",outcome='
    return {f'{name}"preempted"}}': preempted, f'{name}"finished"}}': finished}


PENDING, BATCHES = (
    f'{PREFIX}{m}{{application="a"}}' for m in ("pending_requests", "batch_size_count")
)
FAST, SLOW = "RaySLOBurnsFast", "RaySLOBurnsSlowly"
PLAN, DEAF, SILENT = "RaySLOPlanIsOld", "RaySLOPreemptionIsDeaf", "RaySLOSchedulerIsSilent"


WORSE, LESS = "RaySLOWorseThanExpected", "RaySLOLessAccurateThanExpected"


def of(**patterns):
    return {f"{PREFIX}{name}{{{_AT}}}": how for name, how in patterns.items()}


PLAN_AGE = f'{PREFIX}plan_age_s{{application="a"}}'
# What is counted, when one looks (minutes), and which alerts then fire.
CASES = {
    "a fifth refused": (outcomes(ok="0+80x90", refused="0+20x90"), 80, {FAST, SLOW}),
    "late and failed": (
        outcomes(ok="0+80x90", late="0+10x90", failed="0+10x90"),
        80,
        {FAST, SLOW},
    ),
    "a tenth refused": (outcomes(ok="0+90x90", refused="0+10x90"), 80, {SLOW}),
    "a twentieth refused": (outcomes(ok="0+95x90", refused="0+5x90"), 80, set()),
    "clients' doing": (
        outcomes(ok="0+50x90", cancelled="0+25x90", invalid="0+25x90"),
        80,
        set(),
    ),
    "nothing in time": (outcomes(refused="0+20x90"), 80, {FAST, SLOW}),
    "over for ten minutes": (outcomes(ok="0+10x90", refused="0+10x60 600x30"), 70, {SLOW}),
    "over for 40 minutes": (outcomes(ok="0+10x120", refused="0+10x60 600x60"), 100, set()),
    "a plan of 3 min": ({PLAN_AGE: "0+60x10"}, 3, set()),
    "a plan of 6 min": ({PLAN_AGE: "0+60x10"}, 6, {PLAN}),
    "plans in time": ({PLAN_AGE: "0 30 60 0 30 60 0 30 60 0"}, 9, set()),
    "most run on": (preemptions("0+1x30", "0+3x30"), 25, {DEAF}),
    "most stop": (preemptions("0+3x30", "0+1x30"), 25, set()),
    "requests wait, batches stand still": ({PENDING: "5x20", BATCHES: "7x20"}, 10, {SILENT}),
    "requests wait, no batch ever": ({PENDING: "5x20"}, 10, {SILENT}),
    "requests wait, batches run": ({PENDING: "5x20", BATCHES: "0+7x20"}, 10, set()),
    "requests wait, others are refused": (
        {PENDING: "5x20", **outcomes(refused="0+20x20")},
        10,
        {FAST, SLOW},
    ),
    "requests expire": (
        {PENDING: "0x20", **outcomes(expired="0+20x20")},
        10,
        {SILENT, FAST, SLOW},
    ),
    "hardly any, one refused": (outcomes(ok="0+1x20 20x70", refused="0x70 1x20"), 75, set()),
    "half of too few": (outcomes(ok="0+0.7x70", refused="0+0.7x70"), 65, set()),
    "half of just enough": (outcomes(ok="0+0.9x70", refused="0+0.9x70"), 65, {FAST, SLOW}),
    "a twentieth refused, as expected": (
        {**outcomes(ok="0+95x90", refused="0+5x90"), **of(expected_bad_rate="0.03x90")},
        30,
        set(),
    ),
    "a twentieth refused, a hundredth expected": (
        {**outcomes(ok="0+95x90", refused="0+5x90"), **of(expected_bad_rate="0.01x90")},
        30,
        {WORSE},
    ),
    "the same, over": (
        {
            **outcomes(ok="0+95x90", refused="0+5x20 100x70"),
            **of(expected_bad_rate="0.01x90"),
        },
        30,
        set(),
    ),
    "the same, of a few requests": (
        {**outcomes(ok="0+9x90", refused="0+1x90"), **of(expected_bad_rate="0.01x90")},
        30,
        {SLOW},
    ),
    "the same, nothing is expected any more": (
        {**outcomes(ok="0+95x90", refused="0+5x90"), **of(expected_bad_rate="0.01x5 stale")},
        30,
        set(),
    ),
    "less accurate than planned": (of(expected_accuracy="90x30", accuracy="87.5x30"), 20, {LESS}),
    "a little less": (of(expected_accuracy="90x30", accuracy="88.5x30"), 20, set()),
    "more accurate than planned": (of(expected_accuracy="80x30", accuracy="88x30"), 20, set()),
    "nobody asks": ({PENDING: "0x20"}, 10, set()),
}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_when_they_should(tmp_path):
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in series.items()],
            "promql_expr_test": [
                {
                    # promtool shows the query, and so the name, of what fails.
                    "expr": f'sum by (alertname) (ALERTS{{alertstate="firing"}}) # {name}',
                    "eval_time": f"{minute}m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in firing
                    ],
                }
            ],
        }
        for name, (series, minute, firing) in CASES.items()
    ]
    (tmp_path / "rules.yml").write_text(rules(), "utf-8")
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test), "utf-8")
    ran = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
