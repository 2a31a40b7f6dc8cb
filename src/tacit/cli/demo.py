"""`tacit demo`: what the product can do, on the embedded federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import datasets
from tacit.cli import show
from tacit.cli.federate import bar as rounds_bar
from tacit.cli.federate import megabytes
from tacit.cli.models import bar
from tacit.cli.options import AsJson, Force
from tacit.clinic import write_tables
from tacit.files import PARTIES, fill_parties
from tacit.folders import log_to, new_folder
from tacit.inspection import inspect
from tacit.marking import confidential_share, marked_per_relation
from tacit.parties import METHODS, Parties, partition, pool
from tacit.sources import import_graph, read_mapping

if TYPE_CHECKING:
    from tacit.federated import FederatedRun

SETTINGS: dict[str, Any] = {
    "scorer": {"name": "transe", "dim": 32},
    "negatives": {"count": 32},
    "optimizer": {"learning_rate": 0.01},
    "training": {"batch": 64, "epochs": 60},
}
EPSILON = 4.0
ROUNDS = 30
"""Of each federation; a round is three epochs of every party."""


def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the embedded clinical federation, look it over, import from tables, divide it, and let it learn together.

    Example:
      tacit demo --out demo
    """
    from tacit.evaluation import weighted
    from tacit.models.model import Model
    from tacit.privacy.plan import in_words
    from tacit.run import create
    from tacit.settings import Settings, combine
    from tacit.training import evaluated

    with new_folder(out_path, PARTIES, force=force) as folder, log_to(folder):
        with show.busy("making five hospitals", as_json):
            hospitals = datasets.clinic("demo", seed)
            (folder / "tables").mkdir()
            write_tables(hospitals[0], folder / "tables")
            statistics = hospitals.statistics()
            imported = import_graph(read_mapping("clinic"), str(folder / "tables")).graph
            together = pool(hospitals)
            views = [inspect(graph) for graph in hospitals]
            divided = {by: partition(together, by, 3, seed=seed) for by in METHODS}  # type: ignore[arg-type]
            tables = {by: made.statistics() for by, made in divided.items()}
        runs = _federations(hospitals, seed, folder / "federations", as_json)
        settings, counted = runs["local"].settings, runs["private"]
        run = create(together, Settings.make(combine(SETTINGS, {"seed": seed})), folder / "run")
        with bar(run.settings, as_json, "all in one place") as on_event:
            run.train(on_event)
        fill_parties(hospitals, folder)
        scores = {
            "popular": [evaluated(Model.popular(graph), graph, "test", settings) for graph in hospitals],
            **{label: done.by_party["test"] for label, done in runs.items()},
            "pooled": [evaluated(run.model.seen_by(together, graph), graph, "test", settings) for graph in hospitals],
        }
        sent = {recipe: done.communication() for recipe, done in runs.items()}
        [example] = run.predict(head=hospitals[0].entities[0], relation=together.relations[0], top=1)
    marks, share = marked_per_relation(imported), confidential_share(imported)
    if as_json:
        facts = {"out": str(out_path), "hospitals": statistics, "pooled": inspect(together).json(), "divided": tables}
        trained = {label: [metrics.json() for metrics in found] for label, found in scores.items()}
        facts |= {"imported": {"relations": marks, "confidential_share": share}, "communication": sent}
        print(json.dumps(facts | {"test": trained, "privacy": counted.claim}))
        return
    show.out.rule("Five hospitals: each has its own patients, and a share of what medicine knows")
    show.parties(hospitals, statistics, views)
    show.out.rule(f"{hospitals.names[0]} again, imported from tables by a mapping that says what is confidential")
    show.marks(marks, share)
    show.say(f"{len(imported.groups):,} groups: all records of one patient belong together")
    show.out.rule("All of it in one place, as no one may ever see it")
    show.graph("pooled", inspect(together), None, every_relation=True)
    for by, made in divided.items():
        show.out.rule(f"The pooled graph divided by {by}")
        show.parties(made, tables[by], None)
    show.out.rule("Link prediction: MRR on each hospital's own test triples, among its own entities")
    rows = [
        (label, *(f"{metrics.mrr:.3f}" for metrics in found), f"{weighted(found).mrr:.3f}")
        for label, found in scores.items()
    ]
    show.table(f"{type(settings.scorer).__name__}", *hospitals.names, "all", rows=rows)
    for label, what in (("fede", "entity rows"), ("fedr", "relation rows"), ("secure", "relation rows under masks")):
        size, many = megabytes(sent[label]["bytes"]), sent[label]["messages"]
        show.say(f"{label}: {size} of {what} in {many:,} messages, every one in its transcript")
    show.say("popular: how often an entity is an answer, and nothing else. local: each hospital alone. pooled: all in "
             "one place, which no one may do. None of these is private: rows tell of the triples.")  # fmt: skip
    show.say("secure: FedR of which the server learns sums alone, and no names: still not private, for sums tell too.")
    show.say(f"private: noisy counts of each hospital, added up. {in_words(counted.claim)}")
    show.say(
        f"\nWritten to {out_path}/. To try next:\n"
        f"  tacit data inspect {out_path / hospitals.names[0]} --relations\n"
        f"  tacit data import clinic --source {out_path / 'tables'} --dry-run\n"
        f"  tacit data mark {out_path / hospitals.names[1]} --match 'head=^patient' --group head --dry-run\n"
        f"  tacit evaluate {out_path / 'run'} --per-relation\n"
        f"  tacit predict {out_path / 'run'} --head '{example.head}' --relation '{example.relation}'\n"
        f"  tacit federate {out_path} --recipe fede --scorer rotate --dim 32 --rounds 50 --out runs/together\n"
        f"  tacit attack {out_path / 'federations' / 'fede'} --attack cia,lira --targets canaries --count 400\n"
        f"  tacit federate {out_path} --recipe fede --secure --dim 32 --rounds 50 --out runs/secure\n"
        f"  tacit train {out_path / hospitals.names[0]} --scorer rotate --dim 32 --out runs/first\n"
        "  tacit data inspect YOUR-GRAPH.tsv\n"
        "  tacit data partition YOUR-GRAPH.tsv --by entities --parts 3 --out parts/"
    )


def _federations(hospitals: Parties, seed: int, folder: Path, as_json: bool) -> dict[str, FederatedRun]:
    """Each hospital alone; together by FedE and FedR; by FedR under secure sums; by FedE in private."""
    from tacit.federated import FederatedRun, split_settings
    from tacit.settings import combine

    wanted: dict[str, tuple[str, dict[str, Any]]] = {
        "local": ("local", {}),
        "fede": ("fede", {"federation": {"keep_every": 10}}),
        "fedr": ("fedr", {}),
        "secure": ("fedr", {"federation": {"secure": True, "keep_every": 10}}),
        "private": ("private_fede", {"privacy": {"epsilon": EPSILON}}),
    }
    runs = {}
    for label, (recipe, more) in wanted.items():
        settings, federation = split_settings(combine(SETTINGS, {"seed": seed, "federation": {"rounds": ROUNDS}}, more))
        begun = FederatedRun.create(recipe, hospitals, settings, federation, folder / label)
        with rounds_bar(label, ROUNDS, as_json) as on_event:
            runs[label] = begun.train(on_event)
    return runs
