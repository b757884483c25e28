"""If a file of weights is damaged, or is of another kind, the message names the file."""

import os
import pickle
import random

import pytest

torch = pytest.importorskip("torch")

from ray_slo.models.preemption_profile import load_preemption  # noqa: E402
from ray_slo.models.vision import _fill  # noqa: E402


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def saved(value, path):
    torch.save(value, path)
    return path.read_bytes()


def test_what_torch_saved_is_read(tmp_path):
    path, given, taken = tmp_path / "w.pth", network(), network()
    saved(given.state_dict(), path)
    _fill(taken, "net", path)
    assert torch.equal(given[0].weight, taken[0].weight)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: network(), r"\(it holds other Python objects, such as a whole network"),
        (lambda: [1], "holds a list, wanted a state dict"),
        (lambda: torch.ones(2), "holds a Tensor, wanted a state dict"),
        (lambda: None, "holds a NoneType, wanted a state dict"),
        (lambda: {"state_dict": network().state_dict()}, "is not a state dict of net: Missing key"),
        (lambda: {"0.weight": "x"}, "is not a state dict of net: "),
        (lambda: torch.nn.Linear(4, 3).state_dict(), "is not a state dict of net: Missing key"),
        (lambda: {**network().state_dict(), "more": torch.ones(1)}, "Unexpected key"),
    ],
)
def test_another_kind_of_content_is_refused(value, said, tmp_path):
    path = tmp_path / "w.pth"
    saved(value(), path)
    with pytest.raises(ValueError, match=rf"weights: '.*w\.pth' .*{said}"):
        _fill(network(), "net", path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.filterwarnings("ignore")  # torch's, of pickles that it did not write
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("content", [{"0.weight": [1.0]}, Bomb()])
def test_a_pickle_of_any_version_is_refused_and_not_run(content, protocol, tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=r"weights: '.*w\.pth' is not what torch\.save"):
        _fill(network(), "net", path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x63}.", b"PK\x03\x04", bytes(100_000)])
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights: '.*w\.pth' is not what .* writes \(.+\)"):
        _fill(network(), "net", path)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_refused_or_read_whole(tmp_path):
    path, dice = tmp_path / "w.pth", random.Random(0)
    content = saved(network().state_dict(), path)
    for cut in [dice.randrange(len(content)) for _ in range(60)]:
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"w\.pth"):
            _fill(network(), "net", path)
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(dice.randint(1, 5)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            _fill(network(), "net", path)
        except ValueError as error:
            assert str(path) in str(error)
            assert len(str(error)) < 600 + len(os.fspath(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a latency-profile file"),
        (b"\xff", "not a latency-profile file"),
        (b"[]", "preemption must be a mapping"),
        (b'{"preemption": 1}', "preemption must be a mapping"),
        (b'{"preemption": {"v": 1}}', r"preemption\.v: not a preemption profile"),
        (b'{"preemption": {"v": {"points": 1}}}', r"preemption\.v: not a preemption profile"),
    ],
)
def test_a_damaged_preemption_profile_is_named(content, said, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"profile\.json: {said}"):
        load_preemption(path)
