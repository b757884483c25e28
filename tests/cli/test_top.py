"""`ray-slo top`: the screen, its keys, and what goes over the line."""

import asyncio
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.text import Text
from textual.geometry import Region

from ray_slo.cli import top as command
from ray_slo.cli.top_app import Top
from ray_slo.cli.top_lines import Layout
from ray_slo.serve.watch.screen import screen
from tests.serve.watch.states import EVIL, state


def with_screen(read, size=(140, 60)):
    """Runs `test(app, pilot)` once the screen has shown a reading; nothing is read on its own."""

    def decorated(test):
        def run():
            async def main():
                app = Top(read, interval_s=3600)
                async with app.run_test(size=size) as pilot:
                    await settled(app, pilot)
                    await test(app, pilot)

            asyncio.run(main())

        return run

    return decorated


async def settled(app, pilot):
    await app.workers.wait_for_complete()
    await pilot.pause()


def row(app, name, after="Models"):
    lines = app.body.texts
    return next(line for line in lines[lines.index(after) :] if line.split()[:1] == [name])


def models(app):
    lines = app.body.texts
    first = lines.index("Models") + 2
    return [line.split()[0] for line in lines[first : lines.index("", first)]]


@with_screen(lambda: {"app": state()})
async def _shows(app, pilot):
    text = "\n".join(app.body.texts)
    assert "25.0 (expected 1.0)" in row(app, "find")
    assert "8 × f for 3 of 22 ms" in text
    assert "would" not in text
    assert f"plan by auto: planned, 2 s old. Enough {EVIL}".replace("\x1b", " ") in text
    assert "\x1b" not in text + str(app.query_one("#head").content)
    assert "[red]x" in str(app.query_one("#head").content)  # text, and no markup


@with_screen(lambda: {"app": state()})
async def _keys(app, pilot):
    assert models(app) == ["find", "spell", "join", "read"]
    await pilot.press("s")  # by name
    assert models(app) == ["find", "join", "read", "spell"]
    await pilot.press("r")
    assert models(app) == ["spell", "read", "join", "find"]
    await pilot.press("s")  # by SLO, the largest first
    assert models(app)[-1] == "spell"
    await pilot.press("S", "S")
    assert models(app) == ["find", "spell", "join", "read"]
    await pilot.press("down", "enter")
    assert models(app) == ["spell"]
    assert "app: spell" in str(app.query_one("#head").content)
    await pilot.press("escape")
    assert len(models(app)) == 4
    await pilot.press("t", "s", "s")  # variants in use, by variant
    order = [line.split()[1] for line in app.body.texts if line.split()[:1] in (["find"], ["read"])]
    assert order[-3:] == ["f", "f/join", "s"]


def _two():
    return {"app": state(), "other": {"unreachable": "no frontend answered"}}


@with_screen(_two)
async def _applications(app, pilot):
    await pilot.press("a")
    assert "other" in str(app.query_one("#head").content)
    assert app.body.texts[0] == "no frontend answered"
    await pilot.press("a", "space")
    assert "paused" in str(app.query_one("#head").content)


@with_screen(lambda: {"app": state()}, size=(60, 10))
async def _small(app, pilot):
    for _ in range(3):
        await pilot.press("down")
    line = app._layout.chosen_line(app._screen())
    top = app.body.scroll_offset.y
    assert app.body.texts[line].split()[0] == "read"
    assert top <= line < top + app.body.size.height
    await pilot.press("pagedown", "right")
    await pilot.pause()
    assert app.body.scroll_offset.y > top


@with_screen(lambda: {"app": state()}, size=(80, 24))
async def _eighty_columns(app, pilot):
    keys = str(app.query_one("#keys").content).splitlines()
    assert len(keys) == app.query_one("#keys").size.height == 2
    assert all(len(line) <= 80 for line in keys)
    long = {y for y, text in enumerate(app.body.texts) if len(text) > 80}
    assert long
    for y, text in enumerate(app.body.texts[: app.body.size.height]):
        shown = app.body.render_line(y).text
        assert shown == (text[:79] + "›" if y in long else text.ljust(80))
    widest = max(map(len, app.body.texts))
    app.body.scroll_to(x=widest, animate=False)
    await pilot.pause()
    assert "›" not in "".join(app.body.render_line(y).text for y in range(app.body.size.height))


@pytest.mark.slow
@pytest.mark.parametrize("test", [_shows, _keys, _applications, _small, _eighty_columns])
def test_screen(test):
    test()


def test_what_cannot_be_read_is_said_and_the_last_reading_stays():
    answers = iter([state(), ValueError("no cluster"), RuntimeError("gone"), state()])

    def read():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return {"app": answer}

    @with_screen(read)
    async def test(app, pilot):
        for said in ("no answer: no cluster", "no answer: RuntimeError: gone"):
            app._look()
            await settled(app, pilot)
            head = str(app.query_one("#head").content)
            assert said in head
            assert "what is shown is" in head
            assert models(app)[0] == "find"
        app._look()
        await settled(app, pilot)
        assert "no answer" not in str(app.query_one("#head").content)

    test()


def test_the_mark_of_a_line_that_got_too_long_is_drawn():
    """Although only characters right of the edge changed."""

    @with_screen(lambda: {"app": state()}, size=(80, 60))
    async def test(app, pilot):
        app.body.show([Text("x" * 80)])
        drawn = []
        app.body.refresh = lambda *regions, **_: drawn.extend(regions)
        app.body.show([Text("x" * 80 + "more")])
        assert drawn == [Region(79, 0, 5, 1)]

    test()


def test_only_what_changed_is_drawn_again():
    states = [state(), state(), state(queued={"find": 9, "spell": 0, "join": 0})]

    @with_screen(lambda: {"app": states[0]})
    async def test(app, pilot):
        drawn = []
        app.body.refresh = lambda *regions, **_: drawn.extend(regions)
        for expected in (0, 1):
            states.pop(0)
            app._look()
            await settled(app, pilot)
            assert len(drawn) == expected
        line = app.body.texts.index(row(app, "find"))
        (region,) = drawn
        assert region == Region(region.x, line, 1, 1)
        assert row(app, "find")[region.x] == "9"

    test()


def test_columns_stay_where_they_are_when_numbers_get_shorter():
    layout = Layout()
    long = layout.lines(screen("app", state(goodput={"find": 123456.0})))
    short = layout.lines(screen("app", state(goodput={"find": 1.0})))
    assert long[2].plain.index("p50") == short[2].plain.index("p50")


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/app/-/status"
        refused = self.path.startswith("/refused/")
        self.send_response(200 if found else 400 if refused else 404)
        self.end_headers()
        said = {"message": "set status_hosts: ['here']"} if refused else {}
        self.wfile.write(json.dumps(state() if found else said).encode())

    def log_message(self, *args):
        pass


def test_once_over_http(run):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        code, out, _ = run("top", "--once", "--url", f"{url}/app/", "mine")
        assert code == 0
        assert out.startswith("mine  ")
        assert "find" in out
        assert "\x1b" not in out
        code, _, err = run("top", "--once", "--url", url)
        assert code == 2
        assert f"no status at {url}/-/status" in err
        assert "status_page: true" in err
        code, _, err = run("top", "--once", "--url", f"{url}/refused")
        assert code == 2
        assert "set status_hosts: ['here']" in err and "status_page" not in err
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_without_a_terminal_it_says_what_to_do(run, monkeypatch):
    monkeypatch.setattr(command.sys, "stdin", io.StringIO())
    code, _, err = run("top")
    assert code == 2
    assert "--once" in err
