"""The choice of the way to run a network: the fastest whose outputs are close to the reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'ray-slo[text]'")

from ray_slo.models.running import How, Runner  # noqa: E402
from ray_slo.models.ways import Tried, choose, fit, ways_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class Pretended(Runner):
    """A runner whose speed, and whose error, the test says by how it runs."""

    ms: dict[str, float]
    off: dict[str, float]
    now = 0.0

    def __call__(self, staged, then=lambda output: output):
        Pretended.now += self.ms[str(self.how)] / 1e3 * len(staged.inputs)
        return super().__call__(staged, then) * (1 + self.off.get(str(self.how), 0.0))


@pytest.fixture
def choice(monkeypatch):
    """Of a linear network, by what each way takes."""
    monkeypatch.setattr(Pretended, "now", 0.0)
    linear = torch.nn.Linear(3, 2).eval()

    def chosen(ms, off=None, make=None, **options):
        monkeypatch.setattr(Pretended, "ms", ms, raising=False)
        monkeypatch.setattr(Pretended, "off", off or {}, raising=False)
        ways = {"precision": ["float32", "bfloat16"], "engine": ["eager", "graph"]}
        return choose(
            make or (lambda how: Pretended(linear, CPU, how)),
            stage,
            ways,
            clock=lambda: Pretended.now,
            **options,
        )

    return chosen


def stage(runner, size):
    return runner.stage(lambda lane: lane.put(torch.ones(size, 3)))


SLOW = {"float32, eager": 4.0, "bfloat16, eager": 2.0, "bfloat16, graph": 1.0, "float32, graph": 3}


def test_the_quickest_is_kept_field_by_field(choice):
    best = choice(SLOW)
    assert best.runner.how == How("bfloat16", engine="graph")
    assert [str(tried.how) for tried in best.tried] == list(SLOW)[:3]
    assert best.tried[0].seconds == pytest.approx({1: 0.004, 8: 0.032})
    assert str(best).startswith(
        "bfloat16, graph: 1 ms at batch size 1, 8 ms at batch size 8 (float32, eager: 4, 32); "
        "outputs off by "
    )
    assert best.runner(stage(best.runner, 3)).shape == (3, 2)


def test_what_is_too_far_off_is_not_kept(choice):
    best = choice(SLOW, off={"bfloat16, eager": 0.1, "bfloat16, graph": 0.1})
    assert best.runner.how == How(engine="graph")
    assert choice(SLOW, off={"bfloat16, eager": float("nan")}).runner.how.precision == "float32"


def test_what_is_slower_is_not_kept(choice):
    best = choice({"float32, eager": 1.0, "bfloat16, eager": 2.0, "float32, graph": 1.0})
    assert best.runner.how == How()
    assert str(best) == (
        "float32, eager: 1 ms at batch size 1, 8 ms at batch size 8; the best of 3 ways"
    )


@pytest.mark.slow
def test_what_the_device_cannot_do_is_left_out(choice):
    linear = torch.nn.Linear(3, 2).eval()

    def make(how):
        if how.precision != "float32":
            raise RuntimeError("no such kernel")
        return Pretended(linear, CPU, how)

    best = choice(SLOW, make=make)
    assert best.runner.how == How(engine="graph")
    assert best.tried[1].failed == "RuntimeError: no such kernel"
    assert best.tried[1].cost == float("inf") and Tried(How(), {1: 2.0, 8: 8.0}).cost == 4.0


def test_ways_are_those_that_a_network_and_a_device_have(monkeypatch):
    linear, pictures = torch.nn.Linear(1, 1), torch.nn.Conv2d(1, 1, 1)
    capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ways_of(linear, CPU, fixed_shape=True) == {"precision": ["float32", "bfloat16"]}
    assert ways_of(pictures, CPU, fixed_shape=True)["channels_last"] == [False, True]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    on_gpu = ways_of(linear, torch.device("cuda"), fixed_shape=True)
    assert on_gpu == {"precision": ["float32", "float16"], "engine": ["eager", "graph"]}
    assert "engine" not in ways_of(linear, torch.device("cuda"), fixed_shape=False)
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with_tf32 = ways_of(pictures, torch.device("cuda"), fixed_shape=False)
    assert with_tf32 == {
        "precision": ["float32", "tf32", "bfloat16"],
        "channels_last": [False, True],
    }


def test_tf32_is_chosen_and_refused_like_any_precision(monkeypatch):
    monkeypatch.setattr(Pretended, "now", 0.0)
    linear = torch.nn.Linear(3, 2).eval()
    ms = {"float32, eager": 4.0, "tf32, eager": 1.0, "bfloat16, eager": 2.0}
    monkeypatch.setattr(Pretended, "ms", ms, raising=False)
    for off, chosen in ((0.001, "tf32"), (0.03, "bfloat16")):
        monkeypatch.setattr(Pretended, "off", {"tf32, eager": off}, raising=False)
        best = choose(
            lambda how: Pretended(linear, CPU, how),
            stage,
            {"precision": ["float32", "tf32", "bfloat16"]},
            clock=lambda: Pretended.now,
        )
        assert best.runner.how.precision == chosen and str(best).startswith(f"{chosen}, eager: ")


def test_what_is_compared_may_be_another_output_than_what_is_timed():
    """A network whose answer is no tensor: its inner values are compared."""
    timed, compared = [], []
    linear = torch.nn.Linear(3, 2).eval()

    def call(network, inputs):
        timed.append(len(inputs))
        return ["an answer"] * len(inputs)

    def inner(network, inputs):
        compared.append((len(inputs), torch.is_autocast_enabled("cpu")))
        return network(inputs) + torch.is_autocast_enabled("cpu")

    options = {"plain": How(), "fixed_shape": True, "call": call, "compared": inner}
    runner, runs = fit(linear, CPU, stage, "measure", sizes=(1, 3), **options)
    assert compared == [(1, False), (3, False), (1, True), (3, True)] and set(timed) == {1, 3}
    assert runner.how == How() and runs.startswith("float32, eager: ")  # the other one is far off
    assert runner(stage(runner, 2)) == ["an answer"] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("auto", "float32, channels last, eager"),  # on a CPU: as always
        ({"engine": "graph"}, "float32, graph"),
        ("measure", " ms at batch size 1"),
    ],
)
def test_a_loader_says_how_its_network_runs(how, says):
    network = torch.nn.Conv2d(1, 1, 1).eval()

    def staged(runner, size):
        return runner.stage(lambda lane: lane.put(torch.ones(size, 1, 2, 2)))

    runner, runs = fit(network, CPU, staged, how, plain=How(channels_last=True), fixed_shape=True)
    assert says in runs and runs.startswith(str(runner.how))
    torch.testing.assert_close(
        runner(staged(runner, 2)), network(torch.ones(2, 1, 2, 2)).detach(), rtol=0.02, atol=0.02
    )
