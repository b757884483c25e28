"""The BERT family: answers, tokenizer, weights. What needs transformers is skipped without."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from ray_slo.models import text

PAIRS = [
    ("A soccer game with multiple males playing.", "Some men are playing a sport."),
    ("No.", "It rained on the whole way from the station to the house of her brother."),
]


@pytest.fixture(scope="module")
def transformers():
    """transformers, or a skip; torch on one thread, so that a busy machine does not hold it up."""
    module = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'ray-slo[text]'"
    )
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(before)


# --- without transformers ------------------------------------------------------------------------


def test_the_family_rises_in_cost_and_accuracy():
    sizes = list(text.FAMILY.values())
    assert sizes == sorted(sizes, key=lambda size: size.layers * size.hidden**2)
    assert [size.accuracy for size in sizes] == [70.2, 74.8, 77.6, 80.0, 84.6]
    assert text.accuracy("bert-small") == 77.6
    assert text.size("bert-tiny").checkpoint == "google/bert_uncased_L-2_H-128_A-2"
    assert text.size("bert-base").checkpoint == "google/bert_uncased_L-12_H-768_A-12"


@pytest.mark.parametrize("name", ["bert", "bert-large", None, ["bert-tiny"]])
def test_an_unknown_name_is_refused_with_the_valid_ones(name):
    for call in (text.size, text.accuracy, text.load):
        with pytest.raises(ValueError) as caught:
            call(name)
        assert str(caught.value) == (
            f"name: got {name!r}, "
            "wanted one of bert-tiny, bert-mini, bert-small, bert-medium, bert-base"
        )


def test_bad_arguments_are_said_before_transformers_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"weights: got 'pretrained'.* or that holds bert-mini"):
        text.load("bert-mini", weights="pretrained")
    for tokens in (0, 7, True, 12.5, "128"):
        with pytest.raises(ValueError, match=r"max_tokens: got .*, wanted a whole number from 8"):
            text.load("bert-mini", weights="none", max_tokens=tokens)


def test_missing_transformers_is_named_with_what_to_install(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'ray-slo\[text\]'"):
        text.load("bert-tiny", weights="none")


# --- with transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(transformers):
    return text.load("bert-tiny", weights="none", device="cpu")


def test_a_batch_answers_as_its_items_do_alone(tiny):
    together = tiny(PAIRS)
    for pair, answer in zip(PAIRS, together, strict=True):
        (alone,) = tiny([pair])
        assert set(answer["scores"]) == set(text.LABELS)
        assert sum(answer["scores"].values()) == pytest.approx(1)
        assert answer["confidence"] == max(answer["scores"].values())
        assert answer["confidence"] == answer["scores"][answer["label"]]
        assert alone["scores"] == pytest.approx(answer["scores"], abs=1e-4)
    assert together[0]["scores"] != pytest.approx(together[1]["scores"], abs=1e-4)
    assert tiny([]) == []


def test_random_weights_are_the_same_in_every_process_and_said_to_be_random(tiny, caplog):
    import torch

    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        again = text.load("bert-tiny", weights="none", device="cpu")
    assert "bert-tiny has random weights" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)  # the caller's
    for one, two in zip(tiny(PAIRS), again(PAIRS), strict=True):
        assert one["scores"] == pytest.approx(two["scores"], abs=1e-6)


def test_the_vocabulary_covers_ascii_and_keeps_words_together(tiny):
    assert text._vocabulary() == text._vocabulary()
    premise, hypothesis = PAIRS[0]
    tokens = tiny.tokenizer(premise, hypothesis)
    pieces = tiny.tokenizer.convert_ids_to_tokens(tokens["input_ids"])
    assert pieces[0] == "[CLS]" and pieces[-1] == "[SEP]" and pieces.count("[SEP]") == 2
    assert tokens["token_type_ids"][0] == 0 and tokens["token_type_ids"][-1] == 1
    assert len(pieces) < 2.5 * len(f"{premise} {hypothesis}".split()) + 3
    everything = "".join(chr(code) for code in range(33, 127))
    assert "[UNK]" not in tiny.tokenizer.tokenize(everything)
    assert len(tiny.tokenizer.get_vocab()) < tiny.network.config.vocab_size


@pytest.mark.slow
def test_long_texts_are_cut(transformers):
    short = text.load("bert-tiny", weights="none", device="cpu", max_tokens=16)
    long = ("word " * 1000, "other " * 1000)
    (answer,) = short([long])
    (same,) = short([("word " * 100, "other " * 100)])
    assert answer["scores"] == pytest.approx(same["scores"], abs=1e-6)
    assert text.load("bert-tiny", weights="none", max_tokens=10**6).max_tokens == 512


@pytest.mark.parametrize("name", ["bert-mini", "bert-base"])
def test_dimensions_are_those_of_the_published_network(transformers, name):
    import torch

    with torch.device("meta"):  # no memory, no time
        network = text._random(text.size(name))[0]
    millions = sum(p.numel() for p in network.parameters()) / 1e6
    assert millions == pytest.approx({"bert-mini": 11.2, "bert-base": 109.5}[name], abs=0.1)


@pytest.fixture
def saved(tiny, tmp_path, monkeypatch):
    """A folder as save_pretrained writes it, with labels of its own."""
    folder = tmp_path / "models" / "bert-tiny"
    labels = {0: "yes", 1: "perhaps", 2: "no"}
    monkeypatch.setattr(tiny.network.config, "id2label", labels)
    tiny.network.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def test_weights_from_a_folder_or_the_one_above(tiny, saved):
    for path in (saved, str(saved.parent)):
        loaded = text.load("bert-tiny", weights=path, device="cpu")
        assert loaded.labels == ["yes", "perhaps", "no"]
        for one, two in zip(loaded(PAIRS), tiny(PAIRS), strict=True):
            expected = pytest.approx(list(two["scores"].values()), abs=1e-5)
            assert list(one["scores"].values()) == expected


def test_an_encoder_without_a_classifier_is_said_to_be_untrained(tiny, tmp_path, caplog):
    tiny.network.bert.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="ray_slo"):
        text.load("bert-tiny", weights=tmp_path)
    assert f"{tmp_path} has no trained classifier" in caplog.text


def test_folders_that_do_not_hold_the_network_are_refused(saved, tmp_path):
    def refused(match, name="bert-tiny"):
        with pytest.raises(ValueError, match=match):
            text.load(name, weights=saved)

    refused(r"holds 2 layers of 128, but bert-mini has 4 of 256", "bert-mini")
    with pytest.raises(ValueError, match=r"holds neither config\.json nor bert-tiny/config\.json"):
        text.load("bert-tiny", weights=tmp_path)
    (saved / "model.safetensors").write_bytes(b"hello")
    refused(r"weights: cannot read '.*bert-tiny': ")
    (saved / "model.safetensors").unlink()
    refused(r"weights: cannot read '.*bert-tiny': .*model\.safetensors")
    (saved / "config.json").write_text("{")
    refused(r"weights: cannot read '.*bert-tiny/config\.json': ")
    (saved / "config.json").write_text("[]")
    refused(r"weights: '.*config\.json' must hold a mapping, got \[\]")
    (saved / "config.json").write_text("{}")
    tokenizer = (saved / "tokenizer.json").read_bytes()
    (saved / "tokenizer.json").write_bytes(tokenizer[:-9])
    refused(r"weights: cannot read '.*tokenizer\.json': ")
    (saved / "tokenizer.json").unlink()
    refused(r"'.*bert-tiny' holds no tokenizer \(tokenizer\.json or vocab\.txt\)")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The place of bert-tiny in an empty cache of Hugging Face."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--google--bert_uncased_L-2_H-128_A-2"


def test_the_published_encoder_is_asked_for_by_its_name(
    transformers, hub, saved, monkeypatch, caplog
):
    monkeypatch.setattr(text, "_reach", lambda checkpoint: None)
    asked = []
    real = transformers.BertForSequenceClassification.from_pretrained.__func__

    def local(cls, where, **options):
        asked.append((where, options["id2label"]))
        return real(cls, saved, **options)

    monkeypatch.setattr(
        transformers.BertForSequenceClassification, "from_pretrained", classmethod(local)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda where, **_: asked.append(where) or tokenizer,
    )
    loaded = text.load("bert-tiny")
    name = "google/bert_uncased_L-2_H-128_A-2"
    assert asked == [(name, dict(enumerate(text.LABELS))), name]
    assert loaded.labels == list(text.LABELS)


def test_a_failed_download_is_said_at_once_with_what_else_there_is(transformers, hub, no_network):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        text.load("bert-tiny")
    assert str(caught.value) == (
        "weights: cannot get google/bert_uncased_L-2_H-128_A-2 from the Hugging Face hub "
        f"(no network); copy {hub} from a machine that has it, or say 'none' (random) or a path, "
        "as the argument weights or in RAY_SLO_WEIGHTS"
    )
    assert no_network
    assert time.monotonic() - start < 10  # the hub's client alone waits 23 s between its tries


@pytest.mark.parametrize("weights", ["local", "download"])
@pytest.mark.parametrize("published_as", ["safetensors", "bin and vocab.txt"])
def test_a_cached_encoder_is_read_without_the_network(
    tiny, hub, no_network, monkeypatch, weights, published_as
):
    import torch

    snapshot = hub / "snapshots" / ("a" * 40)
    tiny.network.bert.save_pretrained(snapshot)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    if published_as == "safetensors":
        tiny.tokenizer.save_pretrained(snapshot)
    else:
        (snapshot / "model.safetensors").unlink()
        torch.save(tiny.network.bert.state_dict(), snapshot / "pytorch_model.bin")
        (snapshot / "vocab.txt").write_text("\n".join(text._vocabulary()))
    monkeypatch.setenv("RAY_SLO_WEIGHTS", weights)
    loaded = text.load("bert-tiny", device="cpu")
    assert no_network == []
    assert loaded.labels == list(text.LABELS)
    first, second = (network.bert.pooler.dense.weight for network in (loaded.network, tiny.network))
    assert torch.equal(first, second)
    assert len(loaded(PAIRS)) == 2


def test_a_local_encoder_that_is_not_there_is_named_with_what_to_do(transformers, hub, no_network):
    with pytest.raises(ValueError) as caught:
        text.load("bert-tiny", "local")
    assert str(caught.value) == (
        f"weights: got 'local', but '{hub}' is not there; get google/bert_uncased_L-2_H-128_A-2 "
        "from the Hugging Face hub, or say 'download', 'none' (random) or a path, as the argument "
        "weights or in RAY_SLO_WEIGHTS"
    )
    (hub / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    with pytest.raises(ValueError, match=r"weights: got 'local', but '.*' cannot be read \(.*\);"):
        text.load("bert-tiny", "local")
    assert no_network == []
