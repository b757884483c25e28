"""The status page: the frontend's answer, and how a browser shows it."""

import asyncio
import json
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.deadlines import CAPACITY_HEADER, NO_PLACE, WHOLE_HEADER
from ray_slo.serve.watch.page import StatusPage
from tests.cli.browser import CHROMIUM, chromium
from tests.serve.fakes import Steps
from tests.serve.loops import in_loop
from tests.serve.watch.states import EVIL, state


async def ask(front, path, method="GET", query=b"", headers=()):
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": method, "path": f"/app{path}", "root_path": "/app"}
    return await front(Request({**scope, "query_string": query, "headers": headers}, receive))


@in_loop
async def test_it_is_off_unless_the_config_says_so(app):
    async with app(Steps, policy="eager") as (front, _):
        for path in ("/-/top", "/-/screen", "/-/status"):
            assert (await ask(front, path)).status_code == 404
    with pytest.raises(ValueError, match="status_page: must be true or false, got"):
        parse_spec({"models": {"m": {"callable": Steps}}, "status_page": "maybe"})


@in_loop
async def test_it_shows_the_status_that_operators_ask_for(app):
    async with app(Steps, policy="eager", status_page=True) as (front, _):
        await front(["a", 1])
        page = await ask(front, "/-/top")
        assert page.media_type == "text/html"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        nonce = page.headers["content-security-policy"].partition("'nonce-")[2].partition("'")[0]
        assert page.body.decode().count(nonce) == 2  # style and script
        again = await ask(front, "/-/top")
        assert nonce not in again.body.decode()
        told = json.loads((await ask(front, "/-/status")).body)
        known = await front.slo_status()
        assert told.keys() == known.keys()
        assert told["models"] == known["models"]
        shown = json.loads((await ask(front, "/-/screen")).body)
        assert shown["sections"][0]["rows"][0]["cells"][0] == "m"
        none = json.loads((await ask(front, "/-/screen", query=b"model=gone")).body)
        assert "models" not in {s["key"] for s in none["sections"]}
        # Nothing else is behind it, and it changes nothing.
        for path, method, status in (
            ("/-/other", "GET", 404),
            ("/-", "GET", 404),
            ("/-/top", "POST", 404),
            ("/", "GET", 200),
        ):
            assert (await ask(front, path, method)).status_code == status
        assert (await ask(front, "/-/top", "HEAD")).status_code == 200


@in_loop
async def test_our_door_learns_nothing_from_it(app):
    """Or it would refuse the page under overload, when people need it."""
    async with app(Steps, policy="eager", status_page=True) as (front, _):
        whole = [(WHOLE_HEADER.encode(), b"1")]
        assert ";" in (await ask(front, "/", headers=whole)).headers[CAPACITY_HEADER]
        said = (await ask(front, "/-/status", headers=whole)).headers[CAPACITY_HEADER]
        assert said == NO_PLACE


@in_loop
async def test_many_who_look_cost_as_much_as_one():
    asked = []

    async def status():
        asked.append(1)
        await asyncio.sleep(0.01)
        return state()

    page = StatusPage("app", status)
    request = Request({"type": "http", "method": "GET", "headers": [], "query_string": b""})
    answers = await asyncio.gather(*(page.answer(request, "-/status") for _ in range(20)))
    assert len({answer.body for answer in answers}) == 1
    assert len(asked) == 1


class Served:
    """A page on loopback, whose status is `now`."""

    def __init__(self):
        self.now = state()

        async def status():
            return self.now

        page = StatusPage(f"app {EVIL}", status)

        async def answer(request):
            return await page.answer(request, request.url.path.strip("/"))

        routes = [Route("/-/{rest}", answer)]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        (socket,) = self._server.servers[0].sockets
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}/-/top"
        return self

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()


async def until(tab, code):
    for _ in range(600):
        if await tab.evaluate(code):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never true: {code}; {tab.problems}")


FIRST_CELLS = (
    "[...document.querySelectorAll('[data-key={key}] tbody tr')].map(r => r.cells[{i}].textContent)"
)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium)")
def test_in_a_browser(tmp_path):
    async def main():
        with Served() as served:
            async with chromium(tmp_path) as new_tab:
                tab = await new_tab()
                await tab.open(served.url, width=1280)
                await until(tab, "document.querySelectorAll('main tbody tr').length > 3")
                models = FIRST_CELLS.format(key="models", i=0)
                assert await tab.evaluate(models) == ["find", "spell", "join", "read"]
                # What users named is text.
                assert await tab.evaluate("document.querySelectorAll('b').length") == 0
                said = await tab.evaluate("document.body.innerText")
                assert EVIL.replace("\x1b", " ") in said
                # Sort by what is queued, the largest first; then the other way round.
                await tab.evaluate("document.querySelector('[data-sort=\"models 7\"]').click()")
                assert (await tab.evaluate(models))[0] == "find"
                await tab.evaluate("document.querySelector('[data-sort=\"models 7\"]').click()")
                assert (await tab.evaluate(models))[-1] == "find"
                # Open one model, and go back.
                await tab.evaluate("document.querySelector('[data-open=spell]').click()")
                await until(tab, f"{models}.join() === 'spell'")
                name = await tab.evaluate("document.getElementById('name').textContent")
                assert name.endswith(": spell")
                await tab.evaluate("document.getElementById('back').click()")
                await until(tab, f"{models}.length === 4")
                # It asks again by itself.
                served.now = state(queued={"find": 77, "spell": 0, "join": 0})
                await until(tab, FIRST_CELLS.format(key="models", i=7) + ".includes('77')")
                assert tab.problems == []
                here = served.url.removesuffix("-/top")
                assert all(url.startswith((here, "data:")) for url in tab.fetched)

    asyncio.run(main())
