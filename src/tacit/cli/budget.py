"""`tacit budget`: what may be spent of the privacy of one's data, what was, and what a training would cost."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.options import AsJson, Columns, DataFolder, Header, Separator, SkipBad, one_of, read_any
from tacit.errors import TacitError

budget = typer.Typer(no_args_is_help=True, help="Name your data once, say what it may cost, see what was spent.")
Name = Annotated[str, typer.Argument(help="The holding: a name for the data, chosen once.")]
Home = Annotated[
    Path | None, typer.Option("--home", help="Where holdings are. Default: $TACIT_HOME/holdings, or ~/.tacit/holdings.")
]

# The accountant takes a second to load: the commands that need it do.


@budget.command("open")
def budget_open(
    name: Name,
    epsilon: Annotated[float, typer.Option(help="What everything together may cost, for ever.")],
    delta: Annotated[float, typer.Option(help="At which delta: well below 1 over the number of triples.")],
    graph_path: Annotated[
        str | None, typer.Option("--graph", help="The data it is for: no other holding may have any of it.")
    ] = None,
    party: Annotated[str | None, typer.Option(help="Of a folder of parties: the data of this one.")] = None,
    columns: Columns = None,
    separator: Separator = None,
    header: Header = None,
    skip_bad: SkipBad = False,
    data: DataFolder = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Open a holding: the privacy budget of data that has this name from now on.

    Example:
      tacit budget open ward-7 --epsilon 8 --delta 1e-6 --graph hospital.tsv
    """
    from tacit.parties import Parties
    from tacit.privacy.budget import Holding, account

    graph = None
    if graph_path is not None:
        with show.busy(f"reading {graph_path}", as_json):
            found = read_any(graph_path, data, columns, separator, header, skip_bad)
            if isinstance(found, Parties) and party is not None:
                if party not in found.names:
                    raise TacitError(f"{graph_path} has no party {party!r}. There are: {', '.join(found.names)}.")
                found = found[found.names.index(party)]
            elif party is not None:
                raise TacitError(f"{graph_path} is one graph: leave out --party.")
            graph = one_of(found, graph_path)
    elif party is not None:
        raise TacitError("--party is one of a --graph: say which.")
    held = Holding.begin(name, epsilon=epsilon, delta=delta, graph=graph, home=home)
    if as_json:
        print(json.dumps(account(held)))
        return
    show.say(
        f"Opened {name}: epsilon {epsilon:g} at delta {delta:g}, for one triple more or less. Nothing is spent yet."
    )
    show.say(f"Kept in {held.home / name}. Keep it: without it nothing more can be spent.")


@budget.command("show")
def budget_show(
    name: Annotated[str | None, typer.Argument(help="One holding, with its entries. Default: all of them.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show what was spent and what is left, of all holdings or of one.

    Example:
      tacit budget show ward-7
    """
    from tacit.privacy.budget import Holding, account, explain, home_folder, names

    if name is not None:
        held = Holding.load(name, home)
        if as_json:
            print(json.dumps(account(held) | {"entries": [entry.json() for entry in held.entries]}))
            return
        show.say(explain(held))
        listed = [(str(e.number), e.kind, e.time, _about(e.body), e.hash[:16]) for e in held.entries]
        show.table("entry", "kind", "time", "what", "hash", rows=listed)
        return
    told: list[dict[str, Any]] = []
    for each in names(home):
        try:
            told.append(account(Holding.load(each, home)))
        except TacitError as error:
            told.append({"name": each, "error": str(error)})
    wrong = [each for each in told if "error" in each]
    if as_json:
        print(json.dumps({"home": str(home_folder(home)), "holdings": told}))
    elif not told:
        show.say(
            f"There is no holding in {home_folder(home)}. Open one: tacit budget open NAME --epsilon 8 --delta 1e-6"
        )
    else:
        rows: list[tuple[str, ...]] = [
            (h["name"], f"{h['epsilon']:g}", f"{h['delta']:g}", f"{h['used']['share']:.1%}",
             f"{h['left']['share']:.1%}", str(len(h["runs"])), "closed" if h["closed"] else "open")
            for h in told if "error" not in h
        ]  # fmt: skip
        rows += [(h["name"], "-", "-", "-", "-", "-", "refused") for h in wrong]
        show.table("holding", "epsilon", "delta", "used", "left", "runs", "", rows=rows)
    if wrong:
        raise TacitError("\n".join(each["error"] for each in wrong))


@budget.command("plan")
def budget_plan(
    n: Annotated[int, typer.Option("--n", help="Triples, as far as that is public: rounded or guessed.")],
    batch: Annotated[int, typer.Option(help="Triples per step, on average.")],
    epochs: Annotated[float | None, typer.Option(help="How long; or --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="How long; or --epochs.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="What the run may cost. Default: all that --budget has.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="At which delta. Default: that of --budget.")] = None,
    sigma: Annotated[float | None, typer.Option(help="The noise multiplier, to learn what it costs.")] = None,
    name: Annotated[str | None, typer.Option("--budget", help="A holding: no more than it has left.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Say how much noise an epsilon asks for, or what epsilon a noise costs; nothing is read but the holding.

    Example:
      tacit budget plan --epsilon 4 --delta 1e-5 --n 272115 --batch 16384 --epochs 60
    """
    from tacit.privacy.budget import Holding, plan

    logging.getLogger("absl").setLevel(logging.ERROR)  # the accountant speaks of every order that it tries in vain
    held = None if name is None else Holding.load(name, home)
    if delta is None and held is None:
        raise TacitError("Say at which --delta, or of which --budget.")
    with show.busy("accounting", as_json):
        made = plan(
            n=n, batch=batch, epochs=epochs, steps=steps, epsilon=epsilon, delta=delta, sigma=sigma, holding=held
        )
    if as_json:
        print(json.dumps(made.json()))
        return
    first = made.rows[0]
    rows = [
        (row.batch, row.steps, f"{row.rate:.3g}", f"{row.sigma:.4g}", f"{row.epsilon:.3g}",
         "-" if row.share is None else f"{row.share:.1%}", {None: "-", True: "yes", False: "no"}[row.fits],
         f"x {row.signal / first.signal:.2f}")
        for row in made.rows
    ]  # fmt: skip
    title = f"{made.epochs:g} epochs of {made.n:,} triples, delta {made.delta:g}" + (f", from {name}" if name else "")
    show.table("batch", "steps", "rate", "sigma", "epsilon", "of the budget", "fits", "signal", rows=rows, title=title)
    show.say(f"Counts released one time have the same epsilon, {made.epsilon:.3g}, with sigma {made.once:.4g}.")
    if first.fits is False:
        show.warn(["this would be refused: there is not so much left"])


@budget.command("close")
def budget_close(name: Name, home: Home = None, as_json: AsJson = False) -> None:
    """Close a holding: nothing can be reserved from it any more, and no other gets its statements.

    Example:
      tacit budget close ward-7
    """
    from tacit.privacy.budget import Holding, account

    held = Holding.load(name, home)
    held.close()
    if as_json:
        print(json.dumps(account(held)))
    else:
        show.say(f"Closed {name}: nothing can be reserved any more.")


def _about(body: Any) -> str:
    """An entry's body in a few words."""
    if "run" in body:
        return f"{body['run']}: {sum(segment['count'] for segment in body['segments']):,} releases"
    if "reservation" in body:
        used = sum(segment["count"] for segment in body["segments"])
        return f"of entry {body['reservation']}: " + (f"{used:,} releases" if used else "void")
    return f"epsilon {body['epsilon']:g}, delta {body['delta']:g}" if "epsilon" in body else ""
