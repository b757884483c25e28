"""The part of `live-chaos` that needs no Ray: what is made of a run, and its options."""

import argparse
import math

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.rows import tables
from benchmarks.live.asked import Asked, Seen, recovery, rows
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


@pytest.mark.parametrize(
    "args",
    [
        ["live-chaos", "--faults", "flood"],
        ["symphony-fig5", "--faults", "worker"],
        ["live-chaos", "--flauts"],
    ],
)
def test_mistakes_end_with_code_2(args, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert args[1] in capsys.readouterr().err
