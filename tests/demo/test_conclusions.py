"""The demo's conclusions, for figures in favour of ray-slo and against it."""

import numpy as np
import pytest

from ray_slo.demo import conclusions
from ray_slo.demo.extras import FOLLOWED, followed
from ray_slo.demo.machine import Use
from ray_slo.demo.stream import CALM, STORY, WHOLE, over_time, sums
from tests.demo.made_up import figures, found, model, run


def of(whole, calm=5.0):
    return {WHOLE: figures(whole), CALM: figures(calm)}


@pytest.mark.parametrize(
    ("whole", "calm", "words"),
    [
        (20.0, 5.0, ["Ours answers 2.00 × as many", "two are level"]),
        (13.0, 5.05, ["Ours answers 1.30 ×", "two are level"]),
        (10.1, 5.0, ["Ours is level with tuned plain Serve. In the calm"]),
        (12.0, 5.0, ["is ahead of tuned plain Serve by only 1.20 ×"]),
        (
            7.0,
            4.0,
            ["is not ahead of tuned plain Serve: it answers 0.70 ×", "it answers 0.80 × as many."],
        ),
    ],
)
def test_ahead_or_not(whole, calm, words):
    said = conclusions.compared("Ours", of(whole, calm), of(10.0))
    assert all(word in said for word in words), said


def test_ahead_of_nothing():
    assert conclusions.ratio(figures(1.0), figures(1.0, bad=1.0)) is None
    none = {WHOLE: figures(1.0, bad=1.0), CALM: figures(1.0, bad=1.0)}
    said = conclusions.compared("Ours", of(2.0), none)
    assert "Ours answers requests in time, and tuned plain Serve answers none" in said
    assert "tuned plain Serve answers none in time." in said
    assert "neither does tuned plain Serve" in conclusions.compared("Ours", none, none)


def accuracy(latency_s, accuracy_at):
    result = run(latency_s, accuracy_at)
    return conclusions.accuracy(over_time(result), STORY, sums(result, STORY))


def test_accuracy_falls_and_answers_are_in_time():
    said = accuracy(lambda at: 0.2, lambda at: 99.0 if at < 20 or at > 35 else 96.5)
    assert said == (
        "In the overload, the accuracy of @ray_slo.deployment falls by 2.5 points, from 99.0 % to "
        "96.5 %, and 100.0 % of the requests are answered in time."
    )


def test_accuracy_stays_and_answers_are_late():
    said = accuracy(lambda at: 0.2 if at < 20 or at % 2 > 1 else 2.0, lambda at: 99.0)
    assert said.startswith(
        "In the overload, the accuracy of @ray_slo.deployment stays at 99.0 %, and only 4"
    )


def test_of_no_answers_nothing_is_said():
    assert "nothing can be said" in accuracy(lambda at: 0.2, None)


def test_two_models_keep_their_slos_or_do_not():
    kept, missed = model("hasty", 0.3, 0.0), model("careful", 1.2, 0.4)
    said = conclusions.two_models([kept, model("careful", 1.2, 0.05)])
    assert said.startswith("Each model keeps its own SLO") and "within 300 ms" in said
    said = conclusions.two_models([kept, missed])
    assert said.startswith("Not every model keeps its SLO: careful does not (hasty: 100.0 %")


def counts(*workers):
    """Made-up numbers of workers: (from when, how many)."""
    at = np.arange(0, sum(s.length_s for s in FOLLOWED), 0.5)
    return [(t, [n for start, n in workers if start <= t][-1]) for t in at]


def test_replicas_that_follow():
    begins = FOLLOWED[0].length_s
    result = run(lambda at: 0.2, story=FOLLOWED)
    made = followed(result, counts((0, 1), (begins + 8, 3), (33, 1)))
    assert conclusions.following(made) == (
        "From 1 to 3 replicas, the first more 8 s after the load rose; afterwards 1 was left. "
        "0.0 % of the requests in the high stretch were bad."
    )
    stays = followed(result, counts((0, 1), (begins + 8, 3)))
    assert "all 3 still served" in conclusions.following(stays)
    never = followed(result, counts((0, 1)))
    assert conclusions.following(never).startswith("The load needed no more replicas than the 1 at")
    late = followed(run(lambda at: 5.0, story=FOLLOWED), counts((0, 1)))
    assert conclusions.following(late).startswith("The replicas did not follow the load: 1 served")
    assert followed(result, [(-1.0, 2), (99.0, 2)]).workers == []


def test_the_machine_was_quiet_or_not():
    quiet, loud, unknown = Use(0.0, 0.0, 0.0), Use(0.4, 0.0, 0.0), Use(None, None, 0.0)
    assert conclusions.machine({"a": quiet}) == (
        False,
        "The machine was quiet, and the client sent its requests on time.",
    )
    disturbed, said = conclusions.machine({"a": quiet, "b": loud})
    assert disturbed and said.endswith("b: other programs took 40 % of the CPU time")
    assert conclusions.machine({"a": unknown})[1].endswith("This system does not tell more.")


def test_conclusions_of_a_whole_run():
    made = found()
    assert len(made.conclusions) == 2
    assert all("× as many requests in time" in said for said in made.conclusions)
    assert made.accuracy.startswith(
        "In the overload, the accuracy of @ray_slo.deployment stays at 99.0 %"
    )
    worse = found(plain=lambda at: 0.2, ours=lambda at: 5.0)
    assert all("is not ahead" in said for said in worse.conclusions)
