"""`ray-slo new`: write a small application to start from, with a test and a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ray_slo.cli._output import positive
from ray_slo.core.files import write_text

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def register(app: typer.Typer) -> None:
    app.command("new")(new)


def new(
    folder: Annotated[
        Path, typer.Argument(help="Folder to create; its last part is the name of the application.")
    ],
    slo_ms: Annotated[
        float, typer.Option(help="Time from arrival to answer, milliseconds.")
    ] = 200.0,
) -> None:
    """Write a small application with a test and a config, to start from."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    positive(slo_ms=slo_ms)
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"folder: {name!r} cannot name an application; use a letter, then letters, digits, "
            "'-' or '_', like my-model"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: {str(folder)!r} exists and is not empty; choose another name")
    templates = Environment(
        loader=PackageLoader("ray_slo.cli", "templates/new"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    words = re.split(r"[-_]+", name)
    told = {
        "name": name,
        "class_name": "".join(word[:1].upper() + word[1:] for word in words),
        "slo_ms": f"{slo_ms:g}",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for template in templates.list_templates():
        path = folder / template.removesuffix(".j2")
        write_text(path, templates.get_template(template).render(told))
        typer.echo(path)
    typer.echo(f"\nnext: cd {folder} && pip install pytest && pytest && ray-slo run config.yaml")
