"""Live on Ray Serve: starts, answers, refusals and memory of every file in configs/ that serves.

Each file is started by `serve run` on loopback, with random weights. It gets requests over HTTP:
one until it is answered, and 10 to warm up. Then come 20 at the rate in the file's `ray-slo bench`
line, and 20 at three times that rate. The rows count the outcomes of these 40 requests. In time and
late are judged by the file's SLO. For the files in `STEPS`, the load then rises step by step. The
rows count the requests in time, and give the mean accuracy of the variants that answered them.

* ready: seconds from the command to the first answer to a request.
* memory: of the replicas (proportional set size), after the last request.
* elsewhere: listening sockets that the configuration adds on addresses other than loopback.

`--only NAME` runs one file. `--write` puts the figures of a full run into configs/README.md and
into the heads of the files. A file whose packages are not installed is skipped with a message.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import yaml

from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row
from benchmarks.live.cluster import importable, memory_mb
from ray_slo.load.drive import run_http
from ray_slo.load.report import LoadResult
from ray_slo.load.workload import Payloads, Recorded, load_payloads

NAME = "shipped"
SOURCE = "ray-slo"
ASKED = [
    ("*", "elsewhere", "≤", 0),
    ("*", "in time at its rate", "≥", 1),
    ("traffic-loki, 0.3/s", "refused", "≤", 0),
]
FOLDER = Path(__file__).parents[2] / "configs"
README = FOLDER / "README.md"
REQUESTS = 20
WARM_UP = 10  # requests before those that count, at the same rate
OVERLOAD = 3
STEPS = {"traffic-loki": (0.3, 1.0, 2.0, 3.0, 5.0, 8.0)}  # rising loads in requests/s, by file
_STEP_S = 40.0
QUICK = "digits"
_READY_S = 300.0
_STOP_S = 30.0
_NEEDS = {  # the package that a file's deployment imports, by the beginning of the file's name
    "imagenet": "torchvision",
    "traffic": "torchvision",
    "text": "transformers",
    "recommender": "torch",
    "digits": "sklearn",
    "groups": "sklearn",
    "showcase": "sklearn",
    "ocr": "rapidocr_onnxruntime",
}
_BEGIN, _END = "<!-- shipped: begin -->", "<!-- shipped: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", metavar="NAME", help="run only this file of configs/ (its name without .yaml)"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the figures into the README and the files of configs/",
    )


def run(
    quick: bool = False, seed: int = 0, only: str | None = None, write: bool = False
) -> list[Row]:
    names = [path.stem for path in shipped()]
    if only is not None and only not in names:
        raise SystemExit(f"--only: no file {only!r}; choose one of {', '.join(names)}")
    chosen = [only] if only is not None else [QUICK] if quick else names
    rows: list[Row] = []
    for name in chosen:
        if (package := missing_package(name)) is not None:
            print(f"{name}: left out, as {package} is not installed", file=sys.stderr)
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        rows += tried(FOLDER / f"{name}.yaml", seed)
    if not rows:
        raise Missing(f"the packages of {', '.join(chosen)} are not installed")
    if write:
        write_figures(rows)
    return rows


def shipped() -> list[Path]:
    """Return the files that `serve run` can start."""
    files = sorted(FOLDER.glob("*.yaml"))
    return [path for path in files if "applications" in yaml.safe_load(path.read_text())]


def missing_package(name: str) -> str | None:
    """Return the package that a file needs and that is not installed; None if there is none."""
    needed = _NEEDS.get(name.partition("-")[0])
    return needed if needed is not None and find_spec(needed) is None else None


# -- what a file's head says -------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The `ray-slo bench` line in a file's head."""

    url: str
    rate: float
    slo_ms: float
    payload: str

    @classmethod
    def of(cls, path: Path) -> Bench:
        head = [line.lstrip("# ") for line in path.read_text().splitlines() if line[:1] == "#"]
        text = "\n".join(head).replace("\\\n", " ")
        (line,) = re.findall(r"^ray-slo bench (.*)$", text, re.MULTILINE)
        url, *options = shlex.split(line)
        named = dict(zip(options[::2], options[1::2], strict=True))
        return cls(url, float(named["--rate"]), float(named["--slo-ms"]), named["--payload"])


# -- run a file --------------------------------------------------------------------------------


@dataclass
class Running:
    """A configuration under `serve run`.

    Attributes:
        ready_s: seconds from the command to the first answer to a request.
        refusals: the latest refusal before that answer, by reason.
        elsewhere: addresses other than loopback on which something has listened since its start.
    """

    bench: Bench
    payloads: Payloads
    ready_s: float = math.nan
    refusals: dict[str, str] | None = None
    elsewhere: frozenset[str] = frozenset()

    def load(self, rate: float, count: int = REQUESTS, seed: int = 0) -> LoadResult:
        """Send `count` requests with Poisson arrivals at `rate` per second; return the outcomes."""
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / rate, count))
        workload = Recorded.record(
            times, self.payloads, duration_s=float(times[-1]) + 1e-3, seed=seed
        )
        slo_s = self.bench.slo_ms / 1e3
        return run_http(self.bench.url, workload, self.payloads, slo_s=slo_s, timeout_s=slo_s + 10)


@contextmanager
def serving(path: Path, log: Path, port: int | None = None) -> Iterator[Running]:
    """Run a file with `serve run`, in a Ray cluster of its own, until the end of the block.

    Args:
        port: replaces the file's port, in a copy of the file beside the log.

    Raises:
        RuntimeError: nothing was answered in time, or `serve run` ended. Has the end of its log.
    """
    bench = Bench.of(path)
    if port is not None:
        bench = replace(bench, url=re.sub(r"(?<=127\.0\.0\.1:)\d+", str(port), bench.url))
        text = re.sub(r"(?<=port: )8000\b", str(port), path.read_text(encoding="utf-8"))
        path = log.with_suffix(".yaml")
        path.write_text(text, encoding="utf-8")
    running = Running(bench, load_payloads(bench.payload), refusals={})
    before = listening()
    variables = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "RAY_SLO_WEIGHTS": "none",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that Ray itself listens on loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": importable(FOLDER.parent),
    }
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "serve"), "run", str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=FOLDER.parent,
            start_new_session=True,
        )
    try:
        running.ready_s = _until_answered(running, process, log, began)
        running.elsewhere = frozenset(beyond_loopback(listening() - before))
        yield running
    finally:
        _stop(process)


def _until_answered(
    running: Running, process: subprocess.Popen[bytes], log: Path, began: float
) -> float:
    body, kind = running.payloads.body(0)
    while True:
        request = urllib.request.Request(
            running.bench.url, data=body, headers={"content-type": kind}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                response.read()
                return time.monotonic() - began
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            assert running.refusals is not None
            reason = re.search(r'"reason": ?"(\w+)"', text)
            running.refusals[reason[1] if reason else str(error.code)] = text
        except OSError:
            pass
        waited_s = time.monotonic() - began
        if process.poll() is not None or waited_s > _READY_S:
            what = (
                "ended" if process.poll() is not None else f"answered nothing in {waited_s:.0f} s"
            )
            said = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"serve run {what}; last: {running.refusals}; its log ends:\n{said}")
        time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process as Ctrl-C does. After a while, kill what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    for pid in session_of(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def session_of(leader: int) -> list[int]:
    """Return the ids of the processes in a session (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[3]) == leader:
            found.append(int(entry.name))
    return found


def listening(pids: Iterable[int] | None = None) -> set[str]:
    """Return the addresses with ports on which this machine listens, as /proc/net/tcp writes them.

    Args:
        pids: if given, only the sockets of these processes.
    """
    inodes = None if pids is None else {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and (inodes is None or fields[9] in inodes):
                found.add(fields[1])
    return found


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):  # the process has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = str(file.readlink()).partition(":")
                if kind == "socket":
                    yield inode.strip("[]")


def beyond_loopback(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that are not loopback, so that other machines may reach them."""
    return [address for address in addresses if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    """Tell whether an address of /proc/net/tcp is 127.0.0.0/8, ::1, or ::ffff:127.0.0.0/104."""
    host = address.partition(":")[0]
    if len(host) == 8:
        return host.endswith("7F")  # the kernel writes IPv4 addresses in the byte order of the CPU
    return host == "0" * 24 + "01000000" or (
        host.startswith("0" * 16 + "FFFF0000") and host.endswith("7F")
    )


# -- figures -----------------------------------------------------------------------------------


def tried(path: Path, seed: int) -> list[Row]:
    """Start a file, load it, and return its rows."""
    name = path.stem
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"shipped-{name}.log"
    with serving(path, log) as running:
        rate = running.bench.rate
        running.load(rate, WARM_UP, seed)
        rows = figures_of(name, "at its rate", rate, running.load(rate, seed=seed))
        high = running.load(OVERLOAD * rate, seed=seed + 1)
        rows += figures_of(name, "at 3 ×", OVERLOAD * rate, high)
        rows += [
            Row(name, "ready", "s", running.ready_s),
            Row(name, "memory", "MB", memory_mb()),
            Row(name, "elsewhere", "", float(len(running.elsewhere))),
        ]
        for number, rate in enumerate(STEPS.get(name, ())):
            count = max(round(rate * _STEP_S), 1)
            result = running.load(rate, count, seed=seed + 2 + number)
            rows += figures_of(f"{name}, {rate:g}/s", "", rate, result)
    return rows


def figures_of(case: str, load: str, rate: float, result: LoadResult) -> list[Row]:
    """Return the rows that count the outcomes of the requests of one load."""
    for text, count in result.sample_errors.items():
        print(f"  {case}, {rate:g}/s: {count} × {text}", file=sys.stderr)
    status = result.summary["status"]
    refused = status["refused"] + status["expired"]  # the client got a refusal
    other = result.summary["requests"] - status["ok"] - status["late"] - refused
    requests = result.measured
    in_time = requests[requests["status"] == "ok"]
    accuracy = in_time["accuracy"].mean() if "accuracy" in in_time and len(in_time) else None
    figures = {
        "rate": ("1/s", rate),
        "in time": ("", float(status["ok"])),
        "late": ("", float(status["late"])),
        "refused": ("", float(refused)),
        "other": ("", float(other)),
        "p95": ("ms", result.summary["p95_ms"]),
        "accuracy": ("%", accuracy),
    }
    return [Row(case, f"{what} {load}".strip(), u, value) for what, (u, value) in figures.items()]


def write_figures(rows: Iterable[Row], readme: Path = README, folder: Path = FOLDER) -> None:
    """Write the table into configs/README.md, and what each file needs into the file's head."""
    figures: dict[str, dict[str, float | None]] = {}
    for row in rows:
        figures.setdefault(row.case, {})[row.metric] = row.ours
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    readme.write_text(f"{before}{_BEGIN}\n{table(figures)}{_END}{after}", encoding="utf-8")
    for name, of_file in figures.items():
        if "ready" not in of_file:
            continue
        path = folder / f"{name}.yaml"
        head = re.sub(
            r"^(# Needs: [^;\n]*\(workers\)).*$",
            lambda said, f=of_file: f"{said[1]}; {needs(f)}",
            path.read_text(encoding="utf-8"),
            count=1,
            flags=re.MULTILINE,
        )
        path.write_text(head, encoding="utf-8")


def needs(figures: Mapping[str, float | None]) -> str:
    """Return the text about memory and start time for a file's head."""
    memory, ready = figures["memory"], figures["ready"]
    assert memory is not None and ready is not None
    return f"{memory / 1000:.1f} GB of memory; first answer after {ready:.0f} s on 2 cores"


def table(figures: Mapping[str, Mapping[str, float | None]]) -> str:
    """Return the Markdown tables: one line per file, and one per step of a rising load."""
    each = "requests/s | in time | late | refused | p95"
    lines = [
        f"| config | first answer | memory | {each} | {each} |",
        "|---|" + "---|" * 12,
    ]
    steps = []
    for name, found in figures.items():
        if "ready" not in found:
            cells = [f"`{name.partition(',')[0]}`", *_cells(found, "")]
            cells.append("–" if found["accuracy"] is None else f"{found['accuracy']:.1f}")
            steps.append(f"| {' | '.join(cells)} |")
            continue
        cells = [f"`{name}`", f"{found['ready']:.0f} s", f"{found['memory']:.0f} MB"]
        for load in (" at its rate", " at 3 ×"):
            cells += _cells(found, load)
        lines.append(f"| {' | '.join(cells)} |")
    if steps:
        lines += [
            "",
            f"Load that rises, each step for {_STEP_S:.0f} s:",
            "",
            f"| config | {each} | mean accuracy, % |",
            "|---|" + "---|" * 6,
            *steps,
        ]
    return "\n".join(lines) + "\n"


def _cells(found: Mapping[str, float | None], load: str) -> list[str]:
    other, p95 = found[f"other{load}"], found[f"p95{load}"]
    return [
        f"{found[f'rate{load}']:g}",
        *(f"{found[f'{what}{load}']:.0f}" for what in ("in time", "late")),
        f"{found[f'refused{load}']:.0f}" + (f" ({other:.0f} failed)" if other else ""),
        "–" if p95 is None else f"{p95:.0f} ms",
    ]
