"""Networks on lanes: equal results whatever the way, and the order of what a GPU's two streams do.

There is no GPU here. What is recorded as a CUDA graph runs in the same buffers on the CPU; of
`CudaLane` the calls are looked at, on a pretended device.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'ray-slo[text]'")
from torch import nn  # noqa: E402

from ray_slo.models.checkpoint import PreemptionFlag, preemption_scope  # noqa: E402
from ray_slo.models.exit_points import module_of  # noqa: E402
from ray_slo.models.lanes import CudaLane, Lane, Tf32, lane_of, settled  # noqa: E402
from ray_slo.models.preemption import Preempted, Preemptible  # noqa: E402
from ray_slo.models.running import SIZES, How, Runner, parse_how  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).eval()


def pictures(size, side=9):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, side, side, generator=generator)


def stage(runner, size, side=9):
    return runner.stage(lambda lane: lane.put(pictures(size, side)))


def prepared(how):
    runner = Runner(network(), CPU, how)
    runner.prepare(partial(stage, runner))
    return runner


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """torch.compile without its C++ or Triton compiler: the graphs, run as they were traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "channels_last"),
    [("eager", True), ("graph", False), ("graph", True), ("compile", True)],
)
def test_every_way_has_the_results_of_the_bare_network(engine, channels_last):
    runner = prepared(How(channels_last=channels_last, engine=engine))
    bare = network()
    for size in (1, 3, 16, 2, 17, 16):  # smaller than recorded, as recorded, larger; in any order
        with torch.inference_mode():
            wanted = bare(pictures(size))
        torch.testing.assert_close(runner(stage(runner, size)), wanted, rtol=1e-4, atol=1e-5)


def test_inputs_may_be_a_list_of_unlike_tensors_and_the_output_anything():
    runner = Runner(network(), CPU, How("bfloat16"), lambda net, each: [net(x[None]) for x in each])
    staged = runner.stage(lambda lane: [lane.put(pictures(1, side)[0]) for side in (9, 12)])
    assert [tuple(tensor.shape) for tensor in staged.inputs] == [(3, 9, 9), (3, 12, 12)]
    assert [(tuple(x.shape), x.dtype) for x in runner(staged)] == [((1, 5), torch.bfloat16)] * 2


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_reduced_precision_is_near_and_is_returned_in_float32(engine):
    runner = prepared(How("bfloat16", engine=engine))
    seen = []
    runner.network.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.inference_mode():
        wanted = network()(pictures(3))
    output = runner(stage(runner, 3))
    assert seen[-1] is torch.bfloat16 and output.dtype is torch.float32
    assert 0 < float((output - wanted).abs().max()) < 0.05 * float(wanted.abs().max())


def test_a_batch_runs_in_the_least_recorded_size_that_holds_it():
    runner = prepared(How(engine="graph"))
    sizes = []
    runner.network.register_forward_hook(lambda *args: sizes.append(len(args[2])))
    for size in (1, 2, 3, 5, 16, 17):
        runner(stage(runner, size))
    runner(stage(runner, 3, side=12))  # of another shape: nothing was recorded for it
    assert sizes == [1, 2, 4, 8, 16, 17, 3]
    assert max(SIZES) == 16


def test_results_outlive_the_next_batch():
    runner = prepared(How(engine="graph"))
    first = runner(stage(runner, 4))
    kept = first.clone()
    runner(runner.stage(lambda lane: lane.put(torch.zeros(4, 3, 9, 9))))
    assert torch.equal(first, kept)


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_in_a_scope_a_batch_runs_eagerly_and_can_be_stopped(engine):
    runner = prepared(How(engine=engine))
    with Preemptible(runner.network, ["2"]):
        flag = PreemptionFlag()
        staged = stage(runner, 2)
        with preemption_scope(flag):
            flag.set()
            with pytest.raises(Preempted):
                runner(staged)
        with preemption_scope(PreemptionFlag()):
            stoppable = runner(staged)
    torch.testing.assert_close(stoppable, runner(staged), rtol=1e-4, atol=1e-5)


def test_mappings_are_staged_and_recorded_by_name():
    def call(network, inputs):
        return network(inputs["x"]) * inputs["mask"][:, None]

    runner = Runner(nn.Linear(4, 2).eval(), CPU, How(engine="graph"), call)

    def staged(size):
        given = {"x": torch.arange(4.0 * size).view(size, 4), "mask": torch.arange(size)}
        return runner.stage(lambda lane: {name: lane.put(t) for name, t in given.items()})

    runner.prepare(staged)
    with torch.inference_mode():
        wanted = call(runner.network, staged(3).inputs)
    torch.testing.assert_close(runner(staged(3)), wanted)


def test_staging_in_another_thread_while_a_batch_runs():
    runner = prepared(How())
    inside, staged = threading.Event(), []

    def ahead():
        inside.wait(60)
        staged.append(stage(runner, 2))

    thread = threading.Thread(target=ahead)
    thread.start()

    def then(output):
        inside.set()
        thread.join()
        return output

    runner(stage(runner, 1), then)
    assert torch.equal(runner(staged[0]), runner(stage(runner, 2)))


def test_the_network_of_a_runner_is_where_exit_points_go():
    class Classifier:
        def __init__(self):
            self.runner = Runner(network(), CPU)

    classifier = Classifier()
    assert module_of(classifier) is classifier.runner.network


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fast", "how: got 'fast', wanted one of 'auto', 'measure', a mapping"),
        ({"engin": "graph"}, "how: got 'engin', wanted one of precision, channels_last, engine"),
        ({"engine": "jit"}, r"how.engine: got 'jit', wanted one of eager, graph, compile"),
        (
            {"precision": "int8"},
            r"how.precision: got 'int8', wanted one of float32, tf32, bfloat16",
        ),
        ({"channels_last": 1}, "how.channels_last: got 1, wanted one of true, false"),
    ],
)
def test_bad_ways_are_named(how, message):
    with pytest.raises(ValueError, match=message):
        parse_how(how)


def test_ways_are_read():
    assert parse_how({"engine": "graph"}) == How(engine="graph") == parse_how(How(engine="graph"))
    assert (parse_how("auto"), parse_how("measure")) == ("auto", "measure")
    assert str(How("bfloat16", True, "graph")) == "bfloat16, channels last, graph"


def test_arrays_are_copied_even_where_they_are_read_only():
    array = np.zeros(3, np.uint8)
    array.flags.writeable = False
    there = Lane().put(array)
    assert there.tolist() == [0, 0, 0] and there.dtype is torch.uint8
    assert lane_of(CPU) is lane_of(torch.device("cpu"))  # one per process


# -- TF32: torch's switches, which a CPU has, too ------------------------------------------------


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_tf32_is_on_or_off_while_a_batch_runs_and_as_it_was_afterwards(cuda):
    before, seen = switches(), []
    for how in (How("tf32"), How(), How("tf32", engine="graph"), How(engine="graph")):
        runner = Runner(network(), CPU, how)
        runner.network.register_forward_hook(lambda *_: seen.append(switches()))
        runner.prepare(partial(stage, runner), sizes=(2,))
        if how.engine == "eager":
            runner(stage(runner, 2))
        assert set(seen) == {(how.precision == "tf32",) * 2} and switches() == before
        seen.clear()
    with pytest.raises(RuntimeError, match="broken"), cuda.lane.rounding(to_tf32=True):
        raise RuntimeError("broken")
    assert switches() == before


def test_settings_by_torchs_newer_names_are_kept(cuda):
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only the older names")
    before = switches()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        for on in (False, True):
            with cuda.lane.rounding(to_tf32=on):
                assert switches() == (on, on)
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert switches() == before


def test_threads_with_the_same_setting_run_together_and_others_wait():
    before, switch = switches(), Tf32()
    met, order = threading.Barrier(2), []

    def same():
        with switch.set_to(True):
            met.wait(60)  # both are inside
            order.append(switches())

    def other():
        with switch.set_to(False):
            order.append(switches())

    with switch.set_to(True):
        threads = [threading.Thread(target=work) for work in (other, same)]
        for thread in threads:
            thread.start()
        met.wait(60)
        threads[1].join()
        assert order == [(True, True)]  # the other one waits
    threads[0].join()
    assert order[1:] == [(False, False)] and switches() == before


# -- a GPU's streams, pretended ----------------------------------------------------------------


class Cuda:
    """Notes what is asked of torch.cuda, and in which stream."""

    def __init__(self):
        self.log, self.streams = [], ["default"]

    def patched(self, monkeypatch):
        for name, value in {
            "Stream": self.stream_of,
            "stream": self.within,
            "Event": lambda: Event(self),
            "current_stream": lambda _=None: Stream(self, self.streams[-1]),
            "is_initialized": lambda: True,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.said("pin", tensor))
        to = torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor,
            "to",
            lambda tensor, *args, **options: (
                self.said("copy", tensor)
                if options.pop("non_blocking", False)
                else to(tensor, *args, **options)
            ),
        )
        return self

    def said(self, what, value=None):
        self.log.append(f"{what} in {self.streams[-1]}")
        return value

    def stream_of(self, _device):
        return Stream(self, "copies" if "made" in self.log else "work", self.log.append("made"))

    def within(self, stream):
        return Within(self, stream.name)

    def capture(self, _graph, pool, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.said("capture")
        return Within(self, "capture")


class Stream:
    def __init__(self, cuda, name, _=None):
        self.cuda, self.name = cuda, name

    def synchronize(self):
        self.cuda.log.append(f"synchronise {self.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for {event.at}")


class Event:
    def __init__(self, cuda):
        self.at = None

    def record(self, stream):
        self.at = stream.name


class Graph:
    def __init__(self, cuda):
        self.replay = lambda: cuda.said("replay")


class Within:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def __enter__(self):
        self.cuda.streams.append(self.name)

    def __exit__(self, *_):
        self.cuda.streams.pop()


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda().patched(monkeypatch)
    made.lane = lane = CudaLane(CPU)
    monkeypatch.setattr("ray_slo.models.running.lane_of", lambda _: lane)
    made.log.clear()
    return made


def test_copies_are_pinned_and_beside_the_work_which_waits_for_them(cuda):
    runner = Runner(network(), CPU)
    staged = stage(runner, 2)
    assert cuda.log == ["pin in copies", "copy in copies"]
    cuda.log.clear()
    runner.network.register_forward_hook(lambda *_: cuda.said("run"))
    runner(staged, lambda output: cuda.said("then", output))
    assert cuda.log == [
        *("work waits for copies", "run in work", "then in work", "synchronise work")
    ]
    assert cuda.streams == ["default"]


def test_a_graph_is_recorded_once_and_replayed(cuda):
    runner = Runner(network(), CPU, How(engine="graph"))
    runs = []
    runner.network.register_forward_hook(lambda *_: runs.append(cuda.streams[-1]))
    runner.prepare(partial(stage, runner), sizes=(2,))
    assert runs == [*["work"] * 3, "capture"] and "capture in work" in cuda.log
    cuda.log.clear()
    output = runner(stage(runner, 1))
    assert len(output) == 1 and len(runs) == 4  # the pretended graph computes nothing anew
    assert cuda.log[-2:] == ["replay in work", "synchronise work"]


def test_what_a_method_queued_is_waited_for_before_its_time_is_taken(cuda, monkeypatch):
    assert settled(lambda items: cuda.said("run", items))([1]) == [1]
    assert cuda.log == ["run in default", "synchronise default"]
    cuda.log.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert settled(lambda items: items)([1]) == [1] and cuda.log == []
