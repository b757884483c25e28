"""Counts of the last seconds, of one frontend and of all frontends together."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.serve.watch.lately import WINDOW_S, Lately, Seen, together


def answer(model="m", variant="v", latency_ms=20.0, met=True, size=1, exec_ms=10.0, **others):
    said = {"model": model, "variant": variant, "latency_ms": latency_ms, "deadline_met": met}
    said |= {"batch_size": size, "exec_ms": exec_ms, "slo_class": "", "stages": (), **others}
    return SimpleNamespace(**said)


def lately_of(*seen):
    return together(seen)["lately"]


def seen(lately, now):
    return Seen(counts=lately.counts(now), refused=lately.refused(now))


def test_answers_add_up_to_batches_whoever_got_them():
    one, other = Lately(), Lately()
    for i in range(8):  # a batch of 8, of which each frontend has a part
        (one if i < 3 else other).answered(100.2, [answer(size=8, exec_ms=40.0)])
    one.answered(100.5, [answer(size=1, exec_ms=10.0)])
    one.predicted(100.5, "m", "v", 50.0, 53.0)
    one.predicted(100.5, "m", "v", 20.0, 27.0)
    (found,) = lately_of(seen(one, 101.0), seen(other, 101.0))["variants"]["m"].values()
    assert found["answers"] == 9
    assert found["batches"] == pytest.approx(2.0)
    assert found["batch_size"] == pytest.approx(4.5)
    assert found["exec_ms"] == pytest.approx(25.0)
    assert (found["predicted_ms"], found["measured_ms"]) == (35.0, 40.0)


def test_only_whole_seconds_of_the_window_count():
    lately = Lately()
    lately.answered(100.0, [answer()])
    assert lately_of(seen(lately, 100.9))["models"] == {}
    assert lately_of(seen(lately, 101.0))["models"]["m"]["requests"] == 1
    assert lately_of(seen(lately, 100.99 + WINDOW_S))["models"]["m"]["requests"] == 1
    assert lately_of(seen(lately, 101.0 + WINDOW_S))["models"] == {}


def test_quantiles_are_within_a_bucket():
    lately = Lately()
    for i in range(1, 101):
        lately.answered(5.0, [answer(latency_ms=float(i))])
    found = lately_of(seen(lately, 6.0))["models"]["m"]["latency_ms"]
    assert found["p50"] == pytest.approx(50.0, rel=0.09)
    assert found["p99"] == pytest.approx(99.0, rel=0.09)


def test_refusals_are_told_the_newest_first_and_alike_ones_of_a_second_together():
    lately = Lately()
    lately.unanswered(10.1, "m@gold", "refused", "would_miss", 2)
    lately.unanswered(10.9, "m@gold", "refused", "would_miss", 3)
    lately.unanswered(12.5, "m", "expired", "expired", 1)
    lately.answered(13.5, [answer(met=False, slo_class="gold")])
    told = lately_of(seen(lately, 14.0))["refused"]
    assert [(r["ago_s"], r["model"], r["slo_class"], r["reason"], r["count"]) for r in told] == [
        (1.0, "m", "gold", "", 1),
        (2.0, "m", "", "expired", 1),
        (4.0, "m", "gold", "would_miss", 5),
    ]
    assert [r["outcome"] for r in told] == ["late", "expired", "refused"]
    for i in range(1000):  # bounded, whatever comes
        lately.unanswered(20.0, f"m{i}", "refused", "shed", 1)
    kept = lately.refused(21.0)
    assert len(kept) < 100
    assert kept[0].model == "m999"


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # frontend
        st.floats(100.0, 125.0),
        st.sampled_from(["a", "b"]),
        st.booleans(),
        st.sampled_from([1, 2, 4]),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(EVENTS, st.floats(110.0, 130.0))
def test_several_frontends_know_what_one_would(events, now):
    all_in_one, apart = Lately(), [Lately() for _ in range(3)]
    for who, at, model, met, size in sorted(events, key=lambda e: e[1]):
        if at > now:
            break
        for lately in (all_in_one, apart[who]):
            lately.answered(at, [answer(model, met=met, size=size)])
            if not met:
                lately.unanswered(at, model, "refused", "shed", size)
    whole, parts = lately_of(seen(all_in_one, now)), lately_of(*(seen(s, now) for s in apart))
    assert whole["models"] == parts["models"]
    for model, variants in whole["variants"].items():
        for variant, found in variants.items():
            assert parts["variants"][model][variant] == pytest.approx(found)


def test_frontends_are_weighed_by_what_they_did():
    found = together(
        [
            Seen(2, {"m": 30.0}, {"m": 90.0}, {"m": (100, 10)}),
            Seen(1, {"m": 10.0}, {"m": 70.0}, {"m": (300, 10), "n": (0, 0)}),
        ]
    )
    assert found["frontends"] == 2
    assert found["pending"] == 3
    assert found["goodput"] == {"m": 40.0}
    assert found["accuracy"] == {"m": 85.0}
    assert found["bad_rate"] == {"m": 0.05}
    assert together([Seen(0, {}, {"m": 70.0})])["accuracy"] == {"m": 70.0}
