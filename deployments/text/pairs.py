"""Pairs of texts to try the application with, and a reader's answer to each."""

from __future__ import annotations

# A premise; what follows from it, what may or may not be, what cannot be.
_PAIRS = (
    (
        "It has rained since early in the morning.",
        "It is wet outside.",
        "The rain will stop before the evening.",
        "Not a drop has fallen today.",
    ),
    (
        "Two children are playing football in the park while their father reads the newspaper.",
        "Children are outdoors.",
        "The father reads about sports.",
        "The park is empty.",
    ),
    (
        "The train to the coast leaves at nine and arrives shortly before noon.",
        "The journey takes more than two hours.",
        "The train is full on most days.",
        "The train leaves in the afternoon.",
    ),
    (
        "The committee announced yesterday that the new hospital would be finished before the "
        "winter, although half of the money for it has not been found yet.",
        "Some of the money for the hospital is still missing.",
        "The hospital will have four hundred beds.",
        "The hospital has been paid for in full.",
    ),
    (
        "She sold her bicycle last spring and has walked to work ever since.",
        "She had a bicycle.",
        "She lives close to her office.",
        "She rides her bicycle to work.",
    ),
    (
        "No.",
        "The answer was negative.",
        "The question was about money.",
        "The answer was yes.",
    ),
    (
        "The museum is closed on Mondays, but on the first Sunday of every month everybody gets in "
        "for nothing, and so the queue often reaches around the corner of the building.",
        "On some Sundays a visit costs nothing.",
        "The museum shows paintings from the Netherlands.",
        "The museum is open every day of the week.",
    ),
    (
        "After the second storm of the year the harbour lost one of its three cranes, which had "
        "stood there since before the war; the owners say that it will not be replaced, because "
        "ships have become so large that hardly any of them calls at this port.",
        "The harbour has fewer cranes than before.",
        "The crane was painted red.",
        "The owners have ordered a new crane.",
    ),
)

_LABELS = ("entailment", "neutral", "contradiction")


def payloads() -> tuple[list[dict[str, str]], list[str]]:
    """Payloads for `ray-slo bench --payload deployments.text:payloads`, and the right answers.

    With random weights, or those of an encoder without a trained classifier, a third is right by
    chance.
    """
    pairs = [
        ({"premise": premise, "hypothesis": hypothesis}, label)
        for premise, *hypotheses in _PAIRS
        for hypothesis, label in zip(hypotheses, _LABELS, strict=True)
    ]
    return [pair for pair, _ in pairs], [label for _, label in pairs]
