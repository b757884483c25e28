"""Documents that users write, and files from any source: nothing in them is executed, and their
size is bounded. Unknown keys are refused, and so are numbers that are not finite."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from ray_slo.core.explain import Misplaced, validated
from ray_slo.core.hints import parts_of
from ray_slo.core.names import nearest
from ray_slo.core.profiles import LatencyProfile, load_profiles
from ray_slo.core.requests import MAX_LATENCY_MS
from ray_slo.core.text import quoted, type_in_words

T = TypeVar("T", bound=BaseModel)

MAX_ARRAY_BYTES = 2**31  # of a `.npz` file; a small one may decompress to any size
MAX_TIME_S = 1e12  # longer than any clock runs
MAX_BATCH = 100_000  # more is a typing error, and its table would fill the memory
SloMs = Annotated[float, Field(gt=0, le=MAX_LATENCY_MS)]
DelayMs = Annotated[float, Field(ge=0, le=MAX_LATENCY_MS)]
DelayS = Annotated[float, Field(ge=0, le=MAX_LATENCY_MS / 1e3)]
MAX_DEPTH = 100  # of YAML; deeper documents take seconds, then overflow Python's stack
MAX_ALIASES = 100  # `validated` bounds what they repeat
_ARGS = "`serve run` reads it as `args` of an application with import_path ray_slo.serve:build_app"


class Strict(BaseModel):
    """A pydantic model that refuses unknown keys, infinity and NaN, and `yes` for 1.

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
            for at, value in _bools(given.get(field.alias or name), field.annotation, name):
                raise Misplaced(
                    at,
                    f"must be a number, got {value} (YAML reads yes, no, on and off as booleans)",
                )
        return data


class Frozen(Strict):
    """An immutable `Strict`."""

    model_config = ConfigDict(frozen=True)


def exactly_one(made: BaseModel, *fields: str) -> None:
    """Refuse a model that does not set exactly one of these fields.

    Raises:
        ValueError: names them.
    """
    given = [field for field in fields if getattr(made, field) not in (None, {})]
    if len(given) != 1:
        choose = f"{', '.join(fields[:-1])} and {fields[-1]}"
        raise ValueError(f"give exactly one of {choose}, got {' and '.join(given) or 'none'}")


class ProfileSpec(Frozen):
    """ℓ(b) as α·b + β up to `max_batch_size`, as a table, or from a file of `ray-slo profile`.

    Attributes:
        alpha_ms, beta_ms: α and β of α·b + β, milliseconds.
        max_batch_size: largest b of α·b + β.
        latency_ms: ℓ(1), ℓ(2), …, milliseconds.
        file: path relative to the document's folder; the variant is found by its name.
    """

    alpha_ms: DelayMs | None = None
    beta_ms: DelayMs = 0.0
    max_batch_size: int = Field(128, ge=1, le=MAX_BATCH)
    latency_ms: Annotated[list[SloMs], Field(max_length=MAX_BATCH)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ProfileSpec:
        exactly_one(self, "alpha_ms", "latency_ms", "file")
        return self

    def build(self, variant: str, base: Path) -> LatencyProfile:
        """The profile. `file` is relative to `base`; `variant` is its entry.

        Raises:
            Misplaced: the file cannot be read, or has no such profile.
        """
        if self.file is not None:
            path = base / self.file
            try:
                profiles = load_profiles(path)
            except OSError as error:
                raise Misplaced("file", f"{path}: {error.strerror}{_beside(path)}") from None
            except ValueError as error:
                raise Misplaced("file", str(error)) from None
            if variant not in profiles:
                raise Misplaced(
                    "file",
                    f"{self.file}: no profile of {variant!r}; it has {', '.join(profiles)}"
                    f"{nearest(variant, list(profiles))}",
                )
            return profiles[variant]
        if self.latency_ms is not None:
            return LatencyProfile([ms / 1e3 for ms in self.latency_ms])
        return LatencyProfile.linear(
            (self.alpha_ms or 0.0) / 1e3, self.beta_ms / 1e3, self.max_batch_size
        )


def load_arrays(path: str | Path, what: str) -> dict[str, NDArray[Any]]:
    """The arrays of a `.npz` file, by name; nothing is unpickled.

    Args:
        what: kind of file that is expected, for the message.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is another kind of file, or damaged.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            size = sum(member.file_size for member in file.zip.infolist())
            if size > MAX_ARRAY_BYTES:
                raise ValueError(
                    f"its arrays have {size} bytes, at most {MAX_ARRAY_BYTES} are read"
                )
            found = {name: file[name] for name in file.files}
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # zipfile, zlib, struct and NumPy raise their own
        said = str(error) or type(error).__name__
        raise ValueError(f"{path}: not {what}: {said}") from None
    return found


def load_columns(
    path: str | Path, what: str, form: str, header: str, model: type[T], *needed: str
) -> tuple[T, dict[str, NDArray[Any]]]:
    """The header of a `.npz` file of ours, and its other arrays.

    Args:
        what: as for `load_arrays`.
        form: the `format` that the header must name.
        header: name of the array that holds the header, as JSON.
        model: what the header contains.
        needed: names of arrays that must be there.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is another kind of file, or damaged. The message names the field.
    """
    arrays = load_arrays(path, what)
    with naming(path, what):
        if header not in arrays:
            raise ValueError(f"it has no {header}")
        text = arrays.pop(header)
        if text.ndim or text.dtype.kind != "U":
            raise ValueError(f"{header} must be a text, got an array of {text.dtype}")
        try:
            said = json.loads(str(text))
        except RecursionError:
            raise ValueError(f"{header} is nested too deeply") from None
        if not isinstance(said, dict):
            raise ValueError(f"{header} must be a mapping, got {type_in_words(said)}")
        if said.get("format") != form:
            raise ValueError(f"format must be {form!r}, got {quoted(said.get('format'))}")
        if missing := sorted(set(needed) - set(arrays)):
            raise ValueError(f"it has no {', '.join(missing)}")
        return validated(model, said, header), arrays


@contextmanager
def naming(path: str | Path, what: str) -> Iterator[None]:
    """Return a context manager that names a file, and what it should be, in a ValueError."""
    try:
        yield
    except ValueError as error:
        lines = [f"{path}: not {what}: {line}" for line in str(error).split("\n")]
        raise ValueError("\n".join(lines)) from None


class Column(NamedTuple):
    """The valid values of an array in a file.

    Attributes:
        least, most: bounds of a value. The default is that of times, in seconds.
        is_whole: whether values are integers.
        may_miss: whether a value may be NaN.
    """

    least: float = -MAX_TIME_S
    most: float = MAX_TIME_S
    is_whole: bool = False
    may_miss: bool = False


def check_arrays(
    arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], **wanted: Column
) -> None:
    """Check arrays by name. Those that are not there are not checked.

    Args:
        shape: the shape that all of them must have.

    Raises:
        ValueError: one has another shape or type, or a value out of bounds.
    """
    for name, column in wanted.items():
        if (found := arrays.get(name)) is None:
            continue
        kinds = "iu" if column.is_whole else "iuf"
        if found.dtype.kind not in kinds:
            what = "integers" if column.is_whole else "numbers"
            raise ValueError(f"{name} must be {what}, got {found.dtype}")
        if found.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {found.shape}")
        good = (found >= column.least) & (found <= column.most)
        if column.may_miss:
            good |= np.isnan(found)
        if not good.all():
            wrong = found[np.unravel_index(int(np.argmin(good)), shape)]
            raise ValueError(
                f"{name} must be from {column.least:g} to {column.most:g}, got {wrong}"
            )


def load_yaml(path: str | Path) -> Any:
    """The content of a YAML file.

    Raises:
        OSError: it cannot be opened.
        ValueError: see `parse_yaml`.
    """
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        kind = "not YAML: " * isinstance(error, UnicodeDecodeError)
        raise ValueError(f"{path}: {kind}{error}") from None


def parse_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises:
        ValueError: not YAML, nested too deeply, with too many aliases, or with a key twice in a
            mapping (YAML forbids it, but its parser silently takes the last one).
    """
    import yaml

    opens = (
        yaml.FlowSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.BlockMappingStartToken,
    )
    ends = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    try:
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
        if "found another document" in said:
            said = "a second document begins here; write each into a file of its own"
        raise ValueError(f"not YAML{place}: {said}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also an impossible date
        raise ValueError(f"not YAML: {error}") from None


_SERVE = "`ray-slo check`, `simulate` and `profile` read the ray-slo applications in it"
_SIMULATED = "`ray-slo simulate` and `ray-slo plan` read it"


def what_it_is(data: Mapping[str, Any]) -> tuple[str, str, str]:
    """Recognise a document by its keys.

    Returns:
        Its kind in one word ("" if unknown), what it is, and what it is good for.
    """
    if "apiVersion" in data and "kind" in data:
        kind = quoted(data["kind"]).strip("'")
        told = _SERVE if kind == "RayService" else "it describes no application of Serve"
        return "manifest", f"a Kubernetes manifest of a {kind}", told
    for key, kind, said, told in (
        ("applications", "serve", "a config of `serve run`", _SERVE),
        ("import_path", "serve", "an application of Serve", _SERVE),
        ("workloads", "application", "an application with its workloads", _SIMULATED),
        ("pool", "plan", "a choice of machines", "`ray-slo plan` reads it"),
        ("workload", "simulation", "a simulation", _SIMULATED),
        ("loads", "solve", "a spec of RAMSIS tables", "`ray-slo solve` reads it"),
        ("models", "args", "the args of an application", _ARGS),
        ("pipeline", "args", "the args of an application", _ARGS),
        ("pipelines", "args", "the args of an application", _ARGS),
        ("profiles", "profiles", "a file of profiles", "other documents name it as `file`"),
    ):
        if key in data:
            return kind, said, told
    return "", "", ""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not YAML, or no mapping.
    """
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold a mapping, got {type_in_words(data)}")
    return data


def _beside(path: Path) -> str:
    """A file in the same folder that has almost the same name, for a message."""
    try:
        return nearest(path.name, [other.name for other in path.parent.iterdir()])
    except OSError:
        return ""


def _bools(value: Any, hint: Any, at: str) -> Iterator[tuple[str, bool]]:
    """Places in a value where a number is wanted and a boolean is given, and that boolean."""
    parts = [part for part, _ in parts_of(hint)]
    if isinstance(value, bool):
        if {int, float} & {p for p in parts if p in (int, float, bool)} and bool not in parts:
            yield at, value
    elif isinstance(value, Mapping | list):
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        wanted = Mapping if isinstance(value, Mapping) else list
        for part in parts:
            if isinstance(get_origin(part), type) and issubclass(get_origin(part), wanted):
                for key, one in inner:
                    if isinstance(one, bool | Mapping | list):
                        yield from _bools(one, get_args(part)[-1], f"{at}.{key}")


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
