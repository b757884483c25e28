"""The part of `live-chaos` that needs no Ray: what is made of a run, and its options."""

import argparse
import json
import math
from dataclasses import replace

import pytest

from benchmarks.harness.rows import tables
from benchmarks.live import nodes
from benchmarks.live.asked import Asked, Seen, longest_gap, recovery, rows
from benchmarks.live.chaos import FAULTS, QUICK, chosen


def answered(at_s, number, latency_s=0.1, echo=None):
    return Asked(at_s, at_s + latency_s, "answered", "200", number if echo is None else echo, 1)


def steady(until_s, bad=lambda at_s: False, rate=20):
    """Requests at a steady rate; those at bad times are answered late."""
    times = [i / rate for i in range(int(until_s * rate))]
    return {i: answered(t, i, 1.5 if bad(t) else 0.1) for i, t in enumerate(times)}


def test_recovery_is_when_the_first_good_second_starts():
    asked = list(steady(20, lambda at_s: 10 <= at_s < 13).values())
    assert recovery(asked, 10.0) == pytest.approx(3.0, abs=0.11)
    assert recovery(list(steady(20).values()), 10.0) == 0.0
    assert recovery(list(steady(20, lambda at_s: at_s >= 10).values()), 10.0) is None
    late = list(steady(20, lambda at_s: 12 <= at_s < 14).values())  # it need not show at once
    assert recovery(late, 10.0) == pytest.approx(4.0, abs=0.11)
    shaken = list(steady(20, lambda at_s: at_s * 20 % 50 < 1).values())  # one in 50, all the time
    assert recovery(shaken, 10.0) == 0.0


def test_every_request_is_counted_once(tmp_path):
    asked = steady(8)
    n = len(asked)
    asked[n] = Asked(6.0, 6.2, "expired", "504")
    asked[n + 1] = Asked(6.0, 8.3, "would_miss", "503")  # heard too late
    asked[n + 2] = Asked(6.0, 6.2, "", "500 Internal Server Error")
    asked[n + 3] = Asked(6.0, 17.0, "", "TimeoutError")
    asked[n + 4] = answered(6.0, n + 4, 1.5)
    asked[n + 5] = answered(6.0, n + 5, echo=3)  # another's, which got it, too
    (tmp_path / "1").write_text("1\n2\n3\n77777\n")
    (tmp_path / "2").write_text("2\n77777\n")  # the latter are of another fault
    seen = Seen.of("broken", 5.0, 4, asked, tmp_path)
    assert (seen.sent, seen.answered, seen.lost) == (n + 6, n + 2, 2)
    assert seen.sent == seen.answered + seen.lost + sum(seen.reasons.values())
    assert dict(seen.reasons) == {"expired": 1, "would_miss": 1}
    assert (seen.overdue, seen.late, seen.duplicated, seen.run_twice) == (2, 1, 2, 1)
    assert len(seen.unheard) == 3 and "TimeoutError" in "".join(seen.unheard)
    [table, reasons] = tables(rows([seen]))
    assert table.row_count == reasons.row_count == 1
    assert [c.header for c in reasons.columns] == ["", "expired", "would_miss"]


def test_the_longest_gap_is_between_arrivals_that_were_answered_in_time():
    asked = steady(20, lambda at_s: 10 <= at_s < 13).values()
    assert longest_gap(asked) == pytest.approx(3.05, abs=0.01)
    to_the_end = steady(20, lambda at_s: at_s >= 16).values()
    assert longest_gap(to_the_end) == pytest.approx(4.0, abs=0.01)
    assert longest_gap(steady(20, lambda at_s: True).values()) == pytest.approx(19.95)
    assert longest_gap([]) == 0.0


def test_an_error_is_bare_if_the_server_gives_no_reason(tmp_path):
    asked = steady(4)
    n = len(asked)
    asked[n] = Asked(2.0, 2.1, "", "500 Internal Server Error")
    asked[n + 1] = Asked(2.0, 2.1, "failed", '500 {"reason": "failed"}')
    asked[n + 2] = Asked(2.0, 2.1, "", "ServerDisconnectedError: ")
    seen = Seen.of("broken", 1.0, 0, asked, tmp_path)
    assert (seen.bare, seen.lost, seen.in_time) == (1, 2, n)
    assert seen.share == pytest.approx(100 * n / (n + 3))
    again = Seen.from_json(json.loads(json.dumps(vars(seen))))
    assert again.rows(["failed"]) == seen.rows(["failed"])


def test_the_deadline_of_a_request_is_its_own():
    one = Asked(1.0, 1.5, "answered", "200", 7, 1)
    assert one.in_time and not replace(one, slo_s=0.4).in_time


def test_every_fault_of_a_node_has_a_peer_on_the_same_nodes():
    assert len(nodes.FAULTS) == 4 * 2 * 3 and len(nodes.PEERS) == 2 * 3
    for name, one in nodes.FAULTS.items():
        assert FAULTS[name] is one.fault
        peer = nodes.PEERS[one.peer]
        assert peer.way == one.way and len(peer.places.nodes()) == len(one.places.nodes())
        assert (peer.fault.rate, peer.fault.after_s) == (one.fault.rate, one.fault.after_s)


def test_with_three_nodes_the_head_has_no_worker_and_no_frontend():
    for name, one in nodes.FAULTS.items():
        head, *others = (node["resources"] for node in one.places.nodes())
        assert (head == {}) == name.endswith("-3")
        assert sum(r.get("worker", 0) for r in (head, *others)) == 2


def test_a_request_without_an_end_is_lost_and_overdue():
    assert Asked(1.0).lost and Asked(1.0).overdue and math.isnan(Asked(1.0).latency_s)


def test_faults_are_chosen_by_name_and_strike_in_their_order():
    assert chosen("node, worker") == ["worker", "node"]
    assert set(QUICK) <= set(FAULTS)
    for wrong in ("flood", "worker,flood"):
        with pytest.raises(
            argparse.ArgumentTypeError, match="no fault 'flood'; choose from worker"
        ):
            chosen(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="name some of worker"):
        chosen(" ,")
