"""Wall clocks jump, so no code may decide by one. Code may record the time with one."""

import ast
from pathlib import Path

import ray_slo

ROOT = Path(ray_slo.__file__).parent
STAMPS = {
    "serve/proxy/direct.py",  # since when HAProxy, another process, had a request
    "serve/watch/log_writer.py",  # names of files, and when a log began
    "serve/ray_private/ingress.py",  # lines of the access log
    "serve/scheduler/flights.py",
    "serve/batch/capacity.py",  # when a request came to the door
    "serve/proxy/modes.py",
    "serve/config/spec.py",  # which of two releases is newer, in an actor that just started
    "serve/watch/spans.py",
    "serve/watch/tracing.py",
}
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def reads_a_wall_clock(file):
    text = file.read_text(encoding="utf-8")
    if not any(f"{module}.{function}" in text for module, function in WALL):
        return False  # to parse all files would take seconds
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL
        for node in ast.walk(ast.parse(text))
    )


def test_only_stamps_are_of_wall_clocks():
    packages = ("core", "planning", "policies", "record", "load", "serve", "simulation")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 50
    found = {file.relative_to(ROOT).as_posix() for file in files if reads_a_wall_clock(file)}
    assert found == STAMPS
