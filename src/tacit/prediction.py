"""What a model says: the most plausible answers by name, and its rows for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tacit.errors import BadValue
from tacit.folders import new_folder, seal
from tacit.graph import Graph, UnknownName, Vocab
from tacit.models.model import Model, Queries
from tacit.tensors import save_tensors

Format = Literal["npy", "tsv", "safetensors", "nt"]
FORMATS: dict[str, str] = {
    "npy": "entities.npy, relations.npy and the names of their rows in .tsv",
    "tsv": "one line per row: name, then its numbers",
    "safetensors": "one file with both tables and their names",
    "nt": "predicted links as N-Triples",
}
PIECE = 1 << 22
"""How many numbers are gathered at once when all candidates of a query are scored."""


@dataclass(frozen=True)
class Prediction:
    """One answer. `known`: the graph says so already."""

    head: str
    relation: str
    tail: str
    score: float
    known: bool


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings:
    """A model's rows as plain arrays, with their names.

    Rows that were trained without privacy tell of the triples they were trained on: keep them as you keep those. What a
    row's numbers mean is the scorer's affair (`tacit.models`).

    Attributes
    ----------
    entities, relations
        (n, width) float32: a row for each name. Where training was reciprocal, inverses follow the relations.
    entity_names, relation_names
        The names of the rows, in their order.
    more
        What a score needs beside rows, by name: weights that all triples share (TuckER), noisy counts (a prior).
    """

    entities: npt.NDArray[Any]
    relations: npt.NDArray[Any]
    entity_names: Vocab
    relation_names: tuple[str, ...]
    more: Mapping[str, npt.NDArray[Any]]

    @staticmethod
    def of(model: Model, graph: Graph) -> Embeddings:
        """A copy of a model's rows, under the names of its graph."""
        tables, inverse = model.tables, (f"inverse of {name}" for name in graph.relations if model.reciprocal)
        more = {f"shared-{i}": tensor[0] for i, tensor in enumerate(tables.shared)}
        if model.prior is not None:
            more |= {"prior-tails": model.prior.tails, "prior-heads": model.prior.heads}
        arrays = {name: _array(tensor) for name, tensor in more.items()}
        names = (*graph.relations, *inverse)
        return Embeddings(_array(tables.entity), _array(tables.relation), graph.entities, names, arrays)

    def entity(self, name: str) -> npt.NDArray[Any]:
        """The row of an entity."""
        row: npt.NDArray[Any] = self.entities[self.entity_names.id(name)]
        return row

    def relation(self, name: str) -> npt.NDArray[Any]:
        """The row of a relation."""
        if name not in self.relation_names:
            raise UnknownName(name, self.relation_names)
        row: npt.NDArray[Any] = self.relations[self.relation_names.index(name)]
        return row

    def __repr__(self) -> str:
        (many, wide), (few, broad) = self.entities.shape, self.relations.shape
        more = "".join(f", {name} {array.shape}" for name, array in self.more.items())
        return f"Embeddings({many:,} entities of {wide} numbers, {few:,} relations of {broad}{more})"


def _array(tensor: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return found


def predict(
    model: Model,
    graph: Graph,
    *,
    head: str | None = None,
    relation: str | None = None,
    tail: str | None = None,
    top: int = 10,
    known: bool = False,
) -> list[Prediction]:
    """The `top` most plausible answers for the one part of (head, relation, tail) that is left out.

    What the graph says already is left out too, unless `known`. Equal scores stand in the order of names.
    """
    given = {"head": head, "relation": relation, "tail": tail}
    if sum(name is None for name in given.values()) != 1:
        raise BadValue("give two of head, relation and tail: the third is predicted")
    if top < 1:
        raise BadValue(f"top is at least 1, not {top}")
    h, t = (None if name is None else graph.entities.id(name) for name in (head, tail))
    r = None if relation is None else graph.relations.id(relation)
    facts, device = graph.statements.triples, model.tables.entity.device
    with torch.no_grad():
        if r is None:
            every = torch.arange(len(graph.relations), device=device)
            scores = model.score(torch.full_like(every, h), every, torch.full_like(every, t))
            true = facts[(facts[:, 0] == h) & (facts[:, 2] == t), 1]
        else:
            asks_head = h is None
            of = torch.tensor([r, t if asks_head else h], device=device)
            queries = Queries(model, of[:1], of[1:], asks_head=asks_head)
            scores = torch.cat([_scores(queries, piece) for piece in _pieces(model)])
            column, other = (0, 2) if asks_head else (2, 0)
            true = facts[(facts[:, 1] == r) & (facts[:, other] == (t if asks_head else h)), column]
    found = scores.double().cpu().numpy()
    is_known = np.zeros(len(found), bool)
    is_known[true] = True
    order = np.argsort(-found, kind="stable")
    order = order[: top + len(true)] if known else order[~is_known[order]]
    answers = []
    for i in order[:top].tolist():
        names = (
            graph.entities[i if h is None else h],
            graph.relations[i if r is None else r],
            graph.entities[i if t is None else t],
        )
        answers.append(Prediction(*names, float(found[i]), bool(is_known[i])))
    return answers


def _pieces(model: Model) -> Any:
    every = torch.arange(model.entities, device=model.tables.entity.device)
    return every.split(max(1, PIECE // (model.tables.entity.shape[1] + model.tables.relation.shape[1])))


def _scores(queries: Queries, candidates: Any) -> Any:
    return queries.pairs(torch.zeros_like(candidates), candidates)


def links(model: Model, graph: Graph, *, top: int = 100) -> list[Prediction]:
    """For each relation the `top` most plausible new tails, over all heads it has in train."""
    facts, device, found = graph.statements.triples.astype(np.int64), model.tables.entity.device, []
    facts = facts[np.lexsort((facts[:, 0], facts[:, 1]))]  # by relation, then head: what is true is a slice
    each = max(1, PIECE // (model.entities + model.tables.relation.shape[1]))
    with torch.no_grad():
        for relation in range(len(graph.relations)):
            true = facts[np.searchsorted(facts[:, 1], relation) : np.searchsorted(facts[:, 1], relation, "right")]
            heads = np.unique(graph.train.triples[graph.train.triples[:, 1] == relation, 0]).astype(np.int64)
            best = torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            for first in range(0, len(heads), each):
                some = heads[first : first + each]
                ids = torch.from_numpy(some).to(device)
                queries = Queries(model, torch.full_like(ids, relation), ids, asks_head=False)
                scores, _ = queries.block(torch.arange(len(ids), device=device), slice(0, model.entities))
                known = true[np.isin(true[:, 0], some)]
                scores[np.searchsorted(some, known[:, 0]), known[:, 2]] = float("-inf")
                value, place = scores.reshape(-1).topk(min(top, scores.numel()))
                joined = zip(
                    best, (value.cpu(), ids[place // model.entities].cpu(), (place % model.entities).cpu()), strict=True
                )
                merged = [torch.cat(pair) for pair in joined]
                order = merged[0].argsort(descending=True, stable=True)[:top]
                best = merged[0][order], merged[1][order], merged[2][order]
            found += [
                Prediction(graph.entities[h], graph.relations[relation], graph.entities[t], score, known=False)
                for score, h, t in zip(*(column.tolist() for column in best), strict=True)
                if score > float("-inf")
            ]
    return found


def export(
    model: Model,
    graph: Graph,
    path: str | Path,
    *,
    format: Format = "npy",
    top: int = 100,
    force: bool = False,
    fingerprint: bool = True,
) -> list[str]:
    """Write a model's rows, or the links it predicts, into a folder; the names of the files.

    Rows that were trained without privacy tell of the triples they were trained on, and so do predicted links. The
    graph's `fingerprint` tells whoever knows all triples but one about that one.
    """
    if format not in FORMATS:
        raise BadValue(f"the format is one of {', '.join(FORMATS)}; not {format!r}")
    with new_folder(Path(path), "export.json", force=force) as folder:
        if format == "nt":
            _write_links(links(model, graph, top=top), graph, folder)
        else:
            _write_rows(model, graph, folder, format)
        about = {
            "format": format,
            "scorer": type(model.scorer).__name__,
            "reciprocal": model.reciprocal,
            "graph": graph.fingerprint if fingerprint else None,
            "rows": {"entities": len(graph.entities), "relations": len(model.tables.relation)},
        }
        files = sorted(item.name for item in folder.iterdir())
        seal(folder, "export.json", "tacit.export/1", about)
    return files


def _write_rows(model: Model, graph: Graph, folder: Path, format: Format) -> None:
    rows = Embeddings.of(model, graph)
    names = {"entities": list(rows.entity_names), "relations": list(rows.relation_names)}
    values = {"entities": rows.entities, "relations": rows.relations} | dict(rows.more)
    if format == "safetensors":
        texts = {name: json.dumps(labels, ensure_ascii=False) for name, labels in names.items()}
        save_tensors(folder / "model.safetensors", values, {"schema": "tacit.model/1"} | texts)
        return
    for name, array in values.items():
        if format == "npy":
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        elif name in names:
            lines = (
                "\t".join([label, *map(repr, row)]) + "\n"
                for label, row in zip(names[name], array.tolist(), strict=True)
            )
            with open(folder / f"{name}.tsv", "w", encoding="utf-8") as file:
                file.writelines(lines)
        else:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    if format == "npy":
        for name, labels in names.items():
            text = "".join(f"{row}\t{label}\n" for row, label in enumerate(labels))
            (folder / f"{name}.tsv").write_text(text, encoding="utf-8")


def _write_links(found: list[Prediction], graph: Graph, folder: Path) -> None:
    from tacit.files.rdf import n_triples

    made = Graph.from_triples([(p.head, p.relation, p.tail) for p in found])
    with open(folder / "links.nt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(n_triples(replace(made, prefixes=graph.prefixes), "train"))
    scores = "".join(f"{p.head}\t{p.relation}\t{p.tail}\t{p.score!r}\n" for p in found)
    (folder / "scores.tsv").write_text(scores, encoding="utf-8")
