"""Files that a config names, as far as they can be read from here."""

from __future__ import annotations

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.serve.config.spec import AppSpec


def profiles_of_files(spec: AppSpec) -> dict[str, LatencyProfile]:
    """Profiles of variants as files say, where they are given and can be read from here."""
    found = {}
    for key, ref in spec.variants().items():
        model = spec.models[ref.model]
        own = ref.spec.profile if ref.spec is not None else None
        if (file := own or model.profile) is None:
            continue
        try:
            known = load_profiles(file)
        except (OSError, ValueError):  # a worker will say what is wrong with it
            continue
        alone = own is not None or ref.spec is None
        if (profile := profile_of(known, ref.name, ref.model, alone=alone)) is not None:
            found[key] = profile.truncated(model.max_batch_size)
    return found
