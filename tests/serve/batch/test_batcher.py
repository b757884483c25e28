"""`@ray_slo.batch` in plain asyncio, without Ray, in virtual time: what callers see."""

import asyncio
import contextvars
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.errors import BadInput, BatchResultError, ConfigError, Expired, RefusedEarly
from ray_slo.serve.deadlines import deadline_for, deadline_scope, remaining_ms
from tests.serve import clock

# Generous: nothing here may fail because the machine is slow.
SLO_MS = 20_000


class Doubler:
    """Records its batches; `hold` keeps it busy, `stall_s` makes it slow."""

    def __init__(self, stall_s=0.0):
        self.batches = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.stall_s = stall_s

    async def _double(self, items):
        self.batches.append(list(items))
        await asyncio.sleep(self.stall_s)
        await self.hold.wait()
        return [2 * i for i in items]

    @ray_slo.batch(SLO_MS)
    async def double(self, items):
        """Twice each."""
        return await self._double(items)

    @ray_slo.batch(latency_slo_ms=200)
    async def hurried(self, items):
        return await self._double(items)


async def busy(model, method):
    """Start a batch of one that lasts until `model.hold` is set."""
    model.hold.clear()
    first = asyncio.ensure_future(method(0))
    while not model.batches:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return first


@ray_slo.batch(SLO_MS)
async def double(items):
    return [2 * i for i in items]


class TestCallStyles:
    async def gather(self, method, n=5):
        return await asyncio.gather(*(method(i) for i in range(n)))

    def test_method(self):
        async def main():
            return await self.gather(Doubler().double)

        assert clock.run(main()) == [0, 2, 4, 6, 8]

    def test_function(self):
        assert clock.run(self.gather(double)) == [0, 2, 4, 6, 8]

    def test_local_function_and_lambda_style_name(self):
        @ray_slo.batch(SLO_MS)
        def triple(items):
            return [3 * i for i in items]

        assert clock.run(self.gather(triple, 3)) == [0, 3, 6]

    def test_sync_method_runs_in_one_thread_off_the_loop(self):
        threads = set()

        class Model:
            @ray_slo.batch(SLO_MS)
            def predict(self, items):
                threads.add(threading.current_thread())
                return [-i for i in items]

        async def main():
            model = Model()
            return [await self.gather(model.predict, 3) for _ in range(5)][-1]

        assert clock.run(main()) == [0, -1, -2]
        assert len(threads) == 1
        assert threading.main_thread() not in threads

    def test_the_loop_stays_free_during_a_sync_batch(self):
        begun, release = threading.Event(), threading.Event()

        @ray_slo.batch(SLO_MS)
        def wait_for(items):
            begun.set()
            assert release.wait(20)
            return items

        async def main():
            call = asyncio.ensure_future(wait_for(1))
            while not begun.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0)
            release.set()  # only reached if the loop is free
            return await call

        assert clock.run(main()) == 1

    def test_several_arguments_become_several_lists(self):
        @ray_slo.batch(SLO_MS)
        async def scale(items, factor, *, offset=None):
            assert isinstance(items, list) and isinstance(factor, list)
            offset = offset or [0] * len(items)
            return [i * f + o for i, f, o in zip(items, factor, offset, strict=True)]

        async def main():
            return await asyncio.gather(
                scale(1, 2), scale(1, factor=3), scale(items=2, factor=3, offset=1)
            )

        assert clock.run(main()) == [2, 3, 7]

    def test_wrong_arguments_raise_at_the_call(self):
        async def main():
            with pytest.raises(TypeError, match=r"double: too many .*; it takes items"):
                await double(1, 2)
            with pytest.raises(TypeError, match=r"double: missing .*; it takes items"):
                await double()
            with pytest.raises(TypeError, match=r"double: got an unexpected .*; it takes items"):
                await double(1, factor=2)
            return await double(1)

        assert clock.run(main()) == 2

    def test_numpy_rows_are_results(self):
        @ray_slo.batch(SLO_MS)
        async def rows(items):
            return np.array(items) * 2

        assert clock.run(self.gather(rows, 3)) == [0, 2, 4]

    def test_keeps_name_and_docstring(self):
        assert Doubler.double.__name__ == "double"
        assert Doubler.double.__doc__ == "Twice each."
        assert asyncio.iscoroutinefunction(Doubler.double)

    def test_classmethod(self):
        class Model:
            factor = 3

            @classmethod
            @ray_slo.batch(SLO_MS)
            async def predict(cls, items):
                return [cls.factor * i for i in items]

        assert clock.run(self.gather(Model.predict, 2)) == [0, 3]

    def test_inheritance_with_super(self):
        class Child(Doubler):
            @ray_slo.batch(SLO_MS)
            async def double(self, items):
                parents = await asyncio.gather(*(super(Child, self).double(i) for i in items))
                return [p + 1 for p in parents]

        async def main():
            return await self.gather(Child().double, 3)

        assert clock.run(main()) == [1, 3, 5]


class TestBatches:
    def test_what_waits_while_a_batch_runs_goes_together(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            rest = [asyncio.ensure_future(model.double(i)) for i in range(1, 6)]
            await asyncio.sleep(0.02)
            assert model.batches == [[0]]  # nothing is cut before it can start
            model.hold.set()
            assert await asyncio.gather(first, *rest) == [0, 2, 4, 6, 8, 10]
            return model.batches

        batches = clock.run(main())
        assert sorted(itertools.chain(*batches)) == list(range(6))
        assert len(batches) == 2

    def test_batch_size_one_works(self):
        async def main():
            model = Doubler()
            for i in range(20):
                assert await model.double(i) == 2 * i
            return model.batches

        assert clock.run(main()) == [[i] for i in range(20)]

    def test_max_batch_size_is_an_upper_bound_and_can_be_set(self):
        async def run(bound):
            model = Doubler()
            model.double.set_max_batch_size(bound)
            for _ in range(4):
                await asyncio.gather(*(model.double(i) for i in range(12)))
            return max(map(len, model.batches))

        try:
            assert clock.run(run(3)) == 3
            assert Doubler.double.get_max_batch_size() == 3
            assert clock.run(run(1)) == 1
        finally:
            Doubler.double.set_max_batch_size(64)

    def test_a_bound_set_while_it_runs_holds_from_the_next_batch(self):
        class Model(Doubler):
            @ray_slo.batch(SLO_MS)
            async def own(self, items):
                return await self._double(items)

        async def main():
            model = Model()
            await asyncio.gather(*(model.own(i) for i in range(8)))
            Model.own.set_max_batch_size(2)
            await asyncio.sleep(0)
            del model.batches[:]
            await asyncio.gather(*(model.own(i) for i in range(8)))
            return [len(b) for b in model.batches]

        assert max(clock.run(main())) <= 2

    def test_batches_grow_with_what_was_measured(self):
        async def main():
            model = Doubler()
            for _ in range(4):
                await asyncio.gather(*(model.double(i) for i in range(64)))
            return [len(b) for b in model.batches]

        sizes = clock.run(main())
        assert sizes[0] <= 8
        assert max(sizes) > 8
        assert all(b <= max(8, 4 * max(sizes[:i], default=0)) for i, b in enumerate(sizes))

    def test_concurrent_batches(self):
        running = Counter()

        @ray_slo.batch(SLO_MS, max_batch_size=1, max_concurrent_batches=3)
        async def predict(items):
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
            await asyncio.sleep(0.01)
            running["now"] -= 1
            return items

        async def main():
            return await asyncio.gather(*(predict(i) for i in range(9)))

        assert clock.run(main()) == list(range(9))
        assert running["most"] == 3

    @settings(max_examples=25)
    @given(
        plan=st.lists(
            st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=40
        ),
        bound=st.integers(1, 8),
    )
    def test_every_call_gets_its_own_answer(self, plan, bound):
        """Whatever the arrival pattern, with callers that leave and batches that fail."""

        @ray_slo.batch(SLO_MS, max_batch_size=bound)
        async def predict(items):
            assert 1 <= len(items) <= bound
            await asyncio.sleep(0)
            if any(poison for _, poison in items):
                raise KeyError(tuple(i for i, _ in items))
            return [i for i, _ in items]

        async def main():
            calls = []
            for i, (gap, poison, leaves) in enumerate(plan):
                call = asyncio.ensure_future(predict((i, poison)))
                calls.append(call)
                for _ in range(gap):
                    await asyncio.sleep(0)
                if leaves:
                    call.cancel()
            return await asyncio.gather(*calls, return_exceptions=True)

        for i, answer in enumerate(clock.run(main())):
            if isinstance(answer, asyncio.CancelledError):
                assert plan[i][2]
            elif isinstance(answer, KeyError):
                (batch,) = answer.args
                assert i in batch and any(plan[j][1] for j in batch)
            else:
                assert answer == i and not plan[i][1]


class TestFailures:
    def test_an_exception_goes_to_all_callers_of_its_batch_only(self):
        @ray_slo.batch(SLO_MS)
        async def invert(items):
            return [1 / i for i in items]

        async def main():
            bad = await asyncio.gather(*(invert(i) for i in (1, 0, 2)), return_exceptions=True)
            return bad, await asyncio.gather(invert(1), invert(2))

        bad, good = clock.run(main())
        assert [type(e) for e in bad] == [ZeroDivisionError] * 3
        assert good == [1.0, 0.5]

    @pytest.mark.parametrize("result", [None, [], [1, 2, 3], "ab", {"a": 1, "b": 2}, 7])
    @pytest.mark.parametrize("sync", [False, True])
    def test_wrong_results(self, result, sync):
        def plain(items):
            return result

        async def coroutine(items):
            return result

        predict = ray_slo.batch(SLO_MS)(plain if sync else coroutine)

        async def main():
            return await asyncio.gather(predict(1), predict(2), return_exceptions=True)

        answers = clock.run(main())
        assert all(isinstance(a, BatchResultError) for a in answers)
        assert "was given 2 items" in str(answers[0])

    @pytest.mark.parametrize("sync", [False, True])
    def test_stop_iteration_does_not_hang(self, sync):
        def plain(items):
            raise StopIteration

        async def coroutine(items):
            raise StopIteration

        predict = ray_slo.batch(SLO_MS)(plain if sync else coroutine)

        async def main():
            with pytest.raises(RuntimeError, match="StopIteration"):
                await predict(1)

        clock.run(main())

    def test_a_method_that_cancels_itself_does_not_hang_its_callers(self):
        @ray_slo.batch(SLO_MS)
        async def predict(items):
            if 13 in items:
                raise asyncio.CancelledError
            return items

        async def main():
            with pytest.raises(RuntimeError, match="CancelledError"):
                await predict(13)
            return await predict(1)

        assert clock.run(main()) == 1

    def test_a_policy_that_raises_does_not_hang_its_callers(self, monkeypatch, caplog):
        class Broken:
            serves_late = True

            def requests_arrived(self, now, requests): ...
            def requests_cancelled(self, now, requests): ...
            def batch_finished(self, now, worker, outcome): ...
            def cluster_changed(self, now, cluster): ...
            def decide(self, now):
                raise ArithmeticError("no idea")

        predict = ray_slo.batch(SLO_MS)(double.__wrapped__)
        monkeypatch.setattr("ray_slo.serve.batch.batcher.make_policy", lambda *_: Broken())

        async def main():
            with pytest.raises(ArithmeticError):
                await predict(1)

        clock.run(main())
        assert "policy 'Broken' failed" in caplog.text


class TestCancellation:
    def test_a_caller_that_leaves_the_queue_is_never_served(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            calls = [asyncio.ensure_future(model.double(i)) for i in range(1, 5)]
            await asyncio.sleep(0)
            calls[1].cancel()
            await asyncio.sleep(0)
            model.hold.set()
            answers = await asyncio.gather(first, *calls, return_exceptions=True)
            return model.batches, answers

        batches, answers = clock.run(main())
        assert batches == [[0], [1, 3, 4]]
        assert isinstance(answers.pop(2), asyncio.CancelledError)
        assert answers == [0, 2, 6, 8]

    def test_a_caller_that_leaves_a_running_batch_harms_nobody(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            first.cancel()
            await asyncio.sleep(0)
            other = asyncio.ensure_future(model.double(1))
            await asyncio.sleep(0)
            model.hold.set()
            assert await other == 2
            return await model.double(2)

        assert clock.run(main()) == 4

    def test_all_leave(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            calls = [asyncio.ensure_future(model.double(i)) for i in range(1, 5)]
            await asyncio.sleep(0)
            for call in [first, *calls]:
                call.cancel()
            await asyncio.gather(first, *calls, return_exceptions=True)
            model.hold.set()
            assert await model.double(9) == 18
            return model.batches

        assert clock.run(main()) == [[0], [9]]

    def test_a_timeout_around_the_call(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(model.double(1), 0.01)
            model.hold.set()
            return await first, await model.double(2), model.batches

        assert clock.run(main()) == (0, 4, [[0], [2]])


class TestDeadlines:
    def test_refused_by_a_timer_while_a_batch_runs(self):
        """Behind a batch that never ends, a call is refused when its own time is up."""

        async def main():
            model = Doubler()
            first = await busy(model, model.hurried)
            with pytest.raises((RefusedEarly, Expired)) as refused:
                await model.hurried(1)
            assert not first.done()
            model.hold.set()
            assert await first == 0  # late, but nobody throws a result away
            return refused.value, model.batches

        error, batches = clock.run(main())
        assert batches == [[0]]
        assert (error.model, error.latency_slo_ms) == ("hurried", pytest.approx(200))
        assert error.reason in ("would_miss", "shed", "expired")

    def test_a_call_has_its_own_deadline(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            patient = asyncio.ensure_future(model.double(2))
            with pytest.raises((RefusedEarly, Expired)) as refused:
                await model.double(1, latency_slo_ms=50)
            model.hold.set()
            assert await asyncio.gather(first, patient) == [0, 4]
            return refused.value, model.batches

        error, batches = clock.run(main())
        assert batches == [[0], [2]]
        assert error.latency_slo_ms == pytest.approx(50)

    def test_a_longer_deadline_outlasts_the_slo(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.hurried)
            patient = asyncio.ensure_future(model.hurried(1, latency_slo_ms=1500))
            await asyncio.sleep(0.4)
            assert not patient.done()
            model.hold.set()
            return await asyncio.gather(first, patient)

        assert clock.run(main()) == [0, 2]

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "soon", [1]])
    def test_a_bad_deadline_is_bad_input(self, value):
        with pytest.raises(BadInput) as error:
            clock.run(double(1, latency_slo_ms=value))
        assert error.value.field == "latency_slo_ms"

    def test_deadline_scope(self):
        async def main():
            model = Doubler()
            first = await busy(model, model.double)
            with deadline_scope(50), pytest.raises((RefusedEarly, Expired)) as refused:
                await asyncio.gather(model.double(1))  # child tasks inherit it
            with deadline_scope(50):
                own = asyncio.ensure_future(model.double(2, latency_slo_ms=SLO_MS))
            await asyncio.sleep(0.1)
            model.hold.set()
            assert await asyncio.gather(first, own) == [0, 4]
            return refused.value.latency_slo_ms

        assert clock.run(main()) == pytest.approx(50)

    def test_a_deadline_that_passed_is_expired_at_once(self):
        async def main():
            with deadline_scope(1):
                await asyncio.sleep(0.01)
                with pytest.raises(Expired):
                    await double(1)

        clock.run(main())

    def test_the_deadline_of_one_request_does_not_leak_into_nested_batches(self):
        @ray_slo.batch(SLO_MS)
        async def outer(items):
            assert remaining_ms() is None
            return await asyncio.gather(*(double(i) for i in items))

        async def main():
            with deadline_scope(5_000):
                return await outer(4)

        assert clock.run(main()) == 8


class Request:
    def __init__(self, **headers):
        self.headers = {k.replace("_", "-"): v for k, v in headers.items()}


@pytest.fixture
def still(monkeypatch):
    """No time passes."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


class TestRequestContext:
    @pytest.mark.parametrize(
        ("headers", "left_ms"),
        [
            ({"x_slo_latency_ms": "250"}, 250),
            ({"x_request_timeout_seconds": "0.5"}, 500),
            ({"X_SLO_Latency_MS": "250", "x_request_timeout_seconds": "0.1"}, 250),
            ({"x_slo_latency_ms": "soon", "x_request_timeout_seconds": "0.5"}, 500),
            ({"x_request_timeout_seconds": "0"}, None),
            ({"x_request_timeout_seconds": "-1"}, None),
            ({"x_slo_latency_ms": "nan"}, None),
            ({"accept": "*/*"}, None),
        ],
    )
    def test_headers(self, headers, left_ms, still):
        with deadline_scope(Request(**headers)):
            left = remaining_ms()
        assert left == (None if left_ms is None else pytest.approx(left_ms))

    def test_a_timeout_only_tightens_and_our_header_replaces(self, still):
        now = time.monotonic()
        for headers, budget in [
            ({"x_request_timeout_seconds": "300"}, 100),
            ({"x_request_timeout_seconds": "50"}, 50),
            ({"x_slo_latency_ms": "300000"}, 300),
        ]:
            with deadline_scope(Request(**headers)):
                assert deadline_for(100) - now == pytest.approx(budget)

    def test_scopes_nest_and_none_means_as_the_model_says(self, still):
        with deadline_scope(5_000):
            with deadline_scope(None):
                assert remaining_ms() is None
            assert remaining_ms() == pytest.approx(5_000)
        assert remaining_ms() is None


class TestLearning:
    def test_a_cold_start_does_not_shut_the_door(self):
        """The first batch takes five times the SLO; later ones are quick and must be served."""
        starts = []

        @ray_slo.batch(latency_slo_ms=200)
        async def predict(items):
            starts.append(len(items))
            if len(starts) == 1:
                await asyncio.sleep(1)
            return items

        async def main():
            await predict(0)
            return [await predict(i) for i in range(5)]

        assert clock.run(main()) == list(range(5))
        assert starts == [1] * 6

    def test_nobody_is_refused_for_the_predicted_end_of_a_batch_of_unknown_size(self):
        """A cold start under load: a batch's cost does not grow, but that is not known yet."""

        @ray_slo.batch(latency_slo_ms=2850)
        async def predict(items):
            await asyncio.sleep(0.6)
            return items

        async def main():
            first = asyncio.ensure_future(predict(-1))
            await asyncio.sleep(0.3)
            # In batches of 8, 32 and 20; for the second, 1.8 s are predicted at first.
            rest = await asyncio.gather(*(predict(i) for i in range(60)), return_exceptions=True)
            return [await first, *rest]

        assert clock.run(main()) == list(range(-1, 60))

    def test_a_method_that_is_too_slow_is_refused_once_that_is_known(self):
        served = []

        @ray_slo.batch(latency_slo_ms=50)
        async def predict(items):
            served.extend(items)
            await asyncio.sleep(0.2)
            return items

        async def main():
            answers = []
            for i in range(8):
                answers += await asyncio.gather(predict(i), return_exceptions=True)
            return answers

        answers = clock.run(main())
        assert answers[:2] == [0, 1]  # there is no knowing before it was tried
        assert all(isinstance(a, RefusedEarly) for a in answers[4:])
        assert len(served) == 8 - sum(isinstance(a, RefusedEarly) for a in answers)
        assert answers[-1].reason == "would_miss"
        assert answers[-1].predicted_finish_ms > 50
        finish_ms = answers[-1].predicted_finish_ms
        assert f", predicted finish {finish_ms:.0f} ms after arrival" in str(answers[-1])
        assert answers[-1].retry_after_s > 0

    def test_while_a_batch_is_late_callers_are_told_to_wait_as_long(self):
        @ray_slo.batch(latency_slo_ms=200, margin_ms=20)
        async def predict(items):
            await asyncio.sleep(3 if "slow" in items else 0.05)
            return items

        async def main():
            for _ in range(20):
                await predict("quick")
            slow = asyncio.ensure_future(predict("slow"))
            found = []
            for _ in range(4):
                await asyncio.sleep(0.5)
                with pytest.raises(RefusedEarly) as refused:
                    await predict("behind it")
                found.append(refused.value)
            await slow
            return found

        for number, refused in enumerate(clock.run(main())):
            assert refused.retry_after_s > 0.4 * (number + 1)
            assert "after arrival, and 20 ms are kept as a margin" in str(refused)

    def test_and_tried_again_after_a_while(self, monkeypatch):
        monkeypatch.setattr("ray_slo.core.beliefs._OLD", (0.3, 0.0))
        slow = [True]

        @ray_slo.batch(latency_slo_ms=100)
        async def predict(items):
            await asyncio.sleep(0.3 if slow[0] else 0)
            return items

        async def main():
            for i in range(8):
                await asyncio.gather(predict(i), return_exceptions=True)
            with pytest.raises(RefusedEarly):
                await predict(1)
            slow[0] = False
            await asyncio.sleep(0.4)
            return [await predict(i) for i in range(5)]

        assert clock.run(main()) == list(range(5))

    def test_a_hopeless_deadline_is_refused_although_idle(self):
        @ray_slo.batch(latency_slo_ms=SLO_MS)
        async def predict(items):
            await asyncio.sleep(0.2)
            return items

        async def main():
            for i in range(4):
                await predict(i)
            with pytest.raises(RefusedEarly) as refused:
                await predict(1, latency_slo_ms=20)
            assert await predict(5) == 5
            return refused.value

        assert clock.run(main()).predicted_finish_ms >= 190

    def test_what_is_measured_decides_the_batch(self):
        """50 ms per item and 400 ms to go: never eight in a batch once that is known."""
        sizes = []

        @ray_slo.batch(latency_slo_ms=400)
        async def predict(items):
            sizes.append(len(items))
            await asyncio.sleep(0.05 * len(items))
            return items

        async def main():
            for _ in range(3):
                await predict(0)
            del sizes[:]
            for _ in range(3):
                await asyncio.gather(*(predict(i) for i in range(16)), return_exceptions=True)

        clock.run(main())
        assert max(sizes[1:]) <= 7

    def test_a_profile_is_believed_from_the_start(self):
        @ray_slo.batch(latency_slo_ms=1000, profile=LatencyProfile.linear(0.2, 0.1, 32))
        async def predict(items):
            return items

        async def main():
            batches = await asyncio.gather(*(predict(i) for i in range(4)), return_exceptions=True)
            return batches

        assert 0 in clock.run(main())


class TestStreams:
    class Counter:
        def __init__(self):
            self.batches = []
            self.steps = 0

        @ray_slo.batch(SLO_MS)
        async def count(self, limits):
            self.batches.append(list(limits))
            for i in range(max(limits)):
                self.steps += 1
                yield [i if i < limit else StopIteration for limit in limits]
                await asyncio.sleep(0)

    @staticmethod
    async def collect(stream):
        return [item async for item in stream]

    def test_each_caller_gets_its_own_values(self):
        async def main():
            model = self.Counter()
            streams = (self.collect(model.count(n)) for n in (3, 1, 2))
            return await asyncio.gather(*streams), model.batches

        values, batches = clock.run(main())
        assert values == [[0, 1, 2], [0], [0, 1]]
        assert batches == [[3, 1, 2]]

    def test_it_stops_when_nobody_listens(self):
        async def main():
            model = self.Counter()
            stream = model.count(10_000)
            async for item in stream:
                if item == 2:
                    break
            await stream.aclose()
            assert await self.collect(model.count(2)) == [0, 1]
            return model.steps

        assert clock.run(main()) < 100

    def test_an_error_in_the_middle(self):
        @ray_slo.batch(SLO_MS)
        async def predict(items):
            yield items
            raise LookupError("lost it")

        async def main():
            got = []
            with pytest.raises(LookupError):
                async for item in predict(1):
                    got.append(item)  # noqa: PERF401
            return got

        assert clock.run(main()) == [1]

    def test_a_step_of_the_wrong_length(self):
        @ray_slo.batch(SLO_MS)
        async def predict(items):
            yield [*items, 1]

        with pytest.raises(BatchResultError):
            clock.run(self.collect(predict(1)))

    def test_refusal(self):
        async def main():
            model = self.Counter()
            with deadline_scope(1):
                await asyncio.sleep(0.01)
                with pytest.raises(Expired):
                    await self.collect(model.count(1))

        clock.run(main())


class TestState:
    def test_instances_do_not_share_batches(self):
        async def main():
            a, b = Doubler(), Doubler()
            await asyncio.gather(*(m.double(i) for i in range(3) for m in (a, b)))
            return a.batches, b.batches

        assert clock.run(main()) == ([[0, 1, 2]], [[0, 1, 2]])

    def test_instances_are_not_kept_alive(self):
        async def main():
            model = Doubler()
            await model.double(1)
            alive = weakref.ref(model)
            del model
            gc.collect()
            await asyncio.sleep(0.01)
            return alive()

        assert clock.run(main()) is None

    def test_slots_and_unhashable_instances(self):
        class Slotted:
            __slots__ = ("factor",)
            __hash__ = None

            def __init__(self, factor):
                self.factor = factor

            def __eq__(self, other):
                return True

            @ray_slo.batch(SLO_MS)
            async def predict(self, items):
                return [self.factor * i for i in items]

        async def main():
            a, b = Slotted(2), Slotted(3)
            return await asyncio.gather(a.predict(1), b.predict(1), a.predict(2))

        assert clock.run(main()) == [2, 3, 4]

    def test_several_event_loops_one_after_the_other(self):
        model = None

        async def main(i):
            nonlocal model
            model = model or Doubler()
            return await model.double(i)

        assert [clock.run(main(i)) for i in range(3)] == [0, 2, 4]

    def test_the_thread_of_a_closed_event_loop_ends_when_another_is_used(self):
        threads = []

        @ray_slo.batch(SLO_MS)
        def predict(items):
            threads.append(threading.current_thread())
            return items

        async def main():
            return await predict(1)

        gc.disable()  # it would end the thread, too, but nobody knows when
        try:
            assert [clock.run(main()) for _ in range(2)] == [1, 1]
            before, after = threads
            before.join(10)
            assert (before.is_alive(), after.is_alive()) == (False, True)
        finally:
            gc.enable()

    def test_several_event_loops_at_once(self):
        answers = {}

        def run(i):
            async def main():
                return [await double(i + j) for j in range(20)]

            answers[i] = asyncio.run(main())

        threads = [threading.Thread(target=run, args=(100 * i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert answers == {100 * i: [2 * (100 * i + j) for j in range(20)] for i in range(4)}

    @pytest.mark.parametrize("used", [False, True])
    def test_a_decorated_class_pickles_used_or_not(self, used):
        class Model:
            @ray_slo.batch(SLO_MS, max_batch_size=7)
            async def predict(self, items):
                return items

        async def main(model):
            return await model.predict(1)

        if used:
            assert clock.run(main(Model())) == 1
        copy = cloudpickle.loads(cloudpickle.dumps(Model))
        assert clock.run(main(copy())) == 1
        assert copy.predict.get_max_batch_size() == 7

    def test_module_level_functions_pickle_by_name(self):
        assert pickle.loads(pickle.dumps(double)) is double

    def test_the_method_sees_no_context_of_a_caller(self):
        who = contextvars.ContextVar("who", default="nobody")

        @ray_slo.batch(SLO_MS)
        async def predict(items):
            return [who.get()] * len(items)

        async def call(name):
            who.set(name)
            return await predict(1)

        async def main():
            await predict(0)
            return await asyncio.gather(
                asyncio.create_task(call("a")), asyncio.create_task(call("b"))
            )

        assert clock.run(main()) == ["nobody", "nobody"]


class TestConfiguration:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"latency_slo_ms": 0}, "latency_slo_ms must be a positive number"),
            ({"latency_slo_ms": "fast"}, "got 'fast'"),
            ({"max_batch_size": 0}, "max_batch_size must be a whole number"),
            ({"max_batch_size": 2.5}, "2.5"),
            ({"max_batch_size": 10**9}, "max_batch_size must be at most 100000"),
            ({"max_batch_size": "8"}, "'8'"),
            ({"max_concurrent_batches": 0}, "max_concurrent_batches"),
            ({"objective": "magic"}, "magic"),
            ({"margin_ms": 100}, "margin_ms"),
            ({"profile": "no/such/file.json"}, "profile"),
            ({"batch_wait_timeout_s": 0.01}, "follows from the deadlines"),
            ({"batch_size": 8}, "valid are latency_slo_ms, max_batch_size"),
        ],
    )
    def test_errors_name_the_field(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            ray_slo.batch(**{"latency_slo_ms": 100, **arguments})(double.__wrapped__)

    def test_without_an_slo(self):
        with pytest.raises(ConfigError, match="needs an SLO"):

            @ray_slo.batch
            async def predict(items): ...

    def test_what_cannot_be_decorated(self):
        def generator(items):
            yield items

        async def no_items(self): ...

        async def clash(items, latency_slo_ms): ...

        for bad in (generator, no_items, clash, Doubler, 7):
            with pytest.raises(ConfigError):
                ray_slo.batch(100)(bad)

    def test_profiles_from_a_file(self, tmp_path):
        one, two = LatencyProfile.linear(0.001, 0.01, 8), LatencyProfile.linear(0.002, 0.02, 16)
        path = tmp_path / "profiles.json"
        save_profiles(path, {"whatever": one})
        assert clock.run(ray_slo.batch(1000, profile=path)(double.__wrapped__)(1)) == 2
        save_profiles(path, {"double": one, "other": two})
        assert clock.run(ray_slo.batch(1000, profile=str(path))(double.__wrapped__)(1)) == 2
        save_profiles(path, {"b": one, "a": two})
        with pytest.raises(ConfigError, match="has no 'double'; it has b, a"):
            ray_slo.batch(1000, profile=path)(double.__wrapped__)

    def test_slo_setter(self):
        predict = ray_slo.batch(1000)(double.__wrapped__)
        predict.set_latency_slo_ms(500)
        assert predict.get_latency_slo_ms() == 500
        with pytest.raises(ConfigError):
            predict.set_latency_slo_ms(-1)


def test_a_checkpoint_stops_nothing_and_is_told_once(caplog):
    @ray_slo.batch(SLO_MS)
    async def stepwise(items):
        ray_slo.checkpoint()
        return items

    async def main():
        return [await stepwise(1), await stepwise(2)]

    assert clock.run(main()) == [1, 2]
    (line,) = [r.message for r in caplog.records if "checkpoint()" in r.message]
    assert "@ray_slo.batch stops no batch; use @ray_slo.deployment with the policy" in line
