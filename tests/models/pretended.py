"""A fake device whose memory a test sets."""

from __future__ import annotations


class Pretended:
    """A device whose memory the test says."""

    def __init__(self, used_mb: float | None = 0.0, total_mb: float | None = None) -> None:
        self.used_mb, self.total_mb = used_mb, total_mb
        self.peak_mb = used_mb

    def begin_peak(self) -> None:
        self.peak_mb = self.used_mb

    def take(self, mb: float) -> None:
        self.used_mb = (self.used_mb or 0.0) + mb
        self.peak_mb = max(self.peak_mb or 0.0, self.used_mb)

    def take_for_a_moment(self, mb: float) -> None:
        self.peak_mb = max(self.peak_mb or 0.0, self.used_mb + mb)


NOTHING = Pretended(None)
