"""`ray-slo policy show`: the content of a file with RAMSIS tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_slo.cli._output import PICTURES, percent, positive, print_json, will_write
from ray_slo.cli.solve import loads_table, summary
from ray_slo.core.files import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

    from ray_slo.papers.ramsis import PolicySet, Table

policy_app = typer.Typer(no_args_is_help=True, help="Solved policies.")

_COLUMNS = 60  # number of columns of the heat map on the screen
# The heat map shows queue lengths up to the longest that at least this share of decisions see.
_SHOWN = 1e-5
_COLOURS = (
    "bright_blue", "cyan", "green", "yellow", "magenta", "red", "bright_cyan", "bright_green",
    "bright_yellow", "bright_magenta", "bright_red", "blue", "white",
)  # fmt: skip


@policy_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Tables written by `ray-slo solve`.")],
    compare: Annotated[Path | None, typer.Option(help="Another file, to compare with.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Draw the table that covers this load; default: the middle one."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw heat maps and accuracy by load (.png, .svg, .pdf).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Show the expected accuracy by load, and the chosen variant by queue length and slack."""
    from rich.console import Console

    from ray_slo.papers.ramsis import PolicySet

    positive(rate=rate)
    will_write("--plot", plot, PICTURES)
    paths = [file] if compare is None else [file, compare]
    sets = [PolicySet.load(path) for path in paths]
    if rate is None:
        rate = sets[0].rates[len(sets[0]) // 2]
    chosen = [tables.covering(rate) for tables in sets]
    difference = _difference(chosen[0], chosen[1]) if len(chosen) > 1 else None
    if plot:
        with whole(plot) as half:
            _figure(paths, sets, chosen).savefig(half, dpi=120, format=plot.suffix[1:])
    if as_json:
        print_json(
            {
                "file": str(file),
                **summary(sets[0]),
                "shown_rate": chosen[0].rate,
                "compare": None if compare is None else {"file": str(compare), **summary(sets[1])},
                "different_decisions": difference,
            }
        )
        return
    console = Console()
    options = sets[0].options
    console.print(
        f"SLO {1e3 * chosen[0].slo_s:g} ms, {chosen[0].num_workers} workers, profiles "
        f"{sets[0].profile_hash}, {options['objective']}, {options['balancing']}, "
        f"{options['discretization']}, {options['batching']} batching, late: {options['late']}"
    )
    console.print(loads_table(str(file), sets))
    for path, table in zip(paths, chosen, strict=True):
        console.print(f"{path}, {table.rate:.6g} requests/s: variant by queue length and slack")
        console.print(_heat_map(table))
    if difference is not None:
        console.print(f"other decisions in {percent(difference)} of the states that matter")
    if plot:
        console.print(f"wrote {plot}")


def _longest(table: Table) -> int:
    """Return the longest queue to show. It is at least 1."""
    seen = table.occupancy[1:-1].reshape(table.variant.shape).sum(1) > _SHOWN
    return int(max(seen.nonzero()[0], default=0)) + 1


def _difference(a: Table, b: Table) -> float:
    """Return the share of a's decisions in which b decides differently."""
    weights = a.occupancy[1:-1].reshape(a.variant.shape)
    differing = sum(
        float(weights[n - 1, j])
        for n in range(1, a.max_queue + 1)
        for j, slack in enumerate(a.slacks_s)
        if weights[n - 1, j] > 0 and a.lookup(n, slack) != b.lookup(n, slack)
    )
    return differing / float(weights.sum())


def _heat_map(table: Table) -> Text:
    """Return a heat map with a row per queue length and a column per slack. Each variant has a
    letter and a colour."""
    from rich.text import Text

    from ray_slo.papers.ramsis import DROP

    names = [*table.names, DROP]
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def mark(name: str) -> tuple[str, str]:
        index = names.index(name)
        symbol = "·" if name == DROP else letters[index % len(letters)]
        return symbol, _COLOURS[index % len(_COLOURS)]

    result = Text()
    used: dict[str, None] = {}
    for n in range(1, _longest(table) + 1):
        result.append(f"{n:>4} ")
        for column in range(_COLUMNS):
            name, _ = table.lookup(n, table.slo_s * (column + 0.5) / _COLUMNS)
            used[name] = None
            result.append(*mark(name))
        result.append("\n")
    end = f"{1e3 * table.slo_s:g} ms"
    result.append(f"   n 0{'slack':^{_COLUMNS - 1 - len(end)}}{end}\n")
    for name in sorted(used, key=names.index):
        symbol, colour = mark(name)
        accuracy = "" if name == DROP else f" {table.accuracies[names.index(name)]:.4g} %"
        result.append(f"{symbol} ", colour).append(f"{name or 'drop'}{accuracy}  ")
    return result


def _figure(paths: list[Path], sets: list[PolicySet], chosen: list[Table]) -> Figure:
    """Draw accuracy and violations by load, and one heat map per file."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(6 * (1 + len(sets)), 4.5), layout="constrained")
    curve, *maps = figure.subplots(1, 1 + len(sets))
    for path, tables in zip(paths, sets, strict=True):
        accuracies = [t.expected_accuracy for t in tables]
        curve.plot(tables.rates, accuracies, ".-", label=path.name)
    curve.set_xlabel("requests/s")
    curve.set_ylabel("expected accuracy (%)")
    curve.set_title("by load")
    curve.legend()
    for axes, path, table in zip(maps, paths, chosen, strict=True):
        longest = _longest(table)
        grid = np.where(table.variant[:longest] < 0, np.nan, table.variant[:longest])
        edges = np.append(table.slacks_s, table.slo_s + table.slacks_s[1]) * 1e3
        colours = colormaps["turbo"].resampled(max(len(table.names), 2))
        limits = {"vmin": -0.5, "vmax": max(len(table.names), 2) - 0.5}
        axes.pcolormesh(edges, np.arange(longest + 1) + 0.5, grid, cmap=colours, **limits)
        used = np.unique(grid[~np.isnan(grid)]).astype(int)
        axes.legend(
            handles=[Patch(color=colours(i), label=table.names[i]) for i in used],
            fontsize="small",
            loc="upper left",
        )
        axes.set_xlabel("slack (ms)")
        axes.set_ylabel("queue length")
        axes.set_title(f"{path.name}, {table.rate:.6g} requests/s")
    return figure


def register(app: typer.Typer) -> None:
    app.add_typer(policy_app, name="policy")
