"""Runs one cell of `policy-grid` under one policy, and keeps the figures."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own.grid_cells import Cell, cell
from benchmarks.own.grid_settings import SETTINGS, Setting
from benchmarks.own.split import loki_of
from ray_slo.policies.registry import EXACT, POLICIES, live_arguments, policy_for
from ray_slo.simulation import PolicyError, simulate, simulate_application

KEPT = Path(__file__).parents[2] / "out" / "policy-grid"
FEW = 300
"""Models with fewer requests than this count as one model."""
_DRAW = 10_000  # more than cells: no two runs have the same seed
_HOSTS = {False: "ray_slo.simulation.simulator", True: "ray_slo.simulation.application"}
_COMPOSED = "ray_slo.policies.composed"
_OWN = ("benchmarks.own.grid_cells", "benchmarks.own.grid_run")


def measure(seed: int, number: int, name: str, requests: float, draw: int = 0) -> dict[str, Any]:
    """Run a cell under a setting of `SETTINGS`.

    Args:
        draw: which of the cell's random arrivals, latencies and sizes; the cell stays the same.

    Returns:
        value: mean accuracy over all requests, from 0 to 1; late and refused ones count 0.
        bad: share of bad requests; worst: that of the worst model.
        accuracy: percent, of the answers in time.
        p50_s, p99_s, requests, cpu_s.
        error: only if the policy broke its contract; then only value (0) and cpu_s are there, too.
    """
    setting, of = SETTINGS[name], cell(seed, number)
    start = time.process_time()
    try:
        run_seed = of.number + _DRAW * draw
        figures = (_application if of.tree else _models)(of, setting, requests, run_seed)
    except PolicyError as error:
        figures = {"value": 0.0, "error": str(error)}
    return figures | {"cpu_s": time.process_time() - start}


def _arguments(cell: Cell, setting: Setting) -> dict[str, Any]:
    """Return the policy's arguments; with noise, including those that a live host gives it."""
    lived = live_arguments(setting.policy, 1e3 * min(cell.slos_s)) if cell.noise else {}
    return lived | dict(setting.arguments(cell)) | ({"exact": True} if setting.exact else {})


def _models(cell: Cell, setting: Setting, requests: float, seed: int) -> dict[str, Any]:
    served = cell.quickest() if setting.quickest else cell
    variants = {model.name: len(model.variants) for model in served.models}
    duration_s = cell.warmup_s + cell.measured_s(requests)
    report = simulate(
        policy_for(setting.policy, _arguments(cell, setting), variants=variants),
        served.cluster(served.learned),
        served.workload(duration_s),
        duration_s=duration_s,
        warmup_s=cell.warmup_s,
        seed=seed,
        latency_noise=cell.noise,
        truth=served.cluster(),
        preempt_delay_s=cell.preempt_delay_s,
    )
    good, count = report.count("good"), report.count()
    names = [model.name for model in served.models]
    arrived = np.array([report.count(model=m) for m in names])
    bad = arrived - np.array([report.count("good", m) for m in names])
    accuracy = report.accuracy or 0.0
    return {
        "value": accuracy / 100 * good / count,
        "bad": 1 - good / count,
        "worst": _worst(arrived, bad),
        "accuracy": accuracy,
        "p50_s": report.latency_s(50),
        "p99_s": report.latency_s(99),
        "requests": count,
    }


def _worst(arrived: Any, bad: Any) -> float:
    """Return the bad share of the worst model; all models with few requests count as one."""
    rare = arrived < FEW
    groups = [*zip(arrived[~rare], bad[~rare], strict=True), (arrived[rare].sum(), bad[rare].sum())]
    return max(float(b / n) for n, b in groups if n)


def _application(cell: Cell, setting: Setting, requests: float, seed: int) -> dict[str, Any]:
    served = cell.quickest() if setting.quickest else cell
    told, real = served.problem(served.learned), served.problem()
    tree = told.trees[0]
    arguments = _arguments(cell, setting)
    duration_s = cell.warmup_s + cell.measured_s(requests)
    report = simulate_application(
        told,
        {tree.name: served.workload(duration_s)},
        policy=setting.policy,
        policy_kwargs=arguments,
        planner=loki_of if setting.planned else None,
        duration_s=duration_s,
        seed=seed,
        latency_noise=cell.noise,
        truth=real.models,
        interval_s=5.0,
        preempt_delay_s=cell.preempt_delay_s,
    )
    row = report.streams(cell.warmup_s, duration_s).iloc[0]
    return {
        "value": float(row["value"]),
        "bad": float(row["bad_rate"]),
        "worst": float(row["bad_rate"]),
        "accuracy": float(row["accuracy"]),
        "p50_s": float(row["p50_s"]),
        "p99_s": float(row["p99_s"]),
        "requests": int(row["requests"]),
    }


# -- figures on disk -------------------------------------------------------------------------------


def kept_at(
    seed: int, number: int, name: str, requests: float, folder: Path = KEPT, draw: int = 0
) -> Path:
    slug = name.replace(",", "").replace("'", "").replace(" ", "-")
    run = f"{requests:g}" + (f"-draw-{draw}" if draw else "")
    return folder / f"seed-{seed}" / run / f"cell-{number}" / f"{slug}.json"


def kept(path: Path, code: str | None) -> dict[str, Any] | None:
    """Return the figures in a file if the code of that mark made them; any if `code` is None."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found["figures"] if code is None or found["code"] == code else None


def keep(path: Path, code: str, figures: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"code": code, "figures": {k: _finite(v) for k, v in figures.items()}}
    path.write_text(json.dumps(body), encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def code_for(cell: Cell, name: str) -> str:
    """Return the mark of the code that makes a setting's figures in a cell."""
    return code_of(name, cell.tree is not None, cell.variants > 1)


@cache
def code_of(name: str, piped: bool = False, composed: bool = False) -> str:
    """Return a hash of the code that a setting's figures depend on.

    It covers the cells, the host (of pipelines or models), the policy with what it may be composed
    with, and what these import. For `auto`, it covers all policies, because `auto` contains them.
    """
    policy = SETTINGS[name].policy
    chosen = POLICIES.values() if policy == "auto" else [POLICIES[policy]]
    if SETTINGS[name].exact:
        chosen = [EXACT[policy]]
    waiting = [_HOSTS[piped], *(path.split(":")[0] for path in chosen)]
    unused = set() if composed or piped else {_COMPOSED}  # the registry always imports it
    read = {module: source for module in _OWN if (source := _source(module))}
    while waiting:
        module = waiting.pop()
        source = None if module in read or module in unused else _source(module)
        if source is not None:
            read[module] = source
            waiting += _imported(source)
    return hashlib.sha256(b"\0".join(read[m] for m in sorted(read))).hexdigest()[:16]


def _source(module: str) -> bytes | None:
    """Return a module's source; None if it is a package, or a name that is not a module."""
    path = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    return path.read_bytes() if path.exists() else None


@cache
def _imported(source: bytes) -> frozenset[str]:
    """Return the modules of ray_slo that a source imports, and names that may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in found if name.split(".")[0] == "ray_slo")
