"""What clients ask for: a tree of tasks under one SLO. A single model is a tree of one task.

Demand is counted by *stream*: a root and an SLO class, "root" or "root@class" as text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_slo.core.explain import Misplaced
from ray_slo.core.names import nearest

DEFAULT_CLASS = ""
WAITING_FACTOR = 2.0
"""Planned time of a request at a task, in executions of a batch: it waits for as long as it runs
(Loki §4.1)."""


@dataclass(frozen=True)
class TreeTask:
    """A node of a tree.

    Attributes:
        name: unique in the application.
        model: model that serves it: its own, with the same name, or a shared one.
        parent: the task whose requests make those of this task; None at the root.
        factors: requests made per request, by variant and child task; 1 if not given.
    """

    name: str
    model: str
    parent: str | None = None
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("name", "model"):
            if not getattr(self, what):
                raise ValueError(f"{what} of a task must not be empty")
        for variant, made in self.factors.items():
            for child, factor in made.items():
                if not 0 <= factor < math.inf:
                    raise ValueError(
                        f"tasks.{self.name}.factors.{variant}.{child} must be at least 0, "
                        f"got {factor}"
                    )

    def counted_as(self, variant: str) -> str:
        """Name under which a variant's requests of this task, and what they made, are counted. For
        a shared model it contains the task."""
        return variant if self.name == self.model else f"{self.name}:{variant}"

    def factor(self, variant: str, child: str) -> float:
        """Number of requests for a child task that a request makes, if `variant` serves it."""
        return self.factors.get(variant, {}).get(child, 1.0)


@dataclass(frozen=True)
class Tree:
    """What a client may ask for.

    Attributes:
        name: what a client asks for: the model's, or the pipeline's.
        tasks: in any order.
        slos_s: end-to-end latency SLO by class, seconds. The default class is "".
        path_accuracies: measured end-to-end accuracy, percent, by the variants from the root to a
            last task; a missing path has the product of its variants' accuracies.
    """

    name: str
    tasks: tuple[TreeTask, ...]
    slos_s: Mapping[str, float]
    path_accuracies: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name of a tree must not be empty")
        self._check_shape()
        if DEFAULT_CLASS not in self.slos_s:
            raise ValueError(
                f"slos_s of {self.name!r} needs the default class ''; it has "
                f"{', '.join(map(repr, self.slos_s)) or 'none'}"
            )
        for slo_class, slo_s in self.slos_s.items():
            if not 0 < slo_s < math.inf:
                raise ValueError(
                    f"slos_s.{slo_class} of {self.name!r} must be positive, got {slo_s}"
                )
        for path, accuracy in self.path_accuracies.items():
            if not 0 <= accuracy <= 100:
                raise ValueError(
                    f"path_accuracies.{'/'.join(path)} of {self.name!r} must be 0 to 100 percent, "
                    f"got {accuracy}"
                )

    def _check_shape(self) -> None:
        names = [task.name for task in self.tasks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"tasks of {self.name!r}: two are named {twice[0]!r}")
        for task in self.tasks:
            if task.parent is not None and task.parent not in names:
                raise Misplaced(
                    f"tasks.{task.name}.parent",
                    f"no task {task.parent!r}; the tasks are {', '.join(names)}"
                    f"{nearest(task.parent, names)}",
                )
        roots = [task.name for task in self.tasks if task.parent is None]
        if len(roots) > 1:
            raise Misplaced("tasks", f"{', '.join(roots)} have no parent; a tree has one root")
        if lost := [name for name in names if name not in self.parents]:
            raise Misplaced(
                "tasks",
                f"{', '.join(lost)} are in a cycle or below one; a tree has no cycle",
            )
        if not roots:
            raise ValueError(f"tasks of {self.name!r} must not be empty; a tree has one root")
        for task in self.tasks:
            below = self.children(task.name)
            for variant, made in task.factors.items():
                if unknown := [child for child in made if child not in below]:
                    raise Misplaced(
                        f"tasks.{task.name}.factors.{variant}",
                        f"{unknown[0]!r} is no child of {task.name!r}; its children are "
                        f"{', '.join(below) or 'none'}{nearest(unknown[0], below)}",
                    )

    @classmethod
    def of_model(cls, model: str, slos_s: Mapping[str, float]) -> Tree:
        """The tree of a single model."""
        return cls(model, (TreeTask(model, model),), slos_s)

    def to_json(self) -> dict[str, Any]:
        """The tree as plain values."""
        paths = [[list(path), accuracy] for path, accuracy in self.path_accuracies.items()]
        tasks = [
            {
                "name": task.name,
                "model": task.model,
                "parent": task.parent,
                "factors": {variant: dict(made) for variant, made in task.factors.items()},
            }
            for task in self.tasks
        ]
        slos_s = dict(self.slos_s)
        return {"name": self.name, "tasks": tasks, "slos_s": slos_s, "path_accuracies": paths}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tree:
        """The tree from the result of `to_json`."""
        tasks = tuple(TreeTask(**task) for task in data["tasks"])
        paths = {tuple(path): accuracy for path, accuracy in data["path_accuracies"]}
        return cls(data["name"], tasks, data["slos_s"], paths)

    @functools.cached_property
    def order(self) -> tuple[TreeTask, ...]:
        """Parents before their children, level by level: the root comes first."""
        found = [task for task in self.tasks if task.parent is None]
        for above in found:  # grows as it goes
            found += [task for task in self.tasks if task.parent == above.name]
        return tuple(found)

    @functools.cached_property
    def parents(self) -> Mapping[str, str | None]:
        """Parent by task, in `order`."""
        return {task.name: task.parent for task in self.order}

    @functools.cached_property
    def _by_name(self) -> Mapping[str, TreeTask]:
        return {task.name: task for task in self.tasks}

    @property
    def root(self) -> str:
        """The task that a client's item goes to."""
        return self.order[0].name

    @property
    def slo_s(self) -> float:
        """SLO of the default class, seconds."""
        return self.slos_s[DEFAULT_CLASS]

    @property
    def models(self) -> tuple[str, ...]:
        """Models that serve its tasks, each once, in `order`."""
        return tuple(dict.fromkeys(task.model for task in self.order))

    def __getitem__(self, task: str) -> TreeTask:
        return self._by_name[task]

    def __contains__(self, task: str) -> bool:
        return task in self._by_name

    def children(self, task: str) -> tuple[str, ...]:
        """Tasks that get requests from this one."""
        return tuple(child.name for child in self.tasks if child.parent == task)

    def path(self, task: str) -> tuple[str, ...]:
        """Tasks from the root to this one."""
        above = self.parents[task]
        return (task,) if above is None else (*self.path(above), task)

    def streams(self) -> Iterator[tuple[str, float]]:
        """Every stream of its demand, as text, with its SLO in seconds."""
        for slo_class, slo_s in self.slos_s.items():
            yield stream_of(self.name, slo_class), slo_s


def stream_of(root: str, slo_class: str = DEFAULT_CLASS) -> str:
    """A stream of demand as text: "root", or "root@class"."""
    return f"{root}@{slo_class}" if slo_class else root


def root_and_class(stream: str) -> tuple[str, str]:
    """The root and the SLO class of a stream. Names hold no "@"."""
    root, _, slo_class = stream.partition("@")
    return root, slo_class


def tree_of_task(trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """By task: the tree that it is a node of.

    Raises:
        ValueError: two trees have a task of the same name.
    """
    found: dict[str, Tree] = {}
    for tree in trees.values():
        for task in tree.tasks:
            if task.name in found:
                raise ValueError(
                    f"task {task.name!r} is in {found[task.name].name!r} and in {tree.name!r}; "
                    "tasks of an application have names of their own"
                )
            found[task.name] = tree
    return found
