"""The problem and the answer of a rehearsal, as text and as JSON."""

import json

import numpy as np
import pytest

from ray_slo.core.cluster import Cluster
from ray_slo.core.rehearsal import Rehearsal, Rehearsed, Score, Setting, Traffic


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        (Setting("eager", {}), "eager"),
        (Setting("deferred", {"gathering": "prefix"}), "deferred gathering=prefix"),
        (Setting("eager", {}, quickest=True), "eager on the quickest variants"),
        (Setting("eager", {}, limited=False), "eager without a limit at the root"),
        (
            Setting("flex", {"exact": True}, True, False),
            "flex exact=True on the quickest variants without a limit at the root",
        ),
    ],
)
def test_a_label_says_what_is_set(setting, label):
    assert setting.label == label


def test_a_rehearsal_says_how_large_it_is():
    times = np.arange(3.0)
    traffic = Traffic((("m", "m"),), np.zeros(3, np.int64), times, times + 1)
    rehearsal = Rehearsal(7, Cluster({}, {}), traffic, [Setting("eager", {})])
    assert len(traffic) == 3
    assert repr(rehearsal) == "Rehearsal 7 of 1 settings on 3 requests"
    assert not rehearsal.planned and not rehearsal.calm and traffic.before == 0


def test_answers_survive_json():
    score = Score((1.0, 2.5), (3,), (90.0,), 0.02, "", 0.25)
    made = Rehearsed(1, 5.0, 40.0, ("m",), (4,), (2, 2), {"eager": score, "flex": Score(error="x")})
    body = json.loads(json.dumps(made.to_json()))
    assert Rehearsed.from_json(body) == made
    del body["scores"]["eager"]["fall"]  # of an older log
    assert Rehearsed.from_json(body).scores["eager"].fall is None
