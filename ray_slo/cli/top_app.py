"""The live screen of `ray-slo top`, in a terminal of any size and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.segment import Segment
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from ray_slo.cli.top_lines import Layout
from ray_slo.serve.watch.screen import Screen, screen

Read = Callable[[], Mapping[str, Mapping[str, Any]]]

# Each line fits a terminal of 80 columns.
_KEYS = (
    "q quit  ↑↓ choose  enter open  esc back  ←→ PgUp PgDn scroll  space pause",
    "s/S sort by next/previous column  r reverse  t next table  a next application",
)
_MORE = "›"  # at the right edge, where a line continues


class Lines(ScrollView):
    """Lines of text. Only changed parts of lines are sent to the terminal."""

    can_focus = True
    DEFAULT_CSS = "Lines { scrollbar-size: 0 0; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._strips: list[Strip] = []
        self.texts: list[str] = []

    def show(self, lines: list[Text]) -> None:
        """Show these lines instead of the present ones."""
        console = self.app.console
        strips = [
            Strip([Segment(line.plain, console.get_style(line.style or "none"))]) for line in lines
        ]
        before, self._strips = self._strips, strips
        self.texts = [line.plain for line in lines]
        width = max((strip.cell_length for strip in strips), default=0)
        size = Size(width, len(strips))
        self.virtual_size = size
        for y in range(max(len(before), len(strips))):
            old = before[y] if y < len(before) else Strip.blank(0)
            new = strips[y] if y < len(strips) else Strip.blank(0)
            if (changed := _changed(old, new)) is not None:
                start, end = changed
                edge = self.scroll_offset.x + self.size.width
                if end > edge:
                    start = min(start, max(edge - 1, 0))  # the mark there may change
                self.refresh(Region(start, y, end - start, 1).translate(-self.scroll_offset))

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        width = self.size.width
        at = top + y
        if at >= len(self._strips):
            return Strip.blank(width, self.rich_style)
        line = self._strips[at]
        strip = line.crop(left, left + width)
        if line.cell_length > left + width > 0:
            strip = Strip.join([strip.crop(0, width - 1), Strip([Segment(_MORE)])])
        return strip.extend_cell_length(width).apply_style(self.rich_style)


def _changed(old: Strip, new: Strip) -> tuple[int, int] | None:
    """Return the first column in which two lines differ, and the end of the difference."""
    if old == new:
        return None
    a, b = old.text, new.text
    length = max(old.cell_length, new.cell_length)
    same_style = [s.style for s in old] == [s.style for s in new]
    if not same_style or len(a) != old.cell_length or len(b) != new.cell_length:
        return 0, length  # with wide characters, columns are not indices of the text
    a, b = a.ljust(length), b.ljust(length)
    different = [i for i in range(length) if a[i] != b[i]]
    return (different[0], different[-1] + 1) if different else None


class Top(App[None]):
    """Shows an application live.

    Args:
        read: reads the status by application. It blocks. The user sees the text of its ValueError.
        interval_s: time between two readings, seconds.
    """

    TITLE = "ray-slo top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; max-height: 4; }
    #keys { height: 2; text-style: dim; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", priority=True),
        Binding("up", "choose(-1)", priority=True),
        Binding("down", "choose(1)", priority=True),
        Binding("enter", "open", priority=True),
        Binding("escape", "back", priority=True),
        Binding("s", "sort(1)"),
        Binding("S", "sort(-1)"),
        Binding("r", "reverse"),
        Binding("t", "next_section"),
        Binding("a", "next_application"),
        Binding("space", "pause"),
    ]

    def __init__(self, read: Read, interval_s: float) -> None:
        super().__init__(ansi_color=True)
        self._read, self._interval_s = read, interval_s
        self._layout = Layout()
        self._states: Mapping[str, Mapping[str, Any]] = {}
        self._application = ""
        self._opened: str | None = None
        self._paused = False
        self._error = ""
        self._read_at: float | None = None
        self.body = Lines()

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield self.body
        yield Static("\n".join(_KEYS), id="keys", markup=False)

    def on_mount(self) -> None:
        self.body.focus()
        self._look()
        self.set_interval(self._interval_s, self._look)

    # -- readings --------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._paused and not any(not w.is_finished for w in self.workers):
            self.run_worker(self._ask, thread=True, exit_on_error=False)
        self._draw()

    def _ask(self) -> None:
        """Read the status. This runs in a thread, because a cluster may take seconds to answer."""
        try:
            states, error = self._read(), ""
        except Exception as raised:
            states, error = self._states, f"{type(raised).__name__}: {raised}"
            if isinstance(raised, ValueError):
                error = str(raised)
        self.call_from_thread(self._heard, states, error)

    def _heard(self, states: Mapping[str, Mapping[str, Any]], error: str) -> None:
        self._states, self._error = states, error
        if not error:
            self._read_at = time.monotonic()
        if self._application not in states and states:
            self._application, self._opened = next(iter(states)), None
        self._draw()

    # -- keys ------------------------------------------------------------------------------

    def action_choose(self, step: int) -> None:
        self._layout.choose(self._screen(), step)
        self._draw()
        line = self._layout.chosen_line(self._screen())
        if line is not None:
            top, height = self.body.scroll_offset.y, self.body.size.height
            if not top <= line < top + height:
                self.body.scroll_to(y=max(line - height // 2, 0), animate=False)

    def action_open(self) -> None:
        if self._layout.chosen is not None:
            self._opened = self._layout.chosen
            self.body.scroll_to(0, 0, animate=False)
        self._draw()

    def action_back(self) -> None:
        self._opened = None
        self._draw()

    def action_sort(self, step: int) -> None:
        for section in self._screen().sections:
            if section.key == self._layout.section:
                self._layout.sorting().next(section.columns, step)
        self._draw()

    def action_reverse(self) -> None:
        sorting = self._layout.sorting()
        sorting.down = not sorting.down
        self._draw()

    def action_next_section(self) -> None:
        self._layout.next_section(self._screen())
        self._draw()

    def action_next_application(self) -> None:
        names = list(self._states)
        if names:
            self._application = names[(names.index(self._application) + 1) % len(names)]
            self._opened = None
        self._draw()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw()

    # -- what is shown ---------------------------------------------------------------------

    def _screen(self) -> Screen:
        state = self._states.get(self._application)
        if state is None:
            return Screen("", "")
        return screen(self._application, state, self._opened)

    def _draw(self) -> None:
        found = self._screen()
        head = self.query_one("#head", Static)
        said = self._head(found)
        if said.plain != str(head.content):
            head.update(said)
        self.body.show(self._layout.lines(found))

    def _head(self, found: Screen) -> Text:
        name = found.application + f": {self._opened}" * (self._opened is not None)
        number = f" ({len(self._states)} applications)" * (len(self._states) > 1)
        said: list[str | tuple[str, str]] = [
            ("asking …" if not name and not self._error else name, "bold"),
            number,
        ]
        said.append(f"  {found.head}")
        if self._paused:
            said.append(("  paused", "yellow"))
        if self._error:
            old = ""
            if self._read_at is not None:
                old = f"; what is shown is {time.monotonic() - self._read_at:.0f} s old"
            said.append((f"  no answer: {self._error}{old}", "red"))
        return Text.assemble(*said)
