import pytest

from benchmarks.zoos import ZOOS, load


@pytest.mark.parametrize(
    ("zoo", "count"), [("symphony_1080ti", 35), ("symphony_a100", 37), ("shepherd_v100", 17)]
)
def test_every_model_of_the_table_is_there(zoo, count):
    assert len(load(zoo)) == count


@pytest.mark.parametrize("zoo", ["symphony_1080ti", "symphony_a100"])
def test_symphony_lists_models_by_falling_batching_effect(zoo):
    effects = [m.batching_effect for m in load(zoo).values()]
    assert effects == sorted(effects, reverse=True)


def test_slos_admit_batches_of_four_with_staggered_execution():
    # Appendix C: each model can run with batch size 4 or more; two rounds of it fit most SLOs.
    for zoo in ("symphony_1080ti", "symphony_a100"):
        for m in load(zoo).values():
            assert m.model().variants[0].profiles["default"](4) < m.slo_ms / 1e3


def test_becomes_a_model_with_a_profile():
    resnet = load("symphony_a100")["ResNet50"]
    model = resnet.model(name="copy", slo_ms=25)
    assert (model.name, model.latency_slo_s) == ("copy", 0.025)
    assert model.variants[0].profiles["default"](10) == pytest.approx(2.68e-3 + 5.172e-3)
    assert resnet.model().latency_slo_s == 0.020


def test_shepherd_models_need_an_slo_and_know_their_exit_points():
    resnet18 = load("shepherd_v100")["ResNet18"]
    assert resnet18.exit_points == 40
    with pytest.raises(ValueError, match="slo_ms is needed"):
        resnet18.model()
    assert resnet18.model(slo_ms=250).latency_slo_s == 0.25


def test_unknown_zoo_lists_the_choices():
    with pytest.raises(ValueError, match=", ".join(ZOOS)):
        load("imagenet")
