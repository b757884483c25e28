"""The common part of reports: requests and batches in columns, and frames of them."""

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

# A finish that the policy put on the deadline counts as met in spite of rounding (policies allow
# 0.5 µs).
EPSILON_S = 1e-6
FINISHED = list(BatchStatus).index(BatchStatus.FINISHED)


class Frames:
    """Requests and batches of one run.

    Args:
        meta: variants, workers and more: the meaning of the codes in the columns.
        requests: columns of shape (requests,), among them batch (−1: none), drop_reason (−1: none)
            and dropped_s.
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
        """Whether each request's batch ran to its end."""
        status = np.append(self._b["status"], -1)  # index −1 is "no batch"
        return np.asarray(status[self._r["batch"]] == FINISHED)

    def of_batch(self, column: str) -> Array:
        """Values of a column of batches for each request; NaN or −1 if it was not served."""
        fill = np.nan if column.endswith("_s") else -1
        at = np.where(self.served, self._r["batch"], -1)
        return np.asarray(np.append(self._b[column], fill)[at])

    def fates(self) -> dict[str, Any]:
        """Columns of a frame of requests: drop_reason, dropped_s, batch, worker, variant,
        started_s, finished_s."""
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
    """A pandas frame of columns by name, or of rows with the names of their columns."""
    import pandas as pd

    made: pd.DataFrame = pd.DataFrame(columns, columns=pd.Index(list(names)) if names else None)
    return made


def named(codes: Array, names: Iterable[str]) -> pd.Categorical:
    """Codes as names; −1 is missing."""
    import pandas as pd

    made: pd.Categorical = pd.Categorical.from_codes(codes.tolist(), pd.Index(list(names)))
    return made
