"""Flags, scopes and `ray_slo.checkpoint()`, without torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import ray_slo
from ray_slo.models.checkpoint import Preempted, PreemptionFlag, checkpoint, preemption_scope


def test_is_a_light_import():
    code = (
        "import sys, ray_slo; ray_slo.checkpoint(); "
        "assert not {'ray', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_profiles_of_preemption_are_read_without_torch():
    code = "import sys, ray_slo.models.preemption; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_does_nothing_where_no_batch_can_be_preempted():
    assert ray_slo.checkpoint is checkpoint
    checkpoint()
    with preemption_scope(PreemptionFlag()):
        checkpoint()


def test_stops_at_the_next_checkpoint_and_not_before():
    flag, steps = PreemptionFlag(), []
    with pytest.raises(Preempted) as stop, preemption_scope(flag):
        for step in range(5):
            checkpoint()
            if step == 2:
                assert flag.set()
            steps.append(step)
    assert steps == [0, 1, 2]
    assert stop.value.flag is flag
    checkpoint()  # the scope is over


def test_a_batch_whose_flag_is_set_before_it_starts_does_not_start():
    flag, started = PreemptionFlag(), False
    assert flag.set()
    with pytest.raises(Preempted), preemption_scope(flag):
        started = True
    assert not started


def test_a_late_flag_hits_nobody():
    flag = PreemptionFlag()
    with preemption_scope(flag):
        pass
    assert not flag.set()
    assert not flag.is_set
    with preemption_scope(PreemptionFlag()):
        checkpoint()


def test_a_flag_belongs_to_one_batch():
    flag = PreemptionFlag()
    with preemption_scope(flag):
        pass
    with pytest.raises(ValueError, match="one PreemptionFlag per batch"), preemption_scope(flag):
        pass


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_scopes_nest(which):
    flags = {"outer": PreemptionFlag(), "inner": PreemptionFlag()}
    reached = []
    with pytest.raises(Preempted) as stop, preemption_scope(flags["outer"]):
        try:
            with preemption_scope(flags["inner"]):
                flags[which].set()
                checkpoint()
        except Preempted as inner:
            if inner.flag is flags["outer"]:
                raise
        reached.append("after inner")
        flags["outer"].set()
        checkpoint()
    assert stop.value.flag is flags["outer"]
    assert reached == (["after inner"] if which == "inner" else [])


def test_except_exception_does_not_swallow_it_and_finally_runs():
    cleaned = []

    def model(flag):
        flag.set()
        try:
            checkpoint()
        except Exception:
            return "swallowed"
        finally:
            cleaned.append(True)

    flag = PreemptionFlag()
    with pytest.raises(Preempted), preemption_scope(flag):
        model(flag)
    assert cleaned == [True]


def test_what_the_stopped_frames_held_is_free_while_the_exception_lives():
    class Activation:
        pass

    references = []

    def model(flag):
        activation = Activation()
        references.append(weakref.ref(activation))
        flag.set()
        (lambda: checkpoint() or activation)()

    flag = PreemptionFlag()
    with pytest.raises(Preempted) as stop, preemption_scope(flag):
        model(flag)
    assert stop.value.__traceback__ is not None
    assert references[0]() is None


def test_a_thread_is_stopped_from_the_event_loop():
    async def main():
        loop, flag, running = asyncio.get_running_loop(), PreemptionFlag(), asyncio.Event()

        def batch():
            with preemption_scope(flag):
                loop.call_soon_threadsafe(running.set)
                while True:
                    checkpoint()

        with ThreadPoolExecutor(1) as pool:
            future = loop.run_in_executor(pool, batch)
            await running.wait()
            assert flag.set()
            with pytest.raises(Preempted):
                await future
            assert await loop.run_in_executor(pool, checkpoint) is None
        assert not flag.set()

    asyncio.run(main())


def test_tasks_of_one_loop_have_scopes_of_their_own():
    async def batch(flag, name, done):
        with preemption_scope(flag):
            for _ in range(3):
                await asyncio.sleep(0)
                checkpoint()
            await asyncio.to_thread(checkpoint)  # the scope follows there
            done.append(name)

    async def main():
        flags, done = [PreemptionFlag(), PreemptionFlag()], []
        tasks = [asyncio.create_task(batch(f, n, done)) for f, n in zip(flags, "ab", strict=True)]
        await asyncio.sleep(0)
        flags[0].set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[0], Preempted)
        assert done == ["b"]

    asyncio.run(main())


def test_flags_that_race_with_completion_hit_their_own_batch_or_none():
    """Every odd batch is asked to stop, at any moment up to long after its end."""
    current: list[tuple[int, PreemptionFlag]] = []
    over = threading.Event()
    asked = set()

    def nag():
        while not over.is_set():
            if current:
                number, flag = current[0]
                if number % 2 and flag.set():
                    asked.add(number)

    thread = threading.Thread(target=nag)
    thread.start()
    outcomes = {}
    try:
        for number in range(3000):
            flag = PreemptionFlag()
            current[:] = [(number, flag)]
            try:
                with preemption_scope(flag):
                    for _ in range(number % 7 * 20):
                        checkpoint()
                outcomes[number] = "finished"
            except Preempted as stop:
                assert stop.flag is flag
                outcomes[number] = "preempted"
    finally:
        over.set()
        thread.join()
    assert len(outcomes) == 3000
    preempted = {n for n, outcome in outcomes.items() if outcome == "preempted"}
    assert preempted <= asked
    assert all(n % 2 for n in preempted)
