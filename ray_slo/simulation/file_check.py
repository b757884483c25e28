"""Checks the content of a report's file, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_slo.core.decisions import DropReason
from ray_slo.core.documents import MAX_TIME_S, Column, check_arrays
from ray_slo.core.requests import BatchStatus
from ray_slo.core.text import quoted
from ray_slo.simulation.frames import Array

Seconds = Annotated[float, Field(ge=0, le=MAX_TIME_S)]
_OF_REQUEST = ("model", "arrival_s", "deadline_s", "batch", "drop_reason", "dropped_s")
_OF_BATCH = (
    *("worker", "variant", "size", "status", "dispatched_s"),
    *("predicted_start_s", "predicted_finish_s", "started_s", "finished_s"),
)
NEEDED = (*(f"r.{name}" for name in _OF_REQUEST), *(f"b.{name}" for name in _OF_BATCH))
_MOST = 2**31 - 1  # of a number of items


class Meta(BaseModel):
    """The header of a report's file."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    format: str
    duration_s: Seconds
    warmup_s: Seconds
    policy: str
    models: list[str]
    slo_s: dict[str, Seconds]
    variants: list[str]
    accuracy: dict[str, float | None]
    workers: list[str]

    @model_validator(mode="after")
    def _fits(self) -> Meta:
        if not self.warmup_s < self.duration_s:
            raise ValueError(
                f"warmup_s must be less than duration_s, got {self.warmup_s:g} and "
                f"{self.duration_s:g}"
            )
        for name in ("models", "variants", "workers"):
            if len(set(names := getattr(self, name))) != len(names):
                raise ValueError(f"{name} must be different names")
        if missing := [name for name in self.models if name not in self.slo_s]:
            raise ValueError(f"slo_s has no {quoted(missing[0])}")
        return self


def check(meta: Meta, columns: Mapping[str, Array]) -> None:
    """Check the columns of a report's file. Their names begin with "r." or "b.".

    Raises:
        ValueError: one is not what a report has. The message names it.
    """
    requests, batches = (columns[name].shape[:1] for name in ("r.arrival_s", "b.dispatched_s"))
    time, missing = Column(), Column(may_miss=True)
    code: dict[str, Any] = {
        "r.model": len(meta.models),
        "r.drop_reason": len(DropReason),
        "r.batch": sum(batches),
        "b.worker": len(meta.workers),
        "b.variant": len(meta.variants),
        "b.status": len(BatchStatus),
    }
    least = {"r.drop_reason": -1, "r.batch": -1}
    of_codes = {
        name: Column(least.get(name, 0), count - 1, is_whole=True) for name, count in code.items()
    }
    sizes = {f"{of}.size": Column(1, _MOST, is_whole=True) for of in "rb"}
    sizes["b.size"] = Column(0, _MOST, is_whole=True)
    times = {
        name: missing if name in ("r.dropped_s", "b.price") else time
        for name in (*NEEDED, "b.price")
        if name not in code and name not in sizes
    }
    for of, shape in (("r.", requests), ("b.", batches)):
        wanted = {**of_codes, **sizes, **times}
        check_arrays(
            columns, shape, **{name: how for name, how in wanted.items() if name.startswith(of)}
        )
    if (columns["r.arrival_s"][1:] < columns["r.arrival_s"][:-1]).any():
        raise ValueError("r.arrival_s must be in ascending order")
