"""Replay decision logs: the recorded policy step by step, or any policy in the simulator."""

from ray_slo.simulation.replay.compare import Replayed, policy_arguments, replay
from ray_slo.simulation.replay.simulated import what_if
from ray_slo.simulation.replay.tapes import Tape, newest, recorded, tape

__all__ = [
    "Replayed",
    "Tape",
    "newest",
    "policy_arguments",
    "recorded",
    "replay",
    "tape",
    "what_if",
]
