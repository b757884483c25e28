"""Every way to write a path is one place, or none that a frontend knows."""

import asyncio
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_slo.serve.frontend.http import name_in
from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.door import ProxyDoor
from ray_slo.serve.proxy.places import Place, place_of, place_of_call
from ray_slo.serve.ray_private.addresses import Routes
from tests.serve import clock

PREFIXES = ("/", "/p", "/p/deep", "/q")
MODELS = ("m", "other")


class Router:
    """Serve's table; `tests/serve/ray_private/test_addresses.py` has the real one."""

    def match_route(self, path):
        for route in sorted(PREFIXES, key=len, reverse=True):
            if route == "/" or path == route or path.startswith(route + "/"):
                return route, "handle", False
        return None

    def get_handle_for_endpoint(self, name):
        return ("/p", "handle", False) if name == "p" else None


class Proxy:
    proxy_router = Router()


ROUTES = Routes(Proxy())
PIECES = st.sampled_from(
    [
        "/",
        "//",
        "p",
        "m",
        "deep",
        ".",
        "..",
        ";v=1",
        "%2f",
        "%6d",
        "%70",
        "%00",
        "%",
        "%zz",
        "+",
        "M",
    ]
)
PATHS = st.lists(PIECES, max_size=12).map(lambda pieces: "/" + "".join(pieces))


def scope_of(written, headers=()):
    """What uvicorn makes of a path that a client wrote."""
    return {"type": "http", "path": unquote(written), "headers": list(headers)}


def answered(place):
    """The model that a frontend at that route finds. None: it answers 404."""
    name = place.name or "m"
    return (place.route, name) if name in MODELS else None


@pytest.mark.slow
@settings(max_examples=150)
@given(PATHS)
@example("/p/" + "/" * 60_000)
@example("/p/%2F%2f//")
@example("/p/../p/")
def test_any_alias_is_one_place_or_not_found(written):
    place = place_of(ROUTES, scope_of(written))
    # As the frontend reads it: Serve tells it the prefix.
    path, prefix = unquote(written), "" if place.route == "/" else place.route
    found = answered(place)
    assert place.name == name_in(path, prefix)
    if found is not None:
        assert place.name in ("", found[1])
        plain = f"{prefix}/{place.name}"
        assert place_of(ROUTES, scope_of(plain)) == place


@given(st.sampled_from(PREFIXES[1:]), st.lists(st.booleans(), min_size=2, max_size=2))
def test_what_honest_clients_write_is_what_it_was(prefix, is_encoded):
    first, second = (
        "".join(f"%{ord(c):02x}" for c in part) if encoded else quote(part)
        for part, encoded in zip(("m", "m"), is_encoded, strict=True)
    )
    for written in (f"{prefix}/{first}", f"{prefix}/{second}/", f"{prefix}//{first}//"):
        assert place_of(ROUTES, scope_of(written)) == Place(prefix, "m")


def test_a_servers_own_prefix_does_not_count():
    scope = scope_of("/behind/p/m")
    assert place_of(ROUTES, {**scope, "root_path": "/behind"}) == Place("/p", "m")


def test_a_name_of_an_application_counts_only_if_serve_knows_it():
    metadata = [("x-slo-class", "gold")]
    assert place_of_call(ROUTES, "p", "m", metadata) == Place("/p", "m", "gold")
    assert place_of_call(ROUTES, "made up", "m", ()) == Place(None, "m")
    assert place_of_call(Routes(None), "made up", "m", ()) == Place("", "m")


class Application(Proxy):
    """Answers as a frontend: what it does not serve has no capacity. `foreign`: says nothing."""

    def __init__(self, takes_s=0.01):
        self.takes_s, self.foreign, self.inside, self.most = takes_s, False, 0, 0

    async def __call__(self, scope, receive, send):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(self.takes_s)
        self.inside -= 1
        place = place_of(ROUTES, scope)
        is_there = answered(place) and place.slo_class in ("", "gold")
        said = b"100;400;2000;9000;5000" if is_there else b"none"
        headers = [] if self.foreign else [(b"x-slo-capacity", said)]
        status = 200 if is_there or self.foreign else 404
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(middleware, written, *headers):
    """The status."""
    statuses = []

    async def receive():
        return {"type": "http.request", "body": b"1", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await middleware(scope_of(written, headers), receive, send)
    (status,) = statuses
    return status


@pytest.mark.slow
def test_aliases_and_made_up_places_keep_nobody_out_and_nothing_of_them_is_kept():
    async def main():
        app, door = Application(), ProxyDoor()
        middleware = AdmissionMiddleware(app, door)
        assert await ask(middleware, "/p/m") == 200
        attack = [ask(middleware, f"/p/m{'/' * i}") for i in range(1000)]
        attack += [ask(middleware, f"/p/made-up-{i}") for i in range(1500)]
        attack += [ask(middleware, "/p/m", (b"x-slo-class", b"%d" % i)) for i in range(1500)]
        attacking = asyncio.gather(*attack)
        good = []
        for _ in range(20):
            await asyncio.sleep(0.005)
            began = asyncio.get_running_loop().time()
            good.append((await ask(middleware, "/q"), asyncio.get_running_loop().time() - began))
        assert {status for status, _ in good} == {200}
        assert max(took_s for _, took_s in good) < 0.1
        statuses = await attacking
        assert set(statuses) == {200, 404, 503}
        assert app.most < 64 + 64 + 16 + 2  # at each place what always may, and few strangers
        assert statuses[1000:].count(503)  # the line of all strangers is bounded
        assert set(door._places) == {Place("/p", "m"), Place("/q")}
        assert not door._refused.keys() - door._places.keys()
        assert (door.gate.inside, door.gate.waiting, len(door.gate._strangers)) == (0, 0, 0)
        return await ask(middleware, "/p/m", (b"x-slo-class", b"gold"))

    assert clock.run(main()) == 200


def test_other_applications_are_not_strangers():
    async def main():
        app = Application(takes_s=3.0)
        middleware = AdmissionMiddleware(app)
        await ask(middleware, "/p")
        app.foreign = True
        asked = [ask(middleware, f"/q/users/{i}") for i in range(500)]
        assert set(await asyncio.gather(*asked)) == {200}
        assert app.most == 500

    clock.run(main())


def test_who_came_before_the_first_answer_is_judged_again():
    async def main():
        app, door = Application(takes_s=0.2), ProxyDoor()
        middleware = AdmissionMiddleware(app, door)
        statuses = await asyncio.gather(*(ask(middleware, f"/p/{'/' * i}") for i in range(3000)))
        assert set(statuses) == {200, 503}
        assert app.most < 3000

    clock.run(main())
