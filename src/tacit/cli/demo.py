"""`tacit demo`: what the product can do, on the embedded federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit import datasets
from tacit.cli import show
from tacit.cli.models import bar
from tacit.cli.options import AsJson, Force
from tacit.clinic import write_tables
from tacit.files import PARTIES, fill_parties
from tacit.folders import log_to, new_folder
from tacit.inspection import inspect
from tacit.marking import confidential_share, marked_per_relation
from tacit.parties import METHODS, partition, pool
from tacit.sources import import_graph, read_mapping

SETTINGS: dict[str, Any] = {
    "scorer": {"name": "transe", "dim": 32},
    "negatives": {"count": 32},
    "optimizer": {"learning_rate": 0.01},
    "training": {"batch": 64, "epochs": 60},
}


def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make the embedded clinical federation, look it over, import from tables, divide it, and train on it."""
    from tacit.evaluation import weighted
    from tacit.models.model import Model
    from tacit.run import create
    from tacit.settings import Settings, combine
    from tacit.training import Fit, evaluated

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
        settings = Settings.make(combine(SETTINGS, {"seed": seed}))
        alone, run = Fit(settings, hospitals.graphs), create(together, settings, folder / "run")
        with bar(settings, as_json, "each hospital alone") as on_event:
            alone.run(on_event)
        with bar(settings, as_json, "all in one place") as on_event:
            run.train(on_event)
        fill_parties(hospitals, folder)
        scores = {
            "popularity alone": [evaluated(Model.popular(graph), graph, "test", settings) for graph in hospitals],
            "each alone": alone.evaluate("test"),
            "all in one place": [
                evaluated(run.model.seen_by(together, graph), graph, "test", settings) for graph in hospitals
            ],
        }
        [example] = run.predict(head=hospitals[0].entities[0], relation=together.relations[0], top=1)
    marks, share = marked_per_relation(imported), confidential_share(imported)
    if as_json:
        facts = {"out": str(out_path), "hospitals": statistics, "pooled": inspect(together).json(), "divided": tables}
        trained = {label: [metrics.json() for metrics in found] for label, found in scores.items()}
        print(json.dumps(facts | {"imported": {"relations": marks, "confidential_share": share}, "test": trained}))
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
    show.say("All in one place is what no one may do; federation is to come near it. None of these is private.")
    show.say(
        f"\nWritten to {out_path}/. To try next:\n"
        f"  tacit data inspect {out_path / hospitals.names[0]} --relations\n"
        f"  tacit data import clinic --source {out_path / 'tables'} --dry-run\n"
        f"  tacit data mark {out_path / hospitals.names[1]} --match 'head=^patient' --group head --dry-run\n"
        f"  tacit evaluate {out_path / 'run'} --per-relation\n"
        f"  tacit predict {out_path / 'run'} --head '{example.head}' --relation '{example.relation}'\n"
        f"  tacit train {out_path / hospitals.names[0]} --scorer rotate --dim 32 --out runs/first\n"
        "  tacit data inspect YOUR-GRAPH.tsv\n"
        "  tacit data partition YOUR-GRAPH.tsv --by entities --parts 3 --out parts/"
    )
