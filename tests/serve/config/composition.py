"""Applications with pairs of features, and the tables of the docs that say which pairs work.

`python -m tests.serve.config.composition` writes the tables into the pages; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Plain:
    def __call__(self, items):
        return items


class Sized(Plain):
    @staticmethod
    def size(item):
        return len(item)


class Chooses:
    def __call__(self, network, items):
        return items


class SizedChooses(Chooses):
    @staticmethod
    def size(item):
        return len(item)


def load():
    return None


FEATURES = {
    "several models": "models",
    "variants": "variants",
    "a pipeline": "pipeline",
    "unlike workers": "kinds",
    "a budget": "budget",
    "groups": "groups",
    "preemption": "preemption",
    "replicas follow the load": "autoscaling",
    "sizes": "sizes",
    "SLO classes": "classes",
}
"""What tables call a feature, and its name here."""

PLANNERS = (None, "auto", "loki", "kairos", "kairos_plus", "herd", "partition")
POLICIES = (
    "auto",
    "deferred",
    "deferred_flex",
    "flex",
    "price",
    "ramsis",
    "kairos",
    "eager",
    "timeout",
    "pipeline",
)


KWARGS = {"timeout": {"timeout_ms": 5}}


def model(name: str, features: Collection[str]) -> dict:
    """A model with what these features ask of one."""
    variants = "variants" in features
    cls = {False: {False: Plain, True: Sized}, True: {False: Chooses, True: SizedChooses}}
    made = {"callable": cls[variants]["sizes" in features]}
    if variants:
        made["variants"] = {
            f"{name}-{size}": {"load": load, "accuracy": accuracy}
            for size, accuracy in (("deep", 90), ("flat", 70))
        }
    return made


def config(features: Collection[str], planner=..., policy=None) -> dict:
    """An application with all of these features and no other.

    Args:
        planner: name; None for none; default: the application's own.
        policy: name; default: the application's own.
    """
    args, models = {"name": "app"}, {}
    root = {"latency_slo_ms": 200}
    if "classes" in features:
        root["slo_classes"] = {"gold": 100}
    if "pipeline" in features:
        tasks = {"find": model("find", features), "read": model("read", features)}
        tasks["read"]["parent"] = "find"
        args["pipelines"] = {"pages": {**root, "tasks": tasks}}
    if "pipeline" not in features or "models" in features:
        models["a"] = {**model("a", features), **root}
    if "models" in features:
        models["b"] = {**model("b", features), **root}
    if models:
        args["models"] = models
    workers = {"default": {"num_replicas": 2, **priced(planner, features, 0.5)}}
    if "kinds" in features:
        workers = {k: dict(workers["default"]) for k in ("small", "large")}
        workers["large"] |= priced(planner, features, 1.0)
    if "autoscaling" in features:
        workers = {kind: {**w, "min_replicas": 1, "max_replicas": 4} for kind, w in workers.items()}
    if "groups" in features:
        served = [["find", "read"]] if "pipeline" in features else []
        served += [[name] for name in models]
        args["groups"] = {
            "one": {"workers": workers, "models": served[0]},
            "two": {"workers": workers, "models": [name for more in served[1:] for name in more]},
        }
    else:
        args["workers"] = workers
    if "preemption" in features:
        args["policy"] = "deferred_flex"
    if policy is not None:
        args["policy"] = {"name": policy, "kwargs": KWARGS.get(policy, {})}
    if planner is None:
        args["planner"] = None
    elif planner is not ... or "budget" in features:
        args["planner"] = {"name": "auto" if planner is ... else planner, "kwargs": {}}
        if "budget" in features or args["planner"]["name"].startswith("kairos"):
            args["planner"]["kwargs"]["budget_per_hour"] = 5.0
        if planner == "partition" and "groups" not in features:
            args["planner"]["kwargs"]["sub_clusters"] = 1
    return args


def priced(planner, features: Collection[str], price: float) -> dict:
    """What a kind of worker costs, where that is asked."""
    if planner in ("kairos", "kairos_plus"):
        return {"instance_type": {"price_per_hour": price}}
    return {"price_per_hour": price} if "budget" in features else {}


def refusal(args: dict) -> str:
    """Why an application is refused; "" where it is accepted."""
    from ray_slo.serve.app.build import build_app

    try:
        build_app(args)
    except ValueError as error:
        return str(error).splitlines()[0].partition("; valid keys")[0]
    return ""


# -- tables ------------------------------------------------------------------------------------


def pairs_table() -> str:
    """Every pair of features."""
    return table(
        FEATURES,
        FEATURES,
        lambda row, column: refusal(config({FEATURES[row], FEATURES[column]})),
        triangle=True,
    )


def planners_table() -> str:
    """Every planner with every feature."""
    names = {f"`{name}`" if name else "none": name for name in PLANNERS}

    # What it plans at all.
    own = {"loki": "pipeline", "herd": "models", "partition": "models"}

    def asked(row: str, column: str) -> str:
        planner = names[column]
        features = {FEATURES[row], own.get(planner or "", FEATURES[row])}
        return _of_it(refusal(config(features, planner=planner)), planner)

    return table(FEATURES, names, asked)


def policies_table() -> str:
    """Every policy with every feature."""
    names = {f"`{name}`": name for name in POLICIES}

    def asked(row: str, column: str) -> str:
        policy = names[column]
        features = {FEATURES[row], "pipeline" if policy == "pipeline" else FEATURES[row]}
        return _of_it(refusal(config(features, policy=policy)), policy)

    without = {name: f for name, f in FEATURES.items() if f != "preemption"}
    return table(without, names, asked)


def _of_it(why: str, name: str | None) -> str:
    """A reason that is the same for whoever gives it."""
    return re.sub(rf"(the planner |the policy |policy )?'{name}'", "it", why)


def table(rows, columns, asked: Callable[[str, str], str], triangle: bool = False) -> str:
    """A cell is ✓, or the number of the reason below."""
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for i, row in enumerate(rows):
        cells = []
        for j, column in enumerate(columns):
            if triangle and j >= i:
                cells.append("")
                continue
            why = asked(row, column)
            number = reasons.setdefault(why, len(reasons) + 1) if why else None
            cells.append("✓" if number is None else str(number))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([*lines, "", *notes]).strip()


TABLES = {
    "pairs": ("docs/how-to/one-pool.md", pairs_table),
    "planners": ("docs/policies/planners.md", planners_table),
    "policies": ("docs/policies/index.md", policies_table),
}


def parts(name: str) -> tuple[str, str, str]:
    """A table's page: up to the table, what stands there, and the rest."""
    text = (ROOT / TABLES[name][0]).read_text("utf-8")
    begin, end = (f"<!-- composes: {name}: {which} -->" for which in ("begin", "end"))
    before, found, rest = text.partition(begin)
    there, ends, after = rest.partition(end)
    assert found and ends, f"{TABLES[name][0]} has no table {name!r}"
    return before + begin, there, end + after


def written(name: str) -> str:
    """A table as its page has it."""
    return parts(name)[1].strip()


def main() -> None:
    for name, (page, made) in TABLES.items():
        before, _, after = parts(name)
        (ROOT / page).write_text(f"{before}\n\n{made()}\n\n{after}", "utf-8")


if __name__ == "__main__":
    main()
