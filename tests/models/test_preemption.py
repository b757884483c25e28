"""Exit points on torch modules: where they are, what they stop, what they leave alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from ray_slo.core.profiles import LatencyProfile, load_profiles, save_profiles
from ray_slo.models import exit_points, preemption, preemption_profile
from ray_slo.models.exit_points import Call, module_of, spread
from ray_slo.models.preemption import (
    Preempted,
    Preemptible,
    PreemptionFlag,
    preemption_scope,
)
from ray_slo.models.preemption_profile import (
    PreemptionPoint,
    PreemptionProfile,
    load_preemption,
    plot_preemption,
    profile_preemption,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Step(nn.Module):
    """Appends its name to a log; may set a flag; costs `cost` on the fake clock."""

    def __init__(self, name, log, cost=1.0):
        super().__init__()
        self.name, self.log, self.cost, self.flag = name, log, cost, None

    def forward(self, x):
        self.log.append(self.name)
        if self.flag is not None:
            self.flag.set()
        clock.now += self.cost
        return x + 1


class FakeClock:
    now = 0.0

    def perf_counter(self):
        return self.now


clock = FakeClock()


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch, request):
    if "real_time" not in request.fixturenames:
        for module in (exit_points, preemption_profile):
            monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def real_time():
    """Measures with the real clock."""


def chain(costs, log):
    return nn.Sequential(*(Step(str(i), log, cost) for i, cost in enumerate(costs)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)
        )

    def forward(self, x):
        return x + self.block(x)


class Repeated(nn.Module):
    """One layer, called several times (as in ALBERT)."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return x


def network(kind):
    torch.manual_seed(0)
    if kind == "convolutions":
        stem = nn.Conv2d(3, 8, 3)
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
        return nn.Sequential(stem, Residual(8), Residual(8), *head).eval(), torch.randn(2, 3, 9, 9)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 5, 16)
    assert kind == "repeated"
    return Repeated(nn.Linear(6, 6), 5).eval(), torch.randn(2, 6)


NETWORKS = ("convolutions", "encoder", "repeated")


def hooks(module):
    return sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) + ("forward" in vars(m))
        for m in module.modules()
    )


# -- the module's own work is left alone -----------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_are_those_of_the_bare_module_bit_by_bit(kind, mode, real_time):
    module, x = network(kind)
    with mode():
        bare = module(x)
        for number in (0, 1, 3, 100):
            with Preemptible(module, number, example=x) as preemptible:
                assert torch.equal(preemptible(x), bare)
                assert torch.equal(preemptible(x, flag=PreemptionFlag()), bare)
        with Preemptible(module, 2) as preemptible:  # the passes that are timed, too
            assert all(torch.equal(preemptible(x), bare) for _ in range(6))
        assert torch.equal(module(x), bare)


@pytest.mark.parametrize("layers", [1, 3])
def test_encoder_layers_keep_their_fast_path(layers, monkeypatch, real_time):
    """Hooks on a TransformerEncoderLayer make it take its slower path, with other last bits."""
    module, x = network("encoder")
    module = module if layers == 3 else module.layers[0]
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(1) or fast(*a)
    )
    with torch.inference_mode(), Preemptible(module, 8) as preemptible:
        for _ in range(6):  # the first 4 are timed
            preemptible(x, flag=PreemptionFlag())
        assert set(preemptible.exit_points) <= {"layers.0", "layers.1", "layers.2"}
    assert len(calls) == 6 * layers


@pytest.mark.parametrize("kind", NETWORKS)
def test_close_leaves_nothing_behind(kind, real_time):
    module, x = network(kind)
    first = Preemptible(module, 3, example=x)
    second = Preemptible(module, 3)  # still timing
    third = Preemptible(module, 2, example=x)
    assert hooks(module)
    for preemptible in (first, third, second):
        preemptible.close()
        preemptible.close()
    assert hooks(module) == 0


def test_a_forward_set_on_the_instance_survives(real_time):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    mine = layer.forward
    layer.forward = mine
    with Preemptible(layer, 4):
        assert layer.forward is not mine
    assert layer.forward is mine


# -- where it stops --------------------------------------------------------------------------


def test_stops_before_the_next_exit_point():
    log = []
    module = chain([1.0] * 8, log)
    preemptible = Preemptible(module, ["2", "5"])
    flag = module[3].flag = PreemptionFlag()
    with pytest.raises(Preempted) as stop:
        preemptible(torch.zeros(1), flag=flag)
    assert stop.value.flag is flag
    assert log == ["0", "1", "2", "3", "4"]
    log.clear()
    module[3].flag = None
    preemptible(torch.zeros(1), flag=PreemptionFlag())
    assert log == list("01234567")


def test_a_flag_set_after_the_last_exit_point_lets_the_batch_finish():
    log = []
    module = chain([1.0] * 4, log)
    flag = module[3].flag = PreemptionFlag()
    assert Preemptible(module, ["1"])(torch.zeros(1), flag=flag) == 4
    assert flag.is_set
    assert not flag.set()


def test_the_start_of_the_module_is_an_exit_point():
    log = []
    module = chain([1.0] * 2, log)
    with Preemptible(module, 0), pytest.raises(Preempted):
        flag = PreemptionFlag()
        with preemption_scope(flag):
            flag.set()
            module(torch.zeros(1))
    assert log == []


def test_modules_called_directly_inside_a_scope_stop_too():
    log = []
    module = chain([1.0] * 4, log)
    Preemptible(module, ["2"])
    module[1].flag = PreemptionFlag()
    module(torch.zeros(1))  # in no scope
    assert log == list("0123")
    flag = module[1].flag = PreemptionFlag()
    log.clear()
    with pytest.raises(Preempted), preemption_scope(flag):
        module(torch.zeros(1))
    assert log == ["0", "1"]


def test_nested_modules_stop_for_either_flag():
    log = []
    inner = chain([1.0] * 3, log)
    small = Preemptible(inner, ["1"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.own_flag = None

        def forward(self, x):
            return small(x, flag=self.own_flag)

    outer = Outer()
    large = Preemptible(outer, ["inner"])
    for set_flag, own in (("outer", PreemptionFlag()), ("own", PreemptionFlag())):
        log.clear()
        flag = PreemptionFlag()
        outer.own_flag = own
        inner[0].flag = flag if set_flag == "outer" else own
        with pytest.raises(Preempted) as stop:
            large(torch.zeros(1), flag=flag)
        assert stop.value.flag is inner[0].flag
        assert log == ["0"]


def test_is_stopped_from_another_thread(real_time):
    running, go_on = threading.Event(), threading.Event()

    class Wait(nn.Module):
        def forward(self, x):
            running.set()
            assert go_on.wait(30)
            return x

    log = []
    module = nn.Sequential(Wait(), Step("after", log))
    flag = PreemptionFlag()

    def set_flag():
        assert running.wait(30)
        flag.set()
        go_on.set()

    thread = threading.Thread(target=set_flag)
    thread.start()
    with Preemptible(module, ["1"]) as preemptible, pytest.raises(Preempted):
        preemptible(torch.zeros(1), flag=flag)
    thread.join()
    assert log == []


# -- where exit points are placed ------------------------------------------------------------


def test_exit_points_part_the_measured_time_evenly():
    log = []
    module = chain([1, 1, 6, 1, 1, 2, 2, 2], log)  # 16 in all
    assert Preemptible(module, 1, example=torch.zeros(1)).exit_points == ("3",)  # after 8
    assert Preemptible(module, 3, example=torch.zeros(1)).exit_points == ("2", "3", "6")


def test_blocks_are_named_rather_than_their_first_layer():
    log = []
    module = nn.Sequential(chain([2, 2], log), chain([1, 3], log))
    assert Preemptible(module, 1, example=torch.zeros(1)).exit_points == ("1",)
    assert Preemptible(module, 99, example=torch.zeros(1)).exit_points == ("0.1", "1", "1.1")


def test_the_spread_is_optimal():
    rng = random.Random(1)
    for _ in range(60):
        at = sorted(rng.sample([i / 97 for i in range(1, 97)], rng.randint(1, 9)))
        calls = [Call(str(i), t) for i, t in enumerate(at)]
        number = rng.randint(0, 6)

        def cost(cuts):
            edges = [0.0, *cuts, 1.0]
            return sum((b - a) ** 2 for a, b in itertools.pairwise(edges))

        chosen = [at[int(name)] for name in spread(calls, number)]
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(number, len(at))
        least = min(cost(c) for c in itertools.combinations(at, len(chosen)))
        assert cost(chosen) == pytest.approx(least)


def test_calls_of_a_repeated_module_are_told_apart():
    log = []
    module = Repeated(Step("s", log), 6)
    preemptible = Preemptible(module, 2, example=torch.zeros(1))
    assert preemptible.exit_points == ("layer#2/6", "layer#4/6")
    again = Preemptible(module, preemptible.exit_points)
    preemptible.close()
    log.clear()
    module.layer.flag = flag = PreemptionFlag()
    with pytest.raises(Preempted):
        again(torch.zeros(1), flag=flag)
    assert len(log) == 2
    module.layer.flag = None
    for _ in range(3):  # counted from the start of each pass
        again(torch.zeros(1), flag=PreemptionFlag())


def test_calls_beyond_those_that_were_timed_are_exit_points():
    log = []
    module = Repeated(Step("s", log), 9)
    preemptible = Preemptible(module, ["layer#1/4"])

    class Late(PreemptionFlag):
        """Set by the seventh call."""

        def set(self):
            return len(log) >= 7 and super().set()

    module.layer.flag = flag = Late()
    with pytest.raises(Preempted):
        preemptible(torch.zeros(1), flag=flag)
    assert len(log) == 7


def test_without_an_example_the_first_calls_are_timed():
    log = []
    module = chain([1, 1, 6, 1, 1, 2, 2, 2], log)
    preemptible = Preemptible(module, 1)
    for _ in range(4):
        assert preemptible.exit_points == ()
        log.clear()
        flag = module[4].flag = PreemptionFlag()
        with pytest.raises(Preempted):  # does not count as timed
            preemptible(torch.zeros(1), flag=flag)
        assert log == list("01234")
        module[4].flag = None
        preemptible(torch.zeros(1), flag=PreemptionFlag())
    assert preemptible.exit_points == ("3",)
    assert hooks(module) == 2


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_modules_are_refused_and_compiled_blocks_left_whole():
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError, match=r"compiled by torch\.compile"):
        Preemptible(torch.compile(block, backend="eager"))
    itself = nn.Sequential(nn.Linear(4, 4))
    itself.compile(backend="eager")
    with pytest.raises(ValueError, match=r"compiled by torch\.compile"):
        Preemptible(itself)
    log = []
    step = Step("step", log)
    module = nn.Sequential(step, torch.compile(block, backend="eager"), itself, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no submodule"):
        Preemptible(module, ["1._orig_mod.0"])
    preemptible = Preemptible(module, ["1", "3"])
    with torch.inference_mode():
        bare = preemptible(torch.zeros(1, 4))
        assert torch.equal(preemptible(torch.zeros(1, 4), flag=PreemptionFlag()), bare)
        step.flag = PreemptionFlag()
        with pytest.raises(Preempted):
            preemptible(torch.zeros(1, 4), flag=step.flag)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # deprecated from torch 2.15 on
def test_scripted_modules_are_refused(real_time):
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"scripted by torch\.jit"):
        Preemptible(scripted)
    module = nn.Sequential(scripted, nn.Linear(2, 2))
    assert Preemptible(module, 5, example=torch.zeros(1, 2))(torch.zeros(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    ("exit_points", "message"),
    [
        (-1, "a number ≥ 0 or names, got -1"),
        (["laier"], r"no submodule 'laier' to stop at \(alike: layer\)"),
        (["layer#x/2"], "'layer#x/2' is not of the form name#i/n"),
        ("layer", "a number ≥ 0 or names, got 'layer'"),
    ],
)
def test_bad_exit_points(exit_points, message):
    module = Repeated(nn.Identity(), 2)
    with pytest.raises(ValueError, match=message):
        Preemptible(module, exit_points)
    assert hooks(module) == 0


def test_other_bad_arguments():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got a function"):
        Preemptible(lambda x: x)
    with pytest.raises(ValueError, match="run_ahead must be at least 0, got -1"):
        Preemptible(nn.Identity(), run_ahead=-1)


# -- over and over ---------------------------------------------------------------------------


@pytest.mark.slow
def test_thousands_of_preemptions_leave_nothing(real_time):
    module, x = network("convolutions")
    preemptible = Preemptible(module, 4, example=x)
    rng = random.Random(0)
    setter = preemptible.module[1]  # sets the flag on its way, in some batches
    flag = None
    handle = setter.register_forward_hook(lambda *_: flag is not None and flag.set() and None)
    last = None

    def batches(number):
        nonlocal flag, last
        preempted = 0
        for _ in range(number):
            flag = PreemptionFlag()
            if rng.random() < 0.1:
                flag.set()
            try:
                preemptible(x, flag=flag)
            except Preempted as stop:
                last = stop  # a kept exception keeps no activations
                preempted += 1
        return preempted

    with torch.inference_mode():
        assert batches(200) > 150
        gc.collect()
        objects, hooked = len(gc.get_objects()), hooks(module)
        threads = threading.active_count()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            batches(800)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert isinstance(last, Preempted)
    assert grown < 20_000
    assert abs(len(gc.get_objects()) - objects) < 100
    assert hooks(module) == hooked
    assert threading.active_count() <= threads
    handle.remove()


def test_a_worker_that_is_preempted_at_random_answers_right_or_not_at_all(real_time):
    """As in a Serve worker: batches in a thread, flags set from the event loop at any time."""
    module, x = network("convolutions")
    preemptible = Preemptible(module, 4, example=x)
    rng = random.Random(3)
    with torch.inference_mode():
        bare = module(x)

    def batch(flag):
        with torch.inference_mode(), preemption_scope(flag):
            return preemptible(x)

    async def main():
        loop = asyncio.get_running_loop()
        finished = preempted = 0
        with ThreadPoolExecutor(1) as pool:
            for number in range(300):
                flag = PreemptionFlag()
                future = loop.run_in_executor(pool, batch, flag)
                if number % 3:
                    await asyncio.sleep(rng.random() * 5e-4)
                    loop.call_soon(flag.set)  # often too late
                try:
                    assert torch.equal(await future, bare)
                    finished += 1
                except Preempted as stop:
                    assert stop.flag is flag
                    assert number % 3  # a flag of another batch hits none
                    preempted += 1
        assert finished + preempted == 300
        assert finished >= 100

    asyncio.run(main())


def test_activations_of_a_stopped_batch_are_freed():
    log, activations = [], []
    module = chain([1.0] * 3, log)
    module[0].register_forward_hook(lambda _m, _a, out: activations.append(weakref.ref(out)))
    flag = module[0].flag = PreemptionFlag()
    with pytest.raises(Preempted) as stop:
        Preemptible(module, ["1"])(torch.zeros(9), flag=flag)
    assert stop.value.flag is flag
    assert activations[0]() is None


# -- the GPU's run-ahead, on a pretended device ----------------------------------------------


class Device:
    """Runs what is queued only when somebody waits for it."""

    def __init__(self):
        self.queued = self.done = self.longest = 0

    def work(self, *_):
        self.queued += 1
        self.longest = max(self.longest, self.queued - self.done)

    def event(self):
        device = self

        class Event:
            at = 0

            def record(self, _stream):
                self.at = device.queued

            def synchronize(self):
                device.done = max(device.done, self.at)

        return Event()

    def synchronize(self):
        self.done = self.queued


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_the_host_runs_a_bounded_number_of_segments_ahead(run_ahead, monkeypatch):
    device = Device()
    monkeypatch.setattr(preemption, "cuda_device", lambda _: "cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device)
    log = []
    module = chain([1.0] * 12, log)
    for step in module:
        step.register_forward_pre_hook(device.work)
    preemptible = Preemptible(module, [str(i) for i in range(12)], run_ahead=run_ahead)
    preemptible(torch.zeros(1))
    assert device.longest == 12  # in no scope: as the bare module
    device.synchronize()
    device.longest = 0
    for _ in range(3):
        preemptible(torch.zeros(1), flag=PreemptionFlag())
        assert device.longest == run_ahead + 1
    module[6].flag = PreemptionFlag()
    with pytest.raises(Preempted):
        preemptible(torch.zeros(1), flag=module[6].flag)
    assert device.done == device.queued  # control is back only when the device is free
    assert log[-1] == "6"


# -- how many --------------------------------------------------------------------------------


def points(table):
    """{exit points: {batch size: (delay, slowdown)}} as shares, of a batch of 100 ms."""
    return [
        PreemptionPoint(n, n, size, 0.1, delay * 0.05, delay * 0.1, slowdown, 10, 30)
        for n, sizes in table.items()
        for size, (delay, slowdown) in sizes.items()
    ]


@pytest.mark.parametrize(
    ("table", "chosen", "reason"),
    [
        ({0: {1: (0.9, 0.0)}, 8: {1: (0.04, 0.01)}, 16: {1: (0.03, 0.02)}}, 8, "smallest"),
        ({0: {1: (0.9, 0.0)}, 8: {1: (0.1, 0.01)}, 16: {1: (0.08, 0.2)}}, 8, "no number"),
        ({4: {1: (0.04, 0), 8: (0.06, 0)}, 8: {1: (0.04, 0), 8: (0.04, 0)}}, 8, "size"),
        ({2: {1: (0.2, 0)}, 4: {1: (0.2, 0)}}, 2, "delay 20.0%"),
    ],
)
def test_the_smallest_number_within_both_limits_is_chosen(table, chosen, reason):
    names = {n: [f"block{i}" for i in range(n)] for n in table}
    profile = preemption_profile._choose(points(table), names, 0.05, 0.05)
    assert profile.chosen == chosen
    assert profile.exit_points == tuple(names[chosen])
    assert reason in profile.reason
    assert PreemptionProfile.from_json(profile.to_json()) == profile


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["wall", "thread"])
def test_a_profile_of_a_small_module(clock, real_time, tmp_path):
    module, _ = network("convolutions")
    shares = []
    profile = profile_preemption(
        module,
        torch.randn(3, 40, 40),
        (1, 2),
        (0, 2, 4),
        budget_s=0.05,
        clock=clock,
        progress=shares.append,
    )
    assert {(p.exit_points, p.batch_size) for p in profile.points} == {
        (n, size) for n in (0, 2, 4) for size in (1, 2)
    }
    assert all(p.batch_s > 0 and p.delay_p50_s <= p.delay_p95_s for p in profile.points)
    assert all(p.pairs >= 3 for p in profile.points)
    assert shares == sorted(shares)
    assert hooks(module) == 0
    assert len(Preemptible(module, profile.exit_points).exit_points) == profile.chosen
    path = tmp_path / "profile.json"
    latency = {"net": LatencyProfile.linear(0.001, 0.01, 4)}
    save_profiles(path, latency, preemption={"net": profile.to_json()})
    assert load_preemption(path) == {"net": profile}
    assert load_profiles(path)["net"].hash == latency["net"].hash
    save_profiles(path, latency)
    assert load_preemption(path) == {}
    figure = plot_preemption({"net": profile, "again": profile})
    assert [axes.get_title() for axes in figure.axes] == ["net", "again"]


def test_a_deployment_is_profiled_through_its_own_call(real_time):
    class Deployment:
        def __init__(self):
            self.net, _ = network("repeated")
            self.sizes = set()

        def __call__(self, items):
            self.sizes.add(len(items))
            return self.net(torch.tensor(items)).tolist()

    deployment = Deployment()
    profile = profile_preemption(
        module_of(deployment),
        lambda size: [[0.5] * 6] * size,
        (3,),
        (1, 2),
        run=deployment,
        budget_s=0.05,
    )
    assert deployment.sizes == {3}
    assert all("layer#" in name for name in profile.exit_points)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"batch_sizes": ()}, ValueError, "batch_sizes must be at least one"),
        ({"batch_sizes": (0,)}, ValueError, "batch_sizes must be at least one"),
        ({"candidates": (-1,)}, ValueError, "candidates must be at least one"),
        ({"budget_s": 0}, ValueError, "budget_s must be positive, got 0"),
        ({"clock": "cpu"}, ValueError, "clock must be 'wall' or 'thread', got 'cpu'"),
        ({"max_delay": -1}, ValueError, "max_delay must be positive, got -1"),
        ({"max_slowdown": 0}, ValueError, "max_slowdown must be positive, got 0"),
        ({"example_input": [1]}, TypeError, "must be a tensor"),
        ({"run": lambda batch: batch}, ValueError, "run must call the module"),
    ],
)
def test_bad_profiling_arguments(kwargs, error, message):
    arguments = {"example_input": torch.zeros(2), "budget_s": 0.05} | kwargs
    with pytest.raises(error, match=message):
        profile_preemption(nn.Linear(2, 2), **arguments)


def test_a_bad_profile_is_said_to_be_one():
    with pytest.raises(ValueError, match="not a preemption profile"):
        PreemptionProfile.from_json({"points": []})


def test_module_of():
    class Two:
        def __init__(self):
            self.a, self.b = nn.Identity(), nn.Linear(1, 1)

    two = Two()
    assert module_of(two.a) is two.a
    with pytest.raises(ValueError, match=r"Two must have exactly one attribute .* it has a, b"):
        module_of(two)
