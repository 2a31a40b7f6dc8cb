"""`tacit report`: run folders to one page of HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import show
from tacit.cli.options import AsJson, Force
from tacit.errors import BadInput


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their shareable/ folders.")],
    out_path: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("report.html"),
    internal: Annotated[
        bool, typer.Option("--internal", help="For the owners: scores, attacks and audits too. Not to be handed out.")
    ] = False,
    title: Annotated[str, typer.Option(help="What the page is called.")] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """One self-contained page on some runs: who shared what, what is guaranteed, what is not, what attackers managed.

    It is made from shareable/ alone, so it may be handed out as that may; --internal reads the whole folders.

    Example:
      tacit report runs/together runs/private --internal --out report.html
    """
    from tacit.reporting import report as write

    if out_path.exists() and not force:
        raise BadInput(f"{out_path}: is there already. Choose another --out, or say --force.")
    with show.busy("writing the report", as_json):
        write(runs, out_path, internal=internal, title=title)
    if as_json:
        print(json.dumps({"out": str(out_path), "runs": [str(run) for run in runs], "internal": internal}))
        return
    whom = "for the owners only" if internal else "from what may be handed out; --internal tells more"
    show.say(f"{out_path}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {whom}. Open it in a browser.")
