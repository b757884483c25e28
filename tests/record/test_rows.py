"""The log of a policy is read exactly as it was written; broken files are reported."""

import json
import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_slo.core import (
    Assigned,
    BatchOutcome,
    BatchStatus,
    Cluster,
    Decision,
    Dispatch,
    DispatchDelay,
    Drop,
    DropReason,
    LatencyProfile,
    Model,
    Preempt,
    Request,
    Upstream,
    Variant,
    Worker,
)
from ray_slo.record.decode import read
from ray_slo.record.encode import Encoder, Lines
from ray_slo.record.rows import COLUMNS, Recording, Round, Start, to_arrow, write_file

SMALL = LatencyProfile([0.1, 0.1 + 1e-17, 1 / 3])
LARGE = LatencyProfile([0.2, 0.7])
CLUSTER = Cluster.of(
    [
        Model("a", 1.0, (Variant("a0", {"cpu": SMALL, "gpu": LARGE}, 70.5), Variant("a1", {}))),
        Model("b", 0.5, (Variant("b0", {"cpu": SMALL}),)),
    ],
    [
        Worker("w0", "cpu", frozenset({"a0", "b0"}), (Assigned("a0", 2, 1.5),)),
        Worker("w1", "gpu", frozenset({"a0"})),
        Worker("w2", "cpu", frozenset(), (Assigned("a0", 2), Assigned("b0", 1, 3.0))),
    ],
    DispatchDelay(0.001, 1e-5),
    0.02,
)
ONE = Request(1, "a", 0.1, 1.1, size=3)
TWO = Request(2, "b", 0.1 + 2e-16, 1 / 3, task="read", upstream=Upstream("w1", "a0", 0.25))
SHORT = replace(CLUSTER, workers={"w1": CLUSTER.workers["w1"]})
ROUNDS = [
    Round(0.0, [("cluster_changed", (0.0, CLUSTER))], Decision()),
    Round(
        0.2,
        [("requests_arrived", (0.15, [ONE])), ("requests_arrived", (0.2, [TWO]))],
        Decision(
            [
                Dispatch(1, "w0", "a0", [ONE], 0.2, 0.5),
                Preempt("w0", "more to gain", "b0", 2.5),
                Drop([TWO], DropReason.WOULD_MISS),
            ],
            0.9,
        ),
    ),
    Round(0.3, [("preempt_failed", (0.3, "w0", 1))], Decision([], 0.9)),
    Round(
        0.5,
        [
            (
                "batch_finished",
                (0.5, "w0", BatchOutcome(1, [ONE], 0.2, 0.45, BatchStatus.PREEMPTED)),
            ),
            ("cluster_changed", (0.5, SHORT)),
            ("requests_arrived", (0.5, [ONE])),
        ],
        Decision([Dispatch(2, "w1", "a0", [ONE], 0.5, 0.7)]),
    ),
    Round(0.6, [("requests_cancelled", (0.6, [ONE]))], None, "ValueError: broken"),
]
START = Start.of("eager", {"max_batch_size": 2}, application="tests")


def plain(rounds):
    """Rounds as values that compare; requests by what they hold."""

    def value(x):
        if isinstance(x, Request):
            return (x.id, x.model, x.arrival, x.deadline, x.size, x.task, x.upstream)
        if isinstance(x, Cluster):
            variants = {
                v.name: (v.accuracy, {k: p.table for k, p in v.profiles.items()})
                for v in x.variants.values()
            }
            models = [(m.name, m.latency_slo_s) for m in x.models.values()]
            return (models, variants, list(x.workers.items()), x.delay, x.preempt_delay_s)
        if isinstance(x, list | tuple):
            return [value(y) for y in x]
        if isinstance(x, Dispatch | Drop | Preempt | BatchOutcome | Decision):
            fields = [getattr(x, name) for name in type(x).__dataclass_fields__]
            return [type(x).__name__, *(value(f) for f in fields)]
        return "nan" if isinstance(x, float) and math.isnan(x) else x

    return [value(tuple(r)) for r in rounds]


def write(tmp_path, rounds=ROUNDS, start=START):
    lines = Lines(tmp_path, "s", start)
    for r in rounds:
        lines(r)
    return lines.close()


def test_rounds_come_back_to_the_last_bit(tmp_path):
    (life,) = read(write(tmp_path))
    back = list(life.rounds())
    assert plain(back) == plain(ROUNDS)
    assert (life.start, life.whole, life.lost) == (START, True, ())
    # One object per request, as the policy had it.
    arrived, dispatched = back[1].events[0][1][1][0], back[1].decision.actions[0].requests[0]
    assert arrived is dispatched


def test_logs_from_before_tasks_are_read(tmp_path):
    path = write(tmp_path)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["task"]), path)
    back = [r for (life,) in [read(path)] for r in life.rounds()]
    one, two = (events[1][1][0] for events in back[1].events)
    assert [one.task, two.task] == ["a", "b"]  # the models
    assert back[3].events[2][1][1][0] is one  # it came back


def test_rows_hold_predicted_beside_actual(tmp_path):
    rows = pq.read_table(write(tmp_path)).to_pylist()
    assert list(rows[0]) == list(COLUMNS)
    (ended,) = [r for r in rows if r["what"] == "finished"]
    assert (ended["predicted_finish_at"], ended["finish_at"], ended["slack_s"]) == (
        *(0.5, 0.45),
        pytest.approx(0.65),
    )
    (drop,) = [r for r in rows if r["what"] == "drop"]
    assert (drop["reason"], drop["requests"]) == ("would_miss", [2])
    # A profile stands once, however often a cluster has it.
    assert sum(r["what"] == "profile" for r in rows) == 2
    assert sum(r["what"] == "cluster" for r in rows) == 2


def test_every_file_can_be_read_alone(tmp_path):
    encoder = Encoder()
    encoder.start(START, 0.0)
    for i, r in enumerate(ROUNDS):
        encoder.add(r)
        write_file(tmp_path / f"s-{i}.decisions.parquet", to_arrow(encoder.rows), "s", i)
        encoder.rows.clear()
        encoder.new_file()
    (life,) = read(tmp_path)
    assert life.whole
    assert plain(life.rounds()) == plain(ROUNDS)
    (tail,) = read(tmp_path / "s-3.decisions.parquet")
    assert (tail.start, tail.begins) == (START, False)
    (known, finished, *_) = next(iter(tail.rounds())).events
    assert known[0] == "cluster_changed"
    assert list(known[1][1].workers) == ["w0", "w1", "w2"]
    assert finished[0] == "batch_finished"
    (tmp_path / "s-2.decisions.parquet").unlink()
    (holed,) = read(tmp_path)
    assert (holed.begins, holed.whole, holed.lost) == (True, False, (-1,))


def test_logs_of_when_a_worker_was_assigned_one_variant_are_read(tmp_path):
    path = write(tmp_path, ROUNDS[:1])
    table = pq.read_table(path)
    rows = table.to_pylist()
    (cluster,) = [r for r in rows if r["what"] == "cluster"]
    body = json.loads(cluster["detail"])
    body["workers"] = [["w0", "cpu", ["a0"], ["a0", 2, 1.5]], ["w1", "gpu", ["a0"], None]]
    cluster["detail"] = json.dumps(body)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    (life,) = read(path)
    (_, now), *_ = (args for r in life.rounds() for _, args in r.events)
    assert [w.assigned for w in now.workers.values()] == [(Assigned("a0", 2, 1.5),), ()]


def test_a_new_policy_begins_a_new_life(tmp_path):
    encoder = Encoder()
    for start in (START, Start.of("eager", {})):
        encoder.start(start, 0.0)
        for r in ROUNDS:
            encoder.add(r)
    encoder.lost(7, 9.0)
    path = tmp_path / "x.decisions.parquet"
    write_file(path, to_arrow(encoder.rows), "s", 0)
    first, second = read(path)
    assert plain(first.rounds()) == plain(second.rounds()) == plain(ROUNDS)
    assert (first.lost, second.lost) == ((), (7,))


class Fails:
    serves_late = True

    def cluster_changed(self, now, cluster): ...
    def requests_arrived(self, now, requests): ...
    def requests_cancelled(self, now, requests): ...
    def batch_finished(self, now, worker, outcome): ...
    def decide(self, now):
        raise RuntimeError("no idea")


def test_a_recording_is_its_policy():
    class Solves(Fails):
        preempts = True
        tables = ()

        def solved(self, now, tables):
            self.tables = tables

        def decide(self, now):
            return Decision()

    seen = []
    recording = Recording(Solves(), seen.append)
    assert (recording.preempts, recording.serves_late) == (True, True)
    assert not hasattr(recording, "preempt_failed")
    recording.solved(1.0, ["t"])
    recording.decide(2.0)
    assert recording.policy.tables == ["t"]
    assert seen == [Round(2.0, [("solved", (1.0, ["t"]))], Decision())]
    failing = Recording(Fails(), seen.append)
    with pytest.raises(RuntimeError):
        failing.decide(3.0)
    assert seen[-1] == Round(3.0, [], None, "RuntimeError: no idea")


class Changes(Fails):
    """Runs "a", and from 2 s on "b"."""

    def __init__(self):
        self.label = ""

    def decide(self, now):
        self.label = "a" if now < 2 else "b"
        return Decision()

    def in_force(self):
        return {"setting": self.label, "why": f"it is {self.label}", "since": 0.0}


def test_changes_of_setting_are_rows_that_a_replay_passes_over(tmp_path):
    lines = Lines(tmp_path, "s", START)
    rounds = []

    def sink(round):
        rounds.append(round)
        lines(round)

    recording = Recording(Changes(), sink)
    for now in (0.0, 1.0, 2.0, 3.0):
        recording.decide(now)
    lines.close()
    assert [r.setting for r in rounds] == [("a", "it is a"), None, ("b", "it is b"), None]
    rows = pq.read_table(tmp_path).to_pylist()
    settings = [(r["at"], json.loads(r["detail"])) for r in rows if r["what"] == "setting"]
    said = [(at, {"setting": s, "why": f"it is {s}"}) for at, s in ((0.0, "a"), (2.0, "b"))]
    assert settings == said
    back = [r for life in read(tmp_path) for r in life.rounds()]
    assert back == rounds


def test_what_a_log_cannot_hold_of_a_policy():
    assert Start.of(Fails, {}).policy == f"{__name__}:Fails"
    assert Start.of(Fails(), {}).policy is None
    assert Start.of("ramsis", {"solver": print}).kwargs is None


def test_broken_files_are_named(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    for text, kept in (("cut", whole[: len(whole) // 2]), ("other", b"PAR1"), ("empty", b"")):
        broken = tmp_path / text / path.name
        broken.parent.mkdir()
        broken.write_bytes(kept)
        with pytest.raises(ValueError, match=rf"{text}/{path.name}: no decision log, or cut short"):
            read(broken)
        with pytest.raises(ValueError, match="cut short"):
            read(broken.parent)
    other = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"x": [1]}), other)
    with pytest.raises(ValueError, match="format must be 'ray-slo/decision-log/1', got None"):
        read(other)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no decision log here"):
        read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")
