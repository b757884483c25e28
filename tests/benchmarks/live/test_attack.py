"""What is said of an attack's answers."""

import pytest

from benchmarks.live.attack import Reply, Seen


@pytest.mark.parametrize(("attack", "in_time"), [("burst", 1), ("flood", 2)])
def test_an_answer_is_late_by_the_slo_of_its_own_request(attack, in_time):
    replies = [Reply(0.3, 200), Reply(5.0, 200), Reply(0.1, 503, "queue_full")]
    rows = {row.metric: row.ours for row in Seen("ordinary", attack, 5.0, replies, 1.0).rows()}
    assert rows["answered in time"] == in_time
    assert rows["answered late"] == 2 - in_time
