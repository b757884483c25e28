"""The spans that OpenTelemetry exports of frontends, schedulers and workers in one process."""

import asyncio
import contextlib
import sys
import time

import pytest
import ray
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import StatusCode
from ray.serve._private import tracing_utils

import ray_slo
from ray_slo.errors import BadInput, RefusedEarly
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.messages import Cancel, Grant, Refusal, Submit
from ray_slo.serve.scheduler.actor import SchedulerActor
from ray_slo.serve.watch import spans, tracing
from ray_slo.serve.watch.tracing import Decisions
from tests.serve.fakes import Fifo, Impatient, Steps, beat, obeys
from tests.serve.loops import in_loop, settle, until
from tests.serve.pipelines import spec

SECRET = "a-payload-that-nobody-may-see"


class Traces:
    """What was exported, and a way to be the caller."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @contextlib.contextmanager
    def call(self, name="call"):
        """Serve's span of a call to the frontend."""
        with self.tracer.start_as_current_span(name) as span:
            yield span.get_span_context()

    def spans(self, name=None):
        """Ours, by name or all."""
        ours = [s for s in self.exporter.get_finished_spans() if s.name.startswith("slo.")]
        return [s for s in ours if name in (None, s.name)]

    def one(self, name):
        (span,) = self.spans(name)
        return span


@pytest.fixture
def traces(monkeypatch):
    """Serve's tracing is on, with a ratio of 1."""
    found = Traces()
    monkeypatch.setattr(tracing_utils, "is_tracing_enabled", lambda: True)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: found.provider)
    monkeypatch.setattr(spans, "tracer", lambda: found.tracer)
    return found


def ids(links):
    return [link.context.span_id for link in links]


def events(span):
    return [event.name for event in span.events]


def is_below(span, parent):
    return (span.parent.span_id, span.context.trace_id) == (
        parent.context.span_id,
        parent.context.trace_id,
    )


@in_loop
async def test_a_request_from_the_frontend_to_the_worker(app, traces):
    async with app(policy="eager") as (front, _):
        with traces.call() as call:
            answer = await front((SECRET, 3), response_metadata=True)
        status = await front.slo_status()
    request, queue, batch = (traces.one(f"slo.{name}") for name in ("request", "queue", "batch"))
    assert (request.parent.span_id, request.context.trace_id) == (call.span_id, call.trace_id)
    assert is_below(queue, request)
    assert is_below(batch, request)
    assert (ids(batch.links), ids(request.links)) == (
        [request.context.span_id],
        [batch.context.span_id],
    )
    said = dict(request.attributes)
    assert said.pop("slo.request_id") == 0
    assert said.pop("slo.queue_ms") == pytest.approx(answer.queue_ms)
    assert said.pop("slo.exec_ms") == pytest.approx(answer.exec_ms)
    assert said.pop("slo.latency_ms") == pytest.approx(answer.latency_ms)
    assert said == {
        "slo.model": "m",
        "slo.latency_slo_ms": 30_000,
        "slo.variant": "m",
        "slo.batch_size": 1,
        "slo.outcome": "ok",
        "slo.reason": "",
        "slo.retries": 0,
        "slo.preemptions": 0,
    }
    assert events(request) == ["submitted", "granted"]
    said = queue.attributes
    assert (said["slo.policy"], said["slo.batch_size"], said["slo.worker"]) == ("eager", 1, "w0")
    assert said["slo.decision"] == batch.attributes["slo.decision"]
    assert said["slo.decision"].startswith(f"{status['epoch']}-0-")
    assert 0 < said["slo.budget_ms"] < 30_000
    assert 0 < said["slo.predicted_ms"] < 30_000
    assert 0 < said["slo.slack_ms"] < 30_000
    said = batch.attributes
    assert (said["slo.variant"], said["slo.batch_size"], said["slo.status"]) == ("m", 1, "finished")
    assert said["slo.exec_ms"] == pytest.approx(answer.exec_ms)
    assert said["slo.predicted_ms"] == pytest.approx(queue.attributes["slo.predicted_ms"], rel=0.1)
    assert said["slo.preempted"] is False
    assert request.start_time <= queue.start_time <= queue.end_time
    assert queue.end_time <= batch.start_time <= batch.end_time <= request.end_time
    assert {s.status.status_code for s in traces.spans()} == {StatusCode.UNSET}


@in_loop
async def test_a_batch_is_linked_to_all_of_its_requests_and_they_to_it(app, traces):
    async with app(policy={"name": Impatient, "kwargs": {"size": 8}}) as (front, worker):

        async def ask(i):
            if i == 2:
                return await front((i, 1))  # this one is not traced
            with traces.call():
                return await front((i, 1))

        first = asyncio.create_task(front(("first", 20), latency_slo_ms=60_000))
        await until(lambda: worker.batches.is_running)
        assert await asyncio.gather(*map(ask, range(4))) == [0, 1, 2, 3]
        await first
    requests, batch = traces.spans("slo.request"), traces.one("slo.batch")
    assert batch.attributes["slo.batch_size"] == 4
    assert sorted(ids(batch.links)) == sorted(r.context.span_id for r in requests)
    assert len(requests) == 3
    assert len({r.context.trace_id for r in requests}) == 3
    assert any(is_below(batch, r) for r in requests)
    for request in requests:
        assert ids(request.links) == [batch.context.span_id]
    assert len({q.attributes["slo.decision"] for q in traces.spans("slo.queue")}) == 1


@in_loop
async def test_a_preempted_request_says_so(app, traces):
    async with app() as (front, worker):

        async def ask(item):
            with traces.call(item[0]):
                return await front(item)

        long = asyncio.create_task(ask(("long", 100)))
        await until(lambda: worker.batches.is_running)
        assert [await ask(("short", 1)), await long] == ["short", "long"]
    request = traces.spans("slo.request")[-1]
    assert events(request) == ["submitted", "granted", "requeued", "submitted", "granted"]
    assert request.events[2].attributes == {"slo.reason": "preempted"}
    assert (request.attributes["slo.retries"], request.attributes["slo.preemptions"]) == (1, 1)
    batches = {b.context.span_id: b for b in traces.spans("slo.batch")}
    stopped, ran = (batches[i].attributes for i in ids(request.links))
    assert (stopped["slo.status"], stopped["slo.preempted"]) == ("preempted", True)
    assert (ran["slo.status"], ran["slo.preempted"]) == ("finished", False)
    queues = [q for q in traces.spans("slo.queue") if is_below(q, request)]
    decisions = [q.attributes["slo.decision"] for q in queues]
    assert decisions == [stopped["slo.decision"], ran["slo.decision"]]


class Rude(Steps):
    @staticmethod
    def preprocess(item):
        if item[0] == "bad":
            raise ValueError(SECRET)
        return item

    def __call__(self, items):
        if any(name == "poison" for name, _ in items):
            raise KeyError(SECRET)
        return super().__call__(items)


@in_loop
@pytest.mark.parametrize(
    ("item", "slo_ms", "error", "outcome", "status"),
    [
        (("late", 1), 0.001, RefusedEarly, ("refused", "would_miss"), "refused: would_miss"),
        (("poison", 1), None, KeyError, ("failed", "user_error"), "failed: user_error"),
        (("bad", 1), None, BadInput, ("invalid", "bad_input"), None),
    ],
)
async def test_errors(app, traces, item, slo_ms, error, outcome, status):
    async with app(Rude, policy="eager") as (front, _):
        with traces.call(), pytest.raises(error):
            await front(item, latency_slo_ms=slo_ms)
    request = traces.one("slo.request")
    assert (request.attributes["slo.outcome"], request.attributes["slo.reason"]) == outcome
    assert request.attributes["error.type"] == error.__name__
    wanted = (StatusCode.UNSET, None) if status is None else (StatusCode.ERROR, status)
    assert (request.status.status_code, request.status.description) == wanted
    assert ("refused" in events(request)) == (error is RefusedEarly)
    for batch in traces.spans("slo.batch"):
        assert (batch.status.status_code, batch.status.description) == (StatusCode.ERROR, "failed")
    assert not any(SECRET in span.to_json() for span in traces.spans())


@in_loop
async def test_what_waits_too_long_ends_its_queue_span(app, traces):
    async with app(policy={"name": Impatient, "kwargs": {"size": 1}}) as (front, worker):

        async def ask():
            with traces.call(), pytest.raises(RefusedEarly):
                await front(("short", 1), latency_slo_ms=30)

        long = asyncio.create_task(front(("long", 60), latency_slo_ms=10_000))
        await until(lambda: worker.batches.is_running)
        await ask()
        await long
    queue = traces.one("slo.queue")
    assert (queue.attributes["slo.outcome"], queue.status.status_code) == (
        "refused",
        StatusCode.ERROR,
    )
    assert queue.end_time <= traces.one("slo.request").end_time


@in_loop
async def test_a_worker_that_is_lost_and_a_caller_who_leaves(app, traces):
    async with app(policy="eager", retries=1) as (front, worker):
        execute, dying = worker.execute, [1]

        async def die_once(piece, worker):
            if dying:
                dying.pop()
                raise ray.exceptions.RayActorError
            return await execute(piece, worker)

        async def ask(item):
            with traces.call():
                return await front(item)

        worker.execute = die_once
        asked = asyncio.create_task(ask(("a", 1)))
        while not asked.done():
            await asyncio.sleep(0.02)  # it is left alone for a while
            await front.slo_heartbeat(await worker.introduce())
        assert asked.result() == "a"
        leaver = asyncio.create_task(ask(("b", 20)))
        await until(lambda: worker.batches.is_running)
        leaver.cancel()
        await asyncio.wait([leaver])
        await until(lambda: not worker.batches.ids)
    lost, left = traces.spans("slo.request")
    assert events(lost) == ["submitted", "granted", "requeued", "submitted", "granted"]
    assert lost.events[2].attributes == {"slo.reason": "worker_lost"}
    assert lost.attributes["slo.outcome"] == "ok"
    assert left.attributes["slo.outcome"] == "cancelled"
    assert left.status.status_code == StatusCode.UNSET


@in_loop
async def test_a_pipeline_has_a_span_per_task(running, traces):
    async with running(spec()) as (front, _):
        with traces.call():
            await front(f"{SECRET} or not")
    request = traces.one("slo.request")
    assert (request.attributes["slo.model"], request.attributes["slo.variant"]) == ("p", "f/s")
    tasks = traces.spans("slo.task")
    assert sorted(t.attributes["slo.task"] for t in tasks) == ["find", *["spell"] * 3]
    assert all(is_below(t, request) for t in tasks)
    assert all(t.attributes["slo.outcome"] == "ok" for t in tasks)
    parents = [q.parent.span_id for q in traces.spans("slo.queue")]
    assert sorted(parents) == sorted(t.context.span_id for t in tasks)
    by_id = {t.context.span_id: t.attributes["slo.task"] for t in tasks}
    for batch in traces.spans("slo.batch"):
        assert {by_id[i] for i in ids(batch.links)} == {batch.attributes["slo.model"]}
    assert not any(SECRET in span.to_json() for span in traces.spans())


@in_loop
async def test_spans_of_user_code_are_the_batchs_children(app, traces):
    class Own(Steps):
        def __call__(self, items):
            with traces.tracer.start_as_current_span("slo.own"):
                return super().__call__(items)

    async with app(Own, policy="eager") as (front, _):
        with traces.call():
            await front(("a", 1))
    assert is_below(traces.one("slo.own"), traces.one("slo.batch"))


def sent(worker):
    """Pieces that come to a worker, and the OpenTelemetry context that they come in."""
    pieces = []
    execute = worker.execute

    async def heard(piece, worker):
        pieces.append((piece, trace.get_current_span().get_span_context()))
        return await execute(piece, worker)

    worker.execute = heard
    return pieces


@in_loop
async def test_unsampled_requests_have_no_spans_and_send_nothing(app, traces):
    unsampled = trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=True))
    async with app(policy="eager") as (front, worker):
        pieces = sent(worker)
        with trace.use_span(unsampled):
            await front(("a", 1))
        await front(("a", 1))  # nobody's child: nor does it begin a trace
        assert traces.spans() == []
        assert [(piece.traces, context.trace_flags) for piece, context in pieces] == [((), 0)] * 2
        assert all(context.is_valid for _, context in pieces)  # so that Serve does not draw lots
    # Serve's stack of spans is as it was.
    assert tracing_utils.TRACE_STACK.get([]) == []


def test_where_serves_span_is_not_of_the_callers_trace(traces):
    def traced(header):
        request = tracing.request("m", 0.0, 5.0, header)
        if request is tracing.NOT_TRACED:
            return None
        request.unanswered("cancelled", "cancelled")
        span = traces.spans()[-1]
        return span.context.trace_id, span.parent.span_id

    yes, no = (f"00-{7:032x}-{8:016x}-0{flag}" for flag in (1, 0))
    assert (traced(None), traced("nonsense"), traced(no)) == (None, None, None)
    assert traced(yes) == (7, 8)
    with traces.call() as serves:
        mine = serves.trace_id, serves.span_id
        assert (traced(None), traced("nonsense")) == (mine, mine)
        assert traced(f"00-{serves.trace_id:032x}-{8:016x}-01") == mine
        assert (traced(yes), traced(no)) == ((7, 8), None)


def test_a_grant_that_comes_twice_or_late_does_no_harm(traces):
    grant = Grant("e-0-1", "w", "k", "m", "v", (0,), 0, 1, 1, 0.0, 0.1, 0.2)
    with traces.call():
        one = tracing.request("m", 0.0, 5.0)
    one.submitted(0, 1.0)
    one.submitted(0, 0.9)  # to a scheduler that is new
    one.granted(grant, "eager")
    one.granted(grant, "eager")
    one.unanswered("cancelled", "cancelled")
    one.ran(f"00-{7:032x}-{8:016x}-01")
    request, queue = traces.one("slo.request"), traces.one("slo.queue")
    assert events(request) == ["submitted", "submitted", "granted", "granted"]
    assert queue.attributes["slo.budget_ms"] == 1000
    assert ids(request.links) == []


def waiting(traces, i=0):
    """A traced request that was submitted, and what its frontend tells the scheduler."""
    with traces.call():
        one = tracing.request("m", time.monotonic(), 5.0)
    one.submitted(i, 1.0)
    return one, Submit(i, "m", 1.0, trace=one.waiting)


@in_loop
async def test_a_scheduler_actor_has_spans_of_its_own(traces):
    model = {"callable": Fifo, "latency_slo_ms": 1000, "max_batch_size": 8}
    actor = SchedulerActor(parse_spec({"models": {"m": model}, "policy": Fifo}), "app#m")
    await actor.lead("f", 0)
    epoch, *_ = await actor.poll("f", None, 0)
    await obeys(actor, beat())
    one, submit = waiting(traces)
    _, late = waiting(traces, 1)
    events = [submit, Submit(2, "m", 1.0), late]
    await actor.events("f", epoch, [*events, Cancel(1)])
    await settle()  # what goes at once would be sent here
    *_, (grant,) = await actor.poll("f", epoch, 0)
    one.granted(grant, "a policy")
    one.unanswered("cancelled", "cancelled")
    span, left = sorted(traces.spans("slo.schedule"), key=lambda s: "slo.outcome" in s.attributes)
    queue = traces.one("slo.queue")
    assert is_below(span, queue)
    said = {k: v for k, v in queue.attributes.items() if k != "slo.budget_ms"}
    assert span.attributes == {**said, "slo.policy": "Fifo"}
    assert said["slo.decision"] == grant.batch_id
    assert queue.start_time <= span.start_time <= span.end_time <= queue.end_time
    assert left.attributes == {"slo.outcome": "cancelled", "slo.reason": "cancelled"}
    await actor.goodbye("f")
    actor._scheduler.close()
    actor.close()


@in_loop
async def test_a_scheduler_actor_tells_of_refusals_and_of_frontends_that_are_gone(traces):
    scheduler = Decisions("app#m", "eager")
    for i in range(5):
        scheduler.heard("f" if i < 4 else "g", waiting(traces, i)[1])
    scheduler.heard("f", Submit(7, "m", 1.0))
    scheduler.told("f", [Refusal((0, 7), "would_miss", 9.0), Refusal((1,), "expired", 9.0)])
    scheduler.heard("f", Cancel(2))
    scheduler.heard("f", Cancel(7))
    scheduler.gone("f")
    assert traces.spans() == []  # tracing is not set up
    await settle()
    said = [(s.attributes["slo.reason"], s.status.status_code) for s in traces.spans()]
    refused, left = StatusCode.ERROR, StatusCode.UNSET
    assert said == [
        ("would_miss", refused),
        ("expired", refused),
        ("cancelled", left),
        ("cancelled", left),
    ]
    scheduler.told("g", [Refusal((4,), "shed", 9.0)])
    assert traces.spans()[-1].attributes["slo.outcome"] == "refused"


@in_loop
async def test_a_scheduler_actor_that_cannot_trace_goes_on(traces, monkeypatch, caplog):
    _, submit = waiting(traces)
    monkeypatch.setattr(tracing_utils, "is_tracing_enabled", lambda: False)

    def fail(name):
        raise ImportError("there is no exporter")

    monkeypatch.setattr(tracing.serve_tracing, "set_up", fail)
    scheduler = Decisions("app#m", "eager")
    scheduler.heard("f", submit)
    scheduler.told("f", [Refusal((0,), "shed", 9.0)])
    await until(lambda: "no traces from app#m" in caplog.text)
    await scheduler._setting_up
    scheduler.heard("f", submit)
    scheduler.gone("f")
    scheduler.flush()
    assert traces.spans() == [] and not scheduler._made


@in_loop
async def test_a_decorated_method_runs_in_the_trace_of_its_first_sampled_caller(traces):
    @ray_slo.batch(latency_slo_ms=1000)
    async def double(items):
        with traces.tracer.start_as_current_span("slo.own"):
            return [2 * i for i in items]

    async def ask(i):
        if i == 1:
            with traces.call():
                return await double(i)
        with trace.use_span(unsampled):
            return await double(i)

    unsampled = trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=True))
    assert await asyncio.gather(*map(ask, range(3))) == [0, 2, 4]
    (own,) = traces.spans()
    assert [
        s.context.span_id for s in traces.exporter.get_finished_spans() if s.name == "call"
    ] == [own.parent.span_id]
    await ask(0)  # not in the trace of the first who ever called
    assert traces.spans() == [own]


@in_loop
async def test_the_call_of_a_batch_is_its_first_requests(app, traces):
    async with app(policy="eager") as (front, worker):
        pieces = sent(worker)
        with traces.call():
            await front(("a", 1))
    ((piece, context),) = pieces
    assert context.span_id == traces.one("slo.request").context.span_id
    assert [c.split("-")[2] for c in piece.traces] == [f"{context.span_id:016x}"]


@in_loop
async def test_off(app, traces, monkeypatch):
    monkeypatch.setattr(tracing_utils, "is_tracing_enabled", lambda: False)
    async with app(policy="eager") as (front, worker):
        pieces = sent(worker)
        with traces.call() as call:
            await front(("a", 1))
    assert traces.spans() == []
    ((piece, context),) = pieces
    assert piece.traces == ()
    assert context != call


def test_opentelemetry_is_not_touched_where_tracing_is_off(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "opentelemetry":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    one, scheduler = tracing.request("m", 0.0, 1.0), Decisions("app#m", "eager")
    with one.inside(), tracing.call_of([one]):
        one.submitted(0, 1.0)
    scheduler.heard("f", Submit(0, "m", 1.0, trace=one.waiting))
    scheduler.told("f", [Refusal((0,), "shed", 9.0)])
    scheduler.heard("f", Cancel(0))
    scheduler.flush()
    assert one is tracing.NOT_TRACED
    assert tracing.contexts([one]) == ()
    with pytest.raises(ImportError, match=r"ray-slo\[tracing\]"):
        tracing.otlp()


def test_otlp_is_what_serve_takes(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    processors = tracing_utils._load_span_processors("ray_slo.serve.tracing:otlp", "")
    assert len(processors) == 1
    processors[0].shutdown()
