"""Replay a recorded policy step by step.

`replay` gives a policy the recorded events at the recorded times, and compares every decision with
the recorded one. A policy is a pure state machine, so both must be the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_slo.core.decisions import Action, Decision, Dispatch, Drop
from ray_slo.core.names import import_attr
from ray_slo.core.policy import Policy
from ray_slo.papers.ramsis.table import Table
from ray_slo.policies.registry import COMPOSE, POLICIES, make_policy
from ray_slo.record.decode import Life
from ray_slo.record.rows import damaged


@dataclass(frozen=True)
class Difference:
    """The first decision of a replay that differs from the recorded one.

    Attributes:
        round: number of the decision since the scheduler started, from 0.
        at: time of the decision, seconds on the recorded clock.
        recorded, replayed: the first action, error or wake-up time that differs, in words;
            "nothing" if only the other policy has an action.
    """

    round: int
    at: float
    recorded: str
    replayed: str


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        rounds: number of decisions that are the same.
        actions: number of actions in these decisions.
        difference: the first decision that differs; None if all are the same.
        error: the error that both policies raised at the end; "" if there was none.
    """

    rounds: int
    actions: int
    difference: Difference | None
    error: str = ""

    @property
    def identical(self) -> bool:
        return self.difference is None


def replay(life: Life, make: Callable[[], Policy] | None = None) -> Replayed:
    """Feed the recorded events to a policy and compare decisions, until the first difference.

    Args:
        make: makes the policy; by default, the policy that the log names.

    Raises:
        ValueError: the log's beginning or other rows are missing, or it does not name its policy.
    """
    if not life.begins:
        raise ValueError(
            f"{life.path}: the beginning is gone (max_mb was reached), so what the policy "
            "knew is not known; only `--policy` (what if) can be asked of it"
        )
    if life.lost:
        raise ValueError(
            f"{life.path}: {sum(n for n in life.lost if n > 0)} rows were not kept and "
            f"{life.lost.count(-1)} files are missing, so what the policy knew is not known; only "
            "`--policy` (what if) can be asked of it"
        )
    policy = make() if make else policy_of(life)
    rounds = actions = 0
    for r in life.rounds(Table.load):
        error, decided = "", Decision()
        try:
            for name, args in r.events:
                if name == "solved" and None in args[1]:
                    raise _NotHeld(f"{life.path}: the policy was given answers of its own kind")
                getattr(policy, name)(*args)
            decided = policy.decide(r.now)
        except _NotHeld:
            raise
        except Exception as raised:  # the recorded policy may have raised the same error
            error = f"{type(raised).__name__}: {raised}"
        difference = _difference(rounds, r.now, r.decision, r.error, decided, error)
        if difference is not None:
            return Replayed(rounds, actions, difference)
        if r.decision is None:
            return Replayed(rounds, actions, None, r.error)
        rounds += 1
        actions += len(decided.actions)
    return Replayed(rounds, actions, None)


class _NotHeld(ValueError):
    """The policy got an event that a log cannot contain."""


def policy_of(life: Life) -> Policy:
    """Make the policy that the log names.

    Raises:
        ValueError: the log does not name it.
    """
    name, kwargs = policy_arguments(life)
    with damaged(life.path):
        return make_policy(name, kwargs)


def policy_arguments(life: Life) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of the recorded policy.

    Raises:
        ValueError: the log does not contain them.
    """
    start = life.start
    if start is None or start.policy is None:
        raise ValueError(
            f"{life.path}: the policy was a ready-made object, which a log cannot hold; "
            "only `--policy` (what if) can be asked of it"
        )
    if start.kwargs is None:
        raise ValueError(
            f"{life.path}: arguments of policy {start.policy!r} are nothing that a log can "
            "hold; only `--policy` (what if) can be asked of it"
        )
    composed = start.policy == COMPOSE
    named = str(start.kwargs.get("policy")) if composed else start.policy
    with damaged(life.path):
        if named not in POLICIES and not _is_policy_class(import_attr(named)):
            raise ValueError(f"{named!r} is no class of a policy")
    return start.policy, start.kwargs


def _is_policy_class(target: Any) -> bool:
    """Return whether the target is a policy class. Nothing else from a log may be called, because
    anybody may have written the log."""
    methods = ("requests_arrived", "requests_cancelled", "batch_finished", "cluster_changed")
    return isinstance(target, type) and all(hasattr(target, m) for m in (*methods, "decide"))


def _difference(
    number: int, at: float, was: Decision | None, was_error: str, now: Decision, error: str
) -> Difference | None:
    if was is None or error:
        recorded = f"raised {was_error}" if was is None else "raised nothing"
        replayed = f"raised {error}" if error else "raised nothing"
        same = was is None and bool(error) and was_error == error
        return None if same else Difference(number, at, recorded, replayed)
    for i in range(max(len(was.actions), len(now.actions))):
        then_, now_ = (_in_words(d.actions[i : i + 1]) for d in (was, now))
        if then_ != now_:
            return Difference(number, at, then_, now_)
    if was.wake_at != now.wake_at:
        return Difference(number, at, f"wake at {was.wake_at!r}", f"wake at {now.wake_at!r}")
    return None


def _in_words(actions: Sequence[Action]) -> str:
    """Describe the action with all values that a replay compares; times have all their digits."""
    if not actions:
        return "nothing"
    a = actions[0]
    if isinstance(a, Dispatch):
        return (
            f"dispatch batch {a.batch_id} of {a.variant} to {a.worker}: requests "
            f"{[r.id for r in a.requests]}, from {a.start_at!r} to {a.finish_at!r}"
        )
    if isinstance(a, Drop):
        return f"drop {[r.id for r in a.requests]}: {a.reason.value}, finish {a.finish_at!r}"
    return f"preempt {a.worker}: {a.reason}, for {a.variant}, gain {float(a.gain)!r}"
