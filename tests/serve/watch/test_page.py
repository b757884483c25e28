"""The status page: the frontend's answer, and how a browser shows it."""

import asyncio
import json
import socket
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

HERE = (b"host", b"localhost:8000")


async def ask(front, path, method="GET", query=b"", headers=(HERE,)):
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
        whole = (WHOLE_HEADER.encode(), b"1")
        assert ";" in (await ask(front, "/", headers=[whole, HERE])).headers[CAPACITY_HEADER]
        for host, status in ((HERE, 200), ((b"host", b"evil.example"), 400)):
            answer = await ask(front, "/-/status", headers=[whole, host])
            assert answer.status_code == status
            assert answer.headers[CAPACITY_HEADER] == NO_PLACE


@in_loop
async def test_many_who_look_cost_as_much_as_one():
    asked = []

    async def status():
        asked.append(1)
        await asyncio.sleep(0.01)
        return state()

    page = StatusPage("app", status)
    request = Request({"type": "http", "method": "GET", "headers": [HERE], "query_string": b""})
    answers = await asyncio.gather(*(page.answer(request, "-/status") for _ in range(20)))
    assert len({answer.body for answer in answers}) == 1
    assert len(asked) == 1


def answered(page, headers, path="-/status"):
    """The answer to a GET request with these headers."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return asyncio.run(
        page.answer(
            Request({"type": "http", "method": "GET", "headers": raw, "query_string": b""}), path
        )
    )


def page_of(*hosts):
    async def status():
        return state()

    return StatusPage("app", status, hosts)


SERVED = (
    *(
        "localhost",
        "LOCALHOST:8000",
        "app.localhost:80",
        "localhost.",
        "127.0.0.1:8000",
        "127.9.9.9",
    ),
    *("[::1]:8000", "[::1]", "10.1.2.3:8000", "[fd00::7]:80", socket.gethostname()),
)
NOT_SERVED = (
    *(
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.nip.io",
    ),
    *(
        "",
        ":8000",
        "[::1].evil.example",
        "local host",
        "localhost@evil.example",
        "127.0.0.1x",
        "*",
        "a" * 5000,
    ),
)


@pytest.mark.parametrize("path", ["-/top", "-/screen", "-/status"])
def test_it_answers_to_the_hosts_that_it_is_served_on(path):
    page = page_of()
    for host in SERVED:
        assert answered(page, [("host", host)], path).status_code == 200, host
    for hosts in (*([host] for host in NOT_SERVED), [], ["localhost", "evil.example"]):
        answer = answered(page, [("host", host) for host in hosts], path)
        assert answer.status_code == 400, hosts
        said = json.loads(answer.body)
        assert (said["error"], said["field"]) == ("BadHeader", "host")
        assert "status_hosts" in said["message"] and len(said["message"]) < 500
    said = json.loads(answered(page, [("host", "slo.corp:80")], path).body)["message"]
    assert "set status_hosts: ['slo.corp']" in said


def test_further_hosts_are_a_setting():
    page = page_of("Slo.example.com", "*.corp.example")
    for host, status in (
        ("slo.example.com:8000", 200),
        ("SLO.EXAMPLE.COM.", 200),
        ("x.slo.example.com", 400),
        ("a.corp.example", 200),
        ("a.b.corp.example", 200),
        ("corp.example", 400),
        ("acorp.example", 400),
    ):
        assert answered(page, [("host", host)]).status_code == status, host
    assert answered(page_of("*"), [("host", "any.example")]).status_code == 200
    models = {"m": {"callable": Steps, "latency_slo_ms": 100}}
    for wrong in (
        "http://a.example",
        "a.example:80",
        "a/b",
        "",
        "*a.example",
        "a.*",
        "a..b",
        "[::1]",
    ):
        with pytest.raises(ValueError, match=r"status_hosts\.1: must be the name of a host"):
            parse_spec({"models": models, "status_hosts": ["a", wrong]})
    made = parse_spec({"models": models, "status_hosts": ["*.a.example", "*"]})
    assert made.status_hosts == ["*.a.example", "*"]


OPENED = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://slo.example:8000"}, 200),
        ({"origin": "https://SLO.example:8000"}, 200),  # a proxy in front has the certificate
        ({"origin": "http://slo.example"}, 400),
        ({"origin": "http://slo.example:3000"}, 400),
        ({"origin": "http://evil.example"}, 400),
        ({"origin": "null"}, 400),
        ({"origin": ""}, 400),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", **OPENED}, 200),
        ({"sec-fetch-site": "cross-site"}, 400),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 400),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 400),
        ({"sec-fetch-site": "cross-site", **OPENED}, 200),  # a link in somebody's notes
        ({"sec-fetch-site": "cross-site", **OPENED, "sec-fetch-dest": "iframe"}, 400),
    ],
)
def test_it_does_not_answer_scripts_of_other_sites(headers, status):
    told = [("host", "slo.example:8000"), *headers.items()]
    answer = answered(page_of("slo.example"), told)
    assert answer.status_code == status
    if status == 400:
        said = json.loads(answer.body)
        assert said["field"] in headers and "pages of other sites" in said["message"]


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
        (listening,) = self._server.servers[0].sockets
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/-/top"
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
