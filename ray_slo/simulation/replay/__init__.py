"""Replay decision logs: the recorded policy step by step, or any policy in the simulator."""

from ray_slo.simulation.replay.compare import (
    Difference,
    Replayed,
    policy_arguments,
    policy_of,
    replay,
)
from ray_slo.simulation.replay.simulated import Nearest, Truth, fit, truth_of, what_if
from ray_slo.simulation.replay.tapes import Tape, newest, recorded, tape

__all__ = [
    "Difference",
    "Nearest",
    "Replayed",
    "Tape",
    "Truth",
    "fit",
    "newest",
    "policy_arguments",
    "policy_of",
    "recorded",
    "replay",
    "tape",
    "truth_of",
    "what_if",
]
