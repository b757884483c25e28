"""What clients are told until an application can serve: why not, and when to ask again.

A frontend is up long before the first worker has loaded its models. Workers tell it what they are
loading (`Progress`), Serve tells it how the workers' deployments fare, and the scheduler which
models it has workers for. Requests for a model that nobody can serve yet are refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ray_slo.core.text import clipped
from ray_slo.serve.errors import MAX_MESSAGE, NotReady
from ray_slo.serve.messages import SERVING, Progress

_SILENT_S = 5.0  # after this silence a worker has died, or serves
_RETRY_S = 2.0  # `Retry-After` while an application loads
_FAILED_RETRY_S = 30.0  # the same once it has failed to load


@dataclass(frozen=True)
class Deployment:
    """How Serve sees the workers of a kind.

    Attributes:
        running: replicas that serve.
        starting: replicas that do not yet.
        message: what Serve says of them, its stack traces left out.
        failed: Serve does not try again.
    """

    running: int
    starting: int = 0
    message: str = ""
    failed: bool = False


class Startup:
    """Whether an application can serve, and why not.

    Args:
        offers: models (tasks, of a pipeline) that each thing that clients ask for needs.
        details: whether clients are told what the user's own code said of its error.
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
        """From a worker."""
        before, _ = self._heard.get(progress.worker, (None, 0.0))
        if before is None or before.doing != SERVING:  # what it said before may come after it
            self._heard[progress.worker] = (progress, now)

    def serves(self, models: Iterable[str]) -> None:
        """Models that the schedulers have workers for."""
        self._served |= frozenset(models)
        self.complete = all(needed <= self._served for needed in self._offers.values())

    def deployments(self, states: Mapping[str, Deployment]) -> None:
        """By kind of worker."""
        self._deployments = states

    def plan_says(self, shortfall: str | None, start_s: float | None = None) -> None:
        """Hear the planner.

        Args:
            shortfall: what it cannot have served, and why. None: it has none.
            start_s: that a worker takes to start, as last measured.
        """
        self._shortfall, self._start_s = shortfall, start_s

    def refusal(self, offer: str, now: float) -> NotReady | None:
        """Why a request would wait in vain. None: a worker can take it now, or in a moment, as all
        workers are up and none says that it still loads."""
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

    def _is_up(self, one_serves: bool, one_starts: bool) -> bool:
        """Whether all workers are up, by their own word and Serve's. A worker's last word of its
        start may be older than Serve's."""
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
        """For `ray-slo status`; nothing once all is served."""
        if self.complete:
            return {}
        workers = {p.worker: {"kind": p.kind, "state": str(p)} for p in self._progress(now)}
        deployments = {kind: asdict(d) for kind, d in self._deployments.items()}
        models = sorted(frozenset().union(*self._offers.values()) - self._served)
        return {"starting": {"models": models, "workers": workers, "deployments": deployments}}


def in_a_line(message: str, failed: bool = False) -> str:
    """What Serve says of a deployment, without stack traces.

    Args:
        failed: Serve does not try again.
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
    """The exception at the end of a stack trace."""
    for line in reversed(lines):
        name, colon, text = line.partition(": ")
        if colon and name.replace(".", "").replace("_", "").isalnum() and "Error" in name:
            return f"{name.rpartition('.')[2]}: {text}"
    return lines[-1] if lines else ""
