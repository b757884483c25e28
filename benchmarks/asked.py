"""What was asked of figures before they were measured, to stand beside them on the page."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """Every row of `case` and `metric` (shell patterns) should be on this side of `value`."""

    case: str
    metric: str
    sign: str  # "≥" or "≤"
    value: float

    def worst(self, rows: Iterable[dict[str, Any]]) -> tuple[float, int] | None:
        """The figure that is worst off, and of how many; None where no row is meant."""
        found = [
            row["ours"]
            for row in rows
            if row["ours"] is not None
            and fnmatchcase(row["case"], self.case)
            and fnmatchcase(row["metric"], self.metric)
        ]
        if not found:
            return None
        return (min(found) if self.sign == "≥" else max(found)), len(found)

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.sign == "≥" else figure <= self.value


ASKED: dict[str, list[Ask]] = {
    "symphony-table2": [
        Ask("ResNet50* · deferred", "goodput", "≥", 5450),
        Ask("InceptionResNetV2* · deferred", "goodput", "≥", 965),
        Ask("* · deferred", "of bound at *", "≥", 97),
    ],
    "symphony-fig9": [Ask("*1080Ti*, all models · deferred", "over best peer", "≥", 2.0)],
    "shepherd-table5": [Ask("*1000000*", "*time*", "≤", 13)],
    "shepherd-fig12": [
        Ask("ResNet50, batch 8*", "delay p95", "≤", 5),
        Ask("ResNet50, batch 8*", "slowdown", "≤", 5),
    ],
}
