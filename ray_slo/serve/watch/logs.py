"""The decision and plan logs that an application asks for."""

from __future__ import annotations

import logging
import time
from typing import Any

from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.watch.log_writer import DecisionLog, PlanLog

logger = logging.getLogger(__name__)


def open_log(spec: AppSpec, epoch: str) -> DecisionLog | None:
    """The log that the application asks of its schedulers; None if it does not."""
    return None if spec.decision_log is None else DecisionLog(**_arguments(spec, epoch))


def open_plan_log(spec: AppSpec, epoch: str) -> PlanLog | None:
    """The log that the application asks of its planner; None if it does not, or it is
    impossible."""
    if spec.decision_log is None:
        return None
    planner = spec.planner
    try:
        log = PlanLog(**_arguments(spec, f"plan-{epoch}"))
        log.begin(planner and planner.name, planner.kwargs if planner else {}, time.monotonic())
    except Exception:
        logger.exception("no log of the planner")
        return None
    return log


def _arguments(spec: AppSpec, name: str) -> dict[str, Any]:
    wanted = spec.decision_log
    assert wanted is not None
    application = spec.name or next(iter(spec.models))
    return {
        "folder": wanted.dir,
        "name": f"{application}-{name}",
        "max_mb": wanted.max_mb,
        "flush_s": wanted.flush_s,
        "application": application,
        "models": list(spec.models),
    }
