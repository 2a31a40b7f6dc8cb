"""What a party alone could know at best: how far a test triple's tail is from its head in the party's own train.

    python benchmarks/reachable.py --graph wn18rr [--out FILE]

A party that is told nothing of the others' entities (alone, or in FedR, which shares relations only) has two ways to an
answer: a path from head to tail through its own training triples, or how common a tail is with the relation. The oracle
is right at once wherever there is a path of at most six steps, and goes by popularity elsewhere. Published MRRs of
FedR's Table 2 above the oracle's cannot come from triples divided that way: at random, as the paper says, or with
held-out triples among well-known entities only (`known`), as the code behind it does.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path

import numpy as np
from measure import load, row, write
from scipy.sparse import coo_array
from scipy.sparse.csgraph import dijkstra

from tacit.evaluation import rank
from tacit.graph import Graph
from tacit.models.model import Model
from tacit.parties import partition

PARTS, KNOWN, FAR, AT_ONCE = (5, 10, 15, 20), (0, 2), 6, 256
PUBLISHED = Path(__file__).parent / "fedr-table2" / "published.csv"


def distances(graph: Graph) -> np.ndarray:
    """Steps from head to tail of each test triple through train, either way along a triple; inf: more than `FAR`."""
    train, test, count = graph.train.triples, graph.test.triples, len(graph.entities)
    edges = coo_array((np.ones(len(train)), (train[:, 0], train[:, 2])), (count, count)).tocsr()
    heads, place = np.unique(test[:, 0], return_inverse=True)
    steps = np.empty(len(test))
    for first in range(0, len(heads), AT_ONCE):
        found = dijkstra(edges, directed=False, unweighted=True, indices=heads[first : first + AT_ONCE], limit=FAR)
        mine = (place >= first) & (place < first + AT_ONCE)
        steps[mine] = found[place[mine] - first, test[mine, 2]]
    return steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", required=True, help="a dataset by name or folder, or a file by save_graph")
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    graph, name, results = load(chosen.graph), Path(chosen.graph).stem, []
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        published = [line for line in csv.DictReader(file) if line["dataset"] == name]
    row("", ["reverse", f"path <= {FAR}", "popularity", "oracle", "paper local", "paper fedr"])
    for known, parts in itertools.product(KNOWN, PARTS):
        steps, popular = [], []
        for party in partition(graph, "triples", parts, seed=0, known=known):
            steps.append(distances(party))
            ranks = rank(Model.popular(party), party.test.triples, party.statements.triples, sides="tails")
            popular.append(1 / ranks.of())
        far, guess = np.concatenate(steps), np.concatenate(popular)
        best = {
            recipe: max(
                (float(p["mrr"]) for p in published if (p["setting"], p["parts"]) == (recipe, str(parts))), default=None
            )
            for recipe in ("local", "fedr")
        }
        measured = {
            "reverse": float((far == 1).mean()),
            "path": float(np.isfinite(far).mean()),
            "popularity": float(guess.mean()),
            "oracle": float(np.where(np.isfinite(far), 1.0, guess).mean()),
        }
        row(f"{name}, {parts} parties, known {known}", [*measured.values(), best["local"], best["fedr"]])
        about = {"dataset": name, "parties": parts, "known": known, "seed": 0, "test": len(far)}
        results.append({**about, **measured, "published_best": best})
    write(chosen.out, "cpu", results)


if __name__ == "__main__":
    main()
