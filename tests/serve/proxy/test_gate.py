"""Admission control: earliest deadlines first, one per turn, and no request forgotten."""

import asyncio
import contextlib
import gc
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.errors import RefusedEarly
from ray_slo.serve.proxy.door import Door
from ray_slo.serve.proxy.gate import (
    FEW,
    PLACES_KEPT,
    REFUSED_S,
    STRANGER_S,
    Gate,
    Known,
    NowKnown,
    Rank,
    Ticket,
)
from tests.serve import clock

PURE = settings(max_examples=300)


class Told:
    def __init__(self):
        self.said = []

    def __call__(self, refused):
        self.said.append(refused)


def test_a_lone_request_goes_on_whatever_its_time():
    gate = Gate()
    for left_s in (-1.0, 1e-3, 10.0):
        told = Told()
        ticket = gate.arrive(0.0, left_s, told, Known(1e-9, least_s=20.0))
        assert not gate.turn(0.0)
        assert told.said == [None]
        gate.leave(ticket)
    assert gate.inside == gate.waiting == 0


@pytest.mark.slow
@PURE
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "leave"]),
            st.floats(-1, 5),
            st.sampled_from([None, 0.5, 40.0]),
            st.sampled_from([None, 1, 3]),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from(Rank),
        ),
        max_size=30,
    ),
    st.sampled_from([1.0, 2.0, 100.0]),
)
def test_who_walks_in_goes_on_as_if_it_had_waited_for_nobody(does, window):
    one, other = Gate(), Gate()
    one.window = other.window = window
    inside = []
    for now, (what, left_s, rate, most, least_s, rank) in enumerate(does):
        if what == "leave":
            if inside:
                for gate, ticket in zip((one, other), inside.pop(0), strict=True):
                    gate.leave(ticket)
            continue
        asked = now + left_s, Known(rate, most, least_s), rank
        try:
            ticket, said = one.walk_in(now, *asked), None
        except RefusedEarly as refused:
            ticket, said = None, str(refused)
        told = Told()
        waits = other.arrive(now, asked[0], told, *asked[1:])
        if waits is not None and other.can_turn:
            other.turn(now)
        refused = [str(error) for error in told.said if error is not None]
        assert refused == [said] * (said is not None)
        assert (ticket is not None) == (told.said == [None])
        if ticket is not None:
            inside.append((ticket, waits))
        elif waits is not None:
            other.leave(waits)
        assert (one.inside, one.waiting) == (other.inside, other.waiting)


def test_the_earliest_deadline_goes_on_first():
    gate, order = Gate(), []
    for deadline in (5.0, 1.0, 3.0, 1.0):
        gate.arrive(0.0, deadline, lambda refused, d=deadline: order.append(d))
    while gate.turn(0.0):
        pass
    assert order == [1.0, 1.0, 3.0, 5.0]


def test_those_who_wait_too_long_are_refused_at_once_when_the_pace_is_known():
    gate = Gate()
    for _ in range(300):
        gate.arrive(0.0, 100.0, Told())
    for i in range(200):
        gate.turn(0.01 * i)  # one in 10 ms
    told = Told()
    assert gate.arrive(2.0, 101.0, told) is not None  # 100 wait: 1 s
    told = Told()
    assert gate.arrive(2.0, 2.5, told) is not None  # it goes first
    for _ in range(60):
        gate.arrive(2.0, 2.5, Told())
    told = Told()
    assert gate.arrive(2.0, 2.5, told) is None
    (refused,) = told.said
    assert refused.reason == "would_miss"
    assert "51 requests wait for admission before it" in str(refused)
    assert refused.retry_after_s == pytest.approx(0.51, rel=0.1)


def test_no_more_go_on_than_workers_can_do_by_the_deadline():
    gate = Gate(pace=1.0)
    let = refused = 0
    for _ in range(500):
        told = Told()
        if gate.arrive(0.0, 1.0, told, Known(100.0)) is None:
            refused += 1
            assert told.said[0].reason == "queue_full"
            assert "by its deadline about 100 can be answered" in str(told.said[0])
            assert told.said[0].retry_after_s == pytest.approx(1.0)
        else:
            let += 1
    assert (let, refused) == (100, 400)
    # Those with a day of time do not keep out those with a second, and the other way round.
    assert gate.arrive(0.0, 0.9, Told(), Known(100.0)) is not None
    assert gate.arrive(0.0, 86_400.0, Told(), Known(100.0)) is not None


def test_an_overloaded_application_takes_no_capacity_of_another_one():
    gate = Gate(pace=1.0)
    for _ in range(100):
        assert gate.walk_in(0.0, 0.5, Known(200.0, who="/busy")) is not None
    with pytest.raises(RefusedEarly):
        for _ in range(100):
            gate.walk_in(0.0, 0.5, Known(200.0, who="/busy"))
    told = Told()
    assert gate.arrive(0.0, 0.6, told, Known(5.0, who="/calm")) is not None
    gate.turn(0.0)
    assert told.said == [None]


def test_beyond_what_the_workers_can_do_requests_go_on_at_a_pace():
    """So those that a scheduler finds for its next batch did not all come before the last one."""
    gate, known, went = Gate(pace=1.5), Known(100.0), []
    for ms in range(500):
        now = 1e-3 * ms
        with contextlib.suppress(RefusedEarly):
            gate.walk_in(now, now + 0.5, known)
            went.append(ms)
    assert went[:50] == [*range(50)]  # what can be done in 0.5 s
    later = np.array(went[50:])
    assert len(later) == 50  # at most twice as many are on their way
    assert min(later[15:] - later[:-15]) >= 100  # 1.5 times the rate, so 15 in 0.1 s


def test_nothing_is_kept_of_whom_nobody_asks_for():
    gate = Gate()
    for i in range(2000):
        gate.leave(gate.walk_in(i, i + 1.0, Known(1.0, who=f"/users/{i}")))
    assert not gate._of and len(gate._came) <= PLACES_KEPT


def test_who_has_more_time_takes_nobody_elses_pace():
    gate = Gate(pace=1.0)
    for ms in range(1000):
        now = 1e-3 * ms
        with contextlib.suppress(RefusedEarly):
            gate.walk_in(now, now + 86_400.0, Known(100.0))
        if not ms % 20:
            gate.leave(gate.walk_in(now, now + 0.4, Known(100.0)))


def test_who_was_refused_beyond_as_many_as_were_answered_counts_until_its_deadline():
    gate, known = Gate(pace=1.0), Known(rate=10.0)

    def sent(now, refused):
        ticket = gate.walk_in(now, now + 0.5, known)
        gate.leave(ticket)
        if refused:
            return gate.refused(ticket, now + 0.1)
        return gate.answered(ticket)

    assert [sent(0.0, refused=True) for _ in range(FEW)] == [0.0] * FEW
    sent(0.0, refused=False)  # so one more may be refused
    assert sent(0.0, refused=True) == 0.0
    assert [sent(0.0, refused=True) for _ in range(FEW)] == [pytest.approx(0.4)] * FEW
    with pytest.raises(RefusedEarly, match="16 requests with earlier deadlines are on their way"):
        sent(0.05, refused=True)
    # A long SLO does not keep the door closed for long.
    late = Ticket(0, 60.0, known, print)
    assert gate.refused(late, 0.0) == REFUSED_S
    # Nothing is known of the capacity of others, which are not counted.
    assert gate.refused(Ticket(1, 0.5, Known(), print), 0.0) == 0.0


def test_a_door_forgets_the_refused_at_their_deadline():
    async def scenario():
        door, known = Door(Gate(pace=1.0)), Known(rate=10.0)
        for _ in range(2 * FEW):
            ticket = await door.enter(time.monotonic() + 0.3, known)
            door.leave(ticket, was_refused=True)
            door.leave(ticket)  # when the connection is done
        with pytest.raises(RefusedEarly):
            await door.enter(time.monotonic() + 0.4, known)
        await asyncio.sleep(0.35)
        ticket = await door.enter(time.monotonic() + 0.3, known)
        assert door.gate.inside == 1
        door.leave(ticket, was_refused=False)
        assert door.gate.inside == 0

    asyncio.run(scenario())


def test_no_more_are_on_their_way_than_the_window():
    gate, told = Gate(), [Told() for _ in range(200)]
    gate.window = 100
    tickets = [gate.arrive(0.0, 86_400.0, one, Known(100.0)) for one in told]
    while gate.turn(0.0):
        pass
    assert (gate.inside, gate.waiting) == (100, 100)
    short = Told()
    gate.arrive(0.0, 0.9, short, Known(100.0))
    assert gate.can_turn  # whoever has less time does not wait for those
    gate.turn(0.0)
    assert short.said == [None]
    assert not gate.can_turn
    gate.leave(tickets[1])
    gate.leave(tickets[0])
    gate.turn(0.0)
    assert told[100].said == [None]


def test_beyond_the_bound_the_latest_deadline_gives_way():
    gate = Gate(most=2)
    late, early, later = Told(), Told(), Told()
    gate.arrive(0.0, 9.0, late)
    gate.arrive(0.0, 5.0, Told())
    assert gate.arrive(0.0, 1.0, early) is not None
    assert late.said[0].reason == "queue_full"
    assert early.said == []
    assert gate.arrive(0.0, 10.0, later) is None
    assert later.said[0].reason == "queue_full"
    assert gate.waiting == 2


def test_who_left_while_it_waited_is_not_kept_in_memory():
    gate, told = Gate(), Told()
    gate.leave(gate.arrive(0.0, 1.0, told))
    kept = weakref.ref(told)
    del told
    gc.collect()
    assert kept() is None


def test_of_whom_nothing_is_known_goes_last_and_gives_way_first():
    """Whatever the deadlines are, also if they have passed."""
    gate, order = Gate(most=4), []

    def arrive(name, rank, deadline):
        gate.arrive(0.0, deadline, lambda said: order.append((name, said)), rank=rank)

    for name, rank, deadline in (
        ("strange", Rank.STRANGE, 1.0),
        ("elsewhere", Rank.ELSEWHERE, 2.0),
        ("known", Rank.KNOWN, 9.0),
        ("early", Rank.STRANGE, 0.5),
        ("more", Rank.KNOWN, 8.0),
    ):
        arrive(name, rank, deadline)
    ((name, refused),) = order
    assert (name, refused.reason) == ("strange", "queue_full")
    order.clear()
    while gate.turn(0.0):
        pass
    assert [name for name, said in order] == ["more", "known", "elsewhere", "early"]
    assert {said for _, said in order} == {None}


def test_few_strangers_are_on_their_way_and_keep_nobody_else_out():
    gate = Gate()
    gate.window = 1.0
    told = [Told() for _ in range(40)]
    tickets = [gate.arrive(0.0, 5.0, one, rank=Rank.STRANGE) for one in told]
    while gate.turn(0.0):
        pass
    assert sum(one.said == [None] for one in told) == gate.inside == 16
    for rank in (Rank.KNOWN, Rank.ELSEWHERE):
        other = Told()
        gate.arrive(0.0, 9.0, other, Known(100.0) if rank is Rank.KNOWN else Known(), rank)
        gate.turn(0.0)
        assert other.said == [None]
    shut_out = Told()
    gate.arrive(0.0, 9.5, shut_out, Known(100.0))  # the window is for known ones
    gate.discount(tickets[0])  # one counts no more; one has left
    gate.leave(tickets[1])
    while gate.turn(0.0):
        pass
    assert sum(one.said == [None] for one in told) == 18
    assert shut_out.said == []
    gate.discount(tickets[2])
    gate.turn(6.0)
    assert [one.said[0].reason for one in told[18:26]] == ["would_miss"] * 8  # they expire


def test_who_waits_at_a_place_that_becomes_known_comes_again():
    gate, told = Gate(), {name: Told() for name in "abc"}
    for name, rank in zip("abc", Rank, strict=True):
        gate.arrive(0.0, 5.0, told[name], rank=rank, place=name)
    gate.call_again(lambda ticket: ticket.place != "b")
    assert told["a"].said == told["b"].said == []
    assert [type(said) for said in told["c"].said] == [NowKnown]
    assert gate.waiting == 2


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(list(Rank)), st.floats(-1, 3), st.floats(0, 0.5)), max_size=60
    ),
    st.integers(1, 30),
)
@PURE
def test_strangers_never_keep_out_known_ones_and_every_ticket_ends(arrivals, most):
    """A known request goes on, or is refused, as if there were no strangers."""

    def seen(ranks):
        gate, now, told = Gate(most), 0.0, {}
        for number, (rank, left_s, then_s) in enumerate(arrivals):
            if rank in ranks:
                told[number] = Told()
                gate.arrive(now, now + left_s, told[number], rank=rank)
            now += then_s
            if number % 3 == 0:  # a turn that strangers take only if nobody else may
                while gate._order and gate._order[0][0] is Rank.KNOWN:
                    gate.turn(now)
        while gate.waiting:
            gate.turn(now)
            for ticket in list(gate._strangers):
                gate.leave(ticket)
        assert all(len(one.said) == 1 for one in told.values())
        return {n: one.said[0] is None for n, one in told.items() if arrivals[n][0] is Rank.KNOWN}

    alone = seen([Rank.KNOWN])
    among = seen(list(Rank))
    assert among.keys() == alone.keys()
    assert not [n for n in alone if alone[n] and not among[n]]


def test_a_stranger_whom_nobody_answers_counts_for_a_second():
    async def main():
        door = Door()
        now = asyncio.get_running_loop().time
        began, going = now(), []
        for _ in range(40):
            entering = asyncio.create_task(door.enter(began + 5.0, rank=Rank.STRANGE))
            entering.add_done_callback(lambda _: going.append(now() - began))
        await asyncio.sleep(0.5)
        assert len(going) == 16
        await asyncio.sleep(STRANGER_S)
        assert len(going) == 32
        await asyncio.sleep(5.0)
        assert len(going) == 40

    clock.run(main())


def test_hopeless_ones_do_not_hold_up_the_others():
    gate, told = Gate(), [Told() for _ in range(100)]
    for one in told:
        gate.arrive(0.0, 1.0, one, Known(least_s=0.5))
    good = Told()
    gate.arrive(0.0, 9.0, good)
    turns = 0
    while gate.turn(0.9):
        turns += 1
    assert good.said == [None]
    assert told[0].said == [None]  # nobody was inside
    assert all(one.said[0].reason == "would_miss" for one in told[1:])
    assert turns <= 14


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "turn", "leave", "wait"]),
            st.floats(0, 3),
            st.sampled_from([None, 1.0, 50.0]),
            st.sampled_from(Rank),
        ),
        max_size=80,
    ),
    st.integers(1, 5),
)
@PURE
def test_everybody_hears_once_and_nobody_is_left_behind(steps, most):
    gate, now = Gate(most), 0.0
    tickets, verdicts = {}, {}
    for number, (what, value, rate, rank) in enumerate(steps):
        if what == "arrive":
            said = verdicts[number] = Told()
            ticket = gate.arrive(now, now + value, said, Known(rate, least_s=value / 4), rank)
            if ticket is None:
                assert len(said.said) == 1 and said.said[0] is not None
            else:
                tickets[number] = ticket
        elif what == "turn":
            before = gate.inside
            gate.turn(now)
            assert gate.inside - before in (0, 1)
        elif what == "leave" and tickets:
            number, ticket = tickets.popitem()
            gate.leave(ticket)
            gate.leave(ticket)  # again: nothing
            if not verdicts[number].said:
                del verdicts[number]  # its client has gone
        else:
            now += value
        assert gate.waiting <= most
    while gate.waiting:  # no window is as small as these
        gate.turn(now)
        for ticket in list(gate._strangers):
            gate.discount(ticket)
    assert all(len(v.said) == 1 for v in verdicts.values())
    inside = [n for n in tickets if verdicts[n].said == [None]]
    assert gate.inside == len(inside)
    for number in inside:
        gate.leave(tickets[number])
    assert gate.inside == 0


def test_coroutines_wait_at_a_door():
    async def run():
        door, order = Door(), []

        async def one(number, left_s):
            ticket = await door.enter(asyncio.get_running_loop().time() + left_s)
            order.append(number)
            door.leave(ticket)

        await asyncio.gather(*(one(i, 60 - i) for i in range(20)))
        assert order == [0, *range(19, 0, -1)]  # the first found nobody
        assert (door.gate.waiting, door.gate.inside) == (0, 0)
        # Who leaves while waiting is forgotten.
        tasks = [asyncio.ensure_future(one(i, 60)) for i in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        await asyncio.gather(*tasks[:2])
        assert (door.gate.waiting, door.gate.inside) == (0, 0)
        with pytest.raises(RefusedEarly) as refused:
            tickets = [
                asyncio.ensure_future(door.enter(asyncio.get_running_loop().time() + 1, Known(1.0)))
                for _ in range(70)
            ]
            await asyncio.gather(*tickets)
        assert refused.value.reason == "queue_full"
        assert refused.value.retry_after_s > 0

    asyncio.run(run())


def test_the_length_of_the_loops_turns_is_measured():
    """Every turn takes 50 ms, because a callback blocks the loop."""
    now = [0.0]

    async def run():
        door = Door(per_turn=1)
        door._clock = lambda: now[0]
        for _ in range(20):
            asyncio.get_running_loop().call_soon(lambda: now.__setitem__(0, now[0] + 0.05))
            door.leave(await door.enter(1e6))
            await asyncio.sleep(0)
        return door.turn_s

    assert 0.04 < asyncio.run(run()) < 0.06


def test_who_gives_way_no_longer_counts_for_its_application():
    gate, known = Gate(most=1), Known(100.0, 1, 0.0, "a")
    late, again = Told(), Told()
    gate.arrive(0.0, 5.0, late, known)
    first = gate.arrive(0.0, 1.0, Told())
    assert late.said[0].reason == "queue_full"
    gate.leave(first)
    assert gate.arrive(0.0, 9.0, again, known) is not None
    assert again.said == []
