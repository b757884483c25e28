"""The digits application: input handling, the cache, and the family's order."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ray_slo.demo.digits import (
    Digits,
    DigitsFamily,
    app,
    data,
    load_variant,
    payloads,
    train,
    variants,
)
from ray_slo.demo.digits import serve as make_serve
from ray_slo.demo.digits.family import FAMILY
from ray_slo.serve import build_app

pytest.importorskip("sklearn", reason="no scikit-learn: pip install 'ray-slo[digits]'")
ROOT = Path(__file__).parents[2]
SMALLEST = "digits-xs"


@pytest.fixture
def quick_training(tmp_path, monkeypatch):
    """An empty cache, and little to learn from: for what is the same after an hour or a moment."""
    images, labels = data.train_set()
    monkeypatch.setattr(data, "train_set", lambda: (images[:64], labels[:64]))
    monkeypatch.setenv("RAY_SLO_CACHE", str(tmp_path))


def png(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array, **options).save(buffer, "PNG")
    return buffer.getvalue()


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 64])
@pytest.mark.parametrize("dark_on_light", [True, False])
def test_a_png_becomes_the_image_it_was_made_from(side, dark_on_light):
    images, _ = data.test_set()
    for image in images[::30]:
        got = Digits.preprocess(data.to_png(image, side, dark_on_light))
        assert got.shape == (8, 8) and got.dtype == np.float32
        assert got.max() == 16.0 and got.min() >= 0.0
        # the strongest ink is stretched to 16; pixels are rounded to 1/255
        np.testing.assert_allclose(got, image * (16 / image.max()), atol=0.1)


def test_wide_margins_are_cropped():
    image = data.test_set()[0][0]
    framed = np.full((200, 160), 255, np.uint8)
    framed[70:134, 50:114] = 255 - np.kron(np.rint(image / 16 * 255), np.ones((8, 8))).astype(
        np.uint8
    )
    got = Digits.preprocess(png(framed))
    assert np.corrcoef(got.ravel(), image.ravel())[0, 1] > 0.9


def test_jpeg_colour_sixteen_bit_and_transparency():
    image = data.test_set()[0][0]
    gray = np.kron(np.rint(image / 16 * 255), np.ones((8, 8))).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(gray).convert("RGB").save(buffer, "JPEG", quality=95)
    sixteen = png(gray.astype(np.uint16) * 257)
    for ink in (0, 255):  # either colour of ink on nothing
        rgba = np.dstack([np.full((64, 64, 3), ink, np.uint8), gray])
        np.testing.assert_allclose(Digits.preprocess(png(rgba)), image * 16 / image.max(), atol=0.1)
    for raw in (buffer.getvalue(), sixteen, bytearray(sixteen), memoryview(sixteen)):
        np.testing.assert_allclose(Digits.preprocess(raw), image * 16 / image.max(), atol=0.7)


def test_arrays_and_nested_lists_pass_unchanged():
    image = data.test_set()[0][0]
    for item in (image, image.astype(np.int64), image.tolist(), tuple(map(tuple, image.tolist()))):
        got = Digits.preprocess(item)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, image)


GRID = [[0.0] * 8 for _ in range(8)]


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (None, "a NoneType"),
        ({"image": GRID}, "a dict"),
        ("abc", "a str"),
        ([], "0 rows"),
        (GRID[:7], "7 rows"),
        ([*GRID[:7], [0.0] * 9], "9 numbers in row 7"),
        ([*GRID[:7], "x"], "a str as row 7"),
        ([*GRID[:7], [*[0.0] * 7, "1"]], "'1' in row 7"),
        ([*GRID[:7], [*[0.0] * 7, True]], "True in row 7"),
        ([*GRID[:7], [*[0.0] * 7, float("nan")]], "numbers from nan to nan"),
        ([*GRID[:7], [*[0.0] * 7, 17]], "numbers from 0.0 to 17.0"),
        ([*GRID[:7], [*[0.0] * 7, -1]], "numbers from -1.0 to 0.0"),
        (np.zeros((8, 8, 1)), "an array of shape (8, 8, 1)"),
        (np.zeros((8, 8), bool), "an array of bool"),
        (b"", "an unreadable file"),
        (b"not a picture", "an unreadable file"),
        (data.to_png(data.test_set()[0][0])[:80], "an unreadable file"),
        (png(np.full((20, 20), 7, np.uint8)), "an even 20 x 20 picture"),
        (png(np.zeros((1, app.MAX_SIDE + 1), np.uint8)), "2049 x 1 pixels"),
        (b"\0" * (app.MAX_BYTES + 1), "4194305 bytes"),
    ],
)
def test_bad_input_is_refused_with_what_was_got_and_wanted(item, got):
    with pytest.raises(ValueError) as caught:
        Digits.preprocess(item)
    assert str(caught.value).startswith(f"image: got {got}")
    assert ", wanted " in str(caught.value)


@pytest.mark.parametrize("side", [10_000, 20_000])  # Pillow warns of the first, refuses the second
def test_a_decompression_bomb_is_refused_undecoded(side):
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < app.MAX_BYTES
    with pytest.raises(ValueError, match=r"image: got .*(bomb|pixels), wanted"):
        Digits.preprocess(buffer.getvalue())


# --- data ----------------------------------------------------------------------------------------


def test_the_split_is_fixed_and_complete():
    (train_x, train_y), (test_x, test_y) = data.train_set(), data.test_set()
    assert (len(train_x), len(test_x)) == (len(train_y), len(test_y)) == (898, 899)
    assert set(test_y.tolist()) == set(range(10))
    pngs, labels = data.test_pngs(5)
    every, digits = payloads()
    assert every[:5] == pngs and len(every) == len(digits) == 899
    assert len(pngs) == 5 and labels.tolist() == test_y[:5].tolist()
    assert not test_x.flags.writeable  # shared by every caller in the process


# --- the application -----------------------------------------------------------------------------


def test_reads_digits_it_has_not_seen():
    digits = Digits(SMALLEST)
    pngs, labels = data.test_pngs()
    answers = digits([Digits.preprocess(raw) for raw in pngs])
    right = np.mean([a["label"] == label for a, label in zip(answers, labels, strict=True)])
    assert right > 0.9
    assert {type(value) for value in answers[0].values()} == {int, float}
    assert all(0.1 <= answer["confidence"] <= 1.0 for answer in answers)


def test_a_batch_answers_as_its_items_do_alone():
    digits = Digits(SMALLEST)
    images = list(data.test_set()[0][:7])
    together = digits(images)
    for image, answer in zip(images, together, strict=True):
        (alone,) = digits([image])
        assert alone["label"] == answer["label"]
        assert alone["confidence"] == pytest.approx(answer["confidence"], abs=1e-4)
    assert digits([]) == []
    assert digits([Digits.example_input()])[0]["label"] == together[0]["label"]


def test_threads_are_pinned_and_checked():
    import torch

    before = torch.get_num_threads()
    try:
        Digits(SMALLEST, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"threads: got .*, wanted a whole number"):
            Digits(SMALLEST, threads=bad)


def test_an_unknown_variant_is_named_with_the_valid_ones():
    for call in (Digits, load_variant, lambda name: train.load_or_train([name])):
        with pytest.raises(
            ValueError, match=r"variant: got 'digits-xxl', wanted one of digits-xs,"
        ):
            call("digits-xxl")


# --- training and cache --------------------------------------------------------------------------


def test_training_keeps_the_callers_torch_settings(quick_training):
    import torch

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.inference_mode(False), torch.no_grad():  # a caller may be inferring
        train.load_or_train([SMALLEST])
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert [path.name for path in train.cache_folder().glob("*.tmp")] == []


def test_the_cache_is_used_and_holds_the_accuracy_of_its_weights(monkeypatch):
    first = train.load_or_train([SMALLEST])[SMALLEST]
    monkeypatch.setattr(train, "_train", lambda names: pytest.fail(f"trained {names} again"))
    again = train.load_or_train([SMALLEST])[SMALLEST]
    assert again.accuracy == first.accuracy == train._accuracy(again.module)
    assert train.accuracies([SMALLEST]) == {SMALLEST: first.accuracy}


def test_a_damaged_file_is_trained_again(quick_training):
    accuracy = train.load_or_train([SMALLEST])[SMALLEST].accuracy
    path = train._path(SMALLEST)
    path.write_bytes(path.read_bytes()[:1000])
    assert train.load_or_train([SMALLEST])[SMALLEST].accuracy == pytest.approx(accuracy, abs=0.02)


def test_variants_lists_the_family_in_order(monkeypatch):
    known = {name: 0.9 + i / 100 for i, name in enumerate(FAMILY)}
    monkeypatch.setattr(
        train, "_stored", lambda name, keys=None: {"accuracy": np.float64(known[name])}
    )
    found = variants()
    assert [v.name for v in found] == list(known)
    assert [v.accuracy for v in found] == pytest.approx([100 * a for a in known.values()])
    assert [v.args for v in variants("digits-l")] == [("digits-l",)]
    assert found[0].loader() is load_variant


def test_one_class_reads_with_any_network_of_the_family():
    network = load_variant(SMALLEST)
    images = list(data.test_set()[0][:7])
    assert DigitsFamily()(network, images) == Digits(SMALLEST)(images)
    assert DigitsFamily()(network, []) == []


RACER = f"""
import time
import numpy as np
from ray_slo.core.files import whole
from ray_slo.demo.digits import train
def trained(names):  # in place of the real one, which needs torch
    print("trained", flush=True)
    time.sleep(0.5)
    with whole(train._path("{SMALLEST}")) as half, half.open("wb") as file:
        np.savez(file, accuracy=np.random.default_rng().random())
train._train = trained
print(train.accuracies(["{SMALLEST}"])["{SMALLEST}"])
"""


def test_racing_processes_train_once_and_agree(tmp_path):
    env = os.environ | {"RAY_SLO_CACHE": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER], cwd=ROOT, env=env, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [racer.communicate(timeout=200)[0].decode().split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sum(output.count("trained") for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1


def test_snapshots_of_a_longer_run_begin_with_those_of_a_shorter_one(quick_training):
    import torch

    recipe = FAMILY["digits-s"]
    short, long = ([*train._snapshots(recipe, count)] for count in (1, 2))
    assert all(torch.equal(short[0][key], long[0][key]) for key in short[0])
    assert any(not torch.equal(long[0][key], long[1][key]) for key in long[0])


def test_cost_rises_through_the_family():
    from ray_slo.demo.digits.networks import Network, macs

    networks = [Network(recipe) for recipe in FAMILY.values()]
    costs = [macs(network) for network in networks]
    sizes = [sum(p.numel() for p in network.parameters()) for network in networks]
    assert all(2 * small < large for small, large in pairwise(costs))
    assert sizes == sorted(set(sizes))


def test_importing_and_preprocessing_needs_no_torch():
    code = (
        "import sys; from ray_slo.demo.digits import Digits, data\n"
        "Digits.preprocess(data.to_png(Digits.example_input()))\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_make_serve_finds_its_config():
    (application,) = yaml.safe_load(make_serve.CONFIG.read_text())["applications"]
    assert "policy" not in application["args"]  # what a newcomer tries first is the default
    assert build_app(application["args"])


def test_make_serve_says_that_it_needs_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(make_serve, "CONFIG", tmp_path / "configs" / "digits.yaml")
    monkeypatch.setattr(make_serve.modes, "enter", lambda: pytest.fail("began"))
    with pytest.raises(SystemExit, match=r"in a clone of ray-slo only: there is no .*digits\.yaml"):
        make_serve.main()
