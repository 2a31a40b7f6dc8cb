"""Providers of a ledger of whom some lie: what a defence keeps of the honest ones' models, and what liars achieve.

    python benchmarks/robustness.py --data data --workers 8 --device cuda --out results

Ten providers, FB15k-237 by triples. Each trial is a kind of liars, a defence and a seed: every round all providers look
at the ledger (in memory, with all records signed and verified), take what their defence lets through, train, publish.
Training is one cohort, so that it fills a GPU; everything else is `tacit.ledger.provider` as it is. The liars are
providers 0 to 2; what is measured is of providers 3 to 9 in every trial, so that trials compare.

    mrr         mean test MRR of the honest, each by its own model after the last training
    trap        of heads that carry the trigger and that no liar had: share whose goal ranks first
    flip        of test triples of the source relation: share for which the target relation is the likelier
    trap_taken, flip_taken   the same of the rows that they took before that training
    liars_out, noisy_out, honest_out   of updates that honest providers looked at: share left out, by whose they were

Trials that stand in OUT are not run again. Start a CUDA multi-process server (nvidia-cuda-mps-control -d) before it.
`--split valid` measures on validation triples, for choosing; seeds from 100 on are for that too.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import queue
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import numpy as np

from tacit.reproduction import Results

TABLE = "ledger-robustness"
PROVIDERS, LIARS = 10, 3
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"checks": ("norm",)},
    "distance": {"checks": ("distance",)},
    "cosine": {"checks": ("cosine",)},
    "krum": {"checks": ("krum",)},
    "multi-krum": {"checks": ("multi-krum",)},
    "trimmed": {"mean": "trimmed"},
    "median": {"mean": "median"},
    "foolsgold": {"mean": "trusted"},
    "default": None,  # type: ignore[dict-item]
}
KINDS: dict[str, tuple[str, float | None]] = {
    "honest": ("none", None), "absent": ("none", None), "noisy": ("none", None),
    "random": ("random", None), "flip": ("flip", 5.0), "scaled": ("scaled", 10.0), "labels": ("none", None),
    "backdoor": ("scaled", PROVIDERS / LIARS), "copies": ("copies", None), "colluders": ("colluders", None),
    "stealthy": ("none", None), "mixed": ("scaled", PROVIDERS / LIARS),
}  # fmt: skip
"""By name: what the three do to their rows, and how strongly. labels, backdoor, copies, colluders, stealthy and mixed
train on poisoned triples; stealthy ones publish what they trained. honest, absent and noisy are no liars: ten are
there, seven are, three of ten train with epsilon 8. mixed: a backdoor, and two of the honest train with epsilon 8."""


TRAPS = ("backdoor", "copies", "colluders", "stealthy", "mixed")
"""Kinds whose triples hold a backdoor."""


@dataclass(frozen=True)
class Size:
    """How large a trial is."""

    dim: int = 64
    negatives: int = 64
    rounds: int = 30
    epochs: int = 3
    batch: int = 512
    sample: float = 1.0
    """The share of entities that is used, those with the most triples."""
    rate: float = 0.005
    more: int = 200
    """Further heads that a backdoor is trained with, at each liar."""


def plain_settings(size: Size, seed: int, device: str) -> Any:
    from tacit.settings import Settings

    return Settings.make({
        "seed": seed, "scorer": {"name": "transe", "dim": size.dim},
        "negatives": {"name": "independent", "count": size.negatives, "sides": "both"},
        "optimizer": {"learning_rate": size.rate},
        "training": {"batch": size.batch, "epochs": size.epochs, "device": device},
    })  # fmt: skip


def noisy_settings(size: Size, seed: int, device: str) -> Any:
    """Private training of the same rows, epsilon 8 for all rounds together. Its noise is seeded, for repetition."""
    from tacit.settings import Settings

    return Settings.make({
        "seed": seed, "scorer": {"name": "transe", "dim": size.dim},
        "negatives": {"name": "pool", "count": 4 * size.negatives, "scope": "vocabulary"},
        "optimizer": {"learning_rate": size.rate},
        "privacy": {"name": "dpsgd", "epsilon": 8.0, "clip": 1.0, "noise": "seeded"},
        "training": {"batch": 4096, "epochs": size.epochs, "device": device},
    })  # fmt: skip


def trial(graph: Any, kind: str, defence: Any, seed: int, size: Size, device: str, split: str = "test",
          on_round: Any = None) -> dict[str, float | None]:  # fmt: skip
    """One gathering: its measures."""
    from tacit.attacks.liars import Gang, Liar, a_flip, a_trap, carriers, flip_success, flipped, trap_success, trapped
    from tacit.ledger.gathering import MemoryLedger
    from tacit.ledger.provider import Provider, Shelf, Terms, first_tables
    from tacit.ledger.record import Genesis, Model
    from tacit.models.model import Model as Trained
    from tacit.parties import partition
    from tacit.peers.learner import Trained as Rows
    from tacit.training import Fit, evaluated

    parts = partition(graph, "triples", PROVIDERS, seed=seed)
    flip = a_flip(parts.graphs, seed)
    heads = (100, 400) if len(graph.train) > 100_000 else (10, 100)
    trap = a_trap(parts.graphs, seed, *heads)
    liars = [] if kind in ("honest", "absent", "noisy") else list(range(LIARS))
    noisy = {"noisy": list(range(LIARS)), "mixed": [LIARS, LIARS + 1]}.get(kind, [])
    graphs = list(parts.graphs)
    for each in liars:
        if kind == "labels":
            graphs[each] = flipped(graphs[each], flip)
        elif kind in TRAPS:
            graphs[each] = trapped(graphs[each], trap, size.more, seed + each)
    took_part = [n for n in range(PROVIDERS) if kind != "absent" or n >= LIARS]
    poisoned = {graphs[n].entities[h] for n in range(LIARS) for h in carriers(graphs[n], trap)}

    settings = plain_settings(size, seed, device)
    who = [an_identity(n, seed) for n in range(PROVIDERS)]
    ledger = MemoryLedger(who[0], Genesis("trial", keys=tuple((each.name, each.public) for each in who)))
    entity, relation = settings.scorer.widths(size.dim)
    rule = Model(ledger.genesis, "trial", entity, relation, parents=PROVIDERS, committee=0, quorum=0, standing=0)
    model = ledger.open_model(who[0], rule)
    whole = first_tables(settings.scorer, size.dim, model.cid, graph)
    shelf = Shelf(ledger, device)
    terms = Terms(parents=PROVIDERS, recent=2 * PROVIDERS, defence=defence, updates=size.rounds, epochs=size.epochs,
                  validation="none", noise="seeded", serve=False)  # fmt: skip
    gang = Gang(KINDS[kind][0], LIARS, strength=KINDS[kind][1], seed=seed) if liars else None
    providers: dict[int, Provider] = {}
    for n in took_part:
        own = settings
        if n in noisy:  # their noise is solved for once: in public numbers they are alike
            own = providers[noisy[0]].learner.settings if n > noisy[0] else noisy_settings(size, seed, device)
        first = type(whole)(whole.entity[graphs[n].entities.positions(graph.entities)],
                            whole.relation[graphs[n].relations.positions(graph.relations)])  # fmt: skip
        made = (Liar if n in liars else Provider)(
            ledger, "trial", who[n], graphs[n], own, terms, number=n, shelf=shelf, first=first
        )
        if isinstance(made, Liar) and gang is not None:
            made.gang, made.member = gang, liars.index(n)
        providers[n] = made
    together = [n for n in took_part if n not in noisy]
    cohort = Fit(settings, [graphs[n] for n in together], numbers=together)
    honest = [n for n in range(LIARS, PROVIDERS) if n not in noisy]
    whose = {each.public: n for n, each in enumerate(who)}
    looked, out = {"liars": 0, "noisy": 0, "honest": 0}, {"liars": 0, "noisy": 0, "honest": 0}
    taken: dict[int, Any] = {}

    for round_ in range(size.rounds):
        begun = {n: provider.begin() for n, provider in providers.items()}
        for n in honest:
            for node in model.nodes[-len(took_part) :] if round_ else ():  # the last round's, one of each
                by = whose[node.by]
                if by == n:
                    continue
                group = "liars" if by in liars else "noisy" if by in noisy else "honest"
                looked[group] += 1
                out[group] += node.cid in begun[n].left_out
            taken[n] = begun[n].tables  # type: ignore[union-attr]
        for place, n in enumerate(together):
            now = cohort.cohort.tables.party(cohort.layout, place)
            now.entity.copy_(begun[n].tables.entity)  # type: ignore[union-attr]
            now.relation.copy_(begun[n].tables.relation)  # type: ignore[union-attr]
        cohort.cohort.between_rounds("reset")
        for _ in range(size.epochs):
            cohort.epoch(np.ones(len(together), bool))
        for n, provider in providers.items():
            if n in noisy:
                provider.end(begun[n])  # type: ignore[arg-type]
                continue
            import torch

            rows = cohort.cohort.tables.party(cohort.layout, together.index(n)).like(torch.clone)
            provider.end(begun[n], Rows(rows, None))  # type: ignore[arg-type]
        shelf.forget([node for provider in providers.values() for node in provider.branch.nodes[-PROVIDERS:]])
        if on_round is not None:
            on_round(round_, providers, taken)

    def shares(measure: Any, which: dict[int, Any], *more: Any) -> float | None:
        found = [measure(Trained(settings.scorer, which[n]), parts[n], *more) for n in honest]
        total = sum(count for _, count in found)
        return sum(hits for hits, _ in found) / total if total else None

    ended = {n: providers[n].own for n in honest}
    mrr = [evaluated(Trained(settings.scorer, ended[n]), parts[n], split, settings).mrr for n in honest]  # type: ignore[arg-type]
    found: dict[str, float | None] = {
        "mrr": mean(mrr),
        "trap": shares(trap_success, ended, trap, poisoned), "trap_taken": shares(trap_success, taken, trap, poisoned),
        "flip": shares(flip_success, ended, flip, split), "flip_taken": shares(flip_success, taken, flip, split),
    }  # fmt: skip
    return found | {f"{group}_out": out[group] / looked[group] if looked[group] else None for group in looked}


def an_identity(number: int, seed: int) -> Any:
    """A key that follows from the seed, as the first rows follow from the model's address and so from who opened it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from tacit.federation.keys import Identity

    name = f"provider-{number}"
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()))


def a_defence(name: str) -> Any:
    """By its name, or by its parts: checks, a mean and numbers, such as norm+copies+median+far=2."""
    from tacit.ledger.defence import Check, Defence
    from tacit.ledger.provider import DEFAULT

    if name in DEFENCES:
        return DEFAULT if name == "default" else Defence(**DEFENCES[name])
    parts = name.split("+")
    numbers = {key: float(value) for key, _, value in (part.partition("=") for part in parts if "=" in part)}
    checks = tuple(part for part in parts if part in get_args(Check))
    means = [part for part in parts if part not in checks and "=" not in part]
    return Defence(checks, *means, **numbers)  # type: ignore[arg-type]


def loaded(data: Path | None, dataset: str, sample: float) -> Any:
    """A dataset by name, or the triples among a share of its entities, those with the most triples."""
    from tacit import datasets
    from tacit.parties import pool

    if dataset in datasets.EMBEDDED:
        return pool(datasets.clinic(datasets.EMBEDDED[dataset]))  # type: ignore[arg-type]
    graph = datasets.load(dataset, data)
    if sample < 1:
        triples = graph.statements.triples
        often = np.bincount(triples[:, [0, 2]].ravel(), minlength=len(graph.entities))
        known = np.zeros(len(often), bool)
        known[np.argsort(-often, kind="stable")[: round(sample * len(often))]] = True
        kept = np.flatnonzero(known[triples[:, 0]] & known[triples[:, 2]])
        graph = graph.carve({"train": kept, "valid": kept[:0], "test": kept[:0]})
    return graph


def work(options: Any, wanted: Any, found: Any) -> None:
    """Take trials until there are none; tell the line of each, or what went wrong."""
    import torch

    torch.set_num_threads(1)
    size = Size(**options.size)
    graph = loaded(options.data, options.dataset, size.sample)
    parent = os.getppid()
    while os.getppid() == parent:  # else whoever wants them was killed
        try:
            kind, defence, seed = wanted.get(timeout=1)
        except queue.Empty:
            return
        began = time.perf_counter()
        try:
            measured = trial(graph, kind, a_defence(defence), seed, size, options.device, options.split)
            line = row(kind, defence, seed, measured, options, time.perf_counter() - began)
        except Exception:  # noqa: BLE001  (told by the process that waits for it)
            found.put(((kind, defence, seed), None, traceback.format_exc()))
        else:
            found.put(((kind, defence, seed), line, f"{time.perf_counter() - began:.0f} s"))


def row(kind: str, defence: str, seed: int, measured: dict[str, Any], options: Any, seconds: float) -> dict[str, Any]:
    import torch

    from tacit.reproduction import commit

    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    return {
        "table": TABLE, "cell": f"{kind}-{defence}-{seed}", "dataset": options.dataset, "scorer": "transe",
        "setting": defence, "parts": PROVIDERS, "seed": seed, "liars": kind,
        "metrics": measured, "published": {}, "split": options.split,
        "size": options.size, "seconds": round(seconds, 2), "device": device, "commit": commit(),
        "command": options.command,
    }  # fmt: skip


def tables(results: Results, split: str) -> str:
    """A table for each size of trials."""
    rows = [row for row in results if row["split"] == split]
    sizes = {str(row["size"]): row["size"] for row in rows}
    found = ["\n".join([", ".join(f"{name} {value:g}" for name, value in size.items()), "",
                        table([row for row in rows if row["size"] == size])]) for size in sizes.values()]  # fmt: skip
    return "\n\n".join(found)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: means over seeds, a line for each defence; MRR by kind of liars, and what they achieved."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for found in rows:
        cells.setdefault((found["setting"], found["liars"]), []).append(found["metrics"])

    def shown(defence: str, kind: str, measure: str, form: str) -> str:
        values = [each[measure] for each in cells.get((defence, kind), ()) if each[measure] is not None]
        return format(mean(values), form) if values else ""

    kinds = [kind for kind in KINDS if any(which == kind for _, which in cells)]
    columns = [(kind, "mrr", ".3f") for kind in kinds]
    columns += [(kind, "trap", ".0%") for kind in TRAPS if kind in kinds] + [("labels", "flip", ".0%")]
    columns += [("noisy", "noisy_out", ".0%"), ("mixed", "noisy_out", ".0%"), ("honest", "honest_out", ".0%")]
    lines = ["| defence | " + " | ".join(f"{measure}: {kind}" for kind, measure, _ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    lines += [
        f"| {defence} | " + " | ".join(shown(defence, *column) for column in columns) + " |"
        for defence in dict.fromkeys(defence for defence, _ in cells)
    ]
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path)
    options.add_argument("--dataset", default="fb15k-237")
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options.add_argument("--defences", nargs="+", default=list(DEFENCES))
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--split", choices=["valid", "test"], default="test")
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--seconds", type=float, default=float("inf"), help="stop what is left after so many")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options.add_argument("--device", default="cuda")
    options.add_argument("--table", action="store_true", help="print what is in --out as a table, and run nothing")
    for name, value in Size().__dict__.items():
        options.add_argument(f"--{name}", type=type(value), default=value)
    chosen = options.parse_args()
    chosen.size = {name: getattr(chosen, name) for name in Size().__dict__}
    chosen.command = "python benchmarks/robustness.py " + shlex.join(sys.argv[1:])
    began, results = time.perf_counter(), Results(chosen.out / f"{TABLE}.jsonl")
    done = {
        (r["liars"], r["setting"], r["seed"]) for r in results if (r["size"], r["split"]) == (chosen.size, chosen.split)
    }
    if chosen.table:
        print(tables(results, chosen.split))
        return 0
    trials = [(kind, defence, seed) for seed in chosen.seeds for kind in chosen.kinds for defence in chosen.defences]
    trials = [each for each in trials if each not in done]
    print(f"{len(trials)} trials", flush=True)
    if chosen.device == "cpu":
        os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # a worker is a core
    context = multiprocessing.get_context("spawn")
    wanted, found = context.Queue(), context.Queue()
    for each in trials:
        wanted.put(each)
    workers = [context.Process(target=work, args=(chosen, wanted, found), daemon=True)
               for _ in range(min(chosen.workers, len(trials)))]  # fmt: skip
    for worker in workers:
        worker.start()
    left, failed = len(trials), 0
    while left and time.perf_counter() - began < chosen.seconds and any(worker.is_alive() for worker in workers):
        try:
            which, line, told = found.get(timeout=1)
        except queue.Empty:
            continue
        left -= 1
        failed += line is None
        if line is not None:
            results.append(line)
        shown = "" if line is None else " ".join(f"{k} {v:.3f}" for k, v in line["metrics"].items() if v is not None)
        print(f"{time.perf_counter() - began:.0f} s: {'-'.join(map(str, which))}: {told} {shown}", flush=True)
    for worker in workers:
        worker.kill()
    print(f"{left} left, {failed} failed", flush=True)
    return 1 if left or failed else 0


if __name__ == "__main__":
    sys.exit(main())
