"""The demo's table, on screen and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.cli._output import number, percent
from ray_slo.cli.report_html import Page, Section, Table, svg
from ray_slo.demo import conclusions, plots
from ray_slo.demo.stream import GIVEN_UP_S, PARTS, OverTime, Stretch, Sums, over_time, sums

if TYPE_CHECKING:
    from ray_slo.demo.calibrate import Calibration
    from ray_slo.demo.extras import Following, Model
    from ray_slo.demo.machine import Use
    from ray_slo.demo.systems import System
    from ray_slo.load.report import LoadResult

COLUMNS = ("system", "offered/s", "in time/s", "bad", "p50 ms", "p99 ms", "accuracy")
_NARROW = ("", "offered", "in time", "bad", "p50", "p99", "accuracy")  # 80 columns


@dataclass
class Found:
    """The results of a run of the demo.

    Attributes:
        uses: use of the machine by other processes, for each part of the demo.
        seconds: length of the whole demo.
    """

    calibration: Calibration
    family: Mapping[str, float]
    machine: Mapping[str, Any]
    story: Sequence[Stretch]
    results: dict[System, LoadResult] = field(default_factory=dict)
    models: Sequence[Model] = ()
    following: Following | None = None
    uses: dict[str, Use] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sums(self) -> dict[System, dict[str, Sums]]:
        """Figures by system and part of the run."""
        return {system: sums(result, self.story) for system, result in self.results.items()}

    @property
    def times(self) -> dict[System, OverTime]:
        """Figures of each second, by system."""
        return {system: over_time(result) for system, result in self.results.items()}

    @property
    def conclusions(self) -> list[str]:
        """One sentence for each system of ray-slo. It compares with plain Serve if that ran."""
        all_sums = self.sums
        plain = next((s for system, s in all_sums.items() if not system.ours), None)
        if plain is None:
            return []
        return [
            conclusions.compared(system.name, found, plain)
            for system, found in all_sums.items()
            if system.ours
        ]

    @property
    def accuracy(self) -> str:
        """The sentence about the deployment's accuracy in the overload. "" if it did not run."""
        return next(
            (
                conclusions.accuracy(over_time(result), self.story, self.sums[system])
                for system, result in self.results.items()
                if system.key == "deployment"
            ),
            "",
        )


def milliseconds(value: float | None) -> str:
    """Format a latency in milliseconds. If it is that of requests that were given up, it is only a
    lower bound."""
    given_up = value is not None and value >= 1e3 * GIVEN_UP_S
    return f"> {1e3 * GIVEN_UP_S:.0f}" if given_up else number(value)


def cells(name: str, found: Sums) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        name,
        number(found.offered),
        number(found.goodput),
        percent(found.bad),
        milliseconds(found.p50_ms),
        milliseconds(found.p99_ms),
        percent(found.accuracy),
    )


def rows(
    found: Mapping[System, Mapping[str, Sums]],
) -> list[tuple[str, list[tuple[System, tuple[str, ...]]]]]:
    """Return the rows of the table by part of the run, one for each system."""
    return [
        (part, [(system, cells(system.name, of[part])) for system, of in found.items()])
        for part in PARTS
    ]


def screen_table(found: Mapping[System, Mapping[str, Sums]], title: str) -> Any:
    """Return the table for a terminal with 80 columns."""
    from rich import box
    from rich.table import Table as Screen

    table = Screen(
        title=f"{title} (rates per second, times in ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for index, column in enumerate(_NARROW):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for part, of_part in rows(found):
        table.add_row(part, style="italic")
        for system, row in of_part:
            table.add_row(f"  {row[0]}", *row[1:], style="bold green" if system.ours else "")
    return table


def page(found: Found, next_steps: str) -> Page:
    """Return the page of the report."""
    disturbed, machine = conclusions.machine(found.uses)
    settings = found.calibration.settings
    facts = [
        ("latency SLO", f"{1e3 * settings.slo_s:.0f} ms"),
        ("tuned plain Serve holds", f"{found.calibration.held:.0f} req/s"),
        ("replicas", str(settings.num_replicas)),
        ("machine", str(found.machine.get("hardware", ""))),
        ("was it quiet?", "no, see below" if disturbed else "yes"),
    ]
    sections = [
        *_story(found),
        *_extras(found),
        Section("Was the machine disturbed?", text=[machine], table=_uses(found.uses)),
        Section(
            "How the systems differ",
            table=Table(
                ("system", "batches"), [(s.name, s.about) for s in found.results], prose=True
            ),
        ),
        Section("What is the same", text=_same(found)),
        _chosen(found.calibration),
        _networks(found),
        Section("Next", code=next_steps),
    ]
    return Page("ray-slo beside plain Ray Serve, on this machine", _ABOUT, facts, sections)


_ABOUT = (
    "Every system gets the same requests: a calm stretch, a rise beyond what plain Serve holds, a "
    "burst at twice that rate, and calm again. In time means: answered within the SLO. A bad "
    "request is one that was answered too late, refused, or not answered at all."
)


def story_figure(found: Found) -> Any:
    """Return the figure of the offered rates and the answers in time."""
    calibration = found.calibration
    slo_ms = 1e3 * calibration.settings.slo_s
    return plots.story(found.times, found.story, slo_ms, calibration.held)


def _story(found: Found) -> list[Section]:
    lines: list[tuple[str, ...]] = []
    strong = []
    for part, of_part in rows(found.sums):
        (_, (_, offered, *_)) = of_part[0]
        lines.append((f"{part}: {offered}/s offered", *[""] * (len(COLUMNS) - 2)))
        for system, (name, _, *figures) in of_part:
            if system.ours:
                strong.append(len(lines))
            lines.append((name, *figures))
    figure = svg(lambda: story_figure(found))
    return [
        Section(
            "What each system made of the same requests",
            text=[*found.conclusions, *_warnings(found)],
            figures=[(figure, "Requests by the second they were due.")],
        ),
        Section("The same in figures", table=Table((COLUMNS[0], *COLUMNS[2:]), lines, strong)),
    ]


def _warnings(found: Found) -> list[str]:
    return [
        f"{system.name}: {text}."
        for system, result in found.results.items()
        for text in result.summary["warnings"]
    ]


def _extras(found: Found) -> list[Section]:
    made = []
    slo_ms = 1e3 * found.calibration.settings.slo_s
    if found.accuracy:
        figure = svg(
            lambda: plots.accuracy(found.times, found.story, slo_ms, found.calibration.held)
        )
        made.append(
            Section(
                "What gives way in the overload: accuracy, or latency?",
                text=[found.accuracy],
                figures=[(figure, "Above: 99 % of a second's requests took at most this long.")],
            )
        )
    if found.models:
        made.append(
            Section(
                "Two models with unlike SLOs on the same replicas",
                text=[conclusions.two_models(found.models)],
                table=Table(
                    ("model", "network", "SLO ms", *COLUMNS[1:6], "batch"),
                    [
                        (
                            model.name,
                            model.network,
                            number(1e3 * model.slo_s),
                            *cells(model.name, model.sums)[1:6],
                            number(model.batch),
                        )
                        for model in found.models
                    ],
                ),
            )
        )
    if found.following is not None:
        following = found.following
        made.append(
            Section(
                "Do the replicas follow the load?",
                text=[conclusions.following(following)],
                figures=[(svg(lambda: plots.following(following)), "One network.")],
            )
        )
    return made


def _uses(uses: Mapping[str, Use]) -> Table:
    return Table(
        ("while", "other programs' CPU", "taken by the host", "client late, p99 ms", "disturbed"),
        [
            (
                name,
                percent(use.others),
                percent(use.stolen),
                number(None if use.late_s is None else 1e3 * use.late_s),
                "yes" if use.complaints() else "no",
            )
            for name, use in uses.items()
        ],
    )


def _same(found: Found) -> list[str]:
    settings = found.calibration.settings
    return [
        f"{settings.num_replicas} replicas with one CPU thread each, network {settings.variant}, "
        f"at most {settings.max_batch_size} images in a batch, the same PNG decoding, warmed up; "
        "the same recorded Poisson arrivals and images from a load generator in its own process. "
        "Latency counts from the intended send time, and requests leave on time whatever the "
        "answers, so waiting is never hidden. "
        f"A request without an answer after {GIVEN_UP_S:.0f} s is given up. "
        f"Mode of Serve: {found.machine.get('mode', 'unknown')}.",
        f"ray-slo was told {settings.server_slo_ms:.0f} ms: the client's SLO less 10 % for the way "
        "between client and server, which the server does not see.",
        "All run on the same cores as the proxy and the load generator, one system after another: "
        "a busy machine can favour one of them by chance.",
    ]


def _chosen(calibration: Calibration) -> Section:
    best = calibration.settings.way
    return Section(
        "How SLO, rates and tuned wait were chosen",
        text=[
            f"Plain Serve answered {calibration.capacity:.0f} requests/s with "
            f"{8 * calibration.settings.num_replicas} always in flight; the SLO is three such "
            "rounds.",
            "Then several ways to batch took turns in short probes. A way's rate went up where at "
            "most 1 % of a probe's requests were bad, and down where more were. The worse ways "
            "left, round by round. The median of the last rates is what a way holds: "
            f"{calibration.held:.0f} req/s for {best.name}, which is the tuned plain Serve above.",
        ],
        table=Table(
            ("way to batch", "holds, req/s", "probes: rate and bad"),
            [
                (
                    climb.way.name,
                    number(climb.held),
                    ", ".join(f"{rate:.0f}: {percent(bad)}" for rate, bad in climb.tried),
                )
                for climb in calibration.climbs
            ],
            [i for i, climb in enumerate(calibration.climbs) if climb.way == best],
            prose=True,
        )
        if calibration.climbs
        else None,
    )


def _networks(found: Found) -> Section:
    return Section(
        "The networks",
        table=Table(
            ("network", "right on unseen writers"),
            [(name, percent(accuracy)) for name, accuracy in found.family.items()],
        ),
    )


def write(folder: Path, found: Found, next_steps: str) -> Path:
    """Write `report.html`, `demo.svg` and `demo.png`. Return the path of the page."""
    plots.save(lambda: story_figure(found), folder, "demo")
    return page(found, next_steps).write(folder / "report.html")


def figures(found: Found) -> dict[str, Any]:
    """Return the figures that `--json` prints."""
    calibration, settings = found.calibration, found.calibration.settings
    disturbed, machine = conclusions.machine(found.uses)
    return {
        "machine": dict(found.machine),
        "disturbed": disturbed,
        "disturbances": machine,
        "uses": {name: asdict(use) for name, use in found.uses.items()},
        "networks": list(settings.networks),
        "slo_ms": 1e3 * settings.slo_s,
        "server_slo_ms": settings.server_slo_ms,
        "way": asdict(settings.way),
        "capacity": calibration.capacity,
        "held": calibration.held,
        "tried": {climb.way.name: climb.tried for climb in calibration.climbs},
        "story": [asdict(stretch) for stretch in found.story],
        "seconds": found.seconds,
        "parts": {
            system.key: {part: asdict(one) for part, one in of.items()}
            for system, of in found.sums.items()
        },
        "systems": {system.key: result.summary for system, result in found.results.items()},
        "models": [asdict(model) for model in found.models],
        "following": None
        if found.following is None
        else {
            "workers": list(found.following.workers),
            "parts": {name: asdict(one) for name, one in found.following.sums.items()},
        },
        "conclusions": [
            *found.conclusions,
            *filter(None, [found.accuracy]),
            *([conclusions.two_models(found.models)] if found.models else []),
            *([conclusions.following(found.following)] if found.following else []),
        ],
    }
