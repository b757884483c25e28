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
    """Writes into a folder, when it is closed.

    Args:
        folder: made if it is not there.
        application: its name.
        models: that it serves.
    """

    def __init__(self, folder: str | Path, application: str, models: Sequence[str]) -> None:
        self._folder, self._clock = folder, f"simulated-{application}"
        self._about = {"application": application, "models": list(models), "clock": self._clock}
        self._tables: list[Lines | PlanLines] = []

    def recorded(
        self, policy: Policy, name: Any, kwargs: Mapping[str, Any], group: str = ""
    ) -> Recording:
        """The policy, whose rounds are logged.

        Args:
            name, kwargs: what makes the same policy again, for replay.
            group: whose scheduler it is, where there are groups.
        """
        start = Start.of(name, dict(kwargs), **self._about)
        table = Lines(self._folder, f"{self._clock}-{group}" if group else self._clock, start)
        self._tables.append(table)
        return Recording(policy, table)

    def plans(self, planner: str) -> PlanLines:
        """The planner's table."""
        table = PlanLines(self._folder, self._clock, Start.of(planner, {}, **self._about))
        self._tables.append(table)
        return table

    def close(self) -> None:
        """Write the files."""
        for table in self._tables:
            table.close()
