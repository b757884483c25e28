"""Policies by name. Anything accepted by name is also accepted as an object or "module:attr"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ray_slo.core.names import import_attr, nearest
from ray_slo.core.policy import Policy

POLICIES: dict[str, str] = {
    "deferred": "ray_slo.policies.deferred:Deferred",
    "deferred_flex": "ray_slo.policies.deferred_flex:DeferredFlex",
    "eager": "ray_slo.policies.timeout:Eager",
    "flex": "ray_slo.policies.flex:Flex",
    "kairos": "ray_slo.policies.kairos:Kairos",
    "pipeline": "ray_slo.policies.pipeline:Pipeline",
    "price": "ray_slo.policies.price:Price",
    "ramsis": "ray_slo.policies.ramsis:Ramsis",
    "timeout": "ray_slo.policies.timeout:Timeout",
}


def make_policy(policy: str | Policy, kwargs: Mapping[str, Any] | None = None) -> Policy:
    """A policy from its name, "module:attr", class or object.

    Args:
        kwargs: arguments of the policy's class; refused beside a ready-made object.

    Raises:
        ValueError: unknown name or argument; the message lists the valid choices.
    """
    kwargs = dict(kwargs or {})
    target = _target(policy)
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
        for name, value in kwargs.items():
            _check_kind(f"policy {policy!r}: {name}", value, _hints(target).get(name, Any))
        needed = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if missing := [name for name in needed if name not in kwargs]:
            pipelines = "; it is for pipelines, whose tasks are its arguments"
            raise ValueError(
                f"policy {policy!r} needs the argument {', '.join(missing)}"
                f"{pipelines if policy == 'pipeline' else ''}"
            )
        try:
            made = target(**kwargs)
        except TypeError as error:
            raise ValueError(f"policy {policy!r}: {error}") from error
    if not isinstance(made, Policy):
        raise ValueError(f"policy {policy!r} gives {type(made).__name__}, which is no Policy")
    return made


def _target(policy: str | Policy) -> Any:
    """What a policy's name stands for; a policy itself is left as it is."""
    if not isinstance(policy, str):
        if not callable(policy) and not hasattr(policy, "decide"):
            raise ValueError(
                f"must be one of {', '.join(sorted(POLICIES))}, 'module:attr', or a policy, "
                f"got {policy!r}"
            )
        return policy
    if policy not in POLICIES and ":" not in policy:
        raise ValueError(
            f"policy {policy!r} is unknown; choose one of {', '.join(sorted(POLICIES))}, "
            f'or name your own as "module:attr"{nearest(policy, list(POLICIES))}'
        )
    try:
        return import_attr(POLICIES.get(policy, policy))
    except ValueError as error:
        raise ValueError(f"policy: {error}") from error


def live_arguments(policy: str | Policy, shortest_slo_ms: float) -> dict[str, Any]:
    """Arguments that a live host gives a policy where its user did not, of those that it takes."""
    target = _target(policy)
    arguments = getattr(target, "live_arguments", None)
    if not isinstance(target, type) or arguments is None:
        return {}
    given: dict[str, Any] = arguments(shortest_slo_ms)
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in given.items() if takes_any or name in parameters}


def refuse_sizes(policy: str | Policy, kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse a policy that cannot serve requests with sizes.

    Raises:
        ValueError: it counts requests, not the items in them.
    """
    made = make_policy(policy, kwargs)
    if getattr(made, "counts_requests", False):
        raise ValueError(
            f"policy {name_of(made)!r} counts requests, not the items in them, and these have "
            "sizes; choose 'kairos' (batch: true joins requests)"
        )


def refuse_variants(
    policy: str | Policy,
    kwargs: Mapping[str, Any],
    model: str,
    count: int,
    instead: str = "'price' or 'ramsis'",
) -> None:
    """Refuse a policy that serves a model by its first variant alone, if it has `count` > 1.

    Raises:
        ValueError: names the model and what to choose `instead`.
    """
    made = make_policy(policy, kwargs)
    if count > 1 and not getattr(made, "chooses_variants", True):
        raise ValueError(
            f"policy: {name_of(made)!r} serves a model by its first variant only, and {model} "
            f"has {count}; choose {instead}, or name one variant"
        )


def name_of(policy: Policy) -> str:
    """The name under which a policy is registered, else "module:Class"."""
    path = f"{type(policy).__module__}:{type(policy).__name__}"
    return next((name for name, known in POLICIES.items() if known == path), path)


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of a class's arguments, or a function's; none where they cannot be told."""
    call: Any = target
    if isinstance(target, type):
        call = inspect.getattr_static(target, "__init__")
    try:
        return get_type_hints(call)
    except (NameError, TypeError, AttributeError):
        return {}


_KINDS: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", bool),
    float: ("a number", Real),
    int: ("a whole number", Integral),
    str: ("a text", str),
    NoneType: ("null", NoneType),
}


def _check_kind(what: str, value: Any, hint: Any) -> None:
    """Refuse a value of another kind than the annotation says, where that is a simple one."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
    plain = [kind for kind in kinds if get_origin(kind) is not Literal]
    if not all(kind in _KINDS for kind in plain):
        return
    of_kind = (_KINDS[kind][1] for kind in plain if kind is bool or not isinstance(value, bool))
    if value in choices or isinstance(value, tuple(of_kind)):
        return
    words = [f"one of {', '.join(map(str, choices))}"] if choices else []
    words += [_KINDS[kind][0] for kind in plain]
    raise ValueError(f"{what} must be {' or '.join(words)}, got {value!r}")
