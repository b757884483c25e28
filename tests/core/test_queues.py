"""DeadlineQueue against a sorted list, and cancellation by identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_slo.core import DeadlineQueue, Request


def request(id: int, deadline: float) -> Request:
    return Request(id, "m", 0.0, deadline)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 200)),
    ),
    max_size=200,
)


@given(operations)
def test_behaves_like_a_sorted_list(operations):
    queue, model, pushed = DeadlineQueue(), [], []
    for name, *args in operations:
        if name == "push":
            r = request(len(pushed), float(args[0]))
            pushed.append(r)
            queue.push(r)
            model.append(r)
            model.sort(key=lambda r: r.deadline)  # stable: ties in order of arrival
        elif name == "take":
            count, start = args
            assert queue.take(count, start) == model[start : start + count]
            del model[start : start + count]
        elif name == "pop":
            if model:
                assert queue.pop() is model.pop(0)
            else:
                with pytest.raises(IndexError):
                    queue.pop()
        elif pushed:
            r = pushed[args[0] % len(pushed)]
            assert queue.remove(r) is (r in model)
            if r in model:
                model.remove(r)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert bool(queue) is bool(model)
        assert [queue[i] for i in range(len(queue))] == model
        for d in (-1.0, 3.0, 4.5, 10.0):
            assert queue.position(d) == sum(r.deadline < d for r in model)
        if model:
            assert queue.head is model[0]


def test_empty():
    queue = DeadlineQueue()
    for look in (lambda: queue.head, queue.pop, lambda: queue[0]):
        with pytest.raises(IndexError):
            look()
    assert queue.take(3) == []
    assert queue.remove(request(1, 1.0)) is False


def test_removes_by_identity_among_equal_deadlines():
    twins = [request(1, 5.0), request(1, 5.0), request(1, 5.0)]
    queue = DeadlineQueue(twins)
    assert queue.remove(twins[1])
    assert [r is t for r, t in zip(queue, (twins[0], twins[2]), strict=True)] == [True, True]
    assert not queue.remove(twins[1])


def test_memory_is_reclaimed():
    queue = DeadlineQueue()
    for i in range(10_000):
        queue.push(request(i, float(i)))
        if i % 8 == 7:
            queue.take(8)
    assert len(queue) == 0
    assert len(queue.items) < 200
