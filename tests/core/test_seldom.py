"""Lines that others can cause are few."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core.seldom import EVERY_S, Seldom


def line(at, text="a process of user %d", *args, raised=None):
    info = None if raised is None else (type(raised), raised, None)
    record = logging.LogRecord("a", logging.WARNING, "f", 1, text, args, info)
    record.created = at
    return record


def passed(seldom, *records):
    return [record.getMessage() for record in records if seldom.filter(record)]


def test_a_line_a_minute_with_the_number_of_others():
    seldom = Seldom()
    times = [100.0 + 0.01 * i for i in range(1000)]
    assert passed(seldom, *(line(at, "user %d", i) for i, at in enumerate(times))) == ["user 0"]
    later = [line(100 + EVERY_S, "user %d", 7), line(101 + EVERY_S, "user %d", 7)]
    assert passed(seldom, *later) == ["user 7 (999 more lines of this kind were left out)"]
    assert passed(seldom, line(102 + 2 * EVERY_S, "user %d", 8)) == [
        "user 8 (1 more lines of this kind were left out)"
    ]


def test_kinds_are_counted_alone():
    seldom = Seldom(2)
    raised = [None, ValueError("a"), KeyError("b")]
    records = [line(1.0, "failed", raised=error) for error in raised * 4]
    assert len(passed(seldom, *records)) == 2 * len(raised)
    assert passed(seldom, line(1.0, "another")) == ["another"]
    seldom.forget()
    assert passed(seldom, line(1.0, "failed")) == ["failed"]


def test_a_clock_that_is_set_back_does_not_silence_it():
    seldom = Seldom()
    assert len(passed(seldom, line(1e9), line(5.0), line(6.0))) == 2


@given(st.lists(st.tuples(st.floats(0, 300), st.sampled_from("abc")), max_size=200))
def test_every_line_passes_or_is_counted(events):
    seldom, told, per_kind = Seldom(), 0, {}
    for at, kind in sorted(events):
        record = line(at, kind)
        if seldom.filter(record):
            said = record.getMessage().partition("(")[2]
            told += 1 + int(said.split()[0] if said else 0)
            before = per_kind.get(kind)
            assert before is None or at - before >= EVERY_S
            per_kind[kind] = at
    end = [line(1000.0, kind) for kind in "abc"]
    for said in passed(seldom, *end):
        rest = said.partition("(")[2]
        told += int(rest.split()[0] if rest else 0)
    assert told == len(events)
