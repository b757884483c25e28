"""The results of a run: figures, frames, tables and plots from columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.core.documents import load_columns, naming
from ray_slo.core.files import whole, write_text
from ray_slo.simulation import report_plots
from ray_slo.simulation.file_check import NEEDED, Meta, check
from ray_slo.simulation.frames import EPSILON_S, FINISHED, Array, Bools, Frames, frame, named

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from rich.table import Table

OUTCOMES = ("good", "late", "dropped", "pending")
_GOOD, _LATE, _DROPPED, _PENDING = range(4)
_FORMAT = "ray-slo/report/1"
_WHAT = "a report file"
_PERCENTILES = (50, 95, 99)
_GANTT_BATCHES = 400


class Report(Frames):
    """Requests and batches of one run.

    Figures count the requests that arrive in the measured window [warmup_s, duration_s), and the
    workers' batches in it. The frames contain all requests and batches. A request is *good* if it
    was answered by its deadline. Otherwise it is *bad*: late, dropped, or pending (never answered).

    Args:
        meta: duration_s, warmup_s, seed, policy, models, slo_s, variants, accuracy, workers.
        requests: columns of shape (requests,): model, size (items), arrival_s, deadline_s,
            batch (−1: none), drop_reason (−1: none), dropped_s. In order of arrival.
        batches: columns of shape (batches,): worker, variant, size, status, dispatched_s,
            predicted_start_s, predicted_finish_s, started_s, finished_s. In order of dispatch.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        requests: Mapping[str, Array],
        batches: Mapping[str, Array],
    ) -> None:
        super().__init__(meta, requests, batches)
        self._started, self._finished = self.of_batch("started_s"), self.of_batch("finished_s")
        met = self._finished <= self._r["deadline_s"] + EPSILON_S
        self._outcome = np.select(
            [met, self.served, self._r["drop_reason"] >= 0], [_GOOD, _LATE, _DROPPED], _PENDING
        )
        self._in: Bools = self._r["arrival_s"] >= self.meta["warmup_s"]

    # -- frames --------------------------------------------------------------------------------

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request: model, size, arrival_s, deadline_s, outcome, drop_reason, batch,
        worker, variant, started_s, finished_s, queueing_s, latency_s, slack_s, measured. Seconds;
        missing values are NaN (batch: −1)."""
        r = self._r
        return frame(
            {
                "model": named(r["model"], self.meta["models"]),
                "size": r.get("size", 1),  # older files have none
                "arrival_s": r["arrival_s"],
                "deadline_s": r["deadline_s"],
                "outcome": named(self._outcome, OUTCOMES),
                **self.fates(),
                "queueing_s": self._started - r["arrival_s"],
                "latency_s": self._finished - r["arrival_s"],
                "slack_s": r["deadline_s"] - self._finished,
                "measured": self._in,
            }
        )

    # -- figures -------------------------------------------------------------------------------

    @property
    def window_s(self) -> float:
        """Length of the measured window."""
        return float(self.meta["duration_s"] - self.meta["warmup_s"])

    def _select(self, model: str | None) -> Bools:
        if model is None:
            return self._in
        if model not in self.meta["models"]:
            raise ValueError(f"model {model!r} is unknown; choose {self.meta['models']}")
        return np.asarray(self._in & (self._r["model"] == self.meta["models"].index(model)))

    def count(self, outcome: str | None = None, model: str | None = None) -> int:
        """Number of measured requests with one outcome (good, late, dropped, pending), or of
        all."""
        chosen = self._select(model)
        if outcome is not None:
            chosen = chosen & (self._outcome == OUTCOMES.index(outcome))
        return int(chosen.sum())

    @property
    def offered(self) -> float:
        """Arrivals per second."""
        return self.count() / self.window_s

    @property
    def goodput(self) -> float:
        """Requests answered by their deadline, per second."""
        return self.count("good") / self.window_s

    def bad_rate(self, model: str | None = None) -> float:
        """Return the share of bad requests, of one model or all. It is 0 if no request arrived."""
        arrived = self.count(model=model)
        return 1 - self.count("good", model) / arrived if arrived else 0.0

    @property
    def worst_bad_rate(self) -> float:
        """The largest bad rate of any model."""
        return max(self.bad_rate(m) for m in self.meta["models"])

    def latencies_s(self, model: str | None = None) -> Array:
        """Return the latency of every answered (good or late) measured request, in seconds, shape
        (n,)."""
        chosen = self._select(model) & self.served
        return np.asarray((self._finished - self._r["arrival_s"])[chosen])

    def latency_s(self, percentile: float, model: str | None = None) -> float:
        """Return a percentile (0 … 100) of `latencies_s`. NaN if no request was answered."""
        return _percentile(self.latencies_s(model), percentile)

    def queueing_s(self, model: str | None = None) -> Array:
        """Return the time from arrival to start of execution of every answered measured request, in
        seconds, shape (n,)."""
        chosen = self._select(model) & self.served
        return np.asarray((self._started - self._r["arrival_s"])[chosen])

    @cached_property
    def batch_sizes(self) -> Array:
        """Sizes of the finished batches that started in the measured window, shape (n,)."""
        b = self._b
        done = b["status"] == FINISHED
        start = b["started_s"]
        inside = (start >= self.meta["warmup_s"]) & (start < self.meta["duration_s"])
        return np.asarray(b["size"][done & inside])

    def arrivals(self) -> tuple[Array, Bools]:
        """Arrival times of requests, and whether they were good."""
        return self._r["arrival_s"], self._outcome == _GOOD

    def utilisation(self) -> dict[str, float]:
        """Share of the measured window that each worker spent on batches, by worker."""
        begin, end = self.meta["warmup_s"], self.meta["duration_s"]
        busy = np.clip(self._b["finished_s"], begin, end) - np.clip(
            self._b["started_s"], begin, end
        )
        total = np.bincount(self._b["worker"], busy, minlength=len(self.meta["workers"]))
        return dict(zip(self.meta["workers"], (total / self.window_s).tolist(), strict=True))

    @property
    def idle_fraction(self) -> float:
        """Mean share of the window in which a worker ran no batch (Symphony §3.5)."""
        used = list(self.utilisation().values())
        return 1 - sum(used) / len(used) if used else 1.0

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy (percent) of good requests; None if a variant's accuracy is unknown."""
        good = self._in & (self._outcome == _GOOD)
        used = self._b["variant"][self._r["batch"][good]]
        by_variant = [self.meta["accuracy"].get(v) for v in self.meta["variants"]]
        known = [by_variant[i] for i in np.unique(used)]
        if not known or None in known:
            return None
        return float(np.array(by_variant, dtype=float)[used].mean())

    def summary(self) -> dict[str, Any]:
        """Return the figures of all models together and of each, as JSON data. Latencies are in
        milliseconds."""

        def figures(model: str | None) -> dict[str, Any]:
            queueing = self.queueing_s(model)
            good = self.count("good", model)
            return {
                "requests": self.count(model=model),
                "offered_per_s": self.count(model=model) / self.window_s,
                "goodput_per_s": good / self.window_s,
                "bad_rate": self.bad_rate(model),
                "late": self.count("late", model),
                "dropped": self.count("dropped", model),
                "pending": self.count("pending", model),
                **{f"latency_p{p}_ms": in_ms(self.latency_s(p, model)) for p in _PERCENTILES},
                "queueing_p50_ms": in_ms(_percentile(queueing, 50)),
                "queueing_p99_ms": in_ms(_percentile(queueing, 99)),
            }

        sizes = self.batch_sizes
        return {
            **{k: self.meta[k] for k in ("policy", "seed", "duration_s", "warmup_s")},
            **figures(None),
            "batches": len(sizes),
            "batch_size_mean": float(sizes.mean()) if len(sizes) else None,
            "batch_size_median": float(np.median(sizes)) if len(sizes) else None,
            "idle_fraction": self.idle_fraction,
            "accuracy": self.accuracy,
            "utilisation": self.utilisation(),
            "models": {
                m: {"slo_ms": self.meta["slo_s"][m] * 1e3, **figures(m)}
                for m in self.meta["models"]
            },
        }

    # -- on screen -----------------------------------------------------------------------------

    def table(self) -> Table:
        """A rich table with one line per model, and one for all."""
        from rich import box
        from rich.table import Table

        summary = self.summary()
        batch = summary["batch_size_mean"]
        table = Table(
            box=box.SIMPLE_HEAD,
            title=f"{summary['policy']}, {self.window_s:g} s measured, seed {summary['seed']}",
            caption=f"mean batch {_text(batch, '.1f')} · "
            f"{len(self.meta['workers'])} workers, idle {self.idle_fraction:.0%}",
        )
        table.add_column("model", no_wrap=True)
        for heading in (
            *("SLO\nms", "offered\nreq/s", "goodput\nreq/s", "bad"),
            *("p50\nms", "p99\nms", "queueing\np99 ms"),
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        rows = list(summary["models"].items())
        if len(rows) > 1:
            rows.append(("all", summary))
        for name, row in rows:
            table.add_row(
                name,
                _text(row.get("slo_ms"), "g"),
                f"{row['offered_per_s']:.1f}",
                f"{row['goodput_per_s']:.1f}",
                f"{row['bad_rate']:.2%}",
                _text(row["latency_p50_ms"], ".1f"),
                _text(row["latency_p99_ms"], ".1f"),
                _text(row["queueing_p99_ms"], ".1f"),
            )
        return table

    # -- plots ---------------------------------------------------------------------------------

    def plot(self, directory: str | Path) -> list[Path]:
        """Write PNGs: latency CDF against the SLO, batch sizes, queueing delay, goodput over time
        and, for runs of at most 400 batches, what every worker ran. Returns their paths."""
        from matplotlib.figure import Figure

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        drawings: dict[str, Callable[[Report, Axes], None]] = {
            "latency": report_plots.draw_latency,
            "batch_size": report_plots.draw_batch_sizes,
            "queueing": report_plots.draw_queueing,
            "goodput": report_plots.draw_goodput,
        }
        if 0 < len(self._b["size"]) <= _GANTT_BATCHES:
            drawings["gantt"] = Report.draw_gantt
        paths = []
        for name, draw in drawings.items():
            figure = Figure(figsize=(10 if name == "gantt" else 6, 4), layout="constrained")
            draw(self, figure.subplots())
            paths.append(directory / f"{name}.png")
            with whole(paths[-1]) as half:
                figure.savefig(half, dpi=120, format="png")
        return paths

    def draw_gantt(self, axes: Axes, unit_s: float = 1.0, unit: str = "s") -> None:
        """Batches as bars on their workers (a bar's number is its size); dropped requests as red
        circles, answered ones as blue circles at their arrival."""
        b, workers = self._b, self.meta["workers"]
        for i in range(len(b["size"])):
            start, finish = b["started_s"][i] / unit_s, b["finished_s"][i] / unit_s
            y = int(b["worker"][i])
            axes.barh(
                y,
                finish - start,
                left=start,
                height=0.7,
                color=f"C{int(b['variant'][i]) % 10}",
                alpha=0.6,
                edgecolor="0.2",
            )
            axes.text((start + finish) / 2, y, str(b["size"][i]), ha="center", va="center")
        bad = self._outcome >= _DROPPED
        for chosen, colour in ((~bad, "C0"), (bad, "red")):
            times = self._r["arrival_s"][chosen] / unit_s
            axes.plot(times, np.full(len(times), -1), "o", color=colour, markersize=3)
        axes.set_yticks(range(-1, len(workers)), ["arrivals", *workers])
        axes.invert_yaxis()
        axes.set_xlabel(f"time ({unit})")

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz file that `load` reads back exactly."""
        columns = {f"r.{k}": v for k, v in self._r.items()}
        columns |= {f"b.{k}": v for k, v in self._b.items()}
        meta = json.dumps({"format": _FORMAT, **self.meta})
        with whole(path) as half, half.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, meta=np.array(meta), **columns)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a report, or of another format version.
        """
        meta, columns = load_columns(path, _WHAT, _FORMAT, "meta", Meta, *NEEDED)
        with naming(path, _WHAT):
            check(meta, columns)
        return cls(
            meta.model_dump(exclude={"format"}),
            {k[2:]: v for k, v in columns.items() if k.startswith("r.")},
            {k[2:]: v for k, v in columns.items() if k.startswith("b.")},
        )

    def write(self, directory: str | Path) -> list[Path]:
        """Write everything under `directory`: report.npz, summary.json, both frames as CSV, and
        the plots. Returns the paths."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        names = ("report.npz", "summary.json", "requests.csv", "batches.csv")
        paths = [directory / name for name in names]
        self.save(paths[0])
        write_text(paths[1], json.dumps(self.summary(), indent=1) + "\n")
        for path, rows in ((paths[2], self.requests), (paths[3], self.batches)):
            with whole(path) as half:
                rows.to_csv(half, index=False)
        return paths + self.plot(directory)

    def __repr__(self) -> str:
        return (
            f"Report({self.meta['policy']}: {self.count()} requests, "
            f"goodput {self.goodput:.4g}/s, bad {self.bad_rate():.2%})"
        )


def _percentile(values: Array, percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else float("nan")


def in_ms(seconds: float) -> float | None:
    """Return a time in milliseconds. None if it is NaN."""
    return None if np.isnan(seconds) else seconds * 1e3


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
