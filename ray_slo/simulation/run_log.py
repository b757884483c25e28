"""The decision log of a simulated run with its planner's table. `ray-slo report` and `ray-slo
replay` read it like a live one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_slo.core.policy import Policy
from ray_slo.record.encode import Lines
from ray_slo.record.plans import PlanLines
from ray_slo.record.rows import Recording, Start


class RunLog:
    """Writes a log into a folder when it is closed.

    Args:
        folder: folder of the log. It is made if needed.
        application: name of the application.
        models: names of the models that the application serves.
    """

    def __init__(self, folder: str | Path, application: str, models: Sequence[str]) -> None:
        self._folder, self._clock = folder, f"simulated-{application}"
        self._about = {"application": application, "models": list(models), "clock": self._clock}
        self._tables: list[Lines] = []

    def recorded(
        self, policy: Policy, name: Any, kwargs: Mapping[str, Any], group: str = ""
    ) -> Recording:
        """Return the policy with its rounds logged.

        Args:
            policy: the policy.
            name, kwargs: name and arguments that make the same policy again, for a replay.
            group: group of the policy's scheduler, if there are groups.
        """
        start = Start.of(name, dict(kwargs), **self._about)
        table = Lines(self._folder, f"{self._clock}-{group}" if group else self._clock, start)
        self._tables.append(table)
        return Recording(policy, table)

    def plans(self, planner: str) -> PlanLines:
        """Return the log of the planner's decisions."""
        table = PlanLines(self._folder, self._clock, Start.of(planner, {}, **self._about))
        self._tables.append(table)
        return table

    def close(self) -> None:
        """Write the files."""
        for table in self._tables:
            table.close()
