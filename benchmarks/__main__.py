"""python -m benchmarks [NAME [--quick] [--seed N] [--json FILE|-] [--save] [--plot DIR]]
python -m benchmarks all [--quick] [--seed N] [--save] [--only PATTERN]... [--but PATTERN]...
python -m benchmarks page"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.data import Missing
from benchmarks.harness.every import SKIPPED, every
from benchmarks.harness.plots import plot_bars
from benchmarks.harness.registry import PROGRAMS
from benchmarks.harness.results import origin, save
from benchmarks.harness.rows import Failed, tables


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Benchmark programs.", add_help=False
    )
    parser.add_argument(
        "name",
        nargs="?",
        help='program to run; "all" runs every program, "page" makes docs/benchmarks.md; without '
        "a name, the programs are listed",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a shorter run, at most a minute on 2 cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the run; default: 0")
    parser.add_argument(
        "--json", metavar="FILE", help="write the rows to this file, or to stdout if FILE is -"
    )
    parser.add_argument(
        "--save", action="store_true", help="save the rows in benchmarks/results, for the page"
    )
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write PNGs to this directory")
    options, _ = parser.parse_known_args(args)
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    if options.name == "all":
        every(parser, args)
        return
    known, module = set(vars(options)), None
    if options.name in PROGRAMS:
        program = PROGRAMS[options.name]
        module = import_module(program.module)
        parser.description = f"{program.name}: {program.shows}"
        if hasattr(module, "add_arguments"):  # arguments of its own, which its `run` gets
            module.add_arguments(parser)
    options = parser.parse_args(args)
    if options.name is None:
        listing = Table("name", "source", "shows", box=box.SIMPLE_HEAD)
        for program in PROGRAMS.values():
            listing.add_row(program.name, program.source, program.shows)
        Console().print(listing)
        return
    if options.name == "page":
        from benchmarks.harness import readme
        from benchmarks.harness.page import write

        readme.write()

        print(f"wrote {write()}")
        return
    if module is None:
        parser.error(f"no program {options.name!r}; choose one of all, page, {', '.join(PROGRAMS)}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")

    own = {name: value for name, value in vars(options).items() if name not in known}
    start, where = time.monotonic(), origin(program.module) if options.save else {}
    try:
        rows, complaints = module.run(quick=options.quick, seed=options.seed, **own), ()
    except Failed as error:
        rows, complaints = error.rows, error.complaints
    except Missing as error:
        print(f"{options.name} skipped: {error}", file=sys.stderr)
        sys.exit(SKIPPED)
    console = Console(stderr=options.json == "-")  # stdout has only the JSON then
    if not console.is_terminal:
        console.width = 200
    console.print(f"[bold]{program.name}[/bold] · {program.source} · {program.shows}")
    for table in tables(rows):
        console.print(table)
    body = {
        "name": program.name,
        "source": program.source,
        "quick": options.quick,
        "seed": options.seed,
        "options": in_words(
            {
                name: value
                for name, value in own.items()
                if value != parser.get_default(name) and name not in getattr(module, "UNSAVED", ())
            }
        ),
        "rows": [row.to_json() for row in rows],
    }
    cpu = os.times()
    cpu_s = cpu.user + cpu.system + cpu.children_user + cpu.children_system
    wall_s = time.monotonic() - start
    if hasattr(module, "earlier"):  # the run includes runs of before
        earlier_cpu_s, earlier_wall_s = module.earlier(**own)
        cpu_s, wall_s = cpu_s + earlier_cpu_s, wall_s + earlier_wall_s
    if options.save:
        path = save(body, where, cpu_s, wall_s)
        console.print(f"saved as {path}" if path else "not saved: a full run is", soft_wrap=True)
    if options.json:
        took = {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}
        text = json.dumps(body | took, indent=1, ensure_ascii=False) + "\n"
        if options.json == "-":
            print(text, end="")
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        paths = getattr(module, "plot", plot_bars)(rows, options.plot)
        console.print(f"wrote {', '.join(str(p) for p in paths)}")
    if complaints:
        sys.exit("\n".join(complaints))


def in_words(own: Mapping[str, Any]) -> str:
    """Return a program's own options as on a command line."""
    words = []
    for name, value in own.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(value) if isinstance(value, list) else str(value))
    return " ".join(words)


if __name__ == "__main__":
    # This must be set before NumPy is imported. Programs measure the time of one core. On a busy
    # machine, threads of BLAS spin while they wait for a core, and factorisations take three times
    # as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # programs stop what they started
    main()
