"""Problems of `policies.shared.queue_value` that several tests solve."""

from ray_slo.policies.shared.queue_value import Columns


def columns(workers, slo_s, *variants):
    """(accuracy, seconds of a batch of one, seconds of each one more), batches up to 8."""
    every = [
        (b, accuracy, first + more * (b - 1))
        for accuracy, first, more in variants
        for b in range(1, 9)
        if first + more * (b - 1) <= slo_s
    ]
    size, accuracy, latency = zip(*every, strict=True)
    return Columns(size, accuracy, latency, latency, 1 / workers)


VARIANTS = ((60.0, 0.010, 0.004), (75.0, 0.030, 0.015), (85.0, 0.080, 0.060))
