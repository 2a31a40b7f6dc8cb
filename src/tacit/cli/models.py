"""`tacit train`, `evaluate`, `predict`, `export`: one graph, one model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, TimeRemainingColumn
from rich.text import Text

from tacit.cli import show
from tacit.cli.options import (
    AsJson,
    Assignments,
    Columns,
    Config,
    Count,
    DataFolder,
    Delta,
    Device,
    Dim,
    Epsilon,
    Force,
    Header,
    LearningRate,
    PartyName,
    Patience,
    Pooled,
    Privacy,
    Resume,
    RunOut,
    ScorerName,
    Seed,
    Separator,
    SkipBad,
    SplitShares,
    read_any,
    shares,
    split_anew,
)
from tacit.errors import BadInput, TacitError, excerpt
from tacit.graph import SPLITS, Graph
from tacit.parties import Parties, pool

if TYPE_CHECKING:
    from tacit.evaluation.ranking import Metrics
    from tacit.models.model import Model
    from tacit.run import Run
    from tacit.settings import Settings
    from tacit.training import Event

# What loads torch is imported by the commands that need it: looking at data takes no second longer for it.

RunPath = Annotated[Path, typer.Argument(help="The folder of a run.")]
OfParty = Annotated[str | None, typer.Option("--party", help="Of a federation: whose model is meant.")]
COLUMNS = ("mrr", "hits1", "hits3", "hits10", "mr", "amri")


def train(
    path: Annotated[
        str | None,
        typer.Argument(help="A file, a folder, the name of a benchmark, or clinic-small or clinic-demo."),
    ] = None,
    out_path: RunOut = None,
    config: Config = None,
    resume: Resume = None,
    plan: Annotated[
        Path | None, typer.Option(help="Do not train: write what another machine needs to, into this folder.")
    ] = None,
    scorer: ScorerName = None,
    dim: Dim = None,
    loss: Annotated[str | None, typer.Option(help="self-adversarial, softmax, ... (loss.name)")] = None,
    negatives: Count = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adagrad, sgd, sparse-adam. (optimizer.name)")] = None,
    learning_rate: LearningRate = None,
    batch: Annotated[int | None, typer.Option(help="Triples per step. (training.batch)")] = None,
    epochs: Annotated[int | None, typer.Option(help="At most. (training.epochs)")] = None,
    steps: Annotated[int | None, typer.Option(help="At most. (training.steps)")] = None,
    device: Device = None,
    every: Annotated[int | None, typer.Option(help="Epochs between validations. (evaluation.every)")] = None,
    patience: Patience = None,
    memory_mb: Annotated[int | None, typer.Option(help="For ranking. (evaluation.memory_mb)")] = None,
    privacy: Privacy = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    budget: Annotated[str | None, typer.Option(help="The holding that pays for it: see tacit budget.")] = None,
    seed: Seed = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    assignments: Assignments = None,
    split: SplitShares = None,
    party: PartyName = None,
    pooled: Pooled = False,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a model of one graph, and keep the one that was best on validation.

    PATH is a file, a folder, the name of a benchmark, or clinic-small or clinic-demo.

    Examples:
      tacit train hospital.tsv --split 0.8,0.1,0.1 --scorer rotate --out runs/first
      tacit train --resume runs/first
    """
    local = locals()
    from tacit.run import Run, create, write_plan
    from tacit.settings import FLAGS, Settings, combine, from_flags, parse_assignment, plain_section, read_settings

    if resume is not None:
        others = ("path", "out_path", "config", "plan", "assignments", "split", "party", "budget")
        given = [flag for flag in (*FLAGS, *others) if local[flag] is not None]
        given += [flag for flag in ("pooled", "force") if local[flag]]
        if given:
            raise TacitError(f"--resume goes on with a run as it is: {given[0].replace('_', '-')} cannot change it.")
        _train(Run.open(resume), as_json)
        return
    written = read_settings(config) if config else {}
    about = plain_section(written.pop("graph", {}), "graph", {"path": str, "party": str, "pool": bool, "split": list})
    written.pop("reproduce", None)  # what others reached with it, for `tacit reproduce`
    layers = [written, *(parse_assignment(text) for text in assignments or ())]
    settings = Settings.make(combine(*layers, from_flags({flag: local[flag] for flag in FLAGS})))
    path = path or about.get("path")
    if path is None:
        raise TacitError("Say what to train on: a path, or [graph] path in the --config file.")
    with show.busy(f"reading {path}", as_json):
        found = read_any(path, data, columns, separator, header, skip_bad)
        graph = trained_on(found, path, party or about.get("party"), pooled or about.get("pool", False))
        wanted = shares(split) if split is not None else about.get("split")
        if wanted not in (None, "keep"):
            graph = split_anew(graph, wanted, settings.seed, private=settings.privacy.sound)
    if plan is not None:
        if budget is not None:
            raise TacitError("a plan is for another machine, where no holding is: leave out --budget.")
        write_plan(graph, settings, plan, force=force)
        command = f"python -m tacit.run {plan / 'plan.json'}"
        if as_json:
            print(json.dumps({"plan": str(plan), "command": command}))
        else:
            show.say(f"Written to {plan}. Where NumPy, torch and tacit are: {command}")
        return
    out = out_path or Path("runs") / settings.name
    with show.busy("solving for the noise", as_json):
        run = create(graph, settings, out, force=force, budget=budget)
    _train(run, as_json)


def trained_on(found: Graph | Parties, path: str, party: str | None, pooled: bool) -> Graph:
    """The one graph to train on: given as it is, or one party's of a folder, or all of them in one place."""
    if not isinstance(found, Parties):
        if party or pooled:
            raise TacitError(f"{path} is one graph: leave out --party and --pool.")
        return found
    if pooled:
        return pool(found)
    if party is not None:
        if party not in found.names:
            raise TacitError(f"{path} has no party {party!r}. There are: {', '.join(found.names)}.")
        return found[found.names.index(party)]
    raise TacitError(
        f"{path} holds {len(found)} parties. Train on one by --party ({', '.join(found.names)}), or on all of them in "
        "one place by --pool."
    )


def _train(run: Run, as_json: bool) -> None:
    from tacit.privacy.plan import in_words
    from tacit.privacy.privatizers import Sound
    from tacit.run import by_the_paper
    from tacit.training import evaluated

    began = time.perf_counter()
    try:
        with bar(run.settings, as_json) as on_event:
            run.train(on_event)
    except KeyboardInterrupt:
        Console(stderr=True).print(Text(f"\nStopped. Go on with: tacit train --resume {run.path}"))
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - began
    popular_model = _popular(run.graph, run.settings.evaluation.memory_mb)
    splits = run.metrics if popular_model is not None else ()
    baselines = {s: evaluated(popular_model, run.graph, s, run.settings) for s in splits}  # type: ignore[arg-type]
    if as_json:
        facts = {split: metrics.json() for split, metrics in run.metrics.items()}
        popular = {split: metrics.json() for split, metrics in baselines.items()}
        about = {"out": str(run.path), "best_epoch": run.best_epoch, "seconds": round(seconds, 2)}
        claim = run.claim
        about |= {"epsilon": claim["epsilon"], "delta": claim.get("delta"), "guarantee": claim["guarantee"]}
        print(json.dumps(about | {"metrics": facts, "popularity": popular}))
        return
    rows = [(split, *_numbers(metrics)) for split, metrics in run.metrics.items()]
    rows += [(f"{split}, by popularity alone", *_numbers(metrics)) for split, metrics in baselines.items()]
    settings = run.settings.evaluation
    title = f"Filtered ranks, sides: {settings.sides}, ties: {settings.ties}"
    if rows:
        show.table("split", *COLUMNS, rows=rows, title=title)
    else:
        show.warn(["there are no validation and test triples, so nothing is measured: --split 0.8,0.1,0.1 makes some"])
    if isinstance(run.settings.privacy, Sound):
        show.say(f"{seconds:.1f} s. {in_words(run.claim)}")
    else:
        paper = by_the_paper(run.settings, run.events())
        told = run.claim["why"] + paper if paper else "Not private: the rows tell of the triples."
        show.say(f"Best at epoch {run.best_epoch}; {seconds:.1f} s. {told}")
    show.say(f"Kept in {run.path}. To try next: tacit evaluate {run.path} --per-relation")


def _popular(graph: Graph, memory_mb: float) -> Model | None:
    """The baseline, where its two tables of every relation with every entity fit into the memory for ranking."""
    from tacit.models.model import Model

    if 8 * len(graph.relations) * len(graph.entities) > memory_mb * 2**20:
        show.warn_aside("popularity is left out: it would take more memory than evaluation.memory_mb allows")
        return None
    return Model.popular(graph)


def _numbers(metrics: Metrics) -> tuple[str, ...]:
    return tuple(f"{getattr(metrics, name):.4f}" if name != "mr" else f"{metrics.mr:.1f}" for name in COLUMNS)


@contextmanager
def bar(settings: Settings, quiet: bool, doing: str = "training") -> Iterator[Any]:
    """A progress bar on a terminal, with loss, speed, validation MRR and time left; nothing anywhere else."""
    if quiet or not sys.stderr.isatty():
        yield lambda event: None
        return
    columns = (
        "{task.fields[doing]}",
        "epoch {task.completed}/{task.total}",
        BarColumn(),
        "loss {task.fields[loss]}",
        "{task.fields[speed]} examples/s",
        "valid MRR {task.fields[mrr]}",
        TimeRemainingColumn(),
    )
    with show.progress(*columns) as drawn:
        task = drawn.add_task("", total=settings.training.epochs, doing=doing, loss="-", speed="-", mrr="-")

        def on_event(event: Event) -> None:
            if event["event"] == "kernels":
                if event["seconds"] is None:
                    drawn.update(task, doing="getting kernels ready")
                else:
                    drawn.update(task, doing=doing)
                    if event["seconds"] > 1:
                        drawn.console.print(Text(f"The {event['name']} kernels were ready after {event['seconds']:.0f} "
                                                 "s; what was compiled is kept for the next time."))  # fmt: skip
            elif event["event"] == "epoch":
                speed = f"{event['examples'] / max(event['seconds'], 1e-9):,.0f}"
                drawn.update(task, completed=event["epoch"], loss=_mean(event["loss"]), speed=speed)
            elif event["event"] == "validation":
                drawn.update(task, mrr=f"{_mean(event['mrr'])} (best {_mean(event['best'])})")

        yield on_event


def _mean(values: list[float | None]) -> str:
    """Over parties; some may rest, or have nothing to validate on."""
    there = [value for value in values if value is not None]
    return f"{np.mean(there):.4f}" if there else "-"


def evaluate(
    path: RunPath,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    sides: Annotated[str | None, typer.Option(help="tails, heads or both. Default: the run's.")] = None,
    ties: Annotated[str | None, typer.Option(help="realistic, optimistic, pessimistic. Default: the run's.")] = None,
    per_relation: Annotated[bool, typer.Option("--per-relation", help="A line for each relation.")] = False,
    typed: Annotated[
        bool, typer.Option("--typed", help="Rank only among entities the relation has in train on that side.")
    ] = False,
    classify: Annotated[bool, typer.Option("--classify", help="Tell true triples from corrupted ones, too.")] = False,
    probe: Annotated[
        Path | None, typer.Option(help="A file of entity, tab, class: how well a linear probe tells classes.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Another run: do its embeddings make the same clusters (NMI)?")
    ] = None,
    memory_mb: Annotated[int | None, typer.Option(help="For ranking. Default: the run's.")] = None,
    party: OfParty = None,
    as_json: AsJson = False,
) -> None:
    """Rank the true answers among all entities; classify, probe and compare if asked.

    Example:
      tacit evaluate runs/first --per-relation --classify
    """
    from tacit.evaluation import classify_triples, rank, typed_candidates
    from tacit.federated import is_federation, open_run

    run = open_run(path, party)
    wanted, graph = run.settings.evaluation, run.graph
    if split not in SPLITS:
        raise TacitError(f"--split is train, valid or test; not {split!r}.")
    if not len(graph.splits[split]):
        raise TacitError(f"{path}: its graph has no {split} triples.")
    order, memory = ties or wanted.ties, wanted.memory_mb if memory_mb is None else memory_mb
    with show.busy("ranking", as_json):
        ranks = {
            label: rank(
                model,
                graph.splits[split].triples,
                graph.statements.triples,
                sides=sides or wanted.sides,  # type: ignore[arg-type]
                memory_mb=memory,
                typed=typed_candidates(graph) if typed else None,
            )
            for label, model in (("model", run.model), ("popularity", _popular(graph, memory)))
            if model is not None
        }
    overall = {label: found.metrics(order) for label, found in ranks.items()}  # type: ignore[arg-type]
    by_side = ranks["model"].by_side(order)  # type: ignore[arg-type]
    by_relation = {graph.relations[r]: m for r, m in ranks["model"].by_relation(order).items()}  # type: ignore[arg-type]
    facts: dict[str, Any] = {
        "run": str(path),
        "split": split,
        "sides": sides or wanted.sides,
        "ties": order,
        "filtered": True,
    }
    facts |= {"typed": typed} | {label: metrics.json() for label, metrics in overall.items()}
    facts |= {"by_side": {side: metrics.json() for side, metrics in by_side.items()}}
    if per_relation:
        facts["by_relation"] = {name: metrics.json() for name, metrics in by_relation.items()}
    if classify:
        found = classify_triples(run.model, graph, seed=run.settings.seed)
        facts["classification"] = {"accuracy": found.accuracy, "count": found.count}
    if probe is not None:
        facts["probe"] = asdict(_probe(run, probe))
    if compare is not None:
        facts["cluster_agreement"] = _compared(run, open_run(compare, party if is_federation(compare) else None))
    if as_json:
        print(json.dumps(facts))
        return
    rows = [(label, *_numbers(metrics), metrics.count) for label, metrics in (*overall.items(), *by_side.items())]
    title = f"{split}: filtered ranks{' among fitting types' if typed else ''}, ties: {order}"
    show.table("", *COLUMNS, "questions", rows=rows, title=title)
    if per_relation:
        lines = sorted(by_relation.items(), key=lambda item: -item[1].count)
        show.table("relation", *COLUMNS, "questions", rows=[(n, *_numbers(m), m.count) for n, m in lines])
    if classify:
        show.say(f"Triple classification: accuracy {facts['classification']['accuracy']:.4f}")
    if probe is not None:
        found_probe = facts["probe"]
        show.say(
            f"Linear probe: accuracy {found_probe['accuracy']:.4f}, macro F1 {found_probe['macro_f1']:.4f} on "
            f"{found_probe['count']:,} entities; always the commonest class: {found_probe['majority']:.4f}"
        )
    for k, agreement in facts.get("cluster_agreement", {}).items():
        show.say(f"{k} clusters: normalised mutual information {agreement:.4f}")


def _probe(run: Run, file: Path) -> Any:
    """Fit on four of five entities in the order of their names, score on the fifth."""
    from tacit.evaluation import classify_entities

    ids, classes = [], []
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is no UTF-8 text.") from None
    for number, line in enumerate(lines, 1):
        name, tab, label = line.partition("\t")
        if not tab or not label:
            raise BadInput(f"{file}:{number}: found {excerpt(line)}; expected an entity, a tab, its class.")
        ids.append(run.graph.entities.id(name))
        classes.append(label)
    order = np.argsort(ids)
    rows, labels = np.array(ids)[order], np.unique(np.array(classes)[order], return_inverse=True)[1]
    return classify_entities(run.model.tables.entity[rows], labels, train=np.arange(len(rows)) % 5 != 4)


def _compared(run: Run, other: Run) -> dict[int, float]:
    from tacit.evaluation import cluster_agreement

    there = run.graph.entities.positions(other.graph.entities)
    common = np.flatnonzero(there >= 0)
    if len(common) < 4:
        raise TacitError("the two runs have fewer than four entities in common: there is nothing to cluster")
    return cluster_agreement(run.model.tables.entity[common].cpu(), other.model.tables.entity[there[common]].cpu())


def predict(
    path: RunPath,
    head: Annotated[str | None, typer.Option(help="The head, if it is known.")] = None,
    relation: Annotated[str | None, typer.Option(help="The relation, if it is known.")] = None,
    tail: Annotated[str | None, typer.Option(help="The tail, if it is known.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many answers.")] = 10,
    known: Annotated[bool, typer.Option("--known", help="Also answers that the graph has already.")] = False,
    party: OfParty = None,
    as_json: AsJson = False,
) -> None:
    """The most plausible answers, by name, for the one part of a triple that is left out.

    Example:
      tacit predict runs/first --head aspirin --relation treats --top 10
    """
    from tacit.federated import open_run

    found = open_run(path, party).predict(head=head, relation=relation, tail=tail, top=top, known=known)
    if as_json:
        print(json.dumps([asdict(answer) for answer in found], ensure_ascii=False))
        return
    rows = [(a.head, a.relation, a.tail, f"{a.score:.4f}", "known" if a.known else "") for a in found]
    show.table("head", "relation", "tail", "score", "", rows=rows)


def export(
    path: RunPath,
    out_path: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    format: Annotated[str, typer.Option(help="npy, tsv or safetensors: the rows; nt: predicted links.")] = "npy",
    top: Annotated[int, typer.Option(min=1, help="For nt: links per relation.")] = 100,
    force: Force = False,
    party: OfParty = None,
    as_json: AsJson = False,
) -> None:
    """Write the rows with their names, or the links a model predicts.

    Example:
      tacit export runs/first --format npy --out vectors
    """
    from tacit.federated import open_run
    from tacit.privacy.plan import in_words

    run = open_run(path, party)
    with show.busy("writing", as_json):
        files = run.export(out_path, format=format, top=top, force=force)  # type: ignore[arg-type]
    claim = run.claim
    if as_json:
        print(json.dumps({"out": str(out_path), "files": files, "epsilon": claim["epsilon"]}))
        return
    show.say(f"Written to {out_path}: {', '.join(files)}.")
    if claim["epsilon"] is None and "simulated_epsilon" not in claim:
        show.warn(["trained without privacy: whoever gets these can learn of the triples they were trained on"])
    else:
        show.say(in_words(claim))
