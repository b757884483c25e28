"""The entailment application: input, payloads and variants."""

from __future__ import annotations

import pytest

from deployments.text import Entailment, app, payloads, variants
from ray_slo.models import text

PAIR = ("It rains.", "The street is wet.")


def test_both_forms_of_a_pair():
    for item in (PAIR, list(PAIR), {"hypothesis": PAIR[1], "premise": PAIR[0]}):
        assert Entailment.preprocess(item) == PAIR
    assert Entailment.preprocess(Entailment.example_input()) == Entailment.example_input()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("It rains.", "pair: got a str, wanted {'premise': text, 'hypothesis': text} or "),
        (None, "pair: got a NoneType, wanted "),
        ([], "pair: got 0 items, wanted "),
        (["a", "b", "c"], "pair: got 3 items, wanted "),
        ({"premise": "a"}, "pair: got the keys ['premise'], wanted "),
        ({"premise": "a", "hypothesis": "b", "id": 1}, "pair: got the keys ['hypothesis', 'id', "),
        (["a", 1], "hypothesis: got a int, wanted a text"),
        ({"premise": None, "hypothesis": "b"}, "premise: got a NoneType, wanted a text"),
        ([" \n", "b"], "premise: got an empty text"),
        (["a", "b" * (app.MAX_CHARACTERS + 1)], "hypothesis: got 10001 characters, wanted at most"),
    ],
)
def test_bad_input_is_refused_with_the_field(item, message):
    with pytest.raises(ValueError) as caught:
        Entailment.preprocess(item)
    assert str(caught.value).startswith(message)


def test_payloads_are_pairs_with_labels_of_the_family():
    pairs, labels = payloads()
    assert len(pairs) == len(labels) == 24
    assert set(labels) == set(text.LABELS)
    assert len({Entailment.preprocess(pair) for pair in pairs}) == 24
    lengths = [len(pair["premise"]) for pair in pairs]
    assert max(lengths) > 20 * min(lengths)  # from a word to what fills a batch with padding


def test_the_batch_method_asks_the_network_it_is_handed():
    assert Entailment()(lambda pairs: [len(pair) for pair in pairs], [PAIR, PAIR]) == [2, 2]


def test_variants_carry_names_accuracies_and_arguments():
    family = variants(weights="none", device="cpu")
    assert {v.name: v.accuracy for v in family} == {
        name: size.accuracy for name, size in text.FAMILY.items()
    }
    assert family[0].kwargs == {"name": "bert-tiny", "weights": "none", "device": "cpu"}
    assert family[0].loader() is text.load
    with pytest.raises(ValueError, match=r"name: got 'bert', wanted one of bert-tiny, "):
        variants("bert")
