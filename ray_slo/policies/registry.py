"""Policies by name. Anything accepted by name is also accepted as an object or "module:attr"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ray_slo.core.arguments import check
from ray_slo.core.names import import_attr, nearest
from ray_slo.core.policy import Policy, unwrapped
from ray_slo.core.text import quoted, text_of
from ray_slo.core.trees import Tree
from ray_slo.policies.composed import Composed
from ray_slo.policies.limited import Limited

POLICIES: dict[str, str] = {
    "auto": "ray_slo.policies.auto:Auto",
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

EXACT: dict[str, str] = {
    "deferred": "ray_slo.policies.exact.deferred:ExactDeferred",
    "flex": "ray_slo.policies.exact.flex:ExactFlex",
    "kairos": "ray_slo.policies.exact.kairos:ExactKairos",
}
"""Policies as their papers print them, without our improvements: with `exact: true`."""

DEFAULT = "auto"
"""The policy if the user names none. The planners of papers have their own default."""


def make_policy(policy: str | Policy, kwargs: Mapping[str, Any] | None = None) -> Policy:
    """A policy from its name, "module:attr", class or object.

    Args:
        kwargs: arguments of the policy's class; refused beside a ready-made object.

    Raises:
        ValueError: unknown name or argument; the message lists the valid choices.
    """
    kwargs = dict(kwargs or {})
    target = _target(policy)
    improved, target = target, _exact(policy, target, kwargs)
    if not callable(target):
        if kwargs:
            raise ValueError(f"policy_kwargs {sorted(kwargs)} given beside a policy object")
        made = target
    else:
        if isinstance(target, type) and not hasattr(target, "decide"):  # before it is made
            raise ValueError(f"policy {policy!r} gives {target.__name__}, which is no Policy")
        valid, takes_any = _parameters(target)
        if not takes_any and (unknown := sorted(kwargs.keys() - valid)):
            exact = " with exact: true" if target is not improved else ""
            beyond = getattr(target, "beyond", {})
            for name in [name for name in unknown if exact and name in beyond]:
                raise ValueError(f"policy {policy!r}{exact}: {name} contradicts it: {beyond[name]}")
            told = _TOLD if getattr(target, "composes", False) else ()
            takes = [name for name in valid if name not in told]
            takes += ["exact"] if _name_of_class(improved) in EXACT else []
            raise ValueError(
                f"policy {policy!r}{exact} has no argument {', '.join(unknown)}; "
                f"it takes {', '.join(takes) or 'none'}"
            )
        needed = [name for name, p in valid.items() if p.default is p.empty]
        if missing := [name for name in needed if name not in kwargs]:
            raise ValueError(f"policy {policy!r} needs the argument {', '.join(missing)}")
        try:
            check(target, kwargs)
            made = target(**kwargs)
        except (TypeError, ValueError, OSError) as error:  # a file of tables may be missing
            raise ValueError(f"policy {policy!r}: {text_of(error)}") from error
    if not isinstance(made, Policy):
        raise ValueError(f"policy {policy!r} gives {type(made).__name__}, which is no Policy")
    return made


def _exact(policy: str | Policy, target: Any, kwargs: dict[str, Any]) -> Any:
    """The policy as its paper prints it, if `exact` says so, which is taken out of `kwargs`."""
    name = _name_of_class(target)
    if "exact" not in kwargs or name not in POLICIES:  # a user's own class may have the argument
        return target
    if not isinstance(exact := kwargs.pop("exact"), bool):
        raise ValueError(f"policy {policy!r}: exact must be true or false, got {quoted(exact)}")
    if exact and name not in EXACT:
        raise ValueError(
            f"policy {policy!r} has no exact mode, which are the policies of papers without our "
            f"improvements; {', '.join(EXACT)} have one"
        )
    return import_attr(EXACT[name]) if exact else target


def follows_assignments(policy: Policy) -> bool:
    """Whether a planner must say what each worker serves: the policy does not choose variants
    itself, or is better with a plan."""
    inner = unwrapped(policy)
    by_default = not getattr(inner, "chooses_variants", True)
    return bool(getattr(inner, "follows_assignments", by_default))


COMPOSE = f"{__name__}:compose"
_TOLD = ("trees", "planned")  # arguments that follow from the application


def policy_for(
    policy: str | Policy,
    kwargs: Mapping[str, Any] | None = None,
    trees: Sequence[Tree] = (),
    variants: Mapping[str, int] | None = None,
    **composing: Any,
) -> Policy:
    """A policy that serves an application; arguments as of `recipe_for`."""
    return make_policy(*recipe_for(policy, kwargs, trees, variants, **composing))


def recipe_for(
    policy: str | Policy,
    kwargs: Mapping[str, Any] | None = None,
    trees: Sequence[Tree] = (),
    variants: Mapping[str, int] | None = None,
    *,
    planned: bool = False,
    **composing: Any,
) -> tuple[str | Policy, dict[str, Any]]:
    """Arguments of `make_policy` for the named policy, composed with what it lacks for the
    application. They are plain names and values if the policy is given by its name.

    Args:
        trees: of the application; none for models alone.
        variants: how many each model has.
        planned: a planner assigns variants to workers.
        composing: further arguments of `policies.composed.Composed`, and `limited`: whether
            pipelines limit what their roots admit (`policies.limited`).

    Raises:
        ValueError: as of `make_policy`.
    """
    kwargs = dict(kwargs or {})
    refuse_told(policy, kwargs)
    if getattr(_target(policy), "for_pipelines", False):
        kwargs = {**_of_pipeline(trees, composing), **kwargs}
    made: Any = make_policy(policy, kwargs)
    if getattr(made, "for_pipelines", False):
        return policy, kwargs
    if getattr(made, "composes", False):
        if not (isinstance(policy, str) or callable(policy)):
            made.told_of(trees, planned=planned, **composing)
            return made, {}
        shapes = [tree.to_json() for tree in trees]
        return policy, {**kwargs, "trees": shapes, "planned": planned, **composing}
    lacks_tasks = not getattr(made, "serves_tasks", True)
    lacks_variants = not getattr(made, "chooses_variants", True)
    plans_per_slo = getattr(made, "plans_per_slo", False)
    if (
        (lacks_tasks and any(len(tree.tasks) > 1 for tree in trees))
        or (lacks_variants and any(count > 1 for count in (variants or {}).values()))
        or (plans_per_slo and any(len(tree.slos_s) > 1 for tree in trees))
        or (planned and name_of(made) in POLICIES)
    ):
        if not isinstance(policy, str):
            return _composed(made, trees, **composing), {}
        shapes = [tree.to_json() for tree in trees]
        return COMPOSE, {"policy": policy, "kwargs": kwargs, "trees": shapes, **composing}
    return policy, kwargs


def compose(
    policy: str,
    kwargs: Mapping[str, Any] | None = None,
    trees: Sequence[Mapping[str, Any]] = (),
    **composing: Any,
) -> Policy:
    """A composed policy from plain values, as decision logs hold them."""
    shapes = [Tree.from_json(tree) for tree in trees]
    return _composed(make_policy(policy, kwargs), shapes, **composing)


def _composed(
    policy: Policy, trees: Sequence[Tree], *, limited: bool = True, **composing: Any
) -> Policy:
    composed = Composed(policy, trees, **composing)
    piped = any(len(tree.tasks) > 1 for tree in trees)
    return Limited(composed, trees) if limited and piped else composed


def _parameters(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Arguments by name, and whether it takes any others."""
    parameters = inspect.signature(target).parameters
    valid = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return valid, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _target(policy: str | Policy) -> Any:
    """The class or function that a policy's name means; a policy object is returned unchanged."""
    if not isinstance(policy, str):
        if not callable(policy) and not hasattr(policy, "decide"):
            raise ValueError(
                f"must be one of {', '.join(sorted(POLICIES))}, 'module:attr', or a policy, "
                f"got {quoted(policy)}"
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
    """Arguments that a live host gives a policy if the user did not, among those that it takes."""
    target = _target(policy)
    arguments = getattr(target, "live_arguments", None)
    if not isinstance(target, type) or arguments is None:
        return {}
    given: dict[str, Any] = arguments(shortest_slo_ms)
    valid, takes_any = _parameters(target)
    return {name: value for name, value in given.items() if takes_any or name in valid}


def _of_pipeline(trees: Sequence[Tree], composing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a policy for pipelines, if there is one pipeline."""
    if len(trees) != 1:
        return {}
    (tree,) = trees
    factors = {v: dict(f) for task in tree.tasks for v, f in task.factors.items()}
    delay = (
        {"communication_s": composing["communication_s"]} if "communication_s" in composing else {}
    )
    return {"parents": dict(tree.parents), "factors": factors, **delay}


def refuse_told(policy: str | Policy, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that follow from the application.

    Raises:
        ValueError: names them.
    """
    given = [name for name in _TOLD if name in kwargs]
    if given and getattr(_target(policy), "composes", False):
        raise ValueError(
            f"policy {policy!r}: {' and '.join(given)} follow from the application; leave them out"
        )


def refuse_sizes(policy: str | Policy, kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse a policy that cannot serve requests with sizes.

    Raises:
        ValueError: it counts requests, not the items in them.
    """
    made = make_policy(policy, kwargs)
    if getattr(made, "counts_requests", False):
        raise ValueError(
            f"policy {name_of(made)!r} counts requests, not the items in them, and these have "
            f"sizes; choose {_those('counts_requests', False)}"
        )


def _those(attribute: str, value: bool) -> str:
    """Names of policies for models whose attribute has this value, for a message."""
    classes = {name: import_attr(path) for name, path in POLICIES.items()}
    names = [
        n for n, c in classes.items() if not c.for_pipelines and getattr(c, attribute) == value
    ]
    return " or ".join(map(repr, names))


def name_of(policy: Policy) -> str:
    """The name under which a policy is registered, else "module:Class"."""
    return _name_of_class(type(policy))


def _name_of_class(of: Any) -> str:
    path = f"{getattr(of, '__module__', '')}:{getattr(of, '__name__', '')}"
    known = (*POLICIES.items(), *EXACT.items())
    return next((name for name, found in known if found == path), path)
