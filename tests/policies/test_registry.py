"""Policies by name, "module:attr", class or object."""

from __future__ import annotations

import pytest

from ray_slo.core import Policy
from ray_slo.core.names import import_attr
from ray_slo.policies import POLICIES, make_policy
from ray_slo.policies.deferred import Deferred
from ray_slo.policies.deferred_flex import DeferredFlex
from ray_slo.policies.registry import live_arguments
from ray_slo.policies.timeout import Eager, Timeout


def test_every_name_imports_to_a_policy_class():
    for path in POLICIES.values():
        assert isinstance(import_attr(path), type)
        assert import_attr(path).serves_late in (True, False)


def test_by_name_module_class_and_object():
    assert isinstance(make_policy("deferred"), Deferred)
    assert isinstance(make_policy("timeout", {"timeout_ms": 5.0}), Timeout)
    assert isinstance(make_policy("ray_slo.policies.timeout:Eager"), Eager)
    assert isinstance(make_policy(Deferred, {"objective": "consolidate"}), Policy)
    ready = Eager()
    assert make_policy(ready) is ready


@pytest.mark.parametrize(
    ("policy", "kwargs", "message"),
    [
        ("defered", None, "policy 'defered' is unknown; choose one of .*deferred.*eager"),
        ("deferred", {"wait_ms": 1}, "has no argument wait_ms; it takes objective, gathering"),
        ("deferred", {"objective": "quick"}, "objective must be one of responsive, consolidate"),
        ("timeout", {}, "needs the argument timeout_ms"),
        ("no.such.module:Policy", None, "cannot import 'no.such.module:Policy'"),
        ("ray_slo.policies.timeout:Eagre", None, "cannot import .*Eagre"),
        ("ray_slo.core:DeadlineQueue", None, "gives DeadlineQueue, which is no Policy"),
        ("builtins:dict", None, "policy 'builtins:dict' gives dict, which is no Policy"),
        (Eager(), {"margin_ms": 1.0}, r"policy_kwargs \['margin_ms'\] given beside"),
    ],
)
def test_errors_name_the_valid_choices(policy, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_policy(policy, kwargs)


class MyDeferred(Deferred):
    pass


class Strict(DeferredFlex):
    """Takes none of what a live host would give it."""

    def __init__(self):
        super().__init__()


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("deferred", {"jitter_ms": 10.0}),
        (f"{__name__}:MyDeferred", {"jitter_ms": 10.0}),
        (MyDeferred, {"jitter_ms": 10.0}),
        ("flex", {"margin_ms": 4.0}),
        ("deferred_flex", {"jitter_ms": 10.0, "margin_ms": 4.0}),
        ("ramsis", {"solver": None}),
        ("eager", {"margin_ms": 4.0}),
        ("price", {}),  # it learns its own
        (Strict, {}),
        (Deferred(), {}),
    ],
)
def test_what_a_live_host_gives(policy, given):
    assert live_arguments(policy, 200.0) == given
    make_policy(policy, given)


def test_a_live_host_names_an_unknown_policy():
    with pytest.raises(ValueError, match="policy 'defered' is unknown"):
        live_arguments("defered", 200.0)
