"""The traffic pipeline: boxes and parts of pictures, the tree, configs, and the networks."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

from deployments.imagenet import pictures
from deployments.traffic import Detect, Faces, Vehicles, app, boxes, detection, detectors
from ray_slo.load.workload import load_payloads
from ray_slo.models.lanes import Lane
from ray_slo.models.running import How, Runner
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.tree import TreeRunner, Visit

ROOT = Path(__file__).parents[2]


def lone(spec):
    """The pipeline of an application that has one."""
    (pipeline,) = spec.pipelines.values()
    return pipeline


@pytest.fixture
def torchvision():
    return pytest.importorskip(
        "torchvision", reason="torchvision is not installed: pip install 'ray-slo[traffic]'"
    )


def coordinates(height: int = 100, width: int = 200) -> np.ndarray:
    """A picture whose pixels say where they are: (row, column, 0)."""
    rows, columns = np.mgrid[:height, :width]
    return np.dstack([rows, columns, 0 * rows]).astype(np.uint8)


def thing(label: str, *box: float) -> boxes.Found:
    return {"label": label, "confidence": 0.9, "box": list(box)}


# --- boxes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "wanted"),
    [
        ([100, 40, 120, 60], (98, 38, 122, 62)),  # a tenth of 20 on every side
        ([100, 40, 150, 60], (95, 20, 155, 80)),  # the longer side counts
        ([0, 0, 20, 20], (0, 0, 24, 24)),  # moved inside
        ([180, 80, 200, 100], (176, 76, 200, 100)),
        ([20, 0, 180, 100], (4, 0, 196, 100)),  # 192 wide: cut at the picture's height
        ([0, 0, 200, 100], (0, 0, 200, 100)),
        ([50, 50, 50, 50], (49, 49, 51, 51)),  # of no size at all
    ],
)
def test_the_square_around_a_box_is_whole_and_inside(box, wanted):
    assert boxes.square(box, 100, 200) == wanted


def test_any_box_gives_a_square_that_holds_it_as_far_as_the_picture_goes():
    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width = rng.integers(8, 300, 2).tolist()
        x, y = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
        left, top, right, bottom = boxes.square([x[0], y[0], x[1], y[1]], height, width)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert left <= x[0] + 0.5 and right >= x[1] - 0.5
        assert top <= y[0] + 0.5 and bottom >= y[1] - 0.5
        assert right - left == bottom - top or min(height, width) < max(right - left, bottom - top)


def test_a_crop_is_a_copy_of_what_is_there():
    picture = coordinates()
    part = boxes.crop(picture, [100, 40, 120, 60])
    assert part.shape == (24, 24, 3)
    assert part[0, 0].tolist() == [38, 98, 0] and part[-1, -1].tolist() == [61, 121, 0]
    assert part.base is None and part.flags.c_contiguous


def test_the_head_is_at_the_top_of_a_person():
    assert boxes.head([0, 0, 40, 100]) == [5, 0, 35, 30]  # standing: three tenths of the height
    assert boxes.head([10, 10, 30, 20]) == [15, 10, 25, 20]  # cut off: all of it
    assert boxes.head([0, 0, 90, 100]) == [22.5, 0, 67.5, 45]  # sitting: half the width


def test_things_go_where_they_belong():
    found = [
        thing("bus", 0, 0, 50, 50),
        thing("person", 0, 0, 40, 80),
        thing("bench", 0, 0, 50, 50),
        thing("car", 0, 0, 50, 7),  # nothing to see
        thing("person", 0, 0, 9, 20),
        thing("truck", 0, 0, 8, 8),
    ]
    vehicles, people, others = boxes.parts(found)
    assert [v["label"] for v in vehicles] == ["bus", "truck"]
    assert people == [found[1]]
    assert others == [found[2], found[3], found[4]]


def test_what_is_not_sure_enough_is_not_found():
    n = detection.MOST + 10
    scores = np.linspace(0.4, 0.9, n, dtype=np.float32)
    found = detection.found([f"thing {i}" for i in range(n)], scores, np.ones((n, 4)))
    assert len(found) == detection.MOST
    assert [t["label"] for t in found[:2]] == [f"thing {n - 1}", f"thing {n - 2}"]
    sure = detection.found(["a", "b", "c"], [0.49, 0.5, 0.51], np.zeros((3, 4)))
    assert [t["label"] for t in sure] == ["c", "b"]
    assert detection.found([], [], np.zeros((0, 4))) == []


# --- input ---------------------------------------------------------------------------------------


def test_pictures_keep_their_shape_and_large_ones_are_shrunk():
    picture = coordinates()
    np.testing.assert_array_equal(Detect.preprocess(picture), picture)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    np.testing.assert_array_equal(Detect.preprocess(buffer.getvalue()), picture)
    large = Image.new("RGB", (4000, 1000))
    assert Detect.preprocess(large).shape == (333, app.MAX_SIDE, 3)
    buffer = io.BytesIO()
    large.save(buffer, "JPEG")
    assert Detect.preprocess(buffer.getvalue()).shape == (333, app.MAX_SIDE, 3)
    assert Detect.preprocess(Image.new("RGB", (4000, 10))).shape == (8, app.MAX_SIDE, 3)


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (None, "a NoneType"),
        (b"not a picture", "an unreadable file"),
        (np.zeros((40, 7, 3), np.uint8), "7 x 40 pixels"),
        (np.zeros((40, 40, 3)), "an array of float64"),
    ],
)
def test_bad_input_is_refused_with_what_was_got_and_wanted(item, got):
    with pytest.raises(ValueError) as caught:
        Detect.preprocess(item)
    assert str(caught.value).startswith(f"image: got {got}, wanted ")


def test_photographs_are_pictures_of_a_package():
    pytest.importorskip("skimage", reason="no scikit-image: pip install 'ray-slo[traffic]'")
    shapes = [Detect.preprocess(photograph).shape for photograph in app.photographs()]
    assert len(shapes) == 5 and all(min(shape[:2]) >= 300 for shape in shapes)


def test_payloads_without_scikit_image_say_what_to_install(monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"payload: deployments\.traffic:payloads: .*pip install"):
        load_payloads("deployments.traffic:payloads")


# --- the tree ------------------------------------------------------------------------------------


def looks(name: str):
    """A classifier that says what it was given."""

    def classifier(crops):
        return [
            {"label": name, "confidence": 1.0, "top5": [{"label": f"{name} {c.shape[:2]}"}]}
            for c in crops
        ]

    return classifier


def test_parts_travel_down_the_tree_and_answers_come_back_to_their_boxes():
    """The tasks as the frontend runs them, with stand-ins for networks."""
    picture = coordinates()
    scene = [
        thing("person", 10, 10, 50, 90),
        thing("car", 100, 40, 120, 60),
        thing("dog", 0, 0, 20, 20),
        thing("bus", 100, 40, 150, 60),
    ]
    networks = {
        "detect": (Detect(), lambda pictures: [scene for _ in pictures]),
        "vehicles": (Vehicles(), looks("vehicle")),
        "faces": (Faces(), looks("face")),
    }

    async def serve(task, item, upstream):
        instance, network = networks[task]
        (value,) = instance(network, [item])
        return value, Visit("worker", task, 1, 0.0, 0.0, 0.0, 0.0)

    async def join(result, outputs):
        return Detect.join(result, outputs)

    made = []
    tree = TreeRunner(
        {"detect": None, "vehicles": "detect", "faces": "detect"},
        join={"detect": join},
        made=lambda _, variant, counts: made.append((variant, counts)),
    )
    answer = asyncio.run(tree.run(picture, serve)).joined
    assert made[0] == ("detect", {"vehicles": 2, "faces": 1})
    assert [v["looks_like"] for v in answer["vehicles"]] == [
        [{"label": "vehicle (24, 24)"}],
        [{"label": "vehicle (60, 60)"}],
    ]
    assert answer["vehicles"][0]["box"] == [100, 40, 120, 60]
    assert [p["looks_like"][0]["label"] for p in answer["people"]] == ["face (29, 29)"]
    assert answer["others"] == [scene[2]]


# --- networks ------------------------------------------------------------------------------------


@pytest.fixture
def ssdlite(torchvision):
    return detection.load("ssdlite320_mobilenet_v3_large", "none", "cpu")


def test_random_weights_see_the_made_up_scene_at_the_networks_cost(ssdlite, monkeypatch):
    ran = []
    monkeypatch.setattr(
        ssdlite.network, "forward", lambda inputs: ran.extend(tuple(x.shape) for x in inputs)
    )
    pictures = [coordinates(), coordinates(160, 120)]
    first, second = Detect()(ssdlite, pictures)
    assert ran == [(3, 100, 200), (3, 160, 120)]
    assert [t["label"] for t in first.result] == ["car", "bus", "person", "bench"]
    assert {task: len(items) for task, items in second.items.items()} == {"vehicles": 2, "faces": 1}
    assert Detect()(ssdlite, []) == []


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def plain(torch):
    """A detector whose only thing is the whole picture, without torchvision."""

    def network(inputs):
        boxes = [torch.tensor([[0.0, 0.0, x.shape[2], x.shape[1]]]) for x in inputs]
        sure = {"labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
        return [{**sure, "boxes": box} for box in boxes]

    runner = Runner(network, torch.device("cpu"))
    return detection.Detector("d", runner, lambda picture: picture / 255, ["no", "car"])


def test_pictures_of_unlike_size_are_one_batch(plain):
    pictures = [coordinates(), coordinates(160, 120)]
    assert [[t["box"] for t in things] for things in plain(pictures)] == [
        [[0, 0, 200, 100]],
        [[0, 0, 120, 160]],
    ]
    object.__setattr__(plain, "made_up", True)
    assert plain(pictures) == [detection.made_up(100, 200), detection.made_up(160, 120)]
    assert plain([]) == []


def test_a_batch_staged_ahead_has_the_same_results(plain):
    pictures = [coordinates(), coordinates(160, 120)]
    task = Detect()
    ahead, at_once = task(plain, task.stage(plain, pictures)), task(plain, pictures)
    assert [each.result for each in ahead] == [each.result for each in at_once]
    for one, other in zip(ahead, at_once, strict=True):
        np.testing.assert_array_equal(one.items["vehicles"], other.items["vehicles"])
    assert not plain.stages_ahead  # on a CPU it would take the running batch's time


def test_all_copies_are_queued_before_the_first_transform(plain, monkeypatch):
    log = []

    class Noting(Lane):
        def put(self, data):
            log.append("put")
            return super().put(data)

    monkeypatch.setattr(plain.runner, "lane", Noting())
    object.__setattr__(plain, "transform", lambda one: (log.append(tuple(one.shape)), one)[1])
    plain.stage([coordinates(), coordinates(160, 120)])
    assert log == ["put", "put", (3, 100, 200), (3, 160, 120)]


def layers(torch, two_stages):
    """The parts of torchvision's two sorts of detectors that the measurement looks into."""
    nn = torch.nn

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.deltas = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 8, 1)

        def forward(self, features):
            each = [(self.scores(x), self.deltas(x)) for x in features]
            if two_stages:
                return [score for score, _ in each], [delta for _, delta in each]
            return {"scores": each[0][0], "deltas": each[0][1]}

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 3, stride=2)

        def forward(self, images):
            first = self.first(images)
            return {"0": first, "1": self.second(first)}

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.ran = Backbone(), []
            if two_stages:
                self.rpn = nn.Module()
                self.rpn.head = Head()
            else:
                self.head = Head()

        def transform(self, pictures):
            return SimpleNamespace(tensors=torch.stack(pictures)), None

        def forward(self, pictures):
            images, _ = self.transform(pictures)
            features = self.backbone(images.tensors)
            head = self.rpn.head if two_stages else self.head
            output = detection._tensors(head(list(features.values())))
            types = [{part.dtype for part in parts} for parts in (features.values(), output)]
            self.ran.append((len(pictures), *types))
            return [{"boxes": torch.zeros(len(self.ran) % 2, 4)} for _ in pictures]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().eval()


@pytest.mark.parametrize("two_stages", [False, True])
def test_the_way_is_chosen_by_measurement_and_boxes_are_computed_in_float32(
    torch, monkeypatch, two_stages
):
    network, computed = layers(torch, two_stages), set()
    network.backbone.first.register_forward_hook(lambda *call: computed.add(call[-1].dtype))
    weights = SimpleNamespace(
        meta={"categories": ["no"]}, transforms=lambda: lambda picture: picture / 255
    )
    monkeypatch.setattr(detection, "_published", lambda name: weights)
    monkeypatch.setattr(detection, "build", lambda *args, **options: network)
    monkeypatch.setattr(detection, "_EXAMPLE", (16, 24, 3))
    detector = detection.load(detection.FAMILY[0], "none", "cpu", "measure")
    assert detector.runs.startswith(str(detector.runner.how))
    assert " ms at batch size 1, " in detector.runs and " ms at batch size 4" in detector.runs
    assert {ran[0] for ran in network.ran} == {1, 4}
    assert computed == {torch.float32, torch.bfloat16}
    assert all(ran[1] == ran[2] == {torch.float32} for ran in network.ran)  # anchors, then boxes
    assert detection.load(detection.FAMILY[0], "none", "cpu").runner.how == How(channels_last=True)


def test_what_is_compared_is_what_the_heads_say_of_every_place(torch):
    for two_stages, places in ((False, 7 * 11), (True, 7 * 11 + 3 * 5)):
        network = layers(torch, two_stages)
        with torch.inference_mode():
            compared = detection._dense(network, [torch.ones(3, 16, 24)] * 2)
        assert compared.shape == (2, 10 * places) and compared.std() > 0


@pytest.mark.parametrize("how", [{"engine": "graph"}, How(engine="compile")])
def test_detectors_are_neither_recorded_nor_compiled(how):
    for refuse in (detection.load.check, detection.load):
        with pytest.raises(ValueError, match=r"how.engine: got '\w+', wanted one of eager"):
            refuse(detection.FAMILY[0], "none", how=how)


def test_weights_of_a_file_are_looked_through(ssdlite, tmp_path, monkeypatch):
    """Not right answers, but the network's own."""
    import torch

    torch.save(ssdlite.network.state_dict(), tmp_path / f"{ssdlite.name}.pth")
    loaded = detection.load(ssdlite.name, tmp_path, "cpu")
    assert not loaded.made_up
    inputs = [loaded.transform(torch.tensor(coordinates()).permute(2, 0, 1))]
    with torch.inference_mode():
        (wanted,), (got,) = ssdlite.network(inputs), loaded.network(inputs)
    torch.testing.assert_close(got["boxes"], wanted["boxes"])
    assert loaded([coordinates()]) == [[]]  # of random weights, none is sure of anything
    confident = {k: v.clone() for k, v in got.items()}
    confident["scores"][:] = 0.99
    monkeypatch.setattr(loaded.runner, "_call", lambda network, inputs: [confident])
    (seen,) = loaded([coordinates()])
    assert len(seen) == detection.MOST
    assert seen[0]["label"] == loaded.categories[int(got["labels"][0])]


def test_published_weights_in_the_cache_are_looked_through(
    ssdlite, tmp_path, no_network, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    file = tmp_path / "checkpoints" / "ssdlite320_mobilenet_v3_large_coco-a79551df.pth"
    with pytest.raises(ValueError, match=rf"weights: got 'local', but '{file}' is not there; get"):
        detection.load(ssdlite.name, "local", "cpu")
    file.parent.mkdir()
    torch.save(ssdlite.network.state_dict(), file)
    for weights in ("local", "download", None):
        loaded = detection.load(ssdlite.name, weights, "cpu")
        assert not loaded.made_up
        assert loaded([coordinates()]) == [[]]
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "none")
    assert detection.load(ssdlite.name, device="cpu").made_up
    assert no_network == []


def test_variants_carry_names_accuracies_factors_and_arguments(torchvision):
    family = detectors(weights="none", device="cpu")
    assert [v.name for v in family] == list(detection.FAMILY)
    accuracies = [v.accuracy for v in family]
    assert accuracies == sorted(accuracies) == [21.3, 22.8, 32.8, 46.7]
    assert family[0].factors == app.FACTORS[family[0].name]
    assert family[0].kwargs == {"name": family[0].name, "weights": "none", "device": "cpu"}
    with pytest.raises(ValueError, match=r"name: got 'yolo', wanted one of fasterrcnn_"):
        detectors("yolo")


def test_the_pipeline_is_the_configs(torchvision):
    built = app.pipeline(weights="none", max_replicas=2).spec()
    config = yaml.safe_load((ROOT / "configs" / "traffic-loki.yaml").read_text())
    config = parse_spec(config["applications"][0]["args"])
    assert lone(built).parents == lone(config).parents
    assert lone(built).factors == lone(config).factors
    for task, model in built.models.items():
        assert {n: v.accuracy for n, v in model.variants.items()} == {
            n: v.accuracy for n, v in config.models[task].variants.items()
        }
