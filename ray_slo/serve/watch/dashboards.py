"""A Grafana dashboard and Prometheus rules for the `serve_slo_*` metrics.

Both are files beside this module, with `@name@` for values that are filled in here.
`dashboard.json` contains the dashboard without panels, the common form of all panels, and the
panels by row. It looks and filters like the dashboards that Ray provisions, and the same
environment variables change it: `RAY_GRAFANA_SERVE_SLO_DASHBOARD_UID`,
`RAY_GRAFANA_SERVE_SLO_DASHBOARD_GLOBAL_FILTERS` and `RAY_GRAFANA_SERVE_SLO_LOG_LINK_URL`.

The alerts on the SLO in `rules.yml` are those of the SRE workbook (chapter 5, "Multiwindow,
Multi-Burn-Rate Alerts"): they fire when the error budget is used up 14.4 times too fast over one
hour, or 6 times over six hours. The rate over the last twelfth of that time must be too fast, too,
so that an alert ends soon after its cause. With too few requests these alerts stay silent.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from ray_slo.serve.errors import FAULTS, OF_CLIENTS

PREFIX = "ray_serve_slo_"
_SLACK = 0.01  # added to an expected share
FAST_BURN, SLOW_BURN = 14.4, 6.0
_ENV = "RAY_GRAFANA_SERVE_SLO_"
_FILTERS = (
    'SessionName=~"$SessionName",application=~"$Application",deployment=~"$Deployment",'
    'replica=~"$Replica",ray_io_cluster=~"$Cluster"'
)
_OUTCOMES = {
    "bad": f'outcome=~"{"|".join(("late", *FAULTS))}"',
    "counted": f'outcome!~"{"|".join(OF_CLIENTS)}"',
}


def dashboard(objective: float = 0.99) -> str:
    """The Grafana dashboard, as JSON.

    Args:
        objective: share of requests to be answered in time; for the panel of burn rates.

    Raises:
        ValueError: `objective` is out of range.
    """
    _check(objective)
    extra = os.environ.get(f"{_ENV}DASHBOARD_GLOBAL_FILTERS", "")
    values = {
        **_OUTCOMES,
        "filters": ",".join(filter(None, (_FILTERS, extra))),
        "objective": f"{objective:g}",
        "budget": f"{1 - objective:.6g}",
        ",global": f",{extra}" if extra else "",
        "global": extra,
    }
    asset: Any = _filled(json.loads(_read("dashboard.json")), values)
    made: dict[str, Any] = asset["dashboard"]
    made["uid"] = os.environ.get(f"{_ENV}DASHBOARD_UID") or made["uid"]
    made["tags"].append(f"rayVersion:{ray.__version__}")
    made["panels"] = panels = []
    ids, y = itertools.count(1), 0
    for row in asset["rows"]:
        panels.append(
            {
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "id": next(ids),
                "title": row["title"],
                "type": "row",
                "panels": [],
            }
        )
        for i, panel in enumerate(row["panels"]):
            place = {"h": 8, "w": 12, "x": 12 * (i % 2), "y": y + 1 + 8 * (i // 2)}
            about = {"id": next(ids), "gridPos": place, "links": _links()}
            panels.append(_panel(asset["panel"], panel) | {k: v for k, v in about.items() if v})
        y += 1 + 8 * math.ceil(len(row["panels"]) / 2)
    return json.dumps(made, indent=2)


def _panel(form: Mapping[str, Any], panel: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(form))
    is_stack = panel.get("stack", False)
    made |= {
        "title": panel["title"],
        "description": panel["description"],
        "stack": is_stack,
        "fill": 10 if is_stack else 0,
        "nullPointMode": "connected" if is_stack else None,
    }
    made["yaxes"][0]["format"] = made["fieldConfig"]["defaults"]["unit"] = panel["unit"]
    (target,) = made["targets"]
    made["targets"] = [
        target | {"expr": expr, "legendFormat": legend, "refId": chr(ord("A") + i)}
        for i, (expr, legend) in enumerate(panel["targets"])
    ]
    return made


def _links() -> list[dict[str, Any]]:
    url = os.environ.get(f"{_ENV}LOG_LINK_URL")
    return [{"targetBlank": True, "title": "View Logs", "url": url}] if url else []


def rules(objective: float = 0.99, max_plan_age_s: float = 180.0, min_requests: int = 100) -> str:
    """The Prometheus rules, as YAML.

    Args:
        objective: share of requests to be answered in time.
        max_plan_age_s: longest time without a plan, seconds; several intervals of the planner.
        min_requests: least number of requests in one hour, or six hours, for an alert: one refused
            request of a few is a large share.

    Raises:
        ValueError: a number is out of range.
    """
    _check(objective)
    if not max_plan_age_s > 0:
        raise ValueError(f"max_plan_age_s must be positive, got {max_plan_age_s}")
    if not 0 <= min_requests < math.inf:
        raise ValueError(f"min_requests must be a number of requests, got {min_requests}")
    values = {
        **_OUTCOMES,
        "objective": f"{objective:.6g}",
        "fast": f"{FAST_BURN * (1 - objective):.6g}",
        "slack": f"{max(1 - objective, _SLACK):.6g}",
        "slow": f"{SLOW_BURN * (1 - objective):.6g}",
        "max_plan_age_s": f"{max_plan_age_s:g}",
        "min_requests": f"{min_requests:g}",
    }
    text: str = _filled(_read("rules.yml"), values)
    return text


def _check(objective: float) -> None:
    lowest = 1 - 1 / FAST_BURN
    if not lowest < objective < 1:
        raise ValueError(
            f"objective must be a share above {lowest:.4f} (for less, even {FAST_BURN} times its "
            f"error budget cannot be spent) and below 1, got {objective:g}"
        )


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _filled(what: Any, values: Mapping[str, str]) -> Any:
    """`what`, with every `@name@` in its texts replaced by that value."""
    if isinstance(what, dict):
        return {key: _filled(value, values) for key, value in what.items()}
    if isinstance(what, list):
        return [_filled(value, values) for value in what]
    if isinstance(what, str):
        for name, value in values.items():
            what = what.replace(f"@{name}@", value)
    return what
