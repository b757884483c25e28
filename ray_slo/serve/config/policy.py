"""The policy of an application or of a serving group."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from ray_slo.core.documents import Strict
from ray_slo.core.text import quoted
from ray_slo.policies.registry import POLICIES, refuse_sizes
from ray_slo.serve.config.common import StrictConfig


class PolicyConfig(StrictConfig):
    """A policy by name or "module:attr", with its arguments. The name alone is enough.

    Attributes:
        name: None means the default. That is `pipeline` with the planner "loki", `kairos` with
            "kairos", and `auto` otherwise.
        kwargs: its arguments; each policy's class lists them.
    """

    name: Any = None
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _says_one(cls, value: Any) -> Any:
        if value is None or callable(value) or hasattr(value, "decide"):
            return value
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"must be one of {', '.join(sorted(POLICIES))}, 'module:attr', or a policy, got "
                f"{quoted(value)}"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return value if isinstance(value, dict | PolicyConfig) else {"name": value}


class PolicySpec(Strict):
    """A policy by name, "module:attr", class or object, with its arguments.

    Attributes:
        preempts: it may stop running batches.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: Any
    kwargs: dict[str, Any]
    preempts: bool

    @property
    def how_to_preempt(self) -> str:
        """Why a policy that does not preempt does not, and what to write instead."""
        instead = "choose flex, deferred_flex, or auto with `kwargs: {preempt: true}`"
        if self.name == "auto":
            instead = "write `policy: {name: auto, kwargs: {preempt: true}}`"
        return f"the policy {quoted(self.name)} of this application stops no batch; {instead}"

    def refusal(self, sized: bool) -> str:
        """Why this policy cannot serve a model, and what to choose instead; "" if it can.

        Args:
            sized: the model's requests have sizes.
        """
        if sized:
            try:
                refuse_sizes(self.name, self.kwargs)
            except ValueError as error:
                return str(error)
        return ""
