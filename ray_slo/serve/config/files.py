"""Files that a config names, if this process can read them."""

from __future__ import annotations

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.serve.config.spec import AppSpec


def profiles_of_files(spec: AppSpec) -> dict[str, LatencyProfile]:
    """Profiles of variants from their files, if files are given and this process can read them."""
    found = {}
    for key, ref in spec.variants().items():
        model = spec.models[ref.model]
        own = ref.spec.profile if ref.spec is not None else None
        if (file := own or model.profile) is None:
            continue
        try:
            known = load_profiles(file)
        except (OSError, ValueError):  # a worker reports the error
            continue
        alone = own is not None or ref.spec is None
        if (profile := profile_of(known, ref.name, ref.model, alone=alone)) is not None:
            found[key] = profile.truncated(model.max_batch_size)
    return found
