"""A worker's latency profiles of its variants: from files, and learned here."""

from __future__ import annotations

import logging
import time

from ray_slo.core import LatencyProfile, OnlineProfile
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.serve.config.files import file_of
from ray_slo.serve.config.spec import AppSpec, VariantRef
from ray_slo.serve.errors import ConfigError

logger = logging.getLogger(__name__)

_CUT_S = 600.0  # seconds until a batch size that ran out of memory is tried again


class Profiles:
    """Latency profiles of every variant that was ever loaded on this worker.

    Attributes:
        learned: profiles that were learned here, by variant.
    """

    def __init__(self, spec: AppSpec) -> None:
        self._spec = spec
        self.learned: dict[str, OnlineProfile] = {}
        self._cuts: dict[str, tuple[int, float]] = {}  # largest batch, and the end of its time

    @property
    def current(self) -> dict[str, LatencyProfile]:
        """Return the profiles, up to the largest batch that fits in memory."""
        cuts = self.cuts
        return {
            key: learned.profile.truncated(cuts[key]) if key in cuts else learned.profile
            for key, learned in self.learned.items()
        }

    @property
    def cuts(self) -> dict[str, int]:
        """Return the largest allowed batch of each variant that ran out of memory in service."""
        now = time.monotonic()
        self._cuts = {key: cut for key, cut in self._cuts.items() if now < cut[1]}
        return {key: size for key, (size, _) in self._cuts.items()}

    def cut(self, key: str, size: int) -> None:
        """Limit the batches of a variant for a while, because larger ones do not fit in memory."""
        if size < self.cuts.get(key, self.learned[key].prior.max_batch_size):
            self._cuts[key] = size, time.monotonic() + _CUT_S
            logger.warning(
                "%s ran out of memory; its batches are of at most %d for %.0f s", key, size, _CUT_S
            )

    def from_file(self, ref: VariantRef) -> LatencyProfile | None:
        """Return the variant's profile from its file. None: there is no file.

        Raises:
            ConfigError: the file has no profile of the variant.
        """
        model = self._spec.models[ref.model]
        file, alone = file_of(ref, model)
        if file is None:
            return None
        known = load_profiles(file)
        found = profile_of(known, ref.name, ref.model, alone=alone)
        if found is None:
            owner = f".variants.{ref.name}" if ref.spec is not None and alone else ""
            raise ConfigError(
                f"{self._spec.fields[ref.model]}{owner}.profile: {file} has no profile of "
                f"{ref.name!r}; it has {', '.join(sorted(known))}"
            )
        found = found.measured.truncated(model.max_batch_size)
        points = {b: found.latency(b) for b in range(1, found.max_batch_size + 1)}
        return LatencyProfile.from_points(points, model.max_batch_size)
