"""Actors of an application: which deployed version is the newest, and when actors end."""

import inspect
from types import SimpleNamespace

from ray.serve._private import constants as serve_constants

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.ray_private import actors
from ray_slo.serve.ray_private.actors import Releases
from tests.serve import clock
from tests.serve.loops import until


def release(stamp):
    spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 100}}})
    return spec.model_copy(update={"version": float(stamp)})


def test_what_was_never_heard_of_is_news_whatever_its_stamp():
    now = [0.0]
    first, behind, third = release(100), release(50), release(60)
    known = Releases(first, lambda: now[0])
    now[0] = actors._SETTLED_S
    assert not known.is_news(first, first)  # another of its frontends
    assert known.is_news(behind, first)  # built by a machine whose clock is behind
    assert not known.is_news(first, behind)  # a frontend of the first release still drains
    assert not known.is_news(behind, behind)
    assert known.is_news(third, behind)


def test_an_actor_that_just_started_goes_by_the_stamps():
    old, new = release(1), release(2)
    for first, then, news in ((old, new, True), (new, old, False)):
        assert Releases(first, lambda: 0.0).is_news(then, first) is news


def test_who_came_back_to_a_restarted_actor_is_known_later():
    now = [0.0]
    old, new = release(1), release(2)
    known = Releases(old, lambda: now[0])  # restarted as it was once made
    assert known.is_news(new, old)
    assert not known.is_news(old, new)
    now[0] = 1e3
    assert not known.is_news(old, new)


class Actor(actors.AppActor):
    """Fails at every other step; is alone after three seconds."""

    def __init__(self, spec):
        super().__init__(spec, "app#m", 0.5)
        self.did = []

    def _step(self, now):
        self.did.append("step")
        if len(self.did) % 2:
            raise RuntimeError("a step that fails")

    def _is_alone(self):
        return len(self.did) > 6

    def _leave(self):
        self.did.append("leave")

    def _begin_anew(self):
        self.did.append("anew")

    def _go_on(self):
        self.did.append("on")


def test_an_actor_goes_on_until_it_is_alone_and_its_application_gone(monkeypatch):
    killed = []
    context = SimpleNamespace(current_actor="me")
    ray = SimpleNamespace(
        get_runtime_context=lambda: context, kill=lambda actor, no_restart: killed.append(actor)
    )
    monkeypatch.setattr(actors, "ray", ray)
    monkeypatch.setattr(actors, "application_is_gone", lambda app_key: len(actor.did) > 8)
    actor = Actor(release(1))

    async def live():
        await actor.configure(release(1))
        await until(lambda: killed)
        actor.close()

    clock.run(live())
    assert actor.did == ["step"] * 12 + ["leave"]


def test_an_actor_takes_newer_releases_over():
    def of(stamp, fingerprint):
        spec = release(stamp).stamped(fingerprint)
        spec._version = float(stamp)
        return spec

    actor = Actor(of(1, "a"))

    async def live():
        for spec in (of(1, "a"), of(2, "a"), of(3, "b"), of(2, "a")):
            await actor.configure(spec)
        actor.close()

    clock.run(live())
    assert actor.did == ["on", "anew"]


def test_serve_reads_whether_actors_record_their_calls_as_we_do():
    """Where this fails, Serve has changed: see how it makes `enable_task_events`."""
    read = 'RAY_SERVE_ENABLE_TASK_EVENTS = get_env_bool("RAY_SERVE_ENABLE_TASK_EVENTS", "0")'
    assert read in inspect.getsource(serve_constants)
