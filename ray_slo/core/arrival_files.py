"""Read files of arrivals as people have them: request times, or requests by interval.

`read_arrivals` is the only reader. It takes text with or without a head; columns are found by name,
separators and byte-order marks are recognised. It says in words what it read and what it guessed.
What does not fit is refused with the line.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ray_slo.core.names import listed
from ray_slo.core.text import quoted

Floats = NDArray[np.float64]
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}([.,]\d{3})+", re.ASCII)  # 1,234 may be 1234
_DATE = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?)?"
    r" ?(Z|UTC|([+-])(\d\d):?(\d\d)?)?",
    re.ASCII,
)
_SPACED_DATE = re.compile(r"(\d{4}[-/]\d\d[-/]\d\d) (\d\d:)", re.ASCII)
_EPOCHS = ((1e17, 1e-9, "ns"), (1e14, 1e-6, "µs"), (1e11, 1e-3, "ms"))  # from these values on
_LARGEST = 1e19  # of a number; nanoseconds since 1970 are below it
_ABSOLUTE_S = 1e8  # larger times count from 1970

# Words in the names of columns.
_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "µs", "micros", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nanos", "nanoseconds"), 1e-9),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
_REQUESTS = {"request", "requests", "req", "reqs", "query", "queries", "call", "calls"}
_REQUESTS |= {"invocation", "invocations", "arrivals", "hits"}
_COUNTS = {"count", "counts", "number", "num", "of"}
_RATES = {"rate": 1.0, "rps": 1.0, "qps": 1.0, "tps": 1.0, "rpm": 60.0, "qpm": 60.0}
_TIMES = {"time", "timestamp", "ts", "datetime", "date", "arrival", "arrived", "start", "started"}
_TIMES |= {"intended", "sent", "received", "created", "at", "t", "epoch", "unix", "offset"}
_BEST_TIMES = {"arrival", "arrived", "intended"}  # where there are others beside them
_AZURE = {"HashOwner", "HashApp", "HashFunction"}  # its Functions trace counts by minute
_SEPARATORS = ("\t", ";", ",")
_SAY = "say it in seconds (--interval-s, or interval_s in a document)"
_WRITE = (
    "name the columns: 'timestamp' (of a request or an interval), 'rps' (requests per second) or "
    "'requests' (requests in an interval)"
)


@dataclass(frozen=True)
class ArrivalFile:
    """What a file says. It has either `times_s`, or `rates` and `interval_s`.

    Attributes:
        times_s: time of each request, seconds, ascending, shape (n,). They count from the first
            one if the file has dates or times since 1970.
        rates: requests per second by interval, shape (n,).
        interval_s: length of an interval, seconds.
        said: what was read, and what was guessed, in words.
    """

    said: str
    times_s: Floats | None = None
    rates: Floats | None = None
    interval_s: float = 0.0


class _Wrong(ValueError):
    """What is wrong in a line."""

    def __init__(self, line: int, said: str) -> None:
        super().__init__(f"line {line}: {said}")


@dataclass(frozen=True)
class _Column:
    """A column, and what its name says.

    Attributes:
        unit: seconds of a unit of time (0: not said); for a rate, seconds per unit.
    """

    index: int
    name: str
    role: Literal["time", "rate", "count"]
    unit: float


def read_arrivals(
    path: str | Path,
    *,
    interval_s: float | None = None,
    bare: Literal["rates", "times"] = "rates",
) -> ArrivalFile:
    """Read a file of arrivals.

    Args:
        interval_s: length of an interval, seconds, where the file does not say it.
        bare: what a single column without a head contains.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not fit; with the file, the line, and what to write.
    """
    data = Path(path).read_bytes()
    try:
        return _Table(_text(data), bare).read(interval_s)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from None


def _text(data: bytes) -> str:
    encoding = next((e for mark, e in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _Wrong(line, "it is not text; save the file as UTF-8, not compressed") from None
    if "\0" in text:
        raise _Wrong(text[: text.index("\0")].count("\n") + 1, "it is not text")
    return text


class _Table:
    """The lines of a file, and its columns."""

    def __init__(self, text: str, bare: Literal["rates", "times"]) -> None:
        self._text, self._bare = text, bare
        self._notes: list[str] = []  # what was guessed
        self._decimal_comma = False
        self._separator = _separator(text)
        first = next(self._rows(), None)
        if first is None:
            raise ValueError(f"it has no lines; {_WRITE}")
        self._head, cells = first
        self._width = len(cells)
        self._names: list[str] | None = cells
        if all(map(_is_value, cells)):
            self._names, self._head = self._commented_head(), 0

    def read(self, interval_s: float | None) -> ArrivalFile:
        if first := self._first_of_many():
            return self._added_up(first, interval_s)
        columns = self._unnamed() if self._names is None else self._named()
        rows = list(self._body())
        if not rows:
            raise ValueError("it has a head, and no lines below it")
        lines = [line for line, _ in rows]
        cells = [[row[c.index] for _, row in rows] for c in columns]
        self._check_marks(lines, cells)
        values = np.empty(0)
        if (value := columns[-1]).role != "time":
            values = np.array([self._number(c, n) for c, n in zip(cells[-1], lines, strict=True)])
        if columns[0].role == "time":
            times = self._times(columns[0], cells[0], lines)
            order = self._order(times, lines)
            times, lines = times[order], [lines[i] for i in order]
            if value.role == "time":
                return self._requests(times, value)
            values = values[order]
            interval_s = _spacing(times, lines, interval_s)
        elif interval_s is None and value.role == "count":
            raise _Wrong(
                self._head,
                f"{value.name!r} counts the requests of an interval, and nothing says how long "
                f"that is; add a column 'timestamp', or {_SAY}",
            )
        elif interval_s is None:
            interval_s = 1.0
            self._notes.append("no times in it, so a line is taken as 1 s")
        return self._by_interval(
            values / (interval_s if value.role == "count" else value.unit), interval_s
        )

    # Lines

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Number and cells of each line that is no comment and not blank."""
        lines = (
            "\n" if line.lstrip().startswith(("#", "sep=")) else line
            for line in io.StringIO(self._text, newline="")
        )
        if self._separator is None:
            for number, line in enumerate(lines, start=1):
                if cells := _SPACED_DATE.sub(r"\1T\2", line).split():
                    yield number, cells
            return
        reader = csv.reader(lines, delimiter=self._separator, skipinitialspace=True)
        for row in reader:
            if any(cells := [cell.strip() for cell in row]):
                yield reader.line_num, cells

    def _body(self) -> Iterator[tuple[int, list[str]]]:
        """The lines below the head, all of one width."""
        for line, cells in self._rows():
            if line == self._head:
                continue
            if len(cells) != self._width:
                wanted = f"{len(cells)} values where the first line has {self._width}"
                raise _Wrong(line, f"it has {wanted}")
            yield line, cells

    def _commented_head(self) -> list[str] | None:
        """The names in the last comment above the first line, if they are names of its columns."""
        found = None
        for line in io.StringIO(self._text):
            if line.lstrip().startswith("#"):
                names = [n.strip() for n in line.strip().lstrip("# ").split(self._separator)]
                found = names if len(names) == self._width and any(map(_role, names)) else None
            elif line.strip():
                break
        return found

    # Columns

    def _named(self) -> list[_Column]:
        """The columns that the head names: a time, a rate or count, or both in this order."""
        names = self._names or []
        found = [_Column(i, n, *role) for i, n in enumerate(names) if (role := _role(n))]
        times = [c for c in found if c.role == "time"]
        if len(times) > 1:
            times = [c for c in times if _BEST_TIMES & set(_words(c.name))] or times
        values = [c for c in found if c.role != "time"]
        for same, what in ((times, "times"), (values, "rates or counts")):
            if len(same) > 1:
                both = " and ".join(quoted(c.name) for c in same)
                raise _Wrong(self._head, f"the columns {both} both have {what}; leave one of them")
        if not found:
            shown = listed([quoted(n) for n in names])
            raise _Wrong(self._head, f"none of its columns ({shown}) is known; {_WRITE}")
        if not times and len(names) > 1:
            raise _Wrong(
                self._head,
                f"there are columns beside {quoted(values[0].name)}, and none of them is a time; "
                "name the time 'timestamp', or leave only the one column",
            )
        columns = [*times, *values]
        self._notes.append(f"from {' and '.join(quoted(c.name) for c in columns)}")
        return columns

    def _unnamed(self) -> list[_Column]:
        """The only column of a file without a head."""
        line, cells = next(self._body())
        if self._width > 1:
            comma = " (decimal commas need another separator)" * (self._separator == ",")
            raise _Wrong(
                line,
                f"it has {len(cells)} values without names, and which of them are rates is "
                f"unclear{comma}; write a head above it: {_WRITE}",
            )
        is_time = self._bare == "times" or _DATE.fullmatch(cells[0])
        return [_Column(0, "1", "time", 0.0) if is_time else _Column(0, "1", "rate", 1.0)]

    def _first_of_many(self) -> int | None:
        """Index of the first column of a file that has a column for each interval: 1, 2, 3, …"""
        names = self._names or []
        first = next((i for i, name in enumerate(names) if name in ("0", "1")), len(names))
        numbered = (
            [str(int(names[first]) + i) for i in range(len(names) - first)] if names[first:] else []
        )
        return first if len(numbered) > 1 and names[first:] == numbered else None

    def _added_up(self, first: int, interval_s: float | None) -> ArrivalFile:
        """A file with a column of counts for each interval, such as the Azure Functions trace,
        which has a line for each function; all lines together."""
        names = self._names or []
        known_s = 60.0 if _AZURE & set(names) else None
        if known_s is None and interval_s is None:
            raise _Wrong(
                self._head,
                f"its columns {names[first]} to {names[-1]} are intervals, and nothing says how "
                f"long they are; {_SAY}",
            )
        _agree(known_s, interval_s, f"the columns {names[first]} to {names[-1]} are minutes")
        total, count = np.zeros(len(names) - first), 0
        for line, cells in self._body():
            try:  # quickly: a day of the trace has 60 million numbers
                row = np.array(list(map(int, cells[first:])), dtype=float)
            except ValueError:
                row = np.array([-1.0])
            if row.min() < 0:
                row = np.array([self._number(cell, line) for cell in cells[first:]])
            total += row
            count += 1
        interval_s = known_s or interval_s or 1.0
        self._notes.append(f"{count:,} lines added up")
        return self._by_interval(total / interval_s, interval_s)

    # Values

    def _check_marks(self, lines: Sequence[int], columns: Sequence[Sequence[str]]) -> None:
        """Decide whether numbers have decimal commas, and refuse what may be thousands."""
        marked: dict[str, list[tuple[int, str]]] = {",": [], ".": []}
        for column in columns:
            for line, cell in zip(lines, column, strict=True):
                for mark, found in marked.items():
                    if mark in cell and not _DATE.fullmatch(cell):
                        found.append((line, cell))
        commas, points = marked[","], marked["."]
        for found in (commas, points if self._separator == ";" else []):
            if found and all(_THOUSANDS.fullmatch(cell) for _, cell in found):
                line, cell = found[0]
                whole, mark = re.sub("[.,]", "", cell), "".join(re.findall("[.,]", cell))
                or_less = f" or {cell.replace(',', '.')}0" * (len(mark) == 1)
                raise _Wrong(line, f"{cell!r} may have a mark of thousands; write {whole}{or_less}")
        if commas and points:
            raise _Wrong(
                commas[0][0],
                f"{quoted(commas[0][1])} has a comma, and {quoted(points[0][1])} in line "
                f"{points[0][0]} a point; write decimal points, and no marks of thousands",
            )
        if commas:
            self._decimal_comma = True
            self._notes.append("with decimal commas")

    def _plain(self, cell: str) -> float:
        """A number from 0 to `_LARGEST`.

        Raises:
            ValueError: it is none.
        """
        plain = cell.replace(",", ".") if self._decimal_comma else cell
        if not _NUMBER.fullmatch(plain) or not 0 <= (value := float(plain)) <= _LARGEST:
            raise ValueError(cell)
        return value

    def _number(self, cell: str, line: int) -> float:
        """A rate or count."""
        try:
            return self._plain(cell)
        except ValueError:
            raise _Wrong(
                line,
                "a rate or a number of requests must be a number of at least 0 and at most "
                f"{_LARGEST:g}, got {quoted(cell)}"
                f"{'' if self._names else f'; if the file has other columns, {_WRITE}'}",
            ) from None

    def _times(self, column: _Column, cells: Sequence[str], lines: Sequence[int]) -> Floats:
        """Times in seconds; from the first one if they are dates or count from 1970."""
        dated = _DATE.fullmatch(cells[0]) is not None
        found = np.empty(len(cells), dtype=np.int64 if dated else float)
        for i, cell in enumerate(cells):
            try:
                found[i] = _date_ns(cell) if dated else self._plain(cell)
            except (ValueError, OverflowError):  # 64 bits have nanoseconds until the year 2262
                raise _Wrong(
                    lines[i],
                    f"{quoted(cell)} is no time; write seconds, or dates like "
                    "2023-11-16 18:17:03.979",
                ) from None
        if dated:
            return np.asarray((found - found.min()) / 1e9)
        last, unit = float(found.max()), column.unit
        if not unit:
            _, unit, name = next((e for e in _EPOCHS if last >= e[0]), (0.0, 1.0, "s"))
            self._notes.append(f"times taken as {name}")
        return (found - found.min() if last * unit >= _ABSOLUTE_S else found) * unit

    def _order(self, times: Floats, lines: Sequence[int]) -> NDArray[np.int64]:
        """Indices of the lines by time."""
        back = np.flatnonzero(np.diff(times) < 0)
        if len(back) and self._names is None:  # without a head, these may be gaps, not times
            raise _Wrong(lines[back[0] + 1], "its time is before that of the line above")
        if len(back):
            self._notes.append("sorted by time")
        return np.argsort(times, kind="stable")

    # Results

    def _requests(self, times: Floats, column: _Column) -> ArrivalFile:
        steps = np.diff(times)
        if self._width > 1 and len(steps) > 1 and np.ptp(steps) <= 0.1 * np.median(steps):
            raise _Wrong(
                self._head,
                f"the lines are {steps[0]:g} s apart, so they may be intervals; {_WRITE}, or leave "
                f"only {quoted(column.name)} if a line is a request",
            )
        length = float(times[-1] - times[0])
        mean = f", {len(times) / length:.3g} requests/s on average" if length else ""
        said = f"{len(times):,} requests in {length:,.6g} s{mean}"
        return ArrivalFile(self._said(said), times_s=times)

    def _by_interval(self, rates: Floats, interval_s: float) -> ArrivalFile:
        if not rates.any():
            raise ValueError("it has no requests: every rate is 0")
        said = (
            f"{len(rates):,} intervals of {interval_s:g} s, {rates.mean():.3g} requests/s on "
            "average"
        )
        return ArrivalFile(self._said(said), rates=rates, interval_s=interval_s)

    def _said(self, what: str) -> str:
        return f"{what} ({'; '.join(self._notes)})" if self._notes else what


def _separator(text: str) -> str | None:
    """The separator of the columns; None for whitespace, or if there is only one column."""
    lines = (line for line in io.StringIO(text) if line.strip() and line.lstrip()[0] != "#")
    sample = [line for line in islice(lines, 20) if not line.startswith("sep=")]
    for separator in _SEPARATORS:
        widths = {len(row) for row in csv.reader(sample, delimiter=separator)}
        if len(widths) == 1 and widths.pop() > 1:
            return separator
    return next((s for s in _SEPARATORS if sample and s in sample[0]), None)


def _words(name: str) -> list[str]:
    """The words in the name of a column: "startTime [ms]" has start, time and ms."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("/", " per ")
    return re.findall(r"[^\W_]+", split.lower())


def _role(name: str) -> tuple[Literal["time", "rate", "count"], float] | None:
    """What the name of a column says: its role and its unit, as in `_Column`."""
    words = _words(name)
    unit = _UNITS.get(words[-1], 0.0) if words else 0.0
    *rest, last = words or [""]
    if unit and rest[-1:] == ["per"] and set(rest[:-1]) <= _REQUESTS | _COUNTS | _RATES.keys():
        return "rate", unit
    if last in _RATES and set(rest) <= _REQUESTS | _COUNTS | _TIMES:
        return "rate", _RATES[last]
    if unit and rest and set(rest) <= _REQUESTS | {"rate"}:  # requests_s, rate_min
        return "rate", unit
    named = set(rest if unit else words)
    if named and named <= _REQUESTS | _COUNTS:
        return None if unit or named <= {"of", "num"} else ("count", 1.0)
    if (named & _TIMES and named <= _REQUESTS | _TIMES | {"utc"}) or (unit and not named):
        return "time", unit
    return None


def _is_value(cell: str) -> bool:
    """Whether a cell is a number or a date, so that its line is no head."""
    number = cell.replace(",", ".")
    return bool(_NUMBER.fullmatch(number) or _THOUSANDS.fullmatch(cell) or _DATE.fullmatch(cell))


def _date_ns(cell: str) -> int:
    """A date in nanoseconds since 1970.

    Raises:
        ValueError: it is none.
    """
    if (found := _DATE.fullmatch(cell)) is None:
        raise ValueError(cell)
    year, month, day, clock, fraction, _, sign, hours, minutes = found.groups()
    shown = f"{year}-{month}-{day}T{clock or '00:00'}"
    seconds = int(np.datetime64(shown, "s").astype(np.int64))
    if sign:
        seconds -= int(f"{sign}1") * (3600 * int(hours) + 60 * int(minutes or 0))
    return seconds * 1_000_000_000 + int(f"{fraction or 0:0<9}"[:9])


def _spacing(times: Floats, lines: Sequence[int], given_s: float | None) -> float:
    """The length of intervals that begin at these times, seconds."""
    if len(times) == 1:
        if given_s is None:
            raise _Wrong(lines[0], f"one time does not say how long its interval is; {_SAY}")
        return given_s
    steps = np.diff(times)
    usual = float(np.quantile(steps, 0.5, method="lower"))
    uneven = np.flatnonzero(np.abs(steps - usual) > 0.1 * usual) if usual > 0 else np.arange(1)
    if len(uneven):
        raise _Wrong(
            lines[uneven[0] + 1],
            f"it is {steps[uneven[0]]:g} s after the one before it, and others are {usual:g} s "
            "apart; write one line for each interval, with 0 where no request came, or only the "
            "column of times if a line is a request",
        )
    interval_s = float(f"{(times[-1] - times[0]) / len(steps):.9g}")
    _agree(interval_s, given_s, f"its times are {interval_s:g} s apart")
    return interval_s


def _agree(known_s: float | None, given_s: float | None, why: str) -> None:
    if known_s is not None and given_s is not None and abs(given_s - known_s) > 0.01 * known_s:
        raise ValueError(f"{why}, got an interval of {given_s:g} s; leave the interval out")
