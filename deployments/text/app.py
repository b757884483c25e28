"""The application: a plain class. Its batch method gets one of the loaded variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_slo.models import text
from ray_slo.models.running import Staged
from ray_slo.models.text import PairClassifier, TextAnswer

if TYPE_CHECKING:
    from ray_slo import Variant

MAX_CHARACTERS = 10_000  # characters of a text; the variant's token limit cuts more anyway


class Entailment:
    """Says whether a hypothesis follows from a premise: entailment, neutral or contradiction."""

    def __call__(
        self, classifier: PairClassifier, pairs: list[tuple[str, str]] | Staged
    ) -> list[TextAnswer]:
        """Answer preprocessed pairs, in the same order."""
        return classifier(pairs)

    def stage(self, classifier: PairClassifier, pairs: list[tuple[str, str]]) -> Staged:
        """Prepare the next batch while another one runs on a GPU."""
        return classifier.stage(pairs)

    @staticmethod
    def preprocess(item: Any) -> tuple[str, str]:
        """``{"premise": …, "hypothesis": …}`` or ``[premise, hypothesis]`` as a pair of texts.

        ValueError names the field that was wrong.
        """
        wanted = "{'premise': text, 'hypothesis': text} or [premise, hypothesis]"
        if isinstance(item, dict):
            if set(item) != {"premise", "hypothesis"}:
                raise ValueError(f"pair: got the keys {sorted(map(str, item))}, wanted {wanted}")
            item = (item["premise"], item["hypothesis"])
        if not isinstance(item, list | tuple):
            raise ValueError(f"pair: got a {type(item).__name__}, wanted {wanted}")
        if len(item) != 2:
            raise ValueError(f"pair: got {len(item)} items, wanted {wanted}")
        for name, value in zip(("premise", "hypothesis"), item, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{name}: got a {type(value).__name__}, wanted a text")
            if not value.strip():
                raise ValueError(f"{name}: got an empty text, wanted one with words")
            if len(value) > MAX_CHARACTERS:
                raise ValueError(
                    f"{name}: got {len(value)} characters, wanted at most {MAX_CHARACTERS}"
                )
        return item[0], item[1]

    @staticmethod
    def example_input() -> tuple[str, str]:
        """A pair of usual length, for profiling."""
        return text.EXAMPLE


def variants(*names: str, weights: str | None = None, device: str = "auto") -> list[Variant]:
    """Variants for `@ray_slo.deployment(variants=…)`, with the published accuracies.

    Args:
        names: of the family, default: all of it.
        weights, device: see `ray_slo.models.text.load`.

    ValueError names the valid names.
    """
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=text.accuracy(name),
            load="ray_slo.models.text:load",
            kwargs={"name": name, "weights": weights, "device": device},
        )
        for name in names or text.FAMILY
    ]
