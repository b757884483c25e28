"""Which release is the newest, when the clocks of those who build them differ."""

from ray_slo.serve.config.spec import parse_spec
from ray_slo.serve.ray_private import actors
from ray_slo.serve.ray_private.actors import Releases


def release(stamp):
    spec = parse_spec({"models": {"m": {"callable": dict, "latency_slo_ms": 100}}})
    spec._version = float(stamp)
    return spec


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
