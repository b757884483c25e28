"""What an application is made of: the one typed form behind the decorator and the YAML.

Unknown keys and bad values are refused at parse time with the field, the value and the choices.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from typing_extensions import Self

from ray_slo.core import LatencyProfile
from ray_slo.core.documents import Strict
from ray_slo.core.explain import explained, validated
from ray_slo.core.names import import_attr
from ray_slo.core.text import quoted
from ray_slo.planning import loki
from ray_slo.planning.catalogue import CATALOGUE, InstanceType
from ray_slo.policies.registry import (
    POLICIES,
    make_policy,
    name_of,
    refuse_sizes,
    refuse_variants,
)

_LONGEST_SLO_MS = 86_400_000  # a day, as for a request
_MOST_REPLICAS = 100_000
_LONGEST_NAME = 100  # characters
_PIPELINE = "pipeline"  # the default policy of a pipeline
_WITH_VARIANTS = "price"  # the default policy where a model has variants
# Arguments of a `loki.Problem` that are measured, or follow from the rest.
_PLANNED = ("waiting_factor", "communication_s")  # what its policy must see alike
_MEASURED = {"tasks", "demand", "workers", "slo_s", "path_accuracies", "current"}


class _Strict(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def check_arguments(
    target: Callable[..., Any], what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that do not fit a signature, where it can be known.

    Raises:
        ValueError: says which, and what is taken.
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


class VariantSpec(_Strict):
    """A network that can answer for a model.

    Attributes:
        load: function or class (or "module:attr"); what it returns is handed to the model's batch
            method. Called once per worker, on the thread that runs the batches.
        args, kwargs: of `load`.
        accuracy: percent: what a policy maximises among the variants that are fast enough.
        profile: path of a latency-profile file (`ray-slo profile`) to start from.
        factors: in a task of a pipeline, downstream items that it is expected to make per request,
            by child task; what it does make is learned.
    """

    load: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    accuracy: float = Field(ge=0, le=100)
    profile: str | None = None
    factors: dict[str, float] = Field(default_factory=dict)

    def loader(self) -> Callable[..., Any]:
        """What loads the network.

        Raises:
            ValueError: not importable, or not callable.
        """
        target = import_attr(self.load) if isinstance(self.load, str) else self.load
        if not callable(target):
            raise ValueError(
                f"load: {self.load!r} is a {type(target).__name__}; it must be a function or a "
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


class Variant(VariantSpec):
    """A named variant, for `@ray_slo.deployment(variants=[…])`.

    Args:
        name: says in answers, metrics and profile files which network it was.
        accuracy: percent.
        load: function or class (or "module:attr") that returns the loaded network.
        args, kwargs: of `load`.
        profile: path of a latency-profile file to start from.
        factors: in a task of a pipeline, downstream items expected per request, by child task.

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
        given |= {"kwargs": kwargs or {}, "profile": profile, "factors": factors or {}}
        try:
            BaseModel.__init__(self, **given)
        except ValidationError as error:
            raise ValueError(
                "\n".join(f"Variant {name!r}: {e}" for e in explained(error, Variant, given))
            ) from None


class _Served(_Strict):
    """The user's class, and what is known of it.

    Attributes:
        callable: class (or "module:Class") whose instances map a list of items to a list of
            results. Optional static methods: `preprocess(item)` and `postprocess(result)`, which
            run in the frontend; `example_input()`, a representative preprocessed item for
            warm-up and profiling; and `size(item)` of a preprocessed item that is a list of things,
            say: profiles and `max_batch_size` are then by the sum of sizes, and
            `example_input(size)` makes an item of a size. Optional method:
            `reconfigure(user_config)`.
        args, kwargs: of the class's constructor.
        variants: networks that can answer, by name, best liked first. The batch method is then
            `__call__(self, network, items)`, and the policy chooses the network per batch.
        accuracy: percent, where known; goes into answers. With variants, each has its own.
        max_batch_size: upper bound; the policy chooses the size.
        profile: path of a latency-profile file (`ray-slo profile`) to start from. It may hold
            several profiles, by the names of variants.
        profile_quantile: of measured batch durations, which the policy plans with.
        exit_points: how many places to put into the network where a policy that preempts can stop
            a batch (`ray_slo.models.preemption`). The network is what `load` returned, or the only
            torch module among the instance's attributes. Default: those that the file `profile`
            names, if it does; other code calls `ray_slo.checkpoint()`.
        user_config: passed to `reconfigure`.
    """

    callable: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    variants: dict[str, VariantSpec] = Field(default_factory=dict)
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
        named: dict[str, VariantSpec] = {}
        for variant in value:
            if not isinstance(variant, Variant):
                raise ValueError(
                    "a list of variants holds ray_slo.Variant(name, accuracy=…, load=…)"
                )
            if variant.name in named:
                raise ValueError(f"two variants are named {variant.name!r}")
            named[variant.name] = VariantSpec(
                **{field: getattr(variant, field) for field in VariantSpec.model_fields}
            )
        return named

    @field_validator("variants")
    @classmethod
    def _variant_names(cls, value: dict[str, VariantSpec]) -> dict[str, VariantSpec]:
        for name in value:
            _check_name("variant", name)
        return value

    @model_validator(mode="after")
    def _one_accuracy(self) -> _Served:
        if self.variants and self.accuracy is not None:
            raise ValueError(
                f"accuracy is {self.accuracy:g}, but each variant has an accuracy of its own; "
                "leave the model's out"
            )
        return self

    def load(self) -> type[Any]:
        """The user's class, checked.

        Raises:
            ValueError: not importable, or its methods do not fit.
        """
        target = import_attr(self.callable) if isinstance(self.callable, str) else self.callable
        # What @ray_slo.deployment made of a class will do, too.
        return check_user_class(getattr(target, "user_class", target), bool(self.variants))

    def without_code(self) -> Self:
        """The same without the user's classes and arguments."""
        bare: dict[str, Any] = {"callable": "", "args": (), "kwargs": {}, "user_config": None}
        variants = {
            name: v.model_copy(update={"load": "", "args": (), "kwargs": {}})
            for name, v in self.variants.items()
        }
        return self.model_copy(update={**bare, "variants": variants})


class ModelSpec(_Served):
    """One model: the user's class (see `_Served`) and its SLO.

    Attributes:
        latency_slo_ms: answer within this many milliseconds, counted from arrival at the frontend.
    """

    latency_slo_ms: float = Field(gt=0, le=_LONGEST_SLO_MS)


class TaskSpec(_Served):
    """A task of a pipeline: a model that other tasks may send requests to.

    What is said of a model's class holds for a task's, and its batch method returns, per request,
    a result or `ray_slo.Outputs(result, {child: [item, …]})`: every item is a request of the child
    task. A class may have another static method, `join(result, {child: [joined, …]})`: what
    becomes of a request's result and those of the requests that it made. Default:
    `{"result": result, "outputs": {child: [joined, …]}}`.

    Attributes:
        parent: the task whose batch method makes this one's requests; None at the root.
        factors: downstream items expected per request, by child task, of variants that do not say
            their own; 1 where neither says.
    """

    parent: str | None = None
    factors: dict[str, float] = Field(default_factory=dict)

    @field_validator("parent", mode="before")
    @classmethod
    def _one_parent(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str):
            raise ValueError("a pipeline is a tree: a task has one parent (or none, at the root)")
        return value

    def as_model(self, latency_slo_ms: float) -> ModelSpec:
        """What the scheduler and the workers take it for."""
        common = {field: getattr(self, field) for field in _Served.model_fields}
        return ModelSpec(**common, latency_slo_ms=latency_slo_ms)


class PipelineSpec(_Strict):
    """A rooted tree of tasks under one SLO.

    A client's item is a request of the root. Its answer is there when all that it made are.

    Attributes:
        tasks: by name.
        latency_slo_ms: end to end: answer within this many milliseconds, counted from arrival at
            the frontend.
        join: function (or "module:function") for the root, instead of the `join` of its class.
        path_accuracies: measured end-to-end accuracy, percent, by the names of the variants from
            the root to a last task, "variant/variant"; the product of the variants' accuracies for
            a path that is missing. A task without variants goes by its own name.
    """

    tasks: dict[str, TaskSpec] = Field(min_length=1)
    latency_slo_ms: float = Field(gt=0, le=_LONGEST_SLO_MS)
    join: str | Callable[..., Any] | None = None
    path_accuracies: dict[str, float] = Field(default_factory=dict)

    @field_validator("tasks")
    @classmethod
    def _task_names(cls, value: dict[str, TaskSpec]) -> dict[str, TaskSpec]:
        for name in value:
            _check_name("task", name)
        return value

    @model_validator(mode="after")
    def _is_a_tree(self) -> PipelineSpec:
        for name, task in self.tasks.items():
            if task.parent is not None and task.parent not in self.tasks:
                raise ValueError(
                    f"tasks.{name}.parent: no task {task.parent!r}; "
                    f"the tasks are {', '.join(self.tasks)}"
                )
        roots = [name for name, task in self.tasks.items() if task.parent is None]
        if len(roots) > 1:
            raise ValueError(
                f"tasks: {', '.join(roots)} have no parent; a pipeline is a tree with one root"
            )
        if lost := [name for name in self.tasks if name not in self.parents]:
            raise ValueError(
                f"tasks: {', '.join(lost)} are in a cycle or below one; a pipeline is a tree, and "
                "its root has no parent"
            )
        self._check_variants()
        self._check_paths()
        return self

    def _check_variants(self) -> None:
        owner: dict[str, str] = {}
        for name, task in self.tasks.items():
            children = self.children(name)
            named = {f"tasks.{name}.factors": task.factors}
            for variant, spec in task.variants.items():
                named[f"tasks.{name}.variants.{variant}.factors"] = spec.factors
            for field, factors in named.items():
                for child, factor in factors.items():
                    if child not in children:
                        raise ValueError(
                            f"{field}: {child!r} is no child of {name!r}; "
                            f"its children are {', '.join(children) or 'none'}"
                        )
                    if not 0 <= factor < math.inf:
                        raise ValueError(f"{field}.{child} must be at least 0, got {factor}")
            for variant in task.variants or (name,):
                if variant in owner:
                    raise ValueError(
                        f"tasks.{name}.variants: {variant!r} is a variant of {owner[variant]!r}, "
                        "too; variants of a pipeline have names of their own"
                    )
                owner[variant] = name

    def _check_paths(self) -> None:
        valid = self.paths
        for path, accuracy in self.path_accuracies.items():
            if tuple(path.split("/")) not in valid:
                shown = ["/".join(p) for p in valid[:8]]
                raise ValueError(
                    f"path_accuracies: no path {path!r} from root to a last task; they are "
                    f"{', '.join(shown)}{', …' * (len(valid) > len(shown))}"
                )
            if not 0 <= accuracy <= 100:
                raise ValueError(f"path_accuracies.{path} must be 0 to 100 percent, got {accuracy}")

    @property
    def parents(self) -> dict[str, str | None]:
        """Parent by task, parents before their children: the root comes first."""
        order: dict[str, str | None] = {n: None for n, t in self.tasks.items() if t.parent is None}
        for name in (found := list(order)):  # grows as it goes
            below = self.children(name)
            order |= dict.fromkeys(below, name)
            found += below
        return order

    @property
    def root(self) -> str:
        return next(iter(self.parents))

    def children(self, task: str) -> tuple[str, ...]:
        return tuple(name for name, t in self.tasks.items() if t.parent == task)

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """Downstream items expected per request, by variant and child task; all variants."""
        found: dict[str, dict[str, float]] = {}
        for name, task in self.tasks.items():
            usual = {child: task.factors.get(child, 1.0) for child in self.children(name)}
            own = {variant: spec.factors for variant, spec in task.variants.items()}
            found |= {variant: {**usual, **said} for variant, said in (own or {name: {}}).items()}
        return found

    @property
    def measured_paths(self) -> dict[tuple[str, ...], float]:
        """`path_accuracies` by the variants as a tuple."""
        return {tuple(path.split("/")): value for path, value in self.path_accuracies.items()}

    def loki_tasks(
        self,
        profile: Callable[[str], LatencyProfile],
        factors: Mapping[str, Mapping[str, float]] | None = None,
    ) -> tuple[loki.Task, ...]:
        """What `loki.Problem` takes.

        Args:
            profile: by the name of a variant.
            factors: learned ones, by variant and child task; default: those expected.
        """
        made = {**self.factors, **(factors or {})}
        answer = []
        for name in self.parents:
            task = self.tasks[name]
            # One network whose accuracy is not known takes nothing away from those of others.
            only = 100.0 if task.accuracy is None else task.accuracy
            own = {n: v.accuracy for n, v in task.variants.items()} or {name: only}
            variants = tuple(loki.Variant(v, a, profile(v), made[v]) for v, a in own.items())
            answer.append(loki.Task(name, variants, task.parent))
        return tuple(answer)

    def accuracy(self, path: tuple[str, ...]) -> float | None:
        """End-to-end accuracy, percent, of a path of variants from the root on, to wherever a
        request came; None where it was not measured and a variant's own is not known."""
        if (measured := self.path_accuracies.get("/".join(path))) is not None:
            return measured
        own = {name: task.accuracy for name, task in self.tasks.items() if not task.variants}
        for task in self.tasks.values():
            own.update({name: variant.accuracy for name, variant in task.variants.items()})
        known = [accuracy for variant in path if (accuracy := own.get(variant)) is not None]
        return 100 * math.prod(a / 100 for a in known) if len(known) == len(path) else None

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Every path: its variants, from the root to a last task."""
        found: list[tuple[str, ...]] = []

        def walk(task: str, before: tuple[str, ...]) -> None:
            below = self.children(task)
            for variant in self.tasks[task].variants or (task,):
                if not below:
                    found.append((*before, variant))
                for child in below:
                    walk(child, (*before, variant))

        walk(self.root, ())
        return tuple(found)


class WorkerSpec(_Strict):
    """A kind of worker: Serve replicas with such resources, each hosting every model, or what the
    planner has it host.

    Attributes:
        num_replicas: so many; at first, where a planner changes that (default: `min_replicas`).
        min_replicas, max_replicas: between these the planner decides. With "loki", there are
            always `num_replicas` without `max_replicas`; with "kairos", they are 0 and as many as
            its budget pays for.
        instance_type: for the planner "kairos": name of a type in
            `ray_slo.planning.catalogue.CATALOGUE`, or the fields of one, e.g.
            {price_per_hour: 0.5}.
        ray_actor_options: Ray resources of a worker. Default: those of its instance type, if it
            has one.
    """

    num_replicas: int = Field(default=1, ge=1, le=_MOST_REPLICAS)
    min_replicas: int = Field(default=1, ge=0, le=_MOST_REPLICAS)
    max_replicas: int | None = Field(default=None, ge=1, le=_MOST_REPLICAS)
    instance_type: InstanceType | None = None
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("instance_type", mode="before")
    @classmethod
    def _from_catalogue(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in CATALOGUE:
                raise ValueError(
                    f"no type {value!r} in the catalogue; it has {', '.join(CATALOGUE)}; for "
                    "another one, give its fields, e.g. {price_per_hour: 0.5}"
                )
            return CATALOGUE[value]
        return {"name": "custom", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _resources_of_the_type(self) -> WorkerSpec:
        if self.instance_type is not None and "ray_actor_options" not in self.model_fields_set:
            self.ray_actor_options = dict(self.instance_type.ray_actor_options)
        return self

    @model_validator(mode="after")
    def _in_range(self) -> WorkerSpec:
        if self.instance_type is not None and self.max_replicas is None:
            return self
        if self.max_replicas is None and "min_replicas" in self.model_fields_set:
            raise ValueError(
                f"min_replicas is {self.min_replicas} without max_replicas; there would always be "
                "num_replicas"
            )
        if self.scales and "num_replicas" not in self.model_fields_set:
            self.num_replicas = max(self.min_replicas, 1)
        if self.scales and not self.min_replicas <= self.num_replicas <= self.most_replicas:
            raise ValueError(
                f"num_replicas must be from min_replicas {self.min_replicas} to max_replicas "
                f"{self.max_replicas}, got {self.num_replicas}"
            )
        return self

    @property
    def scales(self) -> bool:
        """Whether a planner decides how many there are."""
        return self.max_replicas is not None

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.max_replicas is None else self.max_replicas


class PolicySpec(_Strict):
    """A policy by name or "module:attr", with its arguments.

    Attributes:
        name: None for the default: `deferred`, or `price` where a model has variants, or
            `pipeline` for a pipeline.
        kwargs: its arguments; each policy's class says which it takes.
    """

    name: Any = None
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _resolves(self) -> PolicySpec:
        if self.name not in (None, _PIPELINE):  # that one's arguments follow from the pipeline
            make_policy(self.name, self.kwargs)  # may raise
        return self

    @property
    def preempts(self) -> bool:
        """Whether it may stop running batches."""
        return bool(getattr(make_policy(self.name, self.kwargs), "preempts", False))

    def refuse_sizes(self) -> None:
        """Raises ValueError for a policy that cannot serve requests with sizes."""
        refuse_sizes(self.name, self.kwargs)

    def refuse_variants(self, model: str, count: int, is_task: bool) -> None:
        """Raises ValueError for a policy that would serve the first of several variants only."""
        instead = "'pipeline' with the planner 'loki'" if is_task else "'price' or 'ramsis'"
        refuse_variants(self.name, self.kwargs, model, count, instead)

    def refuse_tasks(self, planned: bool) -> None:
        """Raises ValueError for a policy that is not for the tasks of a pipeline, or ignores its
        planner."""
        made = make_policy(self.name, self.kwargs)
        if not getattr(made, "serves_tasks", True):
            raise ValueError(
                f"policy: {name_of(made)!r} takes the deadline of the pipeline for that of each "
                "task, and leaves the tasks below no time; choose 'pipeline' with the planner "
                "'loki', or 'eager' with planner: null"
            )
        if planned and name_of(made) in POLICIES:
            raise ValueError(
                f"policy: {name_of(made)!r} knows nothing of what the planner assigns; choose "
                "'pipeline', or planner: null"
            )


class GroupSpec(_Strict):
    """A serving group: workers of its own, with a scheduler of their own.

    Attributes:
        workers: by hardware kind.
        models: what it serves at first.
    """

    workers: dict[str, WorkerSpec] = Field(default_factory=lambda: {"default": WorkerSpec()})
    models: list[str] = Field(default_factory=list)


class PlannerSpec(_Strict):
    """Who decides which models (and, without `groups`, which workers) make a group; in a pipeline,
    how many workers serve which variant in batches of what size; or how many workers of which
    instance type there are.

    Attributes:
        name: "herd" (largest burst tolerance, sizes the groups itself) or "partition" (even loads
            on a fixed number of groups); "loki" for a pipeline; "kairos" for workers of unlike
            instance types under a budget, or "kairos_plus", which simulates what it chooses from.
        interval_s: it plans at deployment, and again after every interval, for the demand that was
            measured in it. Default: 60 for groups, and 10 for the others, which also plan when the
            demand has changed by more than chance.
        rates: requests per second expected of models, until there is a measured interval; 1 where
            not given. In a pipeline, of its root.
        memory_mb: of models on a worker; 0 where not given. For groups.
        min_gain: a plan that is better by no more than this share is not worth the moves. Not for
            "loki", which has `swap_cost`.
        demand: how the demand is anticipated (`ray_slo.core.demand`). Not for groups.
        make_before_break: of "loki": a worker loads its next variant before it lets go of the last
            one, so that it serves all the time; False where memory is for one.
        kwargs: further arguments of the planner's `Problem` (`ray_slo.planning`), e.g.
            {"group_worker_limit": 4} of herd, {"sub_clusters": 2} of partition, or
            {"headroom_quantile": 0.95} of loki. Of kairos: `Arguments` of
            `ray_slo.planning.brains.kairos`, e.g. {"budget_per_hour": 2.5}; they can be changed
            while it runs, by the frontend's `user_config: {planner: {budget_per_hour: 1.5}}`.
    """

    name: Literal["herd", "partition", "loki", "kairos", "kairos_plus"]
    interval_s: float = Field(default=60.0, gt=0)
    rates: dict[str, float] = Field(default_factory=dict)
    memory_mb: dict[str, float] = Field(default_factory=dict)
    min_gain: float = Field(default=0.1, ge=0)
    demand: Literal["ewma", "peak", "holt"] = "ewma"
    make_before_break: bool = True
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _kwargs_fit(self) -> PlannerSpec:
        others = {"demand", "make_before_break"}
        if not self.makes_groups:
            others = {"memory_mb", "min_gain"} if self.is_loki else {"memory_mb", *others}
            others.discard("demand")
        if wrong := sorted(others & self.model_fields_set):
            raise ValueError(f"{wrong[0]}: not for the planner {self.name!r}; leave it out")
        if self.makes_groups:
            from ray_slo.planning.brains.group_plans import check_kwargs

            check_kwargs(self.name, self.kwargs)
            return self
        if "interval_s" not in self.model_fields_set:
            self.interval_s = 10.0
        if self.is_kairos:
            return self  # the application checks them, under their own names
        valid = sorted({f.name for f in fields(loki.Problem)} - _MEASURED)
        if unknown := sorted(set(self.kwargs) - set(valid)):
            raise ValueError(
                f"planner 'loki' has no argument {unknown[0]!r}; "
                f"valid arguments are {', '.join(valid)}"
            )
        if isinstance(sizes := self.kwargs.get("batch_sizes"), list):  # as YAML has it
            self.kwargs = {**self.kwargs, "batch_sizes": tuple(sizes)}
        return self

    @property
    def is_loki(self) -> bool:
        """Whether it plans a pipeline."""
        return self.name == "loki"

    @property
    def is_kairos(self) -> bool:
        """Whether it plans how many workers of which instance type there are."""
        return self.name in ("kairos", "kairos_plus")

    @property
    def makes_groups(self) -> bool:
        """Whether it plans serving groups."""
        return not (self.is_loki or self.is_kairos)


@dataclass(frozen=True)
class VariantRef:
    """A network and the model that it answers for.

    Attributes:
        name: in answers, metrics and profile files.
        accuracy: percent, where known.
        spec: None for the only network of a model without variants: the model's own instance.
    """

    model: str
    name: str
    accuracy: float | None
    spec: VariantSpec | None = None


class DecisionLogSpec(_Strict):
    """Where every scheduler writes what its policy was fed and decided (docs/decision-log.md).

    Attributes:
        dir: folder on the node where the scheduler runs; schedulers may share it.
        max_mb: bound of all logs in it; the oldest files go first.
        flush_s: a crash costs so many seconds of it at most.
    """

    dir: str = Field(min_length=1)
    max_mb: float = Field(default=64.0, gt=0)
    flush_s: float = Field(default=5.0, gt=0)


class AppSpec(_Strict):
    """A whole application.

    Attributes:
        models: by name; the name is what a client asks for (`/name` over HTTP, `model=` on a
            handle; neither is needed when there is one).
        pipeline: a tree of tasks instead of `models`; clients ask for the whole. Its tasks are
            what scheduler, workers and metrics call models: `models` is made of them, and holds
            their code.
        workers: by hardware kind.
        groups: serving groups by name, each with workers and models of its own, instead of
            `workers`.
        planner: decides which models are served by which group; without `groups`, it makes groups
            of the `workers`, too. Of a pipeline: "loki", which is the default there; with None
            every worker loads all variants, and another policy must choose.
        policy: who decides; see `PolicySpec`. Each group has one of its own.
        scheduler: "embedded" in the only frontend (no control round trips), "actor" (a named
            actor that survives frontends and serves several), or "auto": embedded for one
            frontend, else an actor.
        num_frontends: Serve replicas that own requests from arrival to answer.
        frontend_actor_options: Ray resources of a frontend.
        max_queued_requests: per frontend; more are refused with "queue_full".
        isolate_errors: when a batch raises, run its items one by one, so that only the poison
            item gets the error.
        retries: how often a request is tried again after its worker died, within its deadline.
        response_margin_ms: kept free at the end of a request's budget for the way back to the
            client, on top of what is measured between frontend and worker.
        max_body_bytes: largest item that is read, over HTTP and gRPC. Serve's proxies have a bound
            of their own (`RAY_SLO_MAX_BODY_BYTES`, see SECURITY.md).
        max_json_bytes: the same of JSON.
        max_json_values: values in one body of JSON, a list or an object counted as ten. A million
            keep Python's lock, and so all that a frontend does, for about 50 ms.
        error_details: whether clients are told, over HTTP and gRPC, what the user's own code said
            of its error; False keeps it to the log. Without `isolate_errors`, an error of a batch
            goes to all of its requests, and may quote another client's item.
        profile_seconds: time that a worker may spend measuring each variant at start, less than
            that for quick ones. 0: measure nothing, learn from the first batches.
        access_log: a line per request in the frontend's log, as Serve does by default. It costs
            about as much as the scheduling; `serve_slo_*` metrics count requests anyway.
        decision_log: every event and decision of the schedulers, for `ray-slo replay`.
        name: of the frontend's deployment.
    """

    models: dict[str, ModelSpec] = Field(default_factory=dict)
    pipeline: PipelineSpec | None = None
    workers: dict[str, WorkerSpec] = Field(default_factory=lambda: {"default": WorkerSpec()})
    groups: dict[str, GroupSpec] = Field(default_factory=dict)
    planner: PlannerSpec | None = None
    policy: PolicySpec = Field(default_factory=PolicySpec)
    scheduler: Literal["auto", "actor", "embedded"] = "auto"
    num_frontends: int = Field(default=1, ge=1, le=_MOST_REPLICAS)
    frontend_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 0})
    max_queued_requests: int = Field(default=1000, ge=1)
    isolate_errors: bool = False
    retries: int = Field(default=2, ge=0, le=100)
    response_margin_ms: float = Field(default=5.0, ge=0)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1, le=2**31 - 1)
    max_json_bytes: int = Field(default=8 * 2**20, ge=1, le=2**31 - 1)
    max_json_values: int = Field(default=1_000_000, ge=1)
    error_details: bool = True
    profile_seconds: float = Field(default=2.0, ge=0)
    access_log: bool = False
    decision_log: DecisionLogSpec | None = None
    name: str | None = None
    _version: float = PrivateAttr(default_factory=time.time)
    _fingerprint: str = PrivateAttr(default="")

    @field_validator("decision_log", mode="before")
    @classmethod
    def _log_by_folder(cls, value: Any) -> Any:
        return {"dir": value} if isinstance(value, str) else value

    @field_validator("policy", mode="before")
    @classmethod
    def _policy_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict | PolicySpec):
            return value
        return {"name": value}

    @field_validator("planner", mode="before")
    @classmethod
    def _planner_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("workers")
    @classmethod
    def _some_workers(cls, value: dict[str, WorkerSpec]) -> dict[str, WorkerSpec]:
        if not value:
            raise ValueError("name at least one kind of worker")
        return value

    @field_validator("name")
    @classmethod
    def _own_name(cls, value: str | None) -> str | None:
        if value is not None:
            _check_name("deployment", value)
        return value

    @field_validator("models")
    @classmethod
    def _model_names(cls, value: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        for name in value:
            _check_name("model", name)
        return value

    @model_validator(mode="after")
    def _something_to_serve(self) -> AppSpec:
        if self.pipeline is None:
            if not self.models:
                raise ValueError("models: required (or a pipeline)")
            for name, model in self.models.items():
                if any(variant.factors for variant in model.variants.values()):
                    raise ValueError(
                        f"models.{name}.variants: factors are for the tasks of a pipeline"
                    )
            return self
        if self.models:
            raise ValueError(
                "models: the tasks of a pipeline are its models; leave models out, or deploy them "
                "as another application"
            )
        pipeline = self.pipeline
        if self.deployment_name in pipeline.tasks:
            raise ValueError(
                f"name: {self.deployment_name!r} is a task of the pipeline, too; "
                "metrics could not tell them apart"
            )
        self.models = {n: t.as_model(pipeline.latency_slo_ms) for n, t in pipeline.tasks.items()}
        bare = {name: task.without_code() for name, task in pipeline.tasks.items()}
        self.pipeline = pipeline.model_copy(update={"tasks": bare})
        if "planner" not in self.model_fields_set:
            self.planner = PlannerSpec(name="loki")
        return self

    @model_validator(mode="after")
    def _margin_leaves_time(self) -> AppSpec:
        for name, model in self.models.items():
            if self.response_margin_ms >= model.latency_slo_ms:
                where = "pipeline" if self.pipeline is not None else f"models.{name}"
                raise ValueError(
                    f"response_margin_ms must be less than {where}.latency_slo_ms, which is "
                    f"{model.latency_slo_ms:g}, got {self.response_margin_ms:g}"
                )
        return self

    @model_validator(mode="after")
    def _pipeline_fits(self) -> AppSpec:
        scaled = [kind for kind, worker in self.workers.items() if worker.scales]
        if self.planner is not None and self.planner.is_kairos:
            self._check_kairos(self.planner)
            return self
        if self.planner is None or not self.planner.is_loki:
            if scaled:
                raise ValueError(
                    f"workers.{scaled[0]}.max_replicas: nobody decides how many there are; that "
                    "takes a pipeline with the planner 'loki', or the planner 'kairos'"
                )
            if self.pipeline is not None and self.planner is not None:
                raise ValueError(
                    f"planner.name: {self.planner.name!r} makes groups of models; the planner of a "
                    "pipeline is 'loki'"
                )
            if self.pipeline is not None and self.groups:
                raise ValueError("groups: a pipeline has none; name its workers under `workers`")
            return self
        if self.pipeline is None:
            raise ValueError("planner.name: 'loki' plans a pipeline, and there is none")
        if self.groups:
            raise ValueError("groups: a pipeline has none; name its workers under `workers`")
        if len(self.workers) > 1:
            raise ValueError(
                f"workers: the planner 'loki' plans for workers that are alike, but there are "
                f"{', '.join(self.workers)}; name one kind"
            )
        if none := [kind for kind, worker in self.workers.items() if worker.min_replicas < 1]:
            raise ValueError(f"workers.{none[0]}.min_replicas must be at least 1, got 0")
        self._check_loki(self.pipeline, self.planner)
        return self

    def _check_kairos(self, planner: PlannerSpec) -> None:
        from ray_slo.planning.brains.kairos import arguments

        name = planner.name
        if self.pipeline is not None:
            raise ValueError(f"planner.name: {name!r} plans for a model; a pipeline has 'loki'")
        if self.groups:
            raise ValueError(f"groups: {name!r} plans `workers`; leave groups out")
        if len(self.models) > 1 or any(model.variants for model in self.models.values()):
            raise ValueError(f"models: {name!r} plans for one model without variants")
        for kind, worker in self.workers.items():
            if worker.instance_type is None:
                raise ValueError(
                    f"workers.{kind}.instance_type: required by the planner {name!r}: a name in "
                    f"the catalogue ({', '.join(CATALOGUE)}) or, e.g., {{price_per_hour: 0.5}}"
                )
        for model, rate in planner.rates.items():
            if model not in self.models or not 0 < rate < math.inf:
                raise ValueError(
                    f"planner.rates: a positive rate of {', '.join(self.models)}, "
                    f"got {model!r}: {rate}"
                )
        given = arguments(planner.kwargs)
        ((model, served),) = self.models.items()
        if given.sizes is not None and max(given.sizes) > served.max_batch_size:
            raise ValueError(
                f"planner.kwargs.sizes: {max(given.sizes)} is more than {model!r} takes "
                f"(max_batch_size is {served.max_batch_size})"
            )
        if given.base is not None and given.base not in self.workers:
            raise ValueError(
                f"planner.kwargs.base must be one of the workers, {', '.join(self.workers)}, "
                f"got {given.base!r}"
            )

    def replica_bounds(self, kind: str) -> tuple[int, int] | None:
        """The least and the most workers of a kind that its planner may want; None where there are
        always `num_replicas`."""
        worker = self.workers[kind]
        if self.planner is None or not self.planner.is_kairos:
            return (worker.min_replicas, worker.most_replicas) if worker.scales else None
        assert worker.instance_type is not None
        least = worker.min_replicas if "min_replicas" in worker.model_fields_set else 0
        paid = self.planner.kwargs["budget_per_hour"] / worker.instance_type.price_per_hour
        return least, worker.max_replicas or max(worker.num_replicas, math.floor(paid + 1e-9))

    def _check_loki(self, pipeline: PipelineSpec, planner: PlannerSpec) -> None:
        for task, rate in planner.rates.items():
            if task != pipeline.root:
                raise ValueError(
                    f"planner.rates: give what is expected of the root, {pipeline.root!r}; "
                    f"got {task!r}"
                )
            if not 0 < rate < math.inf:
                raise ValueError(f"planner.rates.{task} must be positive, got {rate}")
        slo_s = pipeline.latency_slo_ms / 1e3
        try:  # with profiles that do not matter here
            loki.Problem(
                pipeline.loki_tasks(lambda _: LatencyProfile([slo_s])),
                demand=1.0,
                workers=sum(w.most_replicas for w in self.workers.values()),
                slo_s=slo_s,
                path_accuracies=pipeline.measured_paths,
                **planner.kwargs,
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"planner.kwargs: {error}") from None

    @model_validator(mode="after")
    def _default_policy(self) -> AppSpec:
        if self.pipeline is not None and self.policy.name in (None, _PIPELINE):
            if self.planner is None:
                raise ValueError(
                    "policy: 'pipeline' routes as a planner says, and there is none; choose "
                    "another policy, or the planner 'loki'"
                )
            kwargs = _pipeline_kwargs(self.pipeline, self.planner, self.policy.kwargs)
            make_policy(_PIPELINE, kwargs)  # may raise
            self.policy = PolicySpec(name=_PIPELINE, kwargs=kwargs)
        elif self.policy.name == _PIPELINE:
            raise ValueError("policy: 'pipeline' is for a pipeline, and there is none")
        elif self.pipeline is not None:
            self.policy.refuse_tasks(self.planned)
        if self.policy.name is None and self.planner is not None and self.planner.is_kairos:
            make_policy("kairos", self.policy.kwargs)  # may raise
            self.policy = PolicySpec(name="kairos", kwargs=self.policy.kwargs)
        if self.policy.name is None:
            chooses = any(model.variants for model in self.models.values())
            name = _WITH_VARIANTS if chooses else "deferred"
            make_policy(name, self.policy.kwargs)  # may raise
            self.policy = PolicySpec(name=name, kwargs=self.policy.kwargs)
        for name, model in self.models.items():
            self.policy.refuse_variants(name, len(model.variants), self.pipeline is not None)
        return self

    @model_validator(mode="after")
    def _scheduler_fits(self) -> AppSpec:
        if self.scheduler == "embedded" and self.num_frontends > 1:
            raise ValueError(
                f"scheduler 'embedded' lives in the only frontend, but num_frontends is "
                f"{self.num_frontends}; choose 'actor' or 'auto'"
            )
        return self

    @field_validator("groups")
    @classmethod
    def _group_names(cls, value: dict[str, GroupSpec]) -> dict[str, GroupSpec]:
        for name, group in value.items():
            _check_name("group", name)
            if not group.workers:
                raise ValueError(f"{name}: name at least one kind of worker")
        return value

    @model_validator(mode="after")
    def _groups_fit(self) -> AppSpec:
        if self.grouped and self.scheduler == "embedded":
            raise ValueError(
                "scheduler 'embedded' is one scheduler in the only frontend, but every group has "
                "its own; choose 'actor' or 'auto'"
            )
        if self.groups:
            self._check_groups()
        if self.planner is not None and self.planner.makes_groups:
            self._check_planner(self.planner)
        if self.groups:
            kinds = {_kind(g, k): w for g, s in self.groups.items() for k, w in s.workers.items()}
            if len(kinds) < sum(len(group.workers) for group in self.groups.values()):
                raise ValueError(
                    f"groups: {', '.join(self.groups)} have workers of the same name; "
                    "rename one group"
                )
            self.workers = kinds
        return self

    def _check_groups(self) -> None:
        if "workers" in self.model_fields_set:
            raise ValueError(
                "workers: with groups, every group names its own (groups.NAME.workers); "
                "leave these out"
            )
        listed: dict[str, str] = {}
        for name, group in self.groups.items():
            for model in group.models:
                if model not in self.models:
                    raise ValueError(
                        f"groups.{name}.models: no model {model!r}; "
                        f"the models are {', '.join(sorted(self.models))}"
                    )
                if model in listed:
                    raise ValueError(
                        f"groups.{name}.models: {model!r} is in {listed[model]!r}, too; "
                        "a model has one group"
                    )
                listed[model] = name
        if self.planner is None and (missing := sorted(set(self.models) - set(listed))):
            raise ValueError(
                f"groups: no group lists {missing[0]!r}, and there is no planner to place it; "
                f"add it to the models of one of {', '.join(self.groups)}"
            )

    def _check_planner(self, planner: PlannerSpec) -> None:
        for what, given in (("rates", planner.rates), ("memory_mb", planner.memory_mb)):
            for model, value in given.items():
                if model not in self.models:
                    raise ValueError(
                        f"planner.{what}: no model {model!r}; "
                        f"the models are {', '.join(sorted(self.models))}"
                    )
                if not 0 <= value < math.inf:
                    raise ValueError(
                        f"planner.{what}.{model} must be at least 0 and finite, got {value}"
                    )
        if self.groups and planner.name == "herd":
            raise ValueError(
                "planner.name: 'herd' decides how many workers a group has; leave groups out and "
                "name the workers, or choose 'partition'"
            )
        if not self.groups and len(self.workers) > 1:
            raise ValueError(
                f"workers: a planner makes groups of workers that are alike, but there are "
                f"{', '.join(self.workers)}; name one kind, or name groups"
            )
        parts = planner.kwargs.get("sub_clusters")
        if planner.name == "partition" and self.groups and parts not in (None, len(self.groups)):
            raise ValueError(
                f"planner.kwargs.sub_clusters is {parts}, but there are {len(self.groups)} groups; "
                "leave it out"
            )
        if planner.name == "partition" and not self.groups:
            most = sum(worker.num_replicas for worker in self.workers.values())
            if not isinstance(parts, int) or not 1 <= parts <= most:
                raise ValueError(
                    f"planner.kwargs.sub_clusters: say how many groups 'partition' should make, "
                    f"from 1 to {most} (workers), got {parts!r}"
                )
        if "memory_mb" not in planner.kwargs and planner.name == "herd" and planner.memory_mb:
            raise ValueError(
                "planner.kwargs.memory_mb: with memory_mb of models, say what a worker has"
            )
        room = planner.kwargs.get("memory_mb", math.inf)
        if not isinstance(room, int | float) or math.isnan(room):
            raise ValueError(
                f"planner.kwargs.memory_mb must be a number of megabytes, got {quoted(room)}"
            )
        for model, memory_mb in planner.memory_mb.items():
            if planner.name == "herd" and memory_mb > room:
                raise ValueError(
                    f"planner.memory_mb.{model} is {memory_mb:g}, more than a worker has "
                    f"(planner.kwargs.memory_mb is {room:g})"
                )
        from ray_slo.planning.brains import group_plans

        try:
            alike = dict.fromkeys(self.models, 1.0)
            names = list(self.groups) or ["g"] * int(parts or 1)
            group_plans.make_problem(
                planner.name,
                planner.kwargs,
                group_plans.Measured(alike, alike),
                planner.memory_mb,
                1,
                names,
                {},
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"planner.kwargs: {error}") from None

    @property
    def grouped(self) -> bool:
        """Whether there are serving groups."""
        return bool(self.groups) or (self.planner is not None and self.planner.makes_groups)

    @property
    def planned(self) -> bool:
        """Whether a planner says what workers load and how many there are."""
        return self.planner is not None and not self.planner.makes_groups

    def group_of_kind(self, kind: str) -> str | None:
        """The group that a kind of worker belongs to; None where a planner decides."""
        return next(
            (g for g, s in self.groups.items() for k in s.workers if _kind(g, k) == kind), None
        )

    def joins(self) -> dict[str, Callable[..., Any]]:
        """Of a pipeline, by task with children, what the user has to join results; else nothing.

        Raises:
            ValueError: it cannot be imported, or it is no function.
        """
        pipeline, found = self.pipeline, dict[str, Any]()
        if pipeline is None:
            return found
        for task in pipeline.parents:
            target: Any = self.models[task].load()
            own = inspect.getattr_static(target, "join", None)
            if own is not None and pipeline.children(task):
                if not isinstance(own, staticmethod | classmethod):
                    raise ValueError(
                        f"pipeline.tasks.{task}.callable: join must be a @staticmethod or "
                        "@classmethod: it runs where the model is not loaded"
                    )
                found[task] = target.join
        if (join := pipeline.join) is not None:
            try:
                join = import_attr(join) if isinstance(join, str) else join
            except ValueError as error:
                raise ValueError(f"pipeline.join: {error}") from None
            if not callable(join):
                raise ValueError(f"pipeline.join must be a function, got {join!r}")
            found[pipeline.root] = join
        return found

    def without_code(self) -> AppSpec:
        """The same for the scheduler, which needs neither the user's classes nor arguments."""
        models = {name: model.without_code() for name, model in self.models.items()}
        pipeline = self.pipeline and self.pipeline.model_copy(update={"join": None})
        return self.model_copy(update={"models": models, "pipeline": pipeline})

    def variants(self) -> dict[str, VariantRef]:
        """Every network that workers load, by a name that is unique in the application.

        That is the variant's own name (the model's, where it has no variants), or
        "model/variant" where two models use the name.
        """
        refs = [
            VariantRef(model, name, variant.accuracy, variant)
            for model, m in self.models.items()
            for name, variant in m.variants.items()
        ] + [VariantRef(n, n, m.accuracy) for n, m in self.models.items() if not m.variants]
        uses = Counter(ref.name for ref in refs)
        return {ref.name if uses[ref.name] == 1 else f"{ref.model}/{ref.name}": ref for ref in refs}

    @property
    def version(self) -> float:
        """When it was parsed, by the clock there. See `Releases`."""
        return self._version

    @property
    def fingerprint(self) -> str:
        """Equal for two that differ in nothing that a running replica would have to know of."""
        return self._fingerprint

    def stamped(self, fingerprint: str) -> AppSpec:
        """The same with a fingerprint."""
        copy = self.model_copy()
        copy._fingerprint = fingerprint
        return copy

    @property
    def deployment_name(self) -> str:
        """Name of the frontend's deployment, before Serve makes it unique in its application."""
        if self.pipeline is not None:
            return self.name or "pipeline"
        return self.name or (next(iter(self.models)) if len(self.models) == 1 else "models")

    @property
    def embedded(self) -> bool:
        """Whether the scheduler lives in the frontend."""
        return self.scheduler == "embedded" or (
            self.scheduler == "auto" and self.num_frontends == 1 and not self.grouped
        )


def _pipeline_kwargs(
    pipeline: PipelineSpec, planner: PlannerSpec, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Of the policy `pipeline`: what follows from the rest, and what is given.

    Raises:
        ValueError: given, although it follows from the rest.
    """
    same = {key: planner.kwargs[key] for key in _PLANNED if key in planner.kwargs}
    kwargs = {"parents": pipeline.parents, "factors": pipeline.factors}
    if wrong := sorted(set(given) & {*kwargs, *same}):
        raise ValueError(
            f"policy.kwargs.{wrong[0]}: follows from the "
            f"{'pipeline' if wrong[0] in kwargs else 'arguments of the planner'}; leave it out"
        )
    return {**kwargs, **same, **given}


def _kind(group: str, kind: str) -> str:
    """Name of a kind of worker of a group, unique in the application."""
    return group if kind == "default" else f"{group}-{kind}"


def worker_deployment(frontend: str, kind: str) -> str:
    """Name of the Serve deployment of a kind of worker."""
    return f"{frontend}-worker" if kind == "default" else f"{frontend}-{kind}-worker"


def _check_name(what: str, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"{what} name {quoted(name)} has {len(name)} characters; use at most {_LONGEST_NAME}"
        )
    if not name or not all((c.isascii() and c.isalnum()) or c in "-_." for c in name):
        raise ValueError(
            f"{what} name {name!r}: use ASCII letters, digits, '-', '_' and '.' "
            "(it is part of metric tags, and a model's of a URL)"
        )


def check_user_class(target: Any, has_variants: bool = False) -> type[Any]:
    """Refuse, before anything is deployed, a class that cannot work.

    Args:
        has_variants: its batch method is `__call__(self, network, items)`.

    Raises:
        ValueError: says what is wrong and what is wanted.
    """
    wanted = "__call__(self, network, items: list) -> list"
    if not has_variants:
        wanted = wanted.replace("network, ", "")
    if not inspect.isclass(target):
        raise ValueError(f"a deployment is made from a class with {wanted}, got {target!r}")
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
    for name in ("preprocess", "postprocess", "example_input", "size"):
        for owner in target.__mro__:
            if name in owner.__dict__:
                if not isinstance(owner.__dict__[name], staticmethod | classmethod):
                    raise ValueError(
                        f"{target.__name__}.{name} must be a @staticmethod or @classmethod: it "
                        "runs where the model is not loaded"
                    )
                break
    return target


def parse_spec(data: dict[str, Any]) -> AppSpec:
    """Parse an application's `args`.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    return validated(AppSpec, data)
