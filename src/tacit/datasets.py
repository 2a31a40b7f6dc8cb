"""Graphs by name: public benchmarks from a folder of yours, checked against their published counts; and embedded ones.

Nothing is downloaded. The folder is given as an argument, by `--data`, or by the environment variable TACIT_DATA.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from tacit.clinic import clinic
from tacit.errors import BadInput, TacitError
from tacit.graph import Graph
from tacit.parties import Parties, given
from tacit.tensors import load_graph
from tacit.tensors import load_parties as read_parties_file

__all__ = ["BENCHMARKS", "EMBEDDED", "Benchmark", "clinic", "load", "load_parties"]
EMBEDDED = {"clinic-small": "small", "clinic-demo": "demo"}
"""The federations that come with tacit, by name, and what `clinic` calls them."""


@dataclass(frozen=True)
class Benchmark:
    """The counts a public benchmark was published with, and our fingerprint of its content.

    The fingerprint does not depend on file format, compression or order of lines. None: we have never held the data.
    """

    entities: int
    relations: int
    train: int
    valid: int
    test: int
    fingerprint: str | None
    paper: str


BENCHMARKS = {
    "fb15k-237": Benchmark(
        14_541,
        237,
        272_115,
        17_535,
        20_466,
        "c0c644368942a1d7eef27d09706a185d203831a0e6055ecf7f8fed5e83547fc9",
        "Toutanova and Chen 2015",
    ),
    "wn18rr": Benchmark(
        40_943,
        11,
        86_835,
        3_034,
        3_134,
        "1714617a45dde33c922f43b03c0f24d62282716a18b482afacd0c6eba669ae8f",
        "Dettmers et al. 2018",
    ),
    "fb15k": Benchmark(
        14_951,
        1_345,
        483_142,
        50_000,
        59_071,
        "2e1c12af014593e80a8e31e6c42cec799eb62db5a2a9b3cd8f2829ec784112a7",
        "Bordes et al. 2013",
    ),
    "nell-995": Benchmark(
        75_492,
        200,
        149_678,
        543,
        3_992,
        "145c9988ac6dd57edc5865761510a256355e05826378201483053f22ce4a24ff",
        "Xiong et al. 2017",
    ),
    "ddb14": Benchmark(
        9_203,
        14,
        36_561,
        4_000,
        4_000,
        "7b81b4552e6aa4ba83d6c6007928eb947ac16ce668e643aaa8d35d065e9173d6",
        "Wang et al. 2021",
    ),
    "yago3-10": Benchmark(123_182, 37, 1_079_040, 5_000, 5_000, None, "Mahdisoltani et al. 2015"),
}


def load(name: str, data: str | PathLike[str] | None = None) -> Graph:
    """Read a benchmark and check that it is the one everybody means.

    Parameters
    ----------
    name
        A key of `BENCHMARKS`; the folder `data`/`name` holds its train, valid and test files, or `data` holds the file
        name.safetensors, which `tacit.tensors.save_graph` wrote.
    data
        Default: the environment variable TACIT_DATA.
    """
    if name not in BENCHMARKS:
        raise TacitError(f"No benchmark is called {name!r}. Known: {', '.join(BENCHMARKS)}.")
    root = data or os.environ.get("TACIT_DATA")
    if not root:
        raise TacitError("Say where the benchmarks are: by --data FOLDER, or by setting TACIT_DATA.")
    folder, file = Path(root) / name, Path(root) / f"{name}.safetensors"
    if folder.is_dir():
        from tacit.files import read_graph  # readers need more than NumPy and torch

        graph = read_graph(folder)
    elif file.is_file():
        graph = load_graph(file)
    else:
        raise BadInput(f"{folder}: no such folder; expected the files of {name} there.")
    check(name, graph, str(folder))
    return graph


DBP15K = "dbp15k-zh-en"
SIZES = {"zh": (19_388, 1_701, 70_414), "en": (19_572, 1_323, 95_142)}
"""Entities, relations and triples of DBP15K's Chinese and English graphs (Sun, Hu and Li 2017)."""
LINKS = 15_000


def load_parties(name: str, data: str | PathLike[str] | None = None) -> Parties:
    """Several given graphs and what they have in common, by name.

    Parameters
    ----------
    name
        dbp15k-zh-en: the folder `data`/`name` holds triples-zh, triples-en and files of links between them, and what is
        read is checked against the published counts. Any other: `data`/`name` is a folder of parties. Or `data` holds
        the file name.safetensors, which `tacit.tensors.save_parties` wrote.
    data
        Default: the environment variable TACIT_DATA.
    """
    root = data or os.environ.get("TACIT_DATA")
    if not root:
        raise TacitError("Say where the datasets are: by --data FOLDER, or by setting TACIT_DATA.")
    folder, file = Path(root) / name, Path(root) / f"{name}.safetensors"
    if not folder.is_dir():
        if not file.is_file():
            raise BadInput(f"{folder}: no such folder; expected the graphs of {name} there, or {file.name} beside it.")
        parties = read_parties_file(file)
    elif name == DBP15K:
        parties = _dbp15k(folder)
    else:
        from tacit.files import read_parties  # readers need more than NumPy and torch

        parties = read_parties(folder)
    if name == DBP15K:
        _check_dbp15k(parties, str(folder))
    return parties


def _dbp15k(folder: Path) -> Parties:
    from tacit.files import read_graph
    from tacit.files.parties import read_links

    files = {path.name.split(".")[0]: path for path in sorted(folder.iterdir())}
    if missing := [n for n in ("triples-zh", "triples-en", "links-train", "links-test") if n not in files]:
        raise BadInput(
            f"{folder}: found no file {missing[0]}; expected triples-zh, triples-en, links-train, links-test."
        )
    graphs = {side: read_graph(files[f"triples-{side}"]) for side in SIZES}
    links = [link for part in ("train", "test") for link in read_links(files[f"links-{part}"], graphs, ("zh", "en"))]
    return given(graphs, links)


def _check_dbp15k(parties: Parties, place: str) -> None:
    found = {name: (len(graph.entities), len(graph.relations), len(graph.train))
             for name, graph in zip(parties.names, parties, strict=True)}  # fmt: skip
    if found != SIZES or len(parties.links or ()) != LINKS:
        raise BadInput(f"{place}: this is not {DBP15K} as published: found {found} and {len(parties.links or ()):,} "
                       f"links; expected {SIZES} and {LINKS:,}.")  # fmt: skip


def check(name: str, graph: Graph, place: str) -> None:
    """Refuse a graph that differs from the benchmark of this name."""
    benchmark = BENCHMARKS[name]
    found = {"entities": len(graph.entities), "relations": len(graph.relations)}
    found |= {str(split): len(rows) for split, rows in graph.splits.items()}
    wrong = [
        f"{key} {value:,} (published: {getattr(benchmark, key):,})"
        for key, value in found.items()
        if value != getattr(benchmark, key)
    ]
    if wrong:
        raise BadInput(f"{place}: this is not {name} as published: found {', '.join(wrong)}.")
    if benchmark.fingerprint and graph.fingerprint != benchmark.fingerprint:
        raise BadInput(
            f"{place}: the counts are those of {name}, the content is not: fingerprint {graph.fingerprint[:16]}."
        )


def recognise(graph: Graph) -> str | None:
    """The name of the benchmark that a graph is, if it is one."""
    return next((name for name, known in BENCHMARKS.items() if known.fingerprint == graph.fingerprint), None)
