"""The records of a run: batches and drops, as columns."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.decisions import DropReason
from ray_slo.core.requests import BatchStatus

STATUS = {status: i for i, status in enumerate(BatchStatus)}
REASON = {reason: i for i, reason in enumerate(DropReason)}


class PolicyError(RuntimeError):
    """The policy broke the contract of `ray_slo.core.policy`."""


class Books:
    """Columns of batches (b_…) and of drops (d_…). The requests of all batches are in one
    sequence."""

    def __init__(self) -> None:
        self.b_worker, self.b_variant, self.b_size, self.b_status = (array("q") for _ in range(4))
        self.b_dispatched, self.b_pred_start, self.b_pred_finish = (array("d") for _ in range(3))
        self.b_start, self.b_finish = array("d"), array("d")
        self.b_requests = array("q")
        self.d_request, self.d_reason, self.d_time = array("q"), array("q"), array("d")

    def answers(self, n: int) -> dict[str, NDArray[Any]]:
        """Return columns of `n` requests: their batch, or the reason and time of their drop.

        Raises:
            PolicyError: a request was answered twice.
        """
        sizes = np.array(self.b_size, dtype=np.int64)
        ids = np.array(self.b_requests, dtype=np.int64)
        batch = np.repeat(np.arange(len(sizes)), sizes)
        finished = np.array(self.b_status, dtype=np.int64) == STATUS[BatchStatus.FINISHED]
        served = finished[batch]
        dropped = np.array(self.d_request, dtype=np.int64)
        answers = np.bincount(np.concatenate([ids[served], dropped]), minlength=n)
        if answers.max(initial=0) > 1:
            raise PolicyError(f"request {int(answers.argmax())} was answered twice")
        last_batch = np.full(n, -1)
        last_batch[ids] = batch  # if a request was in several batches, the last one counts
        reason = np.full(n, -1)
        reason[dropped] = np.array(self.d_reason, dtype=np.int64)
        dropped_at = np.full(n, np.nan)
        dropped_at[dropped] = np.array(self.d_time)
        last_batch[reason >= 0] = -1
        return {"batch": last_batch, "drop_reason": reason, "dropped_s": dropped_at}

    def batches(self) -> dict[str, NDArray[Any]]:
        """Return columns of batches for `Report`."""
        return {
            "worker": np.array(self.b_worker, dtype=np.int64),
            "variant": np.array(self.b_variant, dtype=np.int64),
            "size": np.array(self.b_size, dtype=np.int64),
            "status": np.array(self.b_status, dtype=np.int64),
            "dispatched_s": np.array(self.b_dispatched),
            "predicted_start_s": np.array(self.b_pred_start),
            "predicted_finish_s": np.array(self.b_pred_finish),
            "started_s": np.array(self.b_start),
            "finished_s": np.array(self.b_finish),
        }
