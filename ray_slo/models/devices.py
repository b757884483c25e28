"""The argument `device`, which all loaders of networks have: the CPU or a GPU.

"auto" is the GPU if the library can use one, otherwise the CPU. If a GPU could be expected, a
warning, once per process, says why it is the CPU.

    pick_device("auto")                       # a device of torch
    open_session("network.onnx", options)     # a session of onnxruntime

Importing this module imports neither torch nor onnxruntime.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.core.text import quoted

if TYPE_CHECKING:
    import torch

_VISIBLE = "CUDA_VISIBLE_DEVICES"  # Ray sets it to the GPUs of a worker
_NONE_VISIBLE = ("", "-1")
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"  # onnxruntime's names

_log = logging.getLogger(__name__)


def pick_device(device: str = "auto") -> torch.device:
    """Return the torch device of a name.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    library = f"torch {torch.__version__}"
    for_gpus = bool(torch.version.cuda or torch.version.hip)
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        _fall_back(library, for_gpus)
        return torch.device("cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        raise _no_name(device) from None
    if picked.type == "cuda" and (picked.index or 0) >= (count := torch.cuda.device_count()):
        why = "" if count else f". It {_why(for_gpus)}"
        raise ValueError(
            f"device: got {device!r}, but {library} sees {count} CUDA devices here{why}"
        )
    return picked


def check_session_device(device: object) -> None:
    """Check the name of a device for `open_session`.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise _no_name(device)


def open_session(path: Path | str, options: Any, device: str = "auto") -> Any:
    """Return a session of onnxruntime for the network in a file.

    Args:
        options: `onnxruntime.SessionOptions`.

    Raises:
        ValueError: there is no such device.
    """
    check_session_device(device)
    import onnxruntime

    library = f"onnxruntime {onnxruntime.__version__}"
    for_gpus = _CUDA in onnxruntime.get_available_providers()
    providers: list[Any] = [_CPU]
    if device != "cpu" and for_gpus:
        providers.insert(0, (_CUDA, {"device_id": device.partition(":")[2] or "0"}))
    session = onnxruntime.InferenceSession(path, options, providers=providers)
    if device != "cpu" and session_device(session) == "cpu":  # onnxruntime does not raise then
        if device != "auto":
            raise ValueError(f"device: got {device!r}, but {library} {_why(for_gpus)}")
        _fall_back(library, for_gpus)
    return session


def session_device(session: Any) -> str:
    """Return the device of a session: "cpu", "cuda:0", …"""
    if session.get_providers()[0] != _CUDA:
        return "cpu"
    return f"cuda:{session.get_provider_options()[_CUDA]['device_id']}"


def _no_name(device: object) -> ValueError:
    return ValueError(
        f"device: got {quoted(device)}, wanted 'auto', 'cpu', 'cuda' or 'cuda:0', 'cuda:1', …"
    )


def _fall_back(library: str, for_gpus: bool) -> None:
    """Warn if the library was built for GPUs, or this process was given a GPU."""
    if for_gpus or os.environ.get(_VISIBLE, "") not in _NONE_VISIBLE:
        _warn(
            f"device 'auto' is the CPU, because {library} {_why(for_gpus)}. "
            "If the CPU is right, set device: cpu"
        )


def _why(for_gpus: bool) -> str:
    """Return why a library can use no GPU, and what to do."""
    visible = os.environ.get(_VISIBLE)
    given = f"{_VISIBLE} is {'not set' if visible is None else repr(visible)}"
    if not for_gpus:
        return f"was built without support for GPUs ({given}); install its build for GPUs"
    return (
        f"was built for GPUs, but finds none to use ({given}); check that the worker has one "
        "(ray_actor_options: {num_gpus: 1}), and that nvidia-smi lists it"
    )


@cache
def _warn(message: str) -> None:
    """Log a warning, once per process."""
    _log.warning(message)
