"""Policies: one small pure state machine per file. See `ray_slo.core.policy` for the contract."""

from ray_slo.policies.registry import POLICIES, make_policy

__all__ = ["POLICIES", "make_policy"]
