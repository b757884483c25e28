"""Documents that users write, and files that may come from anywhere: nothing in them is run, and
nothing is endless. Unknown keys are refused, and so are numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from ray_slo.core.profiles import LatencyProfile, load_profiles

MAX_BATCH = 100_000  # more is a slip of the pen, and would fill memory with a table
MAX_DEPTH = 100  # of YAML; deeper takes the parser seconds, then Python's stack
MAX_ALIASES = 100  # a few, nested, make billions of items


class Strict(BaseModel):
    """A pydantic model that takes no unknown key, no infinity or NaN, and no `yes` for 1.

    Attributes:
        instead: keys that people may try, and what to write instead.
    """

    instead: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, data: Any) -> Any:
        given = data if isinstance(data, Mapping) else {}
        for name, field in cls.model_fields.items():
            if not isinstance(value := given.get(name), bool):
                continue
            kinds = _kinds(field.annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(
                    f"{name} must be a number, got {value} (YAML reads yes, no, on and off as "
                    "booleans)"
                )
        return data


class Frozen(Strict):
    """A `Strict` that stays as it was written."""

    model_config = ConfigDict(frozen=True)


class ProfileSpec(Frozen):
    """ℓ(b) as α·b + β up to `max_batch_size`, as a table, or from a file of `ray-slo profile`.

    Attributes:
        alpha_ms, beta_ms: of α·b + β.
        max_batch_size: of α·b + β.
        latency_ms: ℓ(1), ℓ(2), …
        file: relative to the document's folder; it is asked for the variant by its name.
    """

    alpha_ms: NonNegativeFloat | None = None
    beta_ms: NonNegativeFloat = 0.0
    max_batch_size: int = Field(128, ge=1, le=MAX_BATCH)
    latency_ms: Annotated[list[PositiveFloat], Field(max_length=MAX_BATCH)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ProfileSpec:
        if sum(v is not None for v in (self.alpha_ms, self.latency_ms, self.file)) != 1:
            raise ValueError("give exactly one of alpha_ms (with beta_ms), latency_ms and file")
        return self

    def build(self, variant: str, base: Path) -> LatencyProfile:
        """The profile; `file` is relative to `base` and is asked for `variant`."""
        if self.file is not None:
            profiles = load_profiles(base / self.file)
            if variant not in profiles:
                raise ValueError(
                    f"{self.file}: no profile of {variant!r}; it has {', '.join(profiles)}"
                )
            return profiles[variant]
        if self.latency_ms is not None:
            return LatencyProfile([ms / 1e3 for ms in self.latency_ms])
        return LatencyProfile.linear(
            (self.alpha_ms or 0.0) / 1e3, self.beta_ms / 1e3, self.max_batch_size
        )


def load_arrays(path: str | Path, what: str, *needed: str) -> dict[str, NDArray[Any]]:
    """The arrays of a `.npz` file, by name; nothing is unpickled.

    Args:
        what: the file should be, for the message.
        needed: names that have to be there.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file, or a damaged one.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # zipfile, zlib, struct and NumPy each have their own
        said = str(error) or type(error).__name__
        raise ValueError(f"{path}: not {what}: {said}") from None
    if missing := sorted(set(needed) - set(found)):
        raise ValueError(f"{path}: not {what}: it has no {', '.join(missing)}")
    return found


def load_yaml(path: str | Path) -> Any:
    """What a YAML file says.

    Raises:
        OSError: it cannot be opened.
        ValueError: not YAML, nested too deeply, with too many aliases, or with a key twice in a
            mapping (YAML forbids it, and its parser takes the last without a word).
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        opens = (
            yaml.FlowSequenceStartToken,
            yaml.FlowMappingStartToken,
            yaml.BlockSequenceStartToken,
            yaml.BlockMappingStartToken,
        )
        ends = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
        depth = aliases = 0
        for token in yaml.scan(text):
            depth += isinstance(token, opens) - isinstance(token, ends)
            aliases += isinstance(token, yaml.AliasToken)
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
            if aliases > MAX_ALIASES:
                raise ValueError(f"it has more than {MAX_ALIASES} aliases")
        loader = yaml.SafeLoader(text)
        if (root := loader.get_single_node()) is None:
            return None
        _check_keys(root)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        said = " ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{path}: not YAML{place}: {said}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also an impossible date
        raise ValueError(f"{path}: not YAML: {error}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not YAML, or no mapping.
    """
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold a mapping, got {type(data).__name__}")
    return data


def _kinds(annotation: Any) -> set[Any]:
    """What a field may hold."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    return {annotation}


def _check_keys(root: Any) -> None:
    """Refuse a mapping that has a key twice."""
    import yaml

    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            todo += [value for _, value in node.value]
            keys: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        line = key.start_mark.line + 1
                        raise ValueError(f"line {line}: the key {key.value!r} was there before")
                    keys.add((key.tag, key.value))
