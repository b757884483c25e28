"""Reads files that may come from anywhere: nothing in them is run, and nothing is endless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DEPTH = 100  # of YAML; deeper takes the parser seconds, then Python's stack
MAX_ALIASES = 100  # a few, nested, make billions of items


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, too
        raise ValueError(f"{path}: not YAML: {error}") from None


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
