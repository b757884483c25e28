"""The ImageNet application: input, payloads and variants."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from deployments.imagenet import ImageNet, app, pictures, variants
from ray_slo.models import vision


@pytest.fixture
def torchvision():
    return pytest.importorskip(
        "torchvision", reason="torchvision is not installed: pip install 'ray-slo[imagenet]'"
    )


def photo(width: int = 60, height: int = 40) -> Image.Image:
    """Smooth colours that tell left from right and top from bottom."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.dstack([x, y, 255 - x]).astype(np.uint8))


def file(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A small PNG whose header claims to be large."""
    raw = bytearray(file(photo()))
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


# --- input ---------------------------------------------------------------------------------------


def test_the_middle_square_is_kept_as_it_is():
    wide, tall = photo(60, 40), photo(40, 60)
    np.testing.assert_array_equal(ImageNet.preprocess(wide), np.asarray(wide)[:, 10:50])
    np.testing.assert_array_equal(ImageNet.preprocess(tall), np.asarray(tall)[10:50])


def test_bytes_pictures_and_arrays_give_the_same():
    picture = photo()
    raw = file(picture)
    wanted = ImageNet.preprocess(picture)
    assert wanted.shape == (40, 40, 3) and wanted.dtype == np.uint8
    for item in (raw, bytearray(raw), memoryview(raw), np.asarray(picture)):
        np.testing.assert_array_equal(ImageNet.preprocess(item), wanted)
    np.testing.assert_array_equal(ImageNet.preprocess(file(picture, "WEBP", lossless=True)), wanted)
    jpeg = ImageNet.preprocess(file(picture, "JPEG", quality=95, subsampling=0))
    np.testing.assert_allclose(jpeg, wanted, atol=8)


def test_gray_sixteen_bit_palette_and_transparency():
    gray = photo().convert("L")
    wanted = np.dstack([np.asarray(gray)[:, 10:50]] * 3)
    sixteen = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    with_alpha = gray.convert("LA")
    for item in (file(gray), np.asarray(gray), file(sixteen), file(with_alpha)):
        np.testing.assert_array_equal(ImageNet.preprocess(item), wanted)
    palette = file(gray.convert("P"), transparency=bytes(range(256)))
    np.testing.assert_array_equal(ImageNet.preprocess(palette), wanted)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_large_pictures_are_shrunk(kind):
    large = photo(1400, 1000)
    small = ImageNet.preprocess(file(large, kind))
    assert small.shape == (app.SIDE, app.SIDE, 3)
    wanted = large.crop((200, 0, 1200, 1000)).resize((app.SIDE, app.SIDE))
    np.testing.assert_allclose(small, np.asarray(wanted), atol=6)


def test_photographs_are_turned_as_they_say():
    upright = photo(48, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me clockwise"
    turned = file(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    np.testing.assert_array_equal(ImageNet.preprocess(turned), ImageNet.preprocess(upright))


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (None, "a NoneType"),
        ("picture.jpg", "a str"),
        ([[0] * 8] * 8, "a list"),
        (np.zeros((40, 40, 3)), "an array of float64"),
        (np.zeros((40, 40, 4), np.uint8), "an array of shape (40, 40, 4)"),
        (np.zeros((0, 40, 3), np.uint8), "an array of shape (0, 40, 3)"),
        (b"", "an unreadable file"),
        (b"not a picture", "an unreadable file"),
        (file(photo())[:100], "an unreadable file"),
        (file(photo(), "GIF"), "an unreadable file"),
        (file(photo(7, 100)), "7 x 100 pixels"),
        (claiming(10_000, 6000), "10000 x 6000 pixels"),
        (b"\0" * (app.MAX_BYTES + 1), "16777217 bytes"),
    ],
)
def test_bad_input_is_refused_with_what_was_got_and_wanted(item, got):
    with pytest.raises(ValueError) as caught:
        ImageNet.preprocess(item)
    assert str(caught.value).startswith(f"image: got {got}, wanted ")


@pytest.mark.parametrize("side", [10_000, 20_000])  # Pillow warns of the first, refuses the second
def test_a_decompression_bomb_is_refused_undecoded(side):
    with pytest.raises(ValueError, match=r"image: got .*(bomb|pixels), wanted"):
        ImageNet.preprocess(claiming(side, side))


def test_the_square_is_all_that_a_network_sees(torchvision):
    """As if the whole picture had gone through the published preprocessing."""
    import torch

    picture = photo(500, 375)
    for name in ("resnet50", "inception_v3", "efficientnet_b7"):
        classifier = vision.load("resnet18", weights="none", device="cpu")
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        square = torch.tensor(ImageNet.preprocess(file(picture))).permute(2, 0, 1)
        seen, wanted = transform(square), transform(picture)
        assert seen.shape == wanted.shape
        assert (seen - wanted).abs().mean() < 0.02, name  # of a standard deviation
    assert ImageNet()(classifier, [ImageNet.preprocess(picture)]) == classifier(
        [ImageNet.preprocess(picture)]
    )


# --- payloads -----------------------------------------------------------------------------------


def test_drawings_are_the_same_each_time_and_differ(monkeypatch):
    drawings = pictures.drawings()
    assert len(set(drawings)) == pictures.DRAWN
    assert drawings == pictures.drawings() != pictures.drawings(seed=1)
    for drawing in drawings:
        assert Image.open(io.BytesIO(drawing)).size == (pictures.WIDTH, pictures.HEIGHT)
        assert ImageNet.preprocess(drawing).std() > 10  # something is on it


def test_payloads_are_photographs_or_drawings(monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    assert pictures.payloads() == pictures.drawings()
    with pytest.raises(ImportError, match=r"pip install 'ray-slo\[traffic\]'"):
        pictures.photographs()
    monkeypatch.undo()
    pytest.importorskip("skimage", reason="no scikit-image: pip install 'ray-slo[traffic]'")
    assert pictures.payloads() == pictures.photographs()


# --- variants ------------------------------------------------------------------------------------


def test_variants_carry_names_accuracies_and_arguments(torchvision):
    few = variants("resnet18", "vit_b_16", weights="none", device="cpu")
    assert [(v.name, v.accuracy) for v in few] == [("resnet18", 69.758), ("vit_b_16", 81.072)]
    assert few[0].kwargs == {"name": "resnet18", "weights": "none", "device": "cpu"}
    assert few[0].loader() is vision.load
    assert variants("resnet18")[0].kwargs["weights"] is None  # the switch decides
    assert [v.name for v in variants()] == list(vision.FAMILY)
    with pytest.raises(ValueError, match=r"name: got 'resnet19', wanted one of "):
        variants("resnet19")
