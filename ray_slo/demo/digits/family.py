"""The family's recipes. No torch here, so that the names are cheap to know."""

from __future__ import annotations

from dataclasses import dataclass

from ray_slo.core.text import quoted


@dataclass(frozen=True)
class Spec:
    """One network: the average of several snapshots of one residual trunk, over several views.

    width   channels of the first stage (doubled at each later stage)
    blocks  residual blocks per stage; every stage after the first halves the side
    side    pixels to which the 8 x 8 image is upscaled
    members snapshots of the training run, averaged
    views   slightly rotated and moved copies of the image that each member sees
    epochs  passes over the training data before the first snapshot; each snapshot adds one more
    """

    name: str
    width: int
    blocks: tuple[int, ...]
    side: int
    members: int
    views: int
    epochs: int

    @property
    def run(self) -> tuple[int, tuple[int, ...], int, int]:
        """What the training run depends on: specs that share it share their snapshots."""
        return self.width, self.blocks, self.side, self.epochs


FAMILY: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("digits-xs", 6, (3, 3), side=16, members=1, views=2, epochs=8),
        Spec("digits-s", 8, (3, 3), side=16, members=3, views=2, epochs=8),
        Spec("digits-m", 16, (1, 1, 1), side=16, members=5, views=5, epochs=10),
        Spec("digits-l", 32, (1, 1, 1), side=16, members=8, views=3, epochs=10),
        Spec("digits-xl", 32, (1, 1, 1), side=16, members=14, views=5, epochs=10),
    )
}


def spec(name: str) -> Spec:
    """The recipe of a variant; ValueError names the valid ones."""
    try:
        return FAMILY[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"variant: got {quoted(name)}, wanted one of {', '.join(FAMILY)}"
        ) from None
