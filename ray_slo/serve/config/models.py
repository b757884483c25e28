"""Models and their variants, as users write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ray_slo.core.documents import SloMs
from ray_slo.core.explain import Misplaced, explained
from ray_slo.core.names import import_attr
from ray_slo.core.pages import PAGE, pointed
from ray_slo.core.text import quoted, type_in_words
from ray_slo.serve.config.common import SloClasses, StrictConfig, names
from ray_slo.serve.config.user_class import check_arguments, check_user_class

if TYPE_CHECKING:
    from typing_extensions import Self


class VariantConfig(StrictConfig):
    """A network that can answer for a model.

    Attributes:
        load: function or class (or "module:attr") that returns the network. The network is passed
            to the model's batch method. Called once per worker, on the thread that runs the
            batches.
        args, kwargs: of `load`.
        accuracy: percent. Policies prefer the most accurate variant among those that are fast
            enough.
        profile: path of a latency-profile file (`ray-slo profile`) to start from.
        factors: for a task of a pipeline: expected number of items per request, by child task. The
            real number is learned.
    """

    load: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    accuracy: float = Field(ge=0, le=100)
    profile: str | None = None
    factors: dict[str, float] = Field(default_factory=dict)

    def loader(self) -> Callable[..., Any]:
        """The function or class that loads the network.

        Raises:
            ValueError: not importable, or not callable.
        """
        target = import_attr(self.load) if isinstance(self.load, str) else self.load
        if not callable(target):
            raise ValueError(
                f"load: {quoted(self.load)} is {type_in_words(target)}; it must be a function or a "
                "class that returns the loaded network"
            )
        loader: Callable[..., Any] = target
        return loader

    def check(self) -> None:
        """Refuse arguments that the loader does not take, or that its `check` refuses.

        Raises:
            ValueError: names the argument.
        """
        loader = self.loader()
        check_arguments(loader, "load", self.args, self.kwargs)
        check = None if inspect.isclass(loader) else getattr(loader, "check", None)
        if callable(check):
            check(*self.args, **self.kwargs)


class Variant(VariantConfig):
    """A named variant, for `@ray_slo.deployment(variants=[…])`.

    Args:
        name: name of the network in answers, metrics and profile files.
        accuracy: percent.
        load: function or class (or "module:attr") that returns the loaded network.
        args, kwargs: of `load`.
        profile: path of a latency-profile file to start from.
        factors: for a task of a pipeline: expected number of items per request, by child task.

    Raises:
        ValueError: a bad value, with the field.
    """

    name: str

    def __init__(
        self,
        name: str,
        *,
        accuracy: float,
        load: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        profile: str | None = None,
        factors: dict[str, float] | None = None,
    ) -> None:
        given = {"name": name, "accuracy": accuracy, "load": load, "args": args}
        given |= {
            "kwargs": {} if kwargs is None else kwargs,
            "profile": profile,
            "factors": {} if factors is None else factors,
        }
        try:
            BaseModel.__init__(self, **given)
        except ValidationError as error:
            said = [f"Variant {quoted(name)}: {e}" for e in explained(error, Variant, given)]
            raise ValueError(pointed("\n".join(said), f"{PAGE}#variants")) from None


class Served(StrictConfig):
    """The user's class and its properties.

    Attributes:
        callable: class (or "module:Class") whose instances map a list of items to a list of
            results. Optional static methods: `preprocess(item)` and `postprocess(result)`, which
            run in the frontend, on several threads (so return a new object for each call);
            `example_input()`, a representative preprocessed item for warm-up and profiling; and
            `size(item)`, the size of a preprocessed item, for example the length of a list.
            Profiles and `max_batch_size` then use the sum of sizes, and `example_input(size)` makes
            an item of a size. Optional method: `reconfigure(user_config)`.
        args, kwargs: of the class's constructor.
        variants: networks that can answer, by name, the preferred one first. The batch method is
            then `__call__(self, network, items)`, and the policy chooses the network per batch.
        accuracy: percent, if known; it is part of answers. With variants, each has its own.
        max_batch_size: upper bound; the policy chooses the size.
        profile: path of a latency-profile file (`ray-slo profile`) to start from. It may contain
            several profiles, by the names of variants.
        profile_quantile: the policy plans with this quantile of the measured batch durations, or
            with a lower one while fewer than one answer in two hundred is late. It predicts no more
            than half of the SLO for a batch of one, unless the typical time is more. With more than
            0.95, the quantile is fixed: fewer answers are late, and more requests are refused.
        exit_points: number of places in the network where a policy that preempts can stop a batch
            (`ray_slo.models.preemption`). The network is the result of `load`, or the only torch
            module among the instance's attributes. Default: those in the file `profile`, if any.
            0: none. Other code calls `ray_slo.checkpoint()`, and the policy `auto` then needs
            `preempt: true`.
        user_config: passed to `reconfigure`.
    """

    callable: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    variants: Annotated[dict[str, VariantConfig], names("variant")] = Field(default_factory=dict)
    accuracy: float | None = Field(default=None, ge=0, le=100)
    max_batch_size: int = Field(default=64, ge=1, le=4096)
    profile: str | None = None
    profile_quantile: float = Field(default=0.95, gt=0, lt=1)
    exit_points: int | None = Field(default=None, ge=0)
    user_config: Any = None

    @field_validator("variants", mode="before")
    @classmethod
    def _variants_by_name(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        named: dict[str, VariantConfig] = {}
        for variant in value:
            if not isinstance(variant, Variant):
                raise ValueError(
                    "a list of variants holds ray_slo.Variant(name, accuracy=…, load=…)"
                )
            if variant.name in named:
                raise ValueError(f"two variants are named {variant.name!r}")
            named[variant.name] = VariantConfig(
                **{field: getattr(variant, field) for field in VariantConfig.model_fields}
            )
        return named

    @model_validator(mode="after")
    def _one_accuracy(self) -> Served:
        if self.variants and self.accuracy is not None:
            raise Misplaced(
                "accuracy",
                f"each variant has an accuracy of its own; leave the model's out, got "
                f"{self.accuracy:g}",
            )
        return self

    def load(self) -> type[Any]:
        """The user's class, checked.

        Raises:
            ValueError: not importable, or its methods do not fit.
        """
        target = import_attr(self.callable) if isinstance(self.callable, str) else self.callable
        # The result of @ray_slo.deployment is accepted, too.
        return check_user_class(getattr(target, "user_class", target), bool(self.variants))

    def without_code(self) -> Self:
        """The same without the user's classes and arguments."""
        bare: dict[str, Any] = {"callable": "", "args": (), "kwargs": {}, "user_config": None}
        variants = {
            name: v.model_copy(update={"load": "", "args": (), "kwargs": {}})
            for name, v in self.variants.items()
        }
        return self.model_copy(update={**bare, "variants": variants})


class ModelConfig(Served):
    """One model: the user's class (see `Served`) and its SLO.

    Attributes:
        latency_slo_ms: answer within this many milliseconds, counted from arrival at the frontend.
        slo_classes: other SLOs in milliseconds, by name. Clients name one with `slo_class=` on a
            handle, or with the header `x-slo-class`.
    """

    latency_slo_ms: SloMs
    slo_classes: SloClasses = Field(default_factory=dict)
