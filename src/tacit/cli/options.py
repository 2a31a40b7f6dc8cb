"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read, and count them.")]
DataFolder = Annotated[Path | None, typer.Option("--data", envvar="TACIT_DATA", help="Where named benchmarks are.")]
Columns = Annotated[
    str | None,
    typer.Option(
        help="Columns of head, relation, tail[, confidential[, group]]: names, or positions from 1; comma-separated."
    ),
]
Separator = Annotated[str | None, typer.Option(help="What stands between columns, such as ';' or '\\t'.")]
Header = Annotated[
    bool | None,
    typer.Option(help="The first row holds names of columns. Default: if it names head, relation and tail."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier result in the same place.")]
