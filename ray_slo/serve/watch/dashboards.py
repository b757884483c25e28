"""A Grafana dashboard and Prometheus rules for the `serve_slo_*` metrics.

The dashboard is made by Ray's own generator from Ray's own panels and variables, so it looks and
filters like those that Ray provisions; `RAY_GRAFANA_SERVE_SLO_DASHBOARD_UID`,
`RAY_GRAFANA_SERVE_SLO_DASHBOARD_GLOBAL_FILTERS` and `RAY_GRAFANA_SERVE_SLO_LOG_LINK_URL` change it
as their likes change Ray's.

The alerts on the SLO are those of the SRE workbook (chapter 5, "Multiwindow, Multi-Burn-Rate
Alerts"): an error budget that is used up 14.4 times too fast over an hour, or 6 times over six,
and still is over the last twelfth of that time, so that an alert ends soon after its cause. Of too
few requests they say nothing.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

import yaml
from ray.dashboard.modules.metrics import grafana_dashboard_factory as factory
from ray.dashboard.modules.metrics.dashboards.common import DashboardConfig, Panel, Row, Target

PREFIX = "ray_serve_slo_"
FAST_BURN, SLOW_BURN = 14.4, 6.0
# What a client did (it left, it sent nonsense) is no fault of the service.
COUNTED = 'outcome!~"cancelled|invalid"'
BAD = 'outcome=~"late|refused|expired|failed"'

_FILTERS = "<filters>"  # of the dashboard's variables
_OF_MODEL = ('model=~"$Model"', _FILTERS)
_APPLICATION = "ray_io_cluster, application"  # the former is there on KubeRay only


def dashboard(objective: float = 0.99) -> str:
    """The Grafana dashboard, as JSON.

    Args:
        objective: share of requests to be answered in time; for the panel of burn rates.

    Raises:
        ValueError: `objective` is out of range.
    """
    _check(objective)
    config = DashboardConfig(
        name="SERVE_SLO",
        default_uid="raySloDashboard",
        rows=list(_rows(objective)),
        standard_global_filters=[
            'SessionName=~"$SessionName"',
            'application=~"$Application"',
            'deployment=~"$Deployment"',
            'replica=~"$Replica"',
            'ray_io_cluster=~"$Cluster"',
        ],
        base_json_file_name="serve_deployment_grafana_dashboard_base.json",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray does not close the file it reads
        text, _ = factory._generate_grafana_dashboard(config)
    made: dict[str, Any] = json.loads(text)
    made["title"] = "Serve SLO Dashboard"
    _, filters, _ = factory._read_configs_for_dashboard(config)
    variables = {v["name"]: v for v in made["templating"]["list"]}
    like = variables.pop("Route")
    of_model = (f"{PREFIX}requests_total", 'application=~"$Application"', *filters)
    variables["Model"] = _variable(like, "Model", "model", *of_model)
    of_session = ("ray_node_network_receive_speed", *filters)
    variables["SessionName"] = _variable(like, "SessionName", "SessionName", *of_session)
    order = ("datasource", "SessionName", "Application", "Deployment", "Replica", "Model")
    made["templating"]["list"] = [variables.pop(n) for n in order] + list(variables.values())
    return json.dumps(made, indent=2)


def rules(objective: float = 0.99, max_plan_age_s: float = 180.0, min_requests: int = 100) -> str:
    """The Prometheus rules, as YAML.

    Args:
        objective: share of requests to be answered in time.
        max_plan_age_s: how long the planner may go without a plan; some of its intervals.
        min_requests: over an hour, or six, that a budget must have been burnt on: of a few, one
            that is refused is a large share.

    Raises:
        ValueError: a number is out of range.
    """
    _check(objective)
    if not max_plan_age_s > 0:
        raise ValueError(f"max_plan_age_s must be positive, got {max_plan_age_s}")
    if not 0 <= min_requests < math.inf:
        raise ValueError(f"min_requests must be a number of requests, got {min_requests}")
    recorded = [
        {"record": _recorded(window), "expr": _bad_share(window, f"{_APPLICATION}, model")}
        for window in ("5m", "30m", "1h", "6h")
    ]
    alerts = [
        _burns("RaySLOBurnsFast", FAST_BURN, "1h", "5m", objective, min_requests, "critical"),
        _burns("RaySLOBurnsSlowly", SLOW_BURN, "6h", "30m", objective, min_requests, "warning"),
        _alert(
            "RaySLOPlanIsOld",
            f"max by ({_APPLICATION}) ({_series('plan_age_s')}) > {max_plan_age_s:g}",
            "1m",
            "warning",
            "The plan of {{ $labels.application }} is {{ $value | humanizeDuration }} old.",
            "The planner is gone, fails, or finds no plan; the last one holds. "
            "`ray-slo status` shows its last error.",
        ),
        _alert(
            "RaySLOPreemptionIsDeaf",
            _share(
                _sum(_STOPPED, _rate("preemptions_total", 'outcome!="preempted"', window="15m")),
                _sum(_STOPPED, _rate("preemptions_total", window="15m")),
            )
            + " > 0.5",
            "5m",
            "warning",
            "{{ $value | humanizePercentage }} of the batches of {{ $labels.variant }} "
            "({{ $labels.application }}) run on when they are to stop.",
            "Its network has no exit points, or too few: docs/preemption.md. Until then "
            "preemption only costs; a policy that does not preempt does better.",
        ),
        _alert(
            "RaySLOSchedulerIsSilent",
            f"({_sum(_APPLICATION, _series('pending_requests'))} > 0"
            f" or {_sum(_APPLICATION, _rate('requests_total', _EXPIRED, window='3m'))} > 0)"
            f" unless ({_sum(_APPLICATION, _rate('batch_size_count', window='3m'))} > 0"
            f" or {_sum(_APPLICATION, _rate('requests_total', *_DECIDED, window='3m'))} > 0)",
            "1m",
            "critical",
            "Requests of {{ $labels.application }} wait or expire, and for three minutes no batch "
            "has ended and the scheduler has refused none.",
            "Look for the scheduler's actor (`ray-slo status`, `ray list actors`) and its log; "
            "if it is there, look whether workers hang (`ray stack`).",
        ),
    ]
    groups = [
        {"name": "ray-slo-shares", "rules": recorded},
        {"name": "ray-slo-alerts", "rules": alerts},
    ]
    return yaml.safe_dump({"groups": groups}, sort_keys=False, width=100)


_STOPPED = f"{_APPLICATION}, deployment, model, variant"
_EXPIRED = 'outcome="expired"'
_DECIDED = ('outcome="refused"', 'reason!="queue_full"')  # that one the frontend says


def _check(objective: float) -> None:
    lowest = 1 - 1 / FAST_BURN
    if not lowest < objective < 1:
        raise ValueError(
            f"objective must be a share above {lowest:.4f} (for less, even {FAST_BURN} times its "
            f"error budget cannot be spent) and below 1, got {objective:g}"
        )


# -- PromQL --------------------------------------------------------------------------------


def _series(metric: str, *matchers: str) -> str:
    return f"{PREFIX}{metric}" + (f"{{{','.join(matchers)}}}" if matchers else "")


def _rate(metric: str, *matchers: str, window: str = "$__rate_interval") -> str:
    return f"rate({_series(metric, *matchers)}[{window}])"


def _sum(by: str, what: str) -> str:
    return f"sum by ({by}) ({what})"


def _share(part: str, whole: str) -> str:
    """Counters that never moved do not exist: none of something is 0 of it."""
    return f"({part} or 0 * {whole}) / {whole}"


def _bad_share(window: str, by: str, *matchers: str) -> str:
    part, whole = (
        _sum(by, _rate("requests_total", outcomes, *matchers, window=window))
        for outcomes in (BAD, COUNTED)
    )
    return _share(part, whole)


def _quantile(q: float, metric: str, by: str) -> str:
    return f"histogram_quantile({q:g}, {_sum(f'{by}, le', _rate(f'{metric}_bucket', *_OF_MODEL))})"


# -- rules ---------------------------------------------------------------------------------


def _recorded(window: str) -> str:
    return f"ray_slo:bad_share:rate{window}"


def _burns(
    name: str,
    times: float,
    long: str,
    short: str,
    objective: float,
    min_requests: int,
    severity: str,
) -> dict[str, Any]:
    limit = f"{times * (1 - objective):.6g}"
    requests = f"increase({_series('requests_total', COUNTED)}[{long}])"
    return _alert(
        name,
        f"{_recorded(long)} > {limit} and {_recorded(short)} > {limit}"
        f" and {_sum(f'{_APPLICATION}, model', requests)} >= {min_requests:g}",
        None,
        severity,
        f"{{{{ $value | humanizePercentage }}}} of the requests for {{{{ $labels.model }}}} "
        f"({{{{ $labels.application }}}}) were not answered in time over {long}.",
        f"The objective is {objective:.6g}: its error budget is used up more than {times:g} times "
        "too fast. The dashboard's panel of reasons says whether they are refused (too little "
        "capacity), late (bad predictions), expired (no scheduler) or failed (the model).",
    )


def _alert(
    name: str, expr: str, lasts: str | None, severity: str, summary: str, description: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        **({"for": lasts} if lasts else {}),
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


# -- dashboard -----------------------------------------------------------------------------


def _variable(
    like: dict[str, Any], name: str, label: str, metric: str, *matchers: str
) -> dict[str, Any]:
    """A variable with the values that the label has."""
    made = copy.deepcopy(like)
    made["name"] = name
    made["definition"] = f"label_values({metric}{{{','.join(matchers)}}}, {label})"
    made["query"]["query"] = made["definition"]
    return made


def _rows(objective: float) -> Iterator[Row]:
    ids = itertools.count(1)

    def panel(
        title: str, description: str, unit: str, *targets: tuple[str, str], stack: bool = False
    ) -> Panel:
        # Ray fills the filters in by `str.format`.
        shown = [
            Target(
                expr.replace("{", "{{").replace("}", "}}").replace(_FILTERS, "{global_filters}"),
                legend,
            )
            for expr, legend in targets
        ]
        fill = 10 if stack else 0
        return Panel(title, description, next(ids), unit, shown, fill=fill, stack=stack)

    def quantiles(metric: str, by: str, *qs: float) -> list[tuple[str, str]]:
        tags = " ".join(f"{{{{{tag}}}}}" for tag in by.split(", "))
        return [(_quantile(q, metric, by), f"{tags} P{100 * q:g}") for q in qs]

    model, variant = "application, model", "application, model, variant"
    of_model, of_variant = "{{application}} {{model}}", "{{application}} {{model}} {{variant}}"
    budget = 1 - objective
    yield Row(
        "SLO",
        next(ids),
        [
            panel(
                "Requests by outcome",
                "All requests that ended. Only ok is in time.",
                "reqps",
                (_sum("outcome", _rate("requests_total", *_OF_MODEL)), "{{outcome}}"),
                stack=True,
            ),
            panel(
                "Not answered in time",
                "Share of requests that were late, refused, expired or failed; those that were "
                "cancelled or invalid do not count.",
                "percentunit",
                (_bad_share("$__rate_interval", model, *_OF_MODEL), of_model),
            ),
            panel(
                "Why not in time",
                "Requests without an answer in time, by outcome and reason.",
                "reqps",
                (
                    _sum("outcome, reason", _rate("requests_total", BAD, *_OF_MODEL)),
                    "{{outcome}} {{reason}}",
                ),
                stack=True,
            ),
            panel(
                "Burn rate",
                f"How many times too fast the error budget of the objective {objective:g} is used "
                f"up. Alerts: {FAST_BURN:g} over 1 h and 5 m, {SLOW_BURN:g} over 6 h and 30 m.",
                "none",
                *(
                    (f"{_bad_share(w, model, *_OF_MODEL)} / {budget:.6g}", f"{of_model} {w}")
                    for w in ("5m", "1h", "6h")
                ),
            ),
            panel(
                "Goodput",
                "Requests answered in time per second, over the last 10 s.",
                "reqps",
                (_sum(model, _series("goodput", *_OF_MODEL)), of_model),
                stack=True,
            ),
            panel(
                "Accuracy",
                "Mean accuracy of the variants that answered in time, over the last 10 s.",
                "percent",
                (
                    _sum(
                        model,
                        f"{_series('accuracy', *_OF_MODEL)} * {_series('goodput', *_OF_MODEL)}",
                    )
                    + f" / {_sum(model, _series('goodput', *_OF_MODEL))}",
                    of_model,
                ),
            ),
        ],
    )
    yield Row(
        "Time",
        next(ids),
        [
            panel(
                "Latency",
                "From the arrival at the frontend to the answer.",
                "ms",
                *quantiles("latency_ms", model, 0.5, 0.9, 0.99),
            ),
            panel(
                "Queueing delay",
                "From the arrival at the frontend to the start of execution.",
                "ms",
                *quantiles("queueing_delay_ms", model, 0.5, 0.99),
            ),
            panel(
                "Slack",
                "Time left to the deadline when the answer was ready; P1 near 0: on the edge.",
                "ms",
                *quantiles("slack_ms", model, 0.01, 0.5),
            ),
            panel(
                "Prediction error",
                "Absolute difference between predicted and actual finish of a batch.",
                "ms",
                *quantiles("prediction_error_ms", variant, 0.5, 0.99),
            ),
        ],
    )
    yield Row(
        "Batches and workers",
        next(ids),
        [
            panel(
                "Batch size",
                "Mean number of requests in a batch.",
                "none",
                (
                    f"{_sum(variant, _rate('batch_size_sum', *_OF_MODEL))}"
                    f" / {_sum(variant, _rate('batch_size_count', *_OF_MODEL))}",
                    of_variant,
                ),
            ),
            panel(
                "Variant mix",
                "Answers by variant.",
                "reqps",
                (_sum(variant, _rate("variant_total", *_OF_MODEL)), of_variant),
                stack=True,
            ),
            panel(
                "Execution",
                "Time of a batch on the worker.",
                "ms",
                *quantiles("execution_ms", variant, 0.5, 0.99),
            ),
            panel(
                "Busy",
                "Share of a worker's time in which it runs a batch.",
                "percentunit",
                (
                    _sum("deployment, replica", _rate("execution_ms_sum", *_OF_MODEL)) + " / 1000",
                    "{{deployment}} {{replica}}",
                ),
            ),
            panel(
                "Preemptions",
                "Batches that were to stop: preempted, or finished where it was too late.",
                "ops",
                (
                    _sum(f"{variant}, outcome", _rate("preemptions_total", *_OF_MODEL)),
                    f"{of_variant} {{{{outcome}}}}",
                ),
                stack=True,
            ),
            panel(
                "Preemption delay",
                "From the request to stop, at the worker, to the end of the batch.",
                "ms",
                *quantiles("preemption_delay_ms", variant, 0.5, 0.99),
            ),
            panel(
                "Unclaimed batches",
                "Granted batches that nobody had any more; their workers were freed.",
                "ops",
                (
                    _sum("application, deployment", _rate("unclaimed_batches_total", _FILTERS)),
                    "{{application}} {{deployment}}",
                ),
            ),
        ],
    )
    yield Row(
        "Queue, plan and groups",
        next(ids),
        [
            panel(
                "Pending requests",
                "Requests that a frontend owns and has not answered.",
                "none",
                (
                    _sum("deployment, replica", _series("pending_requests", _FILTERS)),
                    "{{deployment}} {{replica}}",
                ),
                stack=True,
            ),
            panel(
                "Age of the plan",
                "Time since the planner last decided; grows while it is gone.",
                "s",
                (f"max by (application) ({_series('plan_age_s', _FILTERS)})", "{{application}}"),
            ),
            panel(
                "Plans",
                "Per minute: planned, were it to leave all as it is; failed, and the last plan "
                "holds.",
                "cpm",
                (
                    f"60 * max by (application, outcome) ({_rate('plans_total', _FILTERS)})",
                    "{{application}} {{outcome}}",
                ),
            ),
            panel(
                "Time of a plan",
                "That the solver took for the last one.",
                "s",
                (f"max by (application) ({_series('planning_s', _FILTERS)})", "{{application}}"),
            ),
            panel(
                "Workers",
                "As the plan wants, and as there are.",
                "none",
                (
                    f"max by (application, kind, is) ({_series('replicas', _FILTERS)})",
                    "{{application}} {{kind}} {{is}}",
                ),
            ),
            panel(
                "Requests by serving group",
                "Submitted to the group's scheduler, granted or refused by it.",
                "reqps",
                (
                    _sum("group, event", _rate("group_requests_total", *_OF_MODEL)),
                    "{{group}} {{event}}",
                ),
            ),
            panel(
                "Models by serving group",
                "Where requests for a model go.",
                "none",
                (
                    f"max by (group, model) ({_series('group_serves', *_OF_MODEL)}) == 1",
                    "{{group}} {{model}}",
                ),
                stack=True,
            ),
        ],
    )
