"""Actions carry their predictions."""

from __future__ import annotations

import math

from ray_slo.core import Decision, Dispatch, Drop, DropReason, Request


def test_slack_is_that_of_the_tightest_request():
    requests = [Request(1, "m", 0.0, 9.0), Request(2, "m", 0.0, 7.0)]
    dispatch = Dispatch(1, "w0", "v", requests, start_at=1.0, finish_at=5.0)
    assert dispatch.slack_s == 2.0
    assert Dispatch(2, "w0", "v", requests, 5.0, 8.0).slack_s == -1.0


def test_defaults():
    assert Decision() == Decision([], math.inf)
    assert math.isnan(Drop([], DropReason.NO_WORKER).finish_at)
    assert DropReason("would_miss") is DropReason.WOULD_MISS  # the value is what logs hold


def test_decisions_do_not_share_their_lists():
    first = Decision()
    first.actions.append(Drop([], DropReason.SHED))
    assert Decision().actions == []
