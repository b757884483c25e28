"""torchvision's classifiers: answers, names, weights. What needs torchvision is skipped without."""

from __future__ import annotations

import logging
import re
import sys

import numpy as np
import pytest

from ray_slo.models import vision
from ray_slo.models.running import Runner, Staged

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'ray-slo[imagenet]'"
)


@pytest.fixture
def models():
    """torchvision.models, or a skip."""
    return pytest.importorskip(
        "torchvision", reason="torchvision is not installed: pip install 'ray-slo[imagenet]'"
    ).models


@pytest.fixture
def pictures():
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in ((40, 40), (90, 64))]


# --- without torchvision -------------------------------------------------------------------------


@pytest.fixture
def brightness():
    """A classifier of a picture's mean value into ten bands, all in plain torch."""
    centres = torch.linspace(0, 255, 10)

    def network(batch):
        assert not batch.requires_grad and torch.is_inference_mode_enabled()
        return -(batch.mean((1, 2, 3))[:, None] - centres).abs() / 30

    return vision.ImageClassifier(
        name="brightness",
        runner=Runner(network, torch.device("cpu")),
        transform=lambda picture: picture[:, :8, :8].float(),
        categories=[f"band {i}" for i in range(10)],
    )


def test_answers_name_the_five_likeliest_best_first(brightness):
    dark, light = (np.full((20, 30, 3), value, np.uint8) for value in (0, 255))
    first, second = brightness([dark, light])
    assert [top["label"] for top in first["top5"]] == [f"band {i}" for i in range(5)]
    assert [top["label"] for top in second["top5"]] == [f"band {i}" for i in range(9, 4, -1)]
    for answer in (first, second):
        confidences = [top["confidence"] for top in answer["top5"]]
        assert confidences == sorted(confidences, reverse=True)
        assert 0.95 < sum(confidences) < 1  # of ten
        assert answer["label"] == answer["top5"][0]["label"]
        assert answer["confidence"] == confidences[0] and type(confidences[0]) is float
    assert brightness([]) == []


def test_a_staged_batch_has_the_same_answers(brightness, pictures):
    staged = brightness.stage(pictures)
    assert isinstance(staged, Staged) and brightness(staged) == brightness(pictures)
    assert not brightness.stages_ahead  # on a CPU it would take the running batch's time


def test_read_only_pictures_are_taken(brightness):
    picture = np.zeros((8, 8, 3), np.uint8)
    picture.flags.writeable = False  # as Ray hands them out; torch would warn
    assert brightness([picture])[0]["label"] == "band 0"


def test_the_family_is_that_of_ramsis():
    assert len(set(vision.FAMILY)) == len(vision.FAMILY) == 26
    kinds = ("efficientnet", "resnet", "resnext", "googlenet", "mobilenet", "inception", "shuffle")
    counts = [sum(name.startswith(kind) for name in vision.FAMILY) for kind in kinds]
    assert counts == [11, 5, 2, 1, 2, 1, 4]  # §7 of the paper


def test_wrong_weights_are_said_before_torchvision_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"weights: got 'pretrained'.*folder with resnet18\.pth"):
        vision.load("resnet18", weights="pretrained")


def test_missing_torchvision_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    vision.names.cache_clear()
    for call in (vision.names, lambda: vision.load("resnet18", weights="none")):
        with pytest.raises(ImportError, match=r"pip install 'ray-slo\[imagenet\]'"):
            call()


# --- with torchvision ----------------------------------------------------------------------------


def test_names_and_published_accuracies(models):
    assert set(vision.FAMILY) <= set(vision.names())
    assert vision.accuracy("resnet50") == 80.858  # IMAGENET1K_V2
    assert all(50 < vision.accuracy(name) < 90 for name in vision.names())


def test_no_network_looks_beyond_the_middle_square(models):
    from deployments.imagenet.app import SIDE

    for name in vision.names():
        transform = models.get_model_weights(name).DEFAULT.transforms()
        assert transform.crop_size[0] <= transform.resize_size[0] <= SIDE


@pytest.mark.parametrize("call", [vision.accuracy, lambda name: vision.load(name, "none")])
def test_an_unknown_name_is_refused_with_the_valid_ones(models, call):
    with pytest.raises(
        ValueError, match=r"name: got 'resnet19', wanted one of alexnet, .*resnet18"
    ):
        call("resnet19")


def test_random_weights_are_the_same_in_every_process_and_said_to_be_random(
    models, pictures, caplog
):
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        one = vision.load("resnet18", weights="none", device="cpu")
    assert "resnet18 has random weights" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)  # the caller's
    torch.manual_seed(7)
    two = vision.load("resnet18", weights="none", device="cpu")
    torch.set_rng_state(state)
    for a, b in zip(one(pictures), two(pictures), strict=True):
        assert a["label"] == b["label"] in one.categories
        assert a["confidence"] == pytest.approx(b["confidence"], rel=1e-4)


def test_a_batch_answers_as_its_items_do_alone(models, pictures):
    classifier = vision.load("shufflenet_v2_x0_5", weights="none", device="cpu")
    for picture, together in zip(pictures, classifier(pictures), strict=True):
        (alone,) = classifier([picture])
        assert alone["label"] == together["label"] and len(together["top5"]) == 5
        assert alone["confidence"] == pytest.approx(together["confidence"], rel=1e-4)


def old_densenet(state):
    """As its download is written: module names with dots."""
    renamed = type(state)()
    for key, value in state.items():
        renamed[re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", key)] = value
    assert renamed.keys() != state.keys()
    return renamed


@pytest.mark.parametrize(
    ("name", "options", "file", "written"),
    [
        ("resnet18", {}, "resnet18.pth", dict),
        ("resnet18", {}, "resnet18-f37072fd.pth", dict),  # as torchvision's download is called
        ("densenet121", {}, "densenet121.pth", old_densenet),
        ("mnasnet0_5", {}, "mnasnet0_5.pth", lambda state: state),  # needs its format's version
        (
            "googlenet",  # published with auxiliary heads
            {"aux_logits": True, "init_weights": False, "transform_input": True},
            "googlenet.pth",
            lambda state: state,
        ),
    ],
)
def test_weights_from_a_file_or_its_folder(models, tmp_path, name, options, file, written):
    torch.manual_seed(3)
    network = models.get_model(name, **options).eval()
    torch.save(written(network.state_dict()), tmp_path / file)
    batch = torch.randn(1, 3, 96, 96)
    for path in (tmp_path, tmp_path / file):
        loaded = vision.load(name, weights=path, device="cpu").network
        with torch.inference_mode():
            torch.testing.assert_close(loaded(batch), network(batch))


def test_files_that_do_not_hold_the_network_are_refused(models, tmp_path):
    path = tmp_path / "resnet34.pth"

    def refused(match):
        with pytest.raises(ValueError, match=match):
            vision.load("resnet34", weights=tmp_path)

    refused(r"the folder '.*' holds neither resnet34\.pth nor resnet34-b627a593\.pth")
    path.write_bytes(b"hello")
    refused(r"'.*resnet34\.pth' is not what torch\.save\(network\.state_dict\(\), path\) writes")
    torch.save([1, 2], path)
    refused(r"'.*resnet34\.pth' holds a list, wanted a state dict")
    torch.save(models.resnet18().state_dict(), path)
    refused(r"'.*resnet34\.pth' is not a state dict of resnet34: Missing key\(s\)")


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """torchvision's cache, empty."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("name", "file", "options"),
    [
        ("resnet18", "resnet18-f37072fd.pth", {}),
        (
            "googlenet",  # published with auxiliary heads
            "googlenet-1378be20.pth",
            {"aux_logits": True, "init_weights": False, "transform_input": True},
        ),
    ],
)
@pytest.mark.parametrize("weights", ["local", "download"])
def test_published_weights_in_the_cache_are_read_without_the_network(
    models, checkpoints, no_network, weights, name, file, options
):
    torch.manual_seed(3)
    network = models.get_model(name, **options).eval()
    checkpoints.mkdir()
    torch.save(network.state_dict(), checkpoints / file)
    batch = torch.randn(1, 3, 96, 96)
    loaded = vision.load(name, weights=weights, device="cpu").network
    with torch.inference_mode():
        torch.testing.assert_close(loaded(batch), network(batch))
    assert no_network == []


def test_local_weights_that_are_not_there_are_named_with_what_to_do(
    models, checkpoints, no_network, monkeypatch
):
    def refused(*weights):
        with pytest.raises(ValueError) as caught:
            vision.load("resnet18", *weights)
        assert str(caught.value) == (
            f"weights: got 'local', but '{checkpoints}/resnet18-f37072fd.pth' is not there; get it "
            "from https://download.pytorch.org/models/resnet18-f37072fd.pth, or say 'download', "
            "'none' (random) or a path, as the argument weights or in RAY_SLO_WEIGHTS"
        )

    refused("local")
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "local")
    refused()
    assert no_network == [] and not checkpoints.exists()


def test_a_missing_file_is_fetched_once(models, checkpoints, monkeypatch):
    network = models.resnet18().eval()
    fetched = []

    def fetch(url, file):
        fetched.append(url)
        file.parent.mkdir()
        torch.save(network.state_dict(), file)

    monkeypatch.setattr(vision, "fetch", fetch)
    batch = torch.randn(1, 3, 64, 64)
    for _ in range(2):
        loaded = vision.load("resnet18", device="cpu").network
        with torch.inference_mode():
            torch.testing.assert_close(loaded(batch), network(batch))
    assert fetched == ["https://download.pytorch.org/models/resnet18-f37072fd.pth"]


def test_a_failed_download_is_said_at_once_with_what_else_there_is(models, checkpoints, no_network):
    with pytest.raises(RuntimeError) as caught:
        vision.load("resnet18")
    assert "resnet18-f37072fd.pth (<urlopen error no network>)" in str(caught.value)
    assert f"put the file into {checkpoints}, or say 'none' (random)" in str(caught.value)
    assert "RAY_SLO_WEIGHTS" in str(caught.value)
    assert len(no_network) == 1


@pytest.mark.parametrize("weights", ["local", "download"])
def test_a_cached_file_that_cannot_be_read_is_named(models, checkpoints, no_network, weights):
    checkpoints.mkdir()
    (checkpoints / "resnet18-f37072fd.pth").write_bytes(b"hello")
    with pytest.raises(RuntimeError, match=r"cannot read '.*resnet18-f37072fd\.pth' .* delete it"):
        vision.load("resnet18", weights)


def test_the_environment_decides_for_a_network(models, caplog, no_network, monkeypatch):
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "none")
    vision.load("resnet18", device="cpu")
    assert "resnet18 has random weights" in caplog.text and no_network == []
