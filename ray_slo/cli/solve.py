"""`ray-slo solve`: RAMSIS tables for a range of loads, from a spec."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import (
    in_document,
    mistakes_in,
    number,
    percent,
    print_json,
    read_document,
    table,
    will_write,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ray_slo.papers.ramsis import PolicySet
    from ray_slo.papers.ramsis.spec import SolveSpec


def solve(
    spec: Annotated[Path, typer.Argument(help="YAML spec: variants, SLO, workers, loads.")],
    out: Annotated[
        Path | None, typer.Option(help="Table set to write; default: the spec's name, .npz.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Solve again what the file already contains.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of solver processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Solve RAMSIS tables for a range of loads, and save them.

    A table says which variant answers, given the queue length and the slack. Tables that the file
    already has for the same profiles and options are kept.

    Example: ray-slo solve policies/digits.yaml
    """
    from rich.console import Console

    from ray_slo.papers.ramsis.spec import SolveSpec

    chosen = in_document(spec, SolveSpec, read_document(spec, "policies/digits.yaml", "solve"))
    path = out or spec.with_suffix(".npz")
    will_write("--out", path)
    with mistakes_in(spec, SolveSpec):
        tables, count = _solved(chosen, spec, path if path.exists() and not fresh else None, jobs)
    tables.save(path)
    if as_json:
        print_json({"file": str(path), "solved": count, **summary(tables)})
        return
    console = Console()
    console.print(loads_table(str(path), [tables]))
    console.print(f"wrote {path}: {len(tables)} tables, {count} of them new")


def _solved(
    chosen: SolveSpec, spec: Path, existing: Path | None, jobs: int
) -> tuple[PolicySet, int]:
    """Return the tables, and the number of new ones.

    Raises:
        ValueError: the file's tables are for other profiles or options.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ray_slo.papers.ramsis import PolicySet, solve_set

    problem = chosen.problem(spec.parent)
    kept = PolicySet.load(existing) if existing is not None else None
    if kept and (kept.profile_hash, kept.options) != (problem.profile_hash, problem.options()):
        raise ValueError(
            f"{existing}: its tables are for other profiles or options than those of {spec}; "
            "--fresh replaces it, --out writes to another file"
        )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    new: list[Any] = []
    with ExitStack() as stack:
        progress = stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True)
        )
        task = progress.add_task("solving")
        mapper: Any = map
        if jobs > 1:
            pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
            mapper = stack.enter_context(pool).map

        def solved(found: Any) -> None:
            new.append(found)
            last = f"{found.rate:.6g}/s: {found.expected_accuracy:.2f} %"
            progress.update(task, description=f"{len(new)} tables, the last for {last}")

        loads = chosen.loads.model_dump()
        tables = solve_set(problem, **loads, mapper=mapper, progress=solved, existing=kept)
    return tables, len(new)


def summary(tables: PolicySet) -> dict[str, Any]:
    """Return a summary of a set of tables, as JSON data."""
    return {
        "profile_hash": tables.profile_hash,
        "options": dict(tables.options),
        "variants": dict(zip(tables.tables[0].names, tables.tables[0].accuracies, strict=True)),
        "tables": [
            {
                "rate": t.rate,
                "expected_accuracy": t.expected_accuracy,
                "violation_rate": t.violation_rate,
                "variant_mix": t.variant_mix,
            }
            for t in tables
        ],
    }


def loads_table(title: str, sets: list[PolicySet]) -> RichTable:
    """Return a table of the expected accuracy and violations by load. A second set is shown beside
    the first."""
    columns = ["requests/s", "accuracy", "violations ≤", "variants by share of requests"]
    columns += ["accuracy, other", "violations ≤, other"] * (len(sets) - 1)
    rows = []
    for t in sets[0]:
        mix = sorted(t.variant_mix.items(), key=lambda item: -item[1])[:3]
        row = [number(t.rate, 4), number(t.expected_accuracy, 4, " %"), percent(t.violation_rate)]
        row.append(", ".join(f"{name or 'dropped'} {percent(share)}" for name, share in mix))
        for tables in sets[1:]:
            other = tables.covering(t.rate)
            row += [number(other.expected_accuracy, 4, " %"), percent(other.violation_rate)]
        rows.append(row)
    return table(title, columns, rows)


def register(app: typer.Typer) -> None:
    app.command()(solve)
