"""All measurements for a GPU: profiles, preemption, memory, and serving compared with plain Serve.

The program takes at most ten minutes, or `--minutes`. It works offline, with random weights. If
torch finds no CUDA device, only `--tiny` runs: tiny networks on the CPU, through the same code, as
a test of it. The parts are separate processes. If one fails or takes too long, this is reported,
and the others continue. `out/gpu` has what each printed, and the report, `out/gpu/report.md`.

* profiles: ways to run ResNet50, EfficientNet B0 and BERT-base (precision, layout, CUDA graphs), as
  `how="auto"` times them when it loads a network. ℓ(b) in float32 and in the best way, between CUDA
  events on the stream, and as a caller sees it. Also the gain from staging the next batch while one
  runs.
* exit points (SHEPHERD Figure 12, Table 4): p95 of the preemption delay, and slowdown, over the
  number of exit points, with limits of 3 %. Also α and β of ℓ(b).
* two streams (§7.2): FLEX with and without preemption, on one GPU in one process.
* one process: `timeout` with the best of three waits beside `auto`, at rising rates.
* memory: memory of each network, run plainly and with recorded graphs.
* serving, variants: the same over HTTP on Ray Serve. `@serve.batch` with its best wait is compared
  with `@ray_slo.deployment`; three ResNets are variants under `auto`. A batch runs its network so
  many times that it takes 100 ms; Serve's proxy can keep up with that.
* out of memory: batches that do not fit. Every request must be answered.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu.parts import held
from benchmarks.gpu.setting import Setting
from benchmarks.harness.page import tables_of
from benchmarks.harness.rows import Failed, Row

NAME = "gpu"
SOURCE = "SHEPHERD Table 4, Figure 12, §7.2; ray-slo"
ASKED = [
    ("exit points on *", "delay p95", "≤", 3),
    ("exit points on *", "slowdown", "≤", 3),
    ("two streams, SLO 90 ms, the first burst · flex, no preemption", "flex is better by", "≥", 3),
    ("serving, *", "over the tuned wait", "≥", 1.1),
    ("one process, *", "over the tuned wait", "≥", 1.1),
    ("out of memory, *", "answered", "≥", 32),
]
FOLDER = Path(__file__).parents[2] / "out" / "gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tiny", action="store_true", help="run tiny networks on the CPU, without a GPU"
    )
    parser.add_argument(
        "--minutes", type=float, default=None, help="longest duration in minutes; default: 10"
    )


def run(
    quick: bool,
    seed: int,
    tiny: bool = False,
    minutes: float | None = None,
    folder: Path = FOLDER,
) -> list[Row]:
    """Run all parts.

    Raises:
        Missing: there is no GPU, and `tiny` is false.
        Failed: a part failed. Has the rows of all parts.
    """
    setting = Setting(tiny, seed, 0.0)
    setting.check()
    minutes = minutes if minutes is not None else 2.0 if quick else 10.0
    rows, complaints = held(tiny, seed, 60 * minutes - 5, folder)
    write_report(rows, complaints, setting.name, folder / "report.md")
    if complaints:
        raise Failed(rows, complaints)
    return rows


def write_report(rows: list[Row], complaints: list[str], device: str, path: Path) -> None:
    """Write one page of Markdown: what failed, then a table for each measurement."""
    failed = "".join(f"* **failed:** {complaint}\n" for complaint in complaints)
    head = f"# {device}\n\n{__doc__.partition('parts are')[0].rpartition('.')[0]}.\n\n{failed}\n"
    path.write_text(head + "\n".join(tables_of([row.to_json() for row in rows])), encoding="utf-8")
    print(f"report: {path}")
