"""The plain application with `@ray_slo.batch` instead of `@serve.batch`. All else is equal."""

from __future__ import annotations

from typing import Any

import ray_slo
from ray_slo.demo.digits.plain import DigitsOverHttp


class BatchedDigits(DigitsOverHttp):
    """Batches with `@ray_slo.batch`. It has an SLO instead of a wait that must be tuned."""

    def configure(self, latency_slo_ms: float, max_batch_size: int = 32) -> None:
        batch: Any = self.predict
        batch.set_latency_slo_ms(latency_slo_ms)
        batch.set_max_batch_size(max_batch_size)

    @ray_slo.batch(latency_slo_ms=1000)
    def predict(self, images: list[Any]) -> list[Any]:
        return self.run(images)
