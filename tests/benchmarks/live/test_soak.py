"""The part of `live-soak` that needs no Ray: the rule, the verdict and the rows."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from benchmarks.live.soak import RULES, Rule, Soak, growth

AT = np.arange(0.0, 600.0, 5.0)
MEMORY = RULES["memory, MB"]
NOISE = np.random.default_rng(0).normal(0, 3.0, len(AT))


@pytest.mark.parametrize(
    ("mb", "flat"),
    [
        (150 + NOISE, True),
        (150 + 40 * (1 - np.exp(-AT / 60)) + NOISE, True),  # a warm-up rise
        (150 + np.where(AT > 100, 60, 0), True),  # a step of the warm-up
        (150 + np.where(AT > 420, 60, 0) + NOISE, True),  # a hiccup: a step, and no more
        (150 - 0.1 * AT, True),
        (150 + 0.05 * AT + NOISE, False),  # 180 MB per hour
        (150 + 15 * (AT // 60), False),  # the same, a step every minute
        (150 + np.where(AT > 490, 60, 0), False),  # it cannot be said yet whether that was all
    ],
)
def test_what_grows_is_told_from_noise_and_warm_up(mb, flat):
    assert growth(AT, mb, MEMORY).flat is flat


def test_growth_says_how_much_and_how_fast():
    found = growth(AT, 100 + AT / 60, Rule(0.0, 1.0))
    assert found.thirds == pytest.approx((101.625, 104.958, 108.292), abs=0.01)
    assert found.lately == pytest.approx(1.667, abs=0.01)
    assert found.per_hour == pytest.approx(60.0, abs=0.01)
    assert found.allowed == 1.0 and not found.flat
    with pytest.raises(ValueError, match="got 5"):
        growth(range(5), range(5), MEMORY)


def samples(leak=0.0, process="frontend 1"):
    rows = [
        (at, process, quantity, value)
        for at in AT
        for quantity, value in (
            ("memory, MB", 150 + leak * at),
            ("files", 80),
            ("threads", 40),
            ("tasks", 30),
            ("blocks", 900_000),
            ("pending", 20),
        )
    ]
    return pd.DataFrame(rows, columns=["at_s", "process", "quantity", "value"])


def soak(frame=None, *, counts=None, before=None, after=None):
    idle = {"frontend 1": {"pid": 7, "tasks": 4, "blocks": 900_000, "pending": 0}}
    counts = Counter(sent=100, answered=90, refused=10) if counts is None else Counter(counts)
    frame = samples() if frame is None else frame
    return Soak(60.0, 600.0, counts, frame, before or idle, after or idle)


def holding(**held):
    return {"frontend 1": {"pid": 7, "tasks": 4, "blocks": 900_000, "pending": 0, **held}}


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (soak(samples(0.05)), "frontend 1: memory, MB grew from 164.9 to 174.9"),
        (soak(after=holding(pending=2)), "frontend 1 still holds {'pending': 2}"),
        (soak(after=holding(tasks=9)), "frontend 1 has 9 tasks after the load and had 4 before"),
        (soak(after={"frontend 2": holding()["frontend 1"]}), "was not there all the time"),
        (soak(counts={"answered": 9, "lost: ServerDisconnectedError": 1}), "not answered as"),
        (soak(counts={"answered": 9, "error 500": 1}), "not answered as"),
        (soak(counts={"refused": 9}), "nothing was answered"),
    ],
)
def test_what_is_complained_of(run, complaint):
    assert complaint in "; ".join(run.complaints)


def test_with_faults_only_processes_that_lived_long_are_judged():
    late = samples(0.05, "worker 3").query("at_s > 300")
    frame = pd.concat([samples(), late])
    after = holding() | {"frontend 3": holding()["frontend 1"]}
    before = holding() | {"frontend 2": holding()["frontend 1"]}
    counts = Counter({"answered": 9, "error ActorDiedError": 1})
    run = Soak(60.0, 600.0, counts, frame, before, after, Counter({"worker killed": 1}), "haproxy")
    assert run.complaints == []
    rows = {(row.case, row.metric): row.ours for row in run.rows()}
    assert rows["faults · worker killed", "times"] == 1
    assert ("10 minutes at 110 % of capacity, haproxy, 1 faults · all", "lost") in rows
    run.counts["error 500"] = 1
    del run.after["frontend 3"]
    complaints = "; ".join(run.complaints)
    assert "not answered as" in complaints
    assert "there were {'frontend': 2} before and {'frontend': 1} after" in complaints


def test_a_flat_run_has_no_complaint_and_serve_is_not_judged():
    assert soak().complaints == []
    leaking = soak(samples(0.05, "Serve's proxy"))
    assert leaking.complaints == []
    flat = {row.metric: row.ours for row in leaking.rows() if row.case.startswith("memory")}
    assert flat["flat"] is None and flat["per hour"] == pytest.approx(180.0, abs=0.1)


def test_rows_say_what_became_of_the_requests_and_what_is_held():
    made = {
        (row.case.split(" · ")[-1], row.metric): row.ours
        for row in soak(counts={"sent": 3, "answered": 1, "lost": 1, "lost: X": 1}).rows()
    }
    assert made["all", "sent"] == 3 and made["all", "lost"] == 2 and made["all", "errors"] == 0
    assert made["frontend 1", "requests and batches held"] == 0
    assert made["frontend 1", "flat"] == 1.0
