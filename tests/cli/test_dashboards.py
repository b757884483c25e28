"""`ray-slo dashboards` writes files that Grafana and Prometheus take."""

import json

import pytest
import yaml

from ray_slo.cli import main


def run(*args):
    with pytest.raises(SystemExit) as left:
        main(["dashboards", *map(str, args)])
    return left.value.code


def test_files_for_an_objective(tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert run("--out", out, "--objective", "0.999", "--max-plan-age-s", 30) == 0
    written = sorted(out.iterdir())
    assert [line.strip() for line in capsys.readouterr().out.split()] == [str(p) for p in written]
    dashboard, rules = written
    panels = {p["title"]: p for p in json.loads(dashboard.read_text("utf-8"))["panels"]}
    assert panels["Burn rate"]["targets"][0]["expr"].endswith(" / 0.001")
    groups = yaml.safe_load(rules.read_text("utf-8"))["groups"]
    alerts = {rule["alert"]: rule["expr"] for rule in groups[1]["rules"]}
    fast, _, enough = alerts["RaySLOBurnsFast"].partition(" and sum ")
    assert fast == "ray_slo:bad_share:rate1h > 0.0144 and ray_slo:bad_share:rate5m > 0.0144"
    assert enough.endswith("[1h])) >= 100")
    slow, _, enough = alerts["RaySLOBurnsSlowly"].partition(" and sum ")
    assert slow == "ray_slo:bad_share:rate6h > 0.006 and ray_slo:bad_share:rate30m > 0.006"
    assert enough.endswith("[6h])) >= 100")
    assert alerts["RaySLOPlanIsOld"].endswith(" > 30")


def test_an_objective_in_percent_is_refused(tmp_path, capsys):
    assert run("--out", tmp_path / "none", "--objective", "99") == 2
    assert "objective must be a share" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
