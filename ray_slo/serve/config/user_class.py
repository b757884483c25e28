"""Checks a user's class or function before anything is deployed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray_slo.core.text import quoted

JOIN = "join"
HOOKS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "preprocess": ("preprocess(item)", (1,)),
    "postprocess": ("postprocess(result)", (1,)),
    "example_input": ("example_input(), or example_input(size)", (0, 1)),
    "size": ("size(item)", (1,)),
    JOIN: ("join(result, {child: [joined, …]})", (2,)),
}
"""Optional static methods of a class: how they are written, and with how many arguments they are
called."""

RECORDS = ("record_routing_stats", "record_autoscaling_stats", "record_replica_metadata")
"""Optional methods through which a class tells Serve about its replica."""


def check_arguments(
    target: Callable[..., Any], what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that do not fit a signature, if the signature is known.

    Raises:
        ValueError: names the argument, and the accepted ones.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise ValueError(f"args and kwargs do not fit {what}: {error}; it takes {takes}") from None


def check_user_class(target: Any, has_variants: bool = False) -> type[Any]:
    """Refuse a class that cannot work, before anything is deployed.

    Args:
        has_variants: its batch method is `__call__(self, network, items)`.

    Raises:
        ValueError: says what is wrong and what is expected.
    """
    wanted = "__call__(self, network, items: list) -> list"
    if not has_variants:
        wanted = wanted.replace("network, ", "")
    if not inspect.isclass(target):
        raise ValueError(f"a deployment is made from a class with {wanted}, got {quoted(target)}")
    call = target.__dict__.get("__call__") or getattr(target, "__call__", None)  # noqa: B004
    if not inspect.isfunction(call):
        raise ValueError(
            f"{target.__name__} has no __call__; it must map a list of items to a list of results"
        )
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ValueError(
            f"{target.__name__}.__call__ is a generator; a coordinated batch returns a list. "
            "For streaming, use @ray_slo.batch"
        )
    parameters = inspect.signature(call).parameters.values()
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(takes) < 2 and not takes_any:
        raise ValueError(
            f"{target.__name__}.__call__ takes no argument; it must take a list of items"
        )
    if has_variants and len(takes) < 3 and not takes_any:
        raise ValueError(
            f"{target.__name__}.__call__ takes only a list of items; with variants it must be "
            f"{wanted}, where network is what the variant's load returned"
        )
    if not has_variants and [p.default for p in takes[2:3]] == [inspect.Parameter.empty]:
        raise ValueError(
            f"{target.__name__}.__call__ takes ({', '.join(p.name for p in takes[1:])}); without "
            f"variants it must be {wanted}"
        )
    check_fits(f"{target.__name__}.__call__", call, (3 if has_variants else 2,), wanted)
    _check_methods_of_serve(target)
    for name in HOOKS:
        if name != JOIN and inspect.getattr_static(target, name, target) is not target:
            check_hook(target, name)
    if (example := getattr(target, "example_input", None)) is not None:
        sized = hasattr(target, "size")
        wanted = "example_input(size), as there is a size(item)" if sized else "example_input()"
        check_fits(f"{target.__name__}.example_input", example, (int(sized),), wanted)
    return target


def _check_methods_of_serve(target: type[Any]) -> None:
    """Refuse methods that Serve knows, where they cannot work here.

    Raises:
        ValueError: says what is wrong and what is expected.
    """
    for name in ("check_health", *RECORDS):
        if inspect.isfunction(method := inspect.getattr_static(target, name, None)):
            check_fits(f"{target.__name__}.{name}", method, (1,), f"{name}(self)")
    if inspect.isfunction(method := inspect.getattr_static(target, "reconfigure", None)):
        wanted = "reconfigure(self, user_config) or reconfigure(self, user_config, rank)"
        takes_rank = "rank" in inspect.signature(method).parameters
        check_fits(f"{target.__name__}.reconfigure", method, (3 if takes_rank else 2,), wanted)
    # Imported here, because it brings Serve and pandas along, and every process reads configs.
    from ray_slo.serve.ray_private.context import is_multiplexed

    for name in dir(target):
        if is_multiplexed(inspect.getattr_static(target, name, None)):
            raise ValueError(
                f"{target.__name__}.{name}: @serve.multiplexed needs the model id of each request, "
                "which a coordinated batch does not have. Name the models under `models:`, or the "
                "networks of one model under `variants:`; or use @ray_slo.batch in a "
                "@serve.deployment"
            )


def check_hook(target: type[Any], name: str) -> None:
    """Refuse a hook of a class that cannot be called where the model is not loaded.

    Raises:
        ValueError: says what is wrong and what is expected.
    """
    shown, (wanted, counts) = f"{target.__name__}.{name}", HOOKS[name]
    if not isinstance(inspect.getattr_static(target, name), staticmethod | classmethod):
        raise ValueError(
            f"{shown} must be a @staticmethod or @classmethod: it runs where the model is not "
            "loaded"
        )
    hook = getattr(target, name)
    if not callable(hook):
        raise ValueError(f"{shown} must be a function, {wanted}, got {quoted(hook)}")
    if inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
        raise ValueError(f"{shown} is a generator; it must return what {wanted} returns")
    check_fits(shown, hook, counts, wanted)


def check_fits(
    shown: str, function: Callable[..., Any], counts: Collection[int], wanted: str
) -> None:
    """Refuse a function that none of these numbers of arguments fits, if its signature is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    for count in counts:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return
    takes = str(signature).partition(" -> ")[0]
    raise ValueError(f"{shown} takes {takes}; it must be {wanted}")
