"""The common part of reports: requests and batches in columns, and pandas frames of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.decisions import DropReason
from ray_slo.core.requests import BatchStatus

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[Any]
Bools = NDArray[np.bool_]

# If a policy plans a finish exactly at the deadline, rounding errors must not make it late.
# Policies allow 0.5 µs.
EPSILON_S = 1e-6
FINISHED = list(BatchStatus).index(BatchStatus.FINISHED)


class Frames:
    """Requests and batches of one run.

    Args:
        meta: variants, workers and more: the meaning of the codes in the columns.
        requests: columns of shape (requests,). Among them are batch (−1: none), drop_reason (−1:
            none) and dropped_s.
        batches: columns of shape (batches,): worker, variant, size, status, dispatched_s,
            predicted_start_s, predicted_finish_s, started_s, finished_s. In order of dispatch.
    """

    def __init__(
        self, meta: Mapping[str, Any], requests: Mapping[str, Array], batches: Mapping[str, Array]
    ) -> None:
        self.meta = dict(meta)
        self._r, self._b = dict(requests), dict(batches)

    @cached_property
    def served(self) -> Bools:
        """Whether the batch of each request ran to its end, shape (requests,)."""
        status = np.append(self._b["status"], -1)  # index −1 is "no batch"
        return np.asarray(status[self._r["batch"]] == FINISHED)

    def of_batch(self, column: str) -> Array:
        """Return a column of batches for each request, shape (requests,). It is NaN or −1 for
        requests that were not served."""
        fill = np.nan if column.endswith("_s") else -1
        at = np.where(self.served, self._r["batch"], -1)
        return np.asarray(np.append(self._b[column], fill)[at])

    def fates(self) -> dict[str, Any]:
        """Return these columns of a frame of requests: drop_reason, dropped_s, batch, worker,
        variant, started_s, finished_s."""
        return {
            "drop_reason": named(self._r["drop_reason"], [d.value for d in DropReason]),
            "dropped_s": self._r["dropped_s"],
            "batch": np.where(self.served, self._r["batch"], -1),
            "worker": named(self.of_batch("worker"), self.meta["workers"]),
            "variant": named(self.of_batch("variant"), self.meta["variants"]),
            "started_s": self.of_batch("started_s"),
            "finished_s": self.of_batch("finished_s"),
        }

    @cached_property
    def batches(self) -> pd.DataFrame:
        """One row per dispatched batch: worker, variant, size, status, dispatched_s and predicted
        beside actual start and finish (seconds)."""
        names = {
            "worker": named(self._b["worker"], self.meta["workers"]),
            "variant": named(self._b["variant"], self.meta["variants"]),
            "status": named(self._b["status"], [s.value for s in BatchStatus]),
        }
        return frame({**self._b, **names})


def frame(columns: Mapping[str, Any] | Iterable[Any], names: Iterable[str] = ()) -> pd.DataFrame:
    """Return a pandas frame of columns by name, or of rows with the names of their columns."""
    import pandas as pd

    made: pd.DataFrame = pd.DataFrame(columns, columns=pd.Index(list(names)) if names else None)
    return made


def named(codes: Array, names: Iterable[str]) -> pd.Categorical:
    """Return codes as names. The code −1 is a missing value."""
    import pandas as pd

    made: pd.Categorical = pd.Categorical.from_codes(codes.tolist(), pd.Index(list(names)))
    return made
