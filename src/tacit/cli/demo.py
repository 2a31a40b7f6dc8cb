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
    from tacit.attacks.attack import Findings
    from tacit.federated import FederatedRun
    from tacit.models.model import Model
    from tacit.privacy.onerun import OneRun

SETTINGS: dict[str, Any] = {
    "scorer": {"name": "transe", "dim": 32},
    "negatives": {"count": 32},
    "optimizer": {"learning_rate": 0.01},
    "training": {"batch": 64, "epochs": 60},
}
ROUNDS = 30
"""Of each federation; a round is three epochs of every party."""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "fede": ("fede", {"federation": {"keep_every": 10}}),
    "fedr": ("fedr", {"federation": {"keep_every": 10}}),
    "secure": ("fedr", {"federation": {"secure": True, "keep_every": 10}}),
    "private-1": ("private_fede", {"privacy": {"epsilon": 1.0}}),
    "private": ("private_fede", {"privacy": {"epsilon": 4.0}}),
    "private-16": ("private_fede", {"privacy": {"epsilon": 16.0}}),
    "published": ("fede", {"privacy": {"name": "dp-flames", "mode": "published", "test": False},
                           "training": {"batch": 256}}),
}  # fmt: skip
"""Each hospital alone; together by FedE and FedR; by FedR under secure sums; by FedE in private, at three epsilons; and
under a mechanism as its paper has it, which guarantees nothing.
"""
ATTACKS: dict[str, dict[str, Any]] = {
    "fede": {"attack": ["cip", "si", "reconstruction"], "targets": ["existing", "held"]},
    "fedr": {"attack": ["cip", "reconstruction"], "targets": ["existing", "held"]},
    "secure": {"attack": ["cip", "si", "reconstruction"], "targets": ["existing", "held"]},
    "private": {"attack": "counts", "targets": "canaries"},
}
MEANT = {
    "popular": "how often an entity is an answer, and nothing else",
    "local": "each hospital alone",
    "fede": "entity rows are shared",
    "fedr": "relation rows are shared",
    "secure": "FedR of which the server learns sums alone, and no names: still not private, for sums tell too",
    "private": "noisy counts of each hospital, added up",
    "published": "DP-FLames as its paper has it, for replication: no formal guarantee (tacit flaws says why)",
    "peers": "FKGE in pairs, without a server, as its paper has it: no formal guarantee",
    "ledger": "updates on a ledger, without a server, one provider a liar; nothing is private here",
    "pooled": "all in one place, as no one may ever see it",
}
UPDATES = 4
"""Of each provider of the ledger."""


def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Five made-up hospitals learn alone, together, under secure sums, in private; are attacked; a report is written.

    Example:
      tacit demo --out demo
    """
    from tacit.reporting import report
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
        pooled = create(together, Settings.make(combine(SETTINGS, {"seed": seed})), folder / "run")
        with bar(pooled.settings, as_json, "all in one place") as on_event:
            pooled.train(on_event)
        fill_parties(hospitals, folder)
        met = _peers(hospitals, seed, as_json)
        listed, liar = _ledger(hospitals, seed, folder / "ledger", as_json)
        found, audited = _attacked(runs, as_json)
        scores = _scores(hospitals, runs, together, pooled)
        for label, models in (("peers", met), ("ledger", listed)):
            scores[label] = [
                evaluated(model, graph, "test", pooled.settings) for model, graph in zip(models, hospitals, strict=True)
            ]
        [example] = pooled.predict(head=hospitals[0].entities[0], relation=together.relations[0], top=1)
        with show.busy("writing the reports", as_json):
            several = list(runs.values())
            report(several, folder / "report.html", internal=True, title="Five hospitals: internal report")
            report(several, folder / "shareable.html", title="Five hospitals: report")
    marks, share = marked_per_relation(imported), confidential_share(imported)
    sent = {label: run.communication() for label, run in runs.items()}
    if as_json:
        facts = {"out": str(out_path), "hospitals": statistics, "pooled": inspect(together).json(), "divided": tables}
        trained = {label: [metrics.json() for metrics in each] for label, each in scores.items()}
        facts |= {"imported": {"relations": marks, "confidential_share": share}, "communication": sent}
        facts |= {"attacks": {label: each.json() for label, each in found.items()}, "audit": audited.json()}
        facts |= {"report": str(out_path / "report.html"), "shareable": str(out_path / "shareable.html")}
        print(json.dumps(facts | {"test": trained, "privacy": runs["private"].claim, "ledger": liar}))
        return
    show.out.rule("Five hospitals: each has its own patients, and a share of what medicine knows")
    show.parties(hospitals, statistics, views)
    show.out.rule(f"{hospitals.names[0]} again, imported from tables by a mapping that says what is confidential")
    show.marks(marks, share)
    show.say(f"{len(imported.groups):,} groups: all records of one patient belong together")
    for by, made in divided.items():
        show.out.rule(f"All hospitals in one graph, divided again by {by}")
        show.parties(made, tables[by], None)
    _show_results(hospitals, runs, scores, sent, found, audited)
    show.say(
        f"The ledger: of {liar['updates']} updates {liar['lies']} were random weights of a liar; honest hospitals met "
        f"these {liar['met']} times, and left them out {liar['left_out']} times."
    )
    show.say(
        f"\nWritten to {out_path}/. Open {out_path / 'report.html'} in a browser: it is for the owners; "
        f"{out_path / 'shareable.html'} is what others may see. To try next:\n"
        f"  tacit data inspect {out_path / hospitals.names[0]} --relations\n"
        f"  tacit data import clinic --source {out_path / 'tables'} --dry-run\n"
        f"  tacit data mark {out_path / hospitals.names[1]} --match 'head=^patient' --group head --dry-run\n"
        f"  tacit evaluate {out_path / 'run'} --per-relation\n"
        f"  tacit predict {out_path / 'run'} --head '{example.head}' --relation '{example.relation}'\n"
        f"  tacit federate {out_path} --recipe fede --scorer rotate --dim 32 --rounds 50 --out runs/together\n"
        f"  tacit attack {out_path / 'federations' / 'fede'} --attack cia,lira --targets canaries --count 400\n"
        f"  tacit report {out_path / 'federations' / 'private'} --out private.html\n"
        f"  tacit peer meet {out_path} --mode published --dim 32 --epochs 30 --set pairing.trainings=2 --out runs/met\n"
        f"  tacit ledger verify {out_path / 'ledger'}\n"
        f"  tacit train {out_path / hospitals.names[0]} --scorer rotate --dim 32 --out runs/first\n"
        "  tacit data inspect YOUR-GRAPH.tsv\n"
        "  tacit data partition YOUR-GRAPH.tsv --by entities --parts 3 --out parts/"
    )


def _federations(hospitals: Parties, seed: int, folder: Path, as_json: bool) -> dict[str, FederatedRun]:
    from tacit.federated import FederatedRun, split_settings
    from tacit.settings import combine

    runs = {}
    for label, (recipe, more) in RUNS.items():
        settings, federation = split_settings(combine(SETTINGS, {"seed": seed, "federation": {"rounds": ROUNDS}}, more))
        begun = FederatedRun.create(recipe, hospitals, settings, federation, folder / label)
        with rounds_bar(label, ROUNDS, as_json) as on_event:
            runs[label] = begun.train(on_event)
    return runs


def _peers(hospitals: Parties, seed: int, as_json: bool) -> list[Model]:
    """Each hospital's model after it met the others in pairs."""
    from tacit.peers import PPAT, Pairing, meet
    from tacit.settings import Settings, combine

    settings = Settings.make(combine(SETTINGS, {"seed": seed}))
    pairing = Pairing(mode="published", ppat=PPAT(epochs=2), retrain=20, trainings=2, patience=2)
    with show.busy("hospitals meet in pairs", as_json):
        return [peer.learner.model() for peer in meet(hospitals, settings, pairing).peers]


def _ledger(hospitals: Parties, seed: int, folder: Path, as_json: bool) -> tuple[list[Model], dict[str, int]]:
    """Each hospital's model from a ledger to which one more provider adds random weights; how often these were met."""
    from tacit.attacks.liars import Gang, Liar
    from tacit.federation.keys import Identity
    from tacit.ledger.gathering import Gathering
    from tacit.ledger.ledger import Ledger
    from tacit.ledger.provider import Provider, Terms
    from tacit.ledger.record import Genesis, Model
    from tacit.settings import Settings, combine

    who = [Identity.new(name) for name in (*hospitals.names, "liar")]
    settings = Settings.make(combine(SETTINGS, {"seed": seed, "training": {"epochs": 20}}))
    entity, relation = settings.scorer.widths(settings.dim)
    ledger = Ledger.begin(folder, who[0], Genesis("demo", keys=tuple((each.name, each.public) for each in who)))
    ledger.open_model(who[0], Model(ledger.genesis, "clinic", entity, relation, committee=0, quorum=0, standing=0))
    terms = Terms(updates=UPDATES, epochs=10, serve=False)
    providers = [Provider(ledger, "clinic", each, graph, settings, terms, number=number)
                 for number, (each, graph) in enumerate(zip(who, hospitals, strict=False))]  # fmt: skip
    liar = Liar(ledger, "clinic", who[-1], hospitals[0], settings, terms, number=len(providers))
    liar.gang = Gang("random", 1, seed=seed)
    gathering = Gathering([*providers, liar])
    with show.busy("hospitals learn on a ledger, one provider lies", as_json):
        gathering.run()
    lies = {node.cid for node in liar.branch.nodes if node.by == who[-1].public}
    looks = [look for _, number, look in gathering.looks if number < len(providers)]
    out = sum(len(lies & look.left_out.keys()) for look in looks)
    met = out + sum(len(lies & set(look.taken)) for look in looks)
    counts = {"updates": len(liar.branch.nodes), "lies": len(lies), "met": met, "left_out": out}
    return [provider.learner.model(provider.own) for provider in providers], counts


def _attacked(runs: dict[str, FederatedRun], as_json: bool) -> tuple[dict[str, Findings], OneRun]:
    """What attackers find in each that shares anything; and an audit of what is claimed."""
    from tacit.attacks.attack import attack
    from tacit.privacy.onerun import audit

    found = {}
    for label, wanted in ATTACKS.items():
        with show.busy(f"attacking {label}", as_json):
            found[label] = attack(runs[label], **wanted)
    with show.busy("auditing what is claimed", as_json):
        return found, audit(runs["private"])


def _scores(hospitals: Parties, runs: dict[str, FederatedRun], together: Any, pooled: Any) -> dict[str, list[Any]]:
    """On each hospital's own test triples, among its own entities."""
    from tacit.models.model import Model
    from tacit.training import evaluated

    settings = pooled.settings
    return {
        "popular": [evaluated(Model.popular(graph), graph, "test", settings) for graph in hospitals],
        **{label: run.by_party["test"] for label, run in runs.items()},
        "pooled": [evaluated(pooled.model.seen_by(together, graph), graph, "test", settings) for graph in hospitals],
    }


def _show_results(
    hospitals: Parties,
    runs: dict[str, FederatedRun],
    scores: dict[str, list[Any]],
    sent: dict[str, Any],
    found: dict[str, Findings],
    audited: OneRun,
) -> None:
    """What each is worth, what it sends, what is guaranteed, what attackers managed: one table."""
    from tacit.evaluation import weighted
    from tacit.privacy.plan import in_words

    show.out.rule("What each is worth, what left, what is guaranteed, what was found")
    rows = []
    for label, each in scores.items():
        run, attacked = runs.get(label), found.get(label)
        size = megabytes(sent[label]["bytes"]) if label in sent else "-"
        epsilon = "-" if run is None or run.epsilon is None else f"{run.epsilon:.3g}"
        strongest = "-"
        if attacked is not None:
            best = attacked.strongest
            strongest = "nothing to attack" if best is None else f"{attacked.auc.value:.3f} ({best[0].attack})"  # type: ignore[union-attr]
        rows.append((label, f"{weighted(each).mrr:.3f}", size, epsilon, strongest))
    show.table("", "MRR", "sent and received", "epsilon", "strongest attack (AUC)", rows=rows)
    for label, words in MEANT.items():
        show.say(f"{label}: {words}.")
    show.say(in_words(runs["private"].claim))
    told = f"at least {audited.lower_bound:.3g}: {audited.status}"
    show.say(f"Audit of private: with {audited.canaries:,} canaries the epsilon that was measured is {told}.")
