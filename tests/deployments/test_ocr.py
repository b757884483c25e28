"""The OCR pipeline: pages and how they are judged, networks, tasks, and the config."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from deployments import ocr
from deployments.ocr import Detect, Recognise, app, join, measure, networks
from deployments.ocr.networks import Box, reading_order
from deployments.ocr.pages import edit_distance, errors, image, line, page, pages
from ray_slo.models.devices import open_session
from ray_slo.serve.config.resolve import parse_spec

ROOT = Path(__file__).parents[2]


# --- pages ---------------------------------------------------------------------------------------


def lone(spec):
    """The pipeline of an application that has one."""
    (pipeline,) = spec.pipelines.values()
    return pipeline


def test_a_page_is_the_same_everywhere_and_each_another():
    first, second = pages(2, seed=3)
    assert page(3, 0) == first != second != page(4, 1)
    assert 3 <= len(first.lines) <= 10
    assert image(first).shape == (720, 960)


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [("", "", 0), ("", "ab", 2), ("ab", "", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)],
)
def test_edit_distance(one, other, edits):
    assert edit_distance(one, other) == edits


def test_errors_leave_white_space_out_and_never_exceed_the_text():
    assert errors(["Kitchen 12", "tea"], "Kitchen12\nteo") == (1, 12)
    assert errors(["tea"], "") == (3, 3)
    assert errors(["tea"], "nothing of the kind") == (3, 3)


# --- boxes ---------------------------------------------------------------------------------------


def test_reading_order_is_by_rows_then_from_left_to_right():
    def at(x, y):
        return Box(x, y, 40, 20, 0.0)

    boxes = [at(300, 104), at(50, 200), at(100, 98), at(20, 60)]
    assert reading_order(boxes) == [at(20, 60), at(100, 98), at(300, 104), at(50, 200)]


def test_corners_go_clockwise_and_turn_with_the_angle():
    assert Box(50, 20, 40, 10, 0.0).corners() == [[30, 15], [70, 15], [70, 25], [30, 25]]
    (x, y), *_ = Box(50, 20, 40, 10, 90.0).corners()
    assert (x, y) == pytest.approx((55, 0))


def test_a_crop_is_what_the_box_shows_upright(wheel):
    picture = np.zeros((60, 100), np.uint8)
    picture[20:30, 30:70] = 200
    shown = Box(49.5, 24.5, 40, 10, 0.0).crop(picture)
    assert shown.shape == (10, 40)
    assert (shown == 200).all()
    turned = np.asarray(Image.fromarray(picture).rotate(-10, center=(49.5, 24.5)))  # clockwise
    assert Box(49.5, 24.5, 36, 6, 10.0).crop(turned).mean() > 195


def test_lines_of_similar_width_make_a_batch():
    pieces = list(networks._alike([300, 100, 110, 90, 310]))
    assert pieces == [[3], [1, 2], [0, 4]] or pieces == [[3, 1], [2], [0, 4]]
    widths = [300, 100, 110, 90, 310]
    for piece in pieces:
        assert max(widths[i] for i in piece) <= networks.ALIKE * min(widths[i] for i in piece)


# --- input and answer ----------------------------------------------------------------------------


def png(array, **kwargs):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **kwargs)
    return file.getvalue()


def test_every_form_of_a_page_becomes_the_same_grey():
    grey = image(page(0, 0))
    colour = np.repeat(grey[..., None], 3, axis=2)
    ink = np.zeros((*grey.shape, 4), np.uint8)
    ink[..., 3] = 255 - grey  # black on nothing
    for item in (grey, colour, png(grey), bytearray(png(colour)), memoryview(png(ink))):
        got = Detect.preprocess(item)
        assert got.dtype == np.uint8
        np.testing.assert_allclose(got.astype(int), grey, atol=1)


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (None, "a NoneType"),
        ("page.png", "a str"),
        ([[0, 0]], "a list"),
        (np.zeros((4, 4)), "an array of float64 and shape (4, 4)"),
        (np.zeros(4, np.uint8), "an array of uint8 and shape (4,)"),
        (np.zeros((4, 4, 4), np.uint8), "an array of uint8 and shape (4, 4, 4)"),
        (np.zeros((0, 4), np.uint8), "an array of shape (0, 4)"),
        (np.zeros((1, app.MAX_SIDE + 1), np.uint8), "an array of shape (1, 4097)"),
        (png(np.zeros((1, app.MAX_SIDE + 1), np.uint8)), "4097 x 1 pixels"),
        (b"not a picture", "an unreadable file"),
        (png(np.zeros((50, 50), np.uint8))[:60], "an unreadable file"),
        (b"\0" * (app.MAX_BYTES + 1), "16777217 bytes"),
    ],
)
def test_bad_input_is_refused_with_what_was_got_and_wanted(item, got):
    with pytest.raises(ValueError) as caught:
        Detect.preprocess(item)
    assert str(caught.value).startswith(f"page: got {got}, wanted a PNG or JPEG")


def test_a_decompression_bomb_is_refused_undecoded():
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"page: got .*(bomb|pixels), wanted"):
        Detect.preprocess(file.getvalue())


def test_the_answer_is_in_reading_order_and_leaves_out_what_says_nothing():
    boxes = [Box(x, y, 80, 20, 0.0).corners() for x, y in ((60, 30), (200, 32), (60, 70), (60, 99))]
    read = [("Total", 0.98765), ("$4.20", 0.5), ("", 0.0), ("Thanks", 1.0)]
    answer = join(boxes, {"recognise": read})
    assert answer["text"] == "Total $4.20\nThanks"
    assert [line["confidence"] for line in answer["lines"]] == [0.9877, 0.5, 1.0]
    assert answer["lines"][2]["box"] == boxes[3]
    json.dumps(answer)
    assert join([], {"recognise": []}) == {"text": "", "lines": []}


# --- the networks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel():
    for module in ("rapidocr_onnxruntime", "onnxruntime", "onnx", "cv2"):
        why = f"{module} cannot be imported: pip install 'ray-slo[ocr]'"
        pytest.importorskip(module, reason=why, exc_type=ImportError)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SLO_CACHE", str(tmp_path_factory.mktemp("cache")))
        networks.quantised.cache_clear()
        yield
        networks.quantised.cache_clear()


def test_a_page_is_read_from_end_to_end(wheel):
    detector, recogniser = ocr.load_detector("det960"), ocr.load_recogniser("rec48")
    wrong = written = 0
    for truth in pages(1, seed=7):
        (found,) = Detect()(detector, [Detect.preprocess(truth.png)])
        lines = Recognise()(recogniser, found.items["recognise"])
        answer = join(found.result, {"recognise": lines})
        assert len(answer["lines"]) == len(truth.lines)
        e = errors(truth.lines, answer["text"])
        wrong, written = wrong + e[0], written + e[1]
    assert wrong / written < 0.02


def test_pages_in_a_batch_are_found_as_they_are_alone(wheel):
    detector = ocr.load_detector("det320")
    one, other = (image(truth) for truth in pages(2, seed=7))
    small = one[:300, :400]  # another size: a batch of its own
    together = detector([one, small, other])
    for picture, boxes in zip((one, small, other), together, strict=True):
        (alone,) = detector([picture])
        assert len(boxes) == len(alone) > 0
        for a, b in zip(alone, boxes, strict=True):
            assert a.corners() == pytest.approx(np.array(b.corners()), abs=1.0)
    assert detector([]) == []
    assert detector([np.full((40, 60), 255, np.uint8)]) == [[]]


def test_lines_in_a_batch_are_read_as_they_are_alone(wheel):
    recogniser = ocr.load_recogniser("rec40")
    texts = ["Kitchen 481", "invoice", "Railway 12/9/2028", "yesterday"]
    lines = [line(text, 30) for text in texts]
    together = Recognise()(recogniser, lines)
    assert ["".join(text.split()) for text, _ in together] == ["".join(t.split()) for t in texts]
    assert all(0.5 < sure <= 1 for _, sure in together)
    for picture, (text, _) in zip(lines, together, strict=True):
        assert Recognise()(recogniser, [picture])[0][0] == text
    assert recogniser([]) == []
    text, sure = recogniser([np.full((20, 30), 255, np.uint8)])[0]
    assert len(text) <= 1 and 0 <= sure <= 1  # an empty line, whatever it makes of it


def test_the_int8_network_is_made_once_and_reads_nearly_as_well(wheel, cache, monkeypatch):
    every = networks.calibration_lines
    monkeypatch.setattr(networks, "CALIBRATION", 1)
    monkeypatch.setattr(networks, "calibration_lines", lambda: every()[:4])
    recogniser = ocr.load_recogniser("rec48-int8")
    made = networks.quantised()
    assert made.stat().st_size < 0.5 * networks.model_path("rec").stat().st_size
    assert [path.name for path in made.parent.iterdir()] == [made.name]  # nothing left over
    monkeypatch.setattr(networks, "_quantise", lambda *_: pytest.fail("made again"))
    networks.quantised.cache_clear()
    assert networks.quantised() == made
    texts = ["Kitchen481", "Railway", "yesterday", "tomato"]
    read = recogniser([line(text, 32) for text in texts])
    assert sum(errors([t], r)[0] for t, (r, _) in zip(texts, read, strict=True)) <= 2


def test_examples_are_what_the_networks_take(wheel):
    assert Detect()(ocr.load_detector("det480"), [Detect.example_input()])[0].items["recognise"]
    ((text, _),) = Recognise()(ocr.load_recogniser("rec32"), [Recognise.example_input()])
    assert text


def test_networks_run_on_the_device_that_they_are_told(wheel, monkeypatch):
    asked = []

    def opened(path, options, device):
        asked.append(device)
        return open_session(path, options, "cpu")

    monkeypatch.setattr(networks, "open_session", opened)
    for variant in (*ocr.detectors("det320", device="cuda:1"), *ocr.recognisers("rec32")):
        loaded = variant.loader()(*variant.args, **variant.kwargs)
        assert loaded.runs == "onnxruntime on cpu"
    assert asked == ["cuda:1", "auto"]
    for load, name in ((ocr.load_detector, "det320"), (ocr.load_recogniser, "rec32")):
        with pytest.raises(ValueError, match=r"device: got 'gpu', wanted 'auto', 'cpu', 'cuda'"):
            load.check(name, device="gpu")


def test_measuring_counts_lines_and_characters(wheel):
    found = measure.measure(pages(1, seed=9), ["det320", "det960"], ["rec48"])
    assert set(found["path_accuracies"]) == {"det320/rec48", "det960/rec48"}
    assert found["accuracies"]["rec48"] == max(found["path_accuracies"].values()) > 95
    written = found["written_lines_per_page"]
    assert found["lines_per_page"]["det960"] == pytest.approx(written, abs=0.5)
    assert all(ms > 0 for ms in found["milliseconds"].values())


def test_unknown_names_are_refused_with_the_valid_ones():
    for call in (ocr.load_detector, ocr.detectors):
        with pytest.raises(ValueError, match=r"variant: got 'det', wanted one of det320, "):
            call("det")
    for call in (ocr.load_recogniser, ocr.recognisers):
        with pytest.raises(ValueError, match=r"variant: got 'rec', wanted one of rec32-int8, "):
            call("rec")


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'ray-slo\[ocr\]'"):
        networks.model_path("det")


# --- the application and its config --------------------------------------------------------------


def test_the_measured_figures_are_complete():
    found = app.measured()
    assert set(found["accuracies"]) == {*app.SIDES, *app.READERS}
    assert set(found["lines_per_page"]) == set(app.SIDES)
    assert set(found["path_accuracies"]) == {f"{d}/{r}" for d in app.SIDES for r in app.READERS}
    assert all(0 <= a <= 100 for a in found["path_accuracies"].values())
    assert not any(math.isnan(v) for v in found["lines_per_page"].values())


def test_the_pipeline_has_all_variants_and_what_was_measured_of_them():
    spec = ocr.pipeline(latency_slo_ms=900).spec()
    assert lone(spec).parents == {"detect": None, "recognise": "detect"}
    assert list(spec.models["detect"].variants) == list(app.SIDES)
    assert list(spec.models["recognise"].variants) == list(app.READERS)
    assert lone(spec).path_accuracies == app.measured()["path_accuracies"]
    assert lone(spec).latency_slo_ms == 900
    on_gpu = ocr.pipeline(device="cuda").spec()
    for task in on_gpu.models.values():
        assert all(v.kwargs == {"device": "cuda"} for v in task.variants.values())
    assert spec.planner.name == "loki"


def test_the_config_says_the_same():
    (application,) = yaml.safe_load((ROOT / "configs" / "ocr-loki.yaml").read_text())[
        "applications"
    ]
    spec, own = parse_spec(application["args"]), ocr.pipeline().spec()
    assert lone(spec).path_accuracies == lone(own).path_accuracies, (
        "configs/ocr-loki.yaml and deployments/ocr/measured.json differ"
    )
    assert lone(spec).parents == lone(own).parents
    for name, task in spec.models.items():
        mine = own.models[name]
        assert task.load() is mine.load()
        assert set(task.variants) == set(mine.variants)
        for variant, said in task.variants.items():
            wanted = mine.variants[variant]
            assert (said.accuracy, said.factors) == (wanted.accuracy, wanted.factors)
            assert said.loader() is wanted.loader()
            assert said.args == wanted.args
