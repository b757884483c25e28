"""Files that a config names, if this process can read them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import load_profiles, profile_of
from ray_slo.models.preemption_profile import PreemptionProfile, load_preemption
from ray_slo.serve.config.models import ModelConfig
from ray_slo.serve.config.spec import AppSpec, VariantRef, variants_of


def profiles_of_files(spec: AppSpec) -> dict[str, LatencyProfile]:
    """Profiles of variants from their files, if files are given and this process can read them."""
    found = {}
    for key, ref in spec.variants().items():
        model = spec.models[ref.model]
        file, alone = file_of(ref, model)
        if file is None:
            continue
        try:
            known = load_profiles(file)
        except (OSError, ValueError):  # a worker reports the error
            continue
        if (profile := profile_of(known, ref.name, ref.model, alone=alone)) is not None:
            found[key] = profile.truncated(model.max_batch_size)
    return found


def file_of(ref: VariantRef, model: ModelConfig) -> tuple[str | None, bool]:
    """The file with a variant's profile, and whether the file is only for it."""
    own = ref.spec.profile if ref.spec is not None else None
    return own or model.profile, own is not None or ref.spec is None


def stopping(models: Mapping[str, ModelConfig]) -> set[str]:
    """Models with exit points: those that the config names, or else those in their files."""
    found = {name for name, model in models.items() if model.exit_points}
    for ref in variants_of(models).values():
        if models[ref.model].exit_points is None:
            with suppress(OSError, ValueError):  # `build_app` reports the error
                measured = preemption_of(ref, models[ref.model])
                if measured is not None and measured.exit_points:
                    found.add(ref.model)
    return found


def preemption_of(ref: VariantRef, model: ModelConfig) -> PreemptionProfile | None:
    """The preemption profile in the file of a variant.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    file, alone = file_of(ref, model)
    known = {} if file is None else load_preemption(file)
    return profile_of(known, ref.name, ref.model, alone=alone)
