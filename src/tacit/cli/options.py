"""Options that several commands share, and the reading of what they say."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit import datasets
from tacit.errors import TacitError
from tacit.files import BadRows, holds_parties, read_graph, read_parties
from tacit.graph import Graph
from tacit.parties import Parties, partition, split_by_coin

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
ScorerName = Annotated[str | None, typer.Option(help="transe, rotate, complex, ... (scorer.name)")]
Dim = Annotated[int | None, typer.Option(help="Numbers per row, or complex numbers. (scorer.dim)")]
Count = Annotated[int | None, typer.Option(help="Negatives per triple. (negatives.count)")]
LearningRate = Annotated[float | None, typer.Option(help="(optimizer.learning_rate)")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto. (training.device)")]
Patience = Annotated[int | None, typer.Option(help="Validations without improvement. (evaluation.patience)")]
Privacy = Annotated[
    str | None,
    typer.Option(help="marginals (default), dpsgd, frozen, adafest, confidential, repaired-flames. (privacy.name)"),
]
Epsilon = Annotated[float | None, typer.Option(help="Train privately, at this cost. (privacy.epsilon)")]
Delta = Annotated[float | None, typer.Option(help="Default: 1e-5. (privacy.delta)")]
SplitShares = Annotated[
    str | None, typer.Option(help="Shares of train, valid and test, such as 0.8,0.1,0.1, for a graph without.")
]
PartyName = Annotated[str | None, typer.Option(help="Of a folder of parties: train on this one alone.")]
Pooled = Annotated[bool, typer.Option("--pool", help="Of a folder of parties: train on all, in one place.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Everything random follows from it.")]
Config = Annotated[Path | None, typer.Option(help="A TOML file; its keys are those of --set.")]
Resume = Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")]
RunOut = Annotated[Path | None, typer.Option("--out", help="The folder of the run. Default: runs/NAME.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as key=value; may be repeated.")]


def read_any(
    path: str, data: Path | None, columns: str | None, separator: str | None, header: bool | None, skip_bad: bool
) -> Graph | Parties:
    """What `path` means: a file or folder if there is one, else a name."""
    if not path:
        raise TacitError("an empty path is none: name a file, a folder or a benchmark.")
    if path in datasets.EMBEDDED and not Path(path).exists():
        return datasets.clinic(datasets.EMBEDDED[path])  # type: ignore[arg-type]
    if path in datasets.BENCHMARKS and not Path(path).exists():
        return datasets.load(path, data)
    known = [*datasets.EMBEDDED, *datasets.BENCHMARKS]
    if not Path(path).exists() and (near := get_close_matches(path, known, n=1)):
        raise TacitError(f"{path}: no such file or folder. Did you mean {near[0]}?")
    bad_rows: BadRows = "skip" if skip_bad else "refuse"
    if holds_parties(Path(path)):
        return read_parties(path, bad_rows=bad_rows)
    wanted: list[str | int] | None = None
    if columns:
        names = [name.strip() for name in columns.split(",")]
        wanted = [int(name) if re.fullmatch("[0-9]{1,4}", name) else name for name in names]
    between = separator.replace("\\t", "\t") if separator else None
    return read_graph(path, columns=wanted, separator=between, header=header, bad_rows=bad_rows)


def one_of(found: Graph | Parties, path: str) -> Graph:
    """The one graph that a command works on."""
    if isinstance(found, Parties):
        raise TacitError(
            f"{path} holds {len(found)} parties; one graph is needed here. Name one of them: {', '.join(found.names)}."
        )
    return found


def split_anew(graph: Graph, wanted: tuple[float, ...], seed: int, *, private: bool) -> Graph:
    """A graph split anew: exactly by these shares; or, where one triple may move no other, on average."""
    split: Any = tuple(wanted)
    return (
        split_by_coin(graph, split, seed=seed) if private else partition(graph, "triples", 1, split=split, seed=seed)[0]
    )


def shares(text: str | None) -> Any:
    """What --split says."""
    if text is None or text == "keep":
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise TacitError(f"--split is 'keep' or three shares such as 0.8,0.1,0.1; not {text!r}.") from None
