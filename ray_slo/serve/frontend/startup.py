"""Refusals until an application can serve, with the reason, and the time until the next attempt.

A frontend is up long before the first worker has loaded its models. Workers report what they are
loading (`Progress`). Serve reports the state of the workers' deployments. The scheduler reports the
models that have workers. Requests for a model without workers are refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ray_slo.core.text import clipped
from ray_slo.serve.errors import MAX_MESSAGE, NotReady
from ray_slo.serve.messages import SERVING, Progress

_SILENT_S = 5.0  # a starting worker without a report for this time has died or serves
_RETRY_S = 2.0  # `Retry-After` while an application loads
_FAILED_RETRY_S = 30.0  # `Retry-After` after it failed to load


@dataclass(frozen=True)
class Deployment:
    """Serve's view of the workers of a kind.

    Attributes:
        running: number of replicas that serve.
        starting: number of replicas that do not serve yet.
        message: Serve's message about them, without stack traces.
        failed: whether starting failed for good, so that Serve does not try again.
        awaited: whether the planner wants no replica now, or did so until replicas were added.
    """

    running: int
    starting: int = 0
    message: str = ""
    failed: bool = False
    awaited: bool = False


class Startup:
    """The state of an application's start: whether it can serve, and why not.

    Args:
        offers: the models (or tasks) that each model or pipeline needs.
        details: whether clients see the message of an error of the user's own code.
    """

    def __init__(self, offers: Mapping[str, Collection[str]], details: bool = True) -> None:
        self._offers = {name: frozenset(models) for name, models in offers.items()}
        self._details = details
        self._served: frozenset[str] = frozenset()
        self._heard: dict[str, tuple[Progress, float]] = {}
        self._deployments: Mapping[str, Deployment] = {}
        self._shortfall: str | None = None
        self._start_s: float | None = None
        self.complete = False

    def heard(self, progress: Progress, now: float) -> None:
        """Take a worker's report."""
        self._progress(now)  # forgets the silent ones
        before, _ = self._heard.get(progress.worker, (None, 0.0))
        if before is None or before.doing != SERVING:  # earlier messages may arrive after it
            self._heard[progress.worker] = (progress, now)

    def serves(self, models: Iterable[str]) -> None:
        """Set the models that the schedulers have workers for."""
        self._served |= frozenset(models)
        self.complete = all(needed <= self._served for needed in self._offers.values())

    def deployments(self, states: Mapping[str, Deployment]) -> None:
        """Set Serve's view by kind of worker."""
        self._deployments = states

    def plan_says(self, shortfall: str | None, start_s: float | None = None) -> None:
        """Take the planner's report.

        Args:
            shortfall: what the plan cannot serve, and why. None if it serves everything.
            start_s: last measured time of a worker's start, in seconds.
        """
        self._shortfall, self._start_s = shortfall, start_s

    def refusal(self, offer: str, now: float) -> NotReady | None:
        """Return the refusal of a request that no worker will take. None if a worker can take it
        now or very soon: all workers are up, and none reports that it still loads."""
        missing = self._offers[offer] - self._served
        if not missing:
            return None
        progress = self._progress(now)
        starting = [said for said in progress if said.doing != SERVING]
        if not self._shortfall and self._is_up(len(starting) < len(progress), bool(starting)):
            return None
        failed = any(d.failed for d in self._deployments.values())
        why = self._why(starting)
        return NotReady(
            f"{offer!r} cannot be served yet: {why}",
            reason="start_failed" if failed else None,
            model=offer,
            retry_after_s=_FAILED_RETRY_S if failed else self._start_s or _RETRY_S,
        )

    def is_awaited(self, now: float) -> bool:
        """Return whether the planner wanted no worker until now, and a request starts one. A client
        who can wait for it waits: Serve calls the application running all the while."""
        return any(d.awaited for d in self._deployments.values()) and not (
            self._shortfall or any(said.failed is not None for said in self._progress(now))
        )

    def _is_up(self, one_serves: bool, one_starts: bool) -> bool:
        """Return whether all workers are up, by their reports and by Serve's. A worker's last
        report of its start may be older than Serve's."""
        seen = self._deployments.values()
        if any(d.message for d in seen):
            return False
        if any(d.running for d in seen) and not any(d.starting for d in seen):
            return True
        return not one_starts and (one_serves or any(d.running for d in seen))

    def _progress(self, now: float) -> list[Progress]:
        for worker, (_, at) in list(self._heard.items()):
            if now - at > _SILENT_S:
                del self._heard[worker]
        return [said for said, _ in self._heard.values()]

    def _why(self, progress: list[Progress]) -> str:
        messages = [d.message for d in self._deployments.values() if d.message]
        tries = [str(p) for p in progress if p.failed is None]
        errors = [str(p) for p in progress if p.failed is not None]
        if not self._details and (messages or errors):
            return "loading failed; the log of the application says why"
        if self._shortfall:
            messages.append(self._shortfall)
        said = list(dict.fromkeys([*messages, *(errors if not messages else ()), *tries]))
        return clipped("; ".join(said), MAX_MESSAGE) if said else "its workers are starting"

    def status(self, now: float) -> dict[str, Any]:
        """Return the state for `ray-slo status`. It is empty when everything is served."""
        if self.complete:
            return {}
        workers = {p.worker: {"kind": p.kind, "state": str(p)} for p in self._progress(now)}
        deployments = {kind: asdict(d) for kind, d in self._deployments.items()}
        models = sorted(frozenset().union(*self._offers.values()) - self._served)
        return {"starting": {"models": models, "workers": workers, "deployments": deployments}}


def in_a_line(message: str, failed: bool = False) -> str:
    """Return Serve's message about a deployment, without stack traces.

    Args:
        failed: whether starting failed for good, so that Serve does not try again.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    error = _error_line(lines[1:])
    if failed:
        return f"failed, and not tried again: {error or lines[0]}"
    if (left := re.search(r"Retrying (\d+) more time", lines[0])) is not None:
        times = f"{left[1]} more time{'s' * (left[1] != '1')}"
        return f"failed, will be tried {times}: {error}"
    return f"{lines[0]} {error}".strip()


def _error_line(lines: list[str]) -> str:
    """Return the exception at the end of a stack trace."""
    for line in reversed(lines):
        name, colon, text = line.partition(": ")
        if colon and name.replace(".", "").replace("_", "").isalnum() and "Error" in name:
            return f"{name.rpartition('.')[2]}: {text}"
    return lines[-1] if lines else ""
