"""Policies by name. Anything accepted by name is also accepted as an object or "module:attr"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ray_slo.core.policy import Policy

POLICIES: dict[str, str] = {
    "deferred": "ray_slo.scheduling.deferred:Deferred",
    "deferred_flex": "ray_slo.scheduling.deferred_flex:DeferredFlex",
    "eager": "ray_slo.scheduling.timeout:Eager",
    "flex": "ray_slo.scheduling.flex:Flex",
    "kairos": "ray_slo.scheduling.kairos:Kairos",
    "pipeline": "ray_slo.scheduling.pipeline:Pipeline",
    "price": "ray_slo.scheduling.price:Price",
    "ramsis": "ray_slo.scheduling.ramsis:Ramsis",
    "timeout": "ray_slo.scheduling.timeout:Timeout",
}


def import_attr(path: str) -> Any:
    """Import "module:attr".

    Raises:
        ValueError: the module or the attribute does not exist.
    """
    module, _, attr = path.partition(":")
    try:
        return getattr(import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {path!r}: {error}") from error


def make_policy(policy: str | Policy, kwargs: Mapping[str, Any] | None = None) -> Policy:
    """A policy from its name, "module:attr", class or object.

    Args:
        kwargs: arguments of the policy's class; refused beside a ready-made object.

    Raises:
        ValueError: unknown name or argument; the message lists the valid choices.
    """
    kwargs = dict(kwargs or {})
    target: Any = policy
    if isinstance(policy, str):
        if policy not in POLICIES and ":" not in policy:
            raise ValueError(
                f"policy {policy!r} is unknown; choose one of {', '.join(sorted(POLICIES))}, "
                'or name your own as "module:attr"'
            )
        try:
            target = import_attr(POLICIES.get(policy, policy))
        except ValueError as error:
            raise ValueError(f"policy: {error}") from error
    if not callable(target):
        if kwargs:
            raise ValueError(f"policy_kwargs {sorted(kwargs)} given beside a policy object")
        made = target
    else:
        if isinstance(target, type) and not hasattr(target, "decide"):  # before it is made
            raise ValueError(f"policy {policy!r} gives {target.__name__}, which is no Policy")
        try:
            parameters = inspect.signature(target).parameters
        except ValueError:  # a class written in C
            raise ValueError(f"policy {policy!r} gives {target!r}, which is no Policy") from None
        valid = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        takes_any = len(valid) < len(parameters)
        if not takes_any and (unknown := sorted(set(kwargs) - set(valid))):
            raise ValueError(
                f"policy {policy!r} has no argument {', '.join(unknown)}; "
                f"it takes {', '.join(valid) or 'none'}"
            )
        try:
            made = target(**kwargs)
        except TypeError as error:
            raise ValueError(f"policy {policy!r}: {error}") from error
    if not isinstance(made, Policy):
        raise ValueError(f"policy {policy!r} gives {type(made).__name__}, which is no Policy")
    return made
