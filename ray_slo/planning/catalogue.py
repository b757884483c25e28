"""Instance types: their prices, and the resources that Ray needs to place a worker on one.

    from ray_slo.planning.catalogue import CATALOGUE, load_catalogue
    CATALOGUE["g4dn.xlarge"].price_per_hour          # Kairos Table 4
    types = {**CATALOGUE, **load_catalogue("my_types.yaml")}

A catalogue file maps names to the fields of `InstanceType`. `catalogue.yaml` beside this module is
an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat

from ray_slo.core.documents import Strict, load_yaml
from ray_slo.core.explain import validated

MAX_PRICE = 1e9
"""The highest price of a machine per hour in a config or a document."""

Price = Annotated[float, Field(gt=0, le=MAX_PRICE)]


class InstanceType(Strict):
    """A kind of machine that can be rented.

    Attributes:
        name: also the hardware kind under which latency profiles are kept.
        price_per_hour: price in the budget's currency.
        memory_gb: main memory, if known.
        accelerator_type: Ray's name of the accelerator ("T4"), if there is one.
        resources: resources of one worker: num_cpus, num_gpus and custom resources.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    price_per_hour: Price
    memory_gb: PositiveFloat | None = None
    accelerator_type: str | None = None
    resources: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    @property
    def ray_actor_options(self) -> dict[str, object]:
        """Return the `ray_actor_options` of a Serve deployment whose replicas run on this type."""
        named = {k: v for k, v in self.resources.items() if k in ("num_cpus", "num_gpus")}
        custom = {k: v for k, v in self.resources.items() if k not in named}
        options: dict[str, object] = dict(named)
        if custom:
            options["resources"] = custom
        if self.accelerator_type is not None:
            options["accelerator_type"] = self.accelerator_type
        return options


def load_catalogue(path: str | Path) -> dict[str, InstanceType]:
    """Read a YAML file of instance types, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a mapping of types. The message names the type and the field.
    """
    data = load_yaml(path)
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{path}: must be a mapping from names to instance types")
    types = {}
    for name, fields in data.items():
        given = {} if fields is None else fields
        given = {**given, "name": str(name)} if isinstance(given, Mapping) else given
        try:
            types[str(name)] = validated(InstanceType, given, str(name))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return types


CATALOGUE: Mapping[str, InstanceType] = load_catalogue(Path(__file__).with_name("catalogue.yaml"))
"""The types of Kairos Table 4."""
