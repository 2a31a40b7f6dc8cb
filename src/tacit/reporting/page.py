"""The page: what it says, in which order, and how it looks. No script, no outside request, one file.

First in plain words, run by run: who shared what, what is guaranteed, what is not, what attackers managed. Then the
numbers. Every plot has its numbers in a table beside it, for eyes that do not see it and programs that read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from tacit import __version__
from tacit.privacy.plan import in_words
from tacit.reporting.drawing import COLOURS, GREY, Panel, dash, drawn, ticks, variables
from tacit.reporting.facts import Cloud, Facts, Inside
from tacit.reporting.markup import count, details, figure, key, number, sized, table
from tacit.reporting.words import ADVERSARIES, ATTACKS, SIMULATION, best, claim_of, status_of, strongest, summary


def page(runs: Sequence[Facts], *, internal: bool, title: str = "") -> str:
    """The whole page."""
    title = title or ("Tacit: internal report" if internal else "Tacit: report")
    sections = [
        ("summary", "In plain words", summary(runs, internal)),
        ("glance", "At a glance", _glance(runs, internal)),
    ]
    if internal:
        sections += [
            ("utility", "What the models are worth", _utility(runs)),
            ("frontier", "Privacy and worth", _frontier(runs)),
            ("attacks", "Attacks", _attacks(runs)),
            ("audits", "Audits", _audits(runs)),
        ]
    sections += [
        ("guarantees", "Guarantees, word by word", _guarantees(runs)),
        ("sent", "What was sent", _sent(runs)),
        ("map", "Maps of the entities", _maps(runs)),
    ]
    if internal:
        sections += [
            ("relations", "Relation by relation", _relations(runs)),
            ("published", "Published figures beside ours", _published(runs)),
            ("settings", "Settings and environment", _settings(runs)),
        ]
    sections = [(place, heading, body) for place, heading, body in sections if body]
    links = "".join(f'<li><a href="#{place}">{escape(heading)}</a></li>' for place, heading, _ in sections)
    body = "".join(
        f'<section id="{place}" aria-labelledby="{place}-h"><h2 id="{place}-h">{escape(heading)}</h2>{text}</section>'
        for place, heading, text in sections
    )
    banner = (
        '<p class="banner" role="note"><strong>Internal.</strong> This page holds what was measured with the triples '
        "at hand: scores, losses, attacks. It is not covered by any guarantee, and not to be handed out.</p>"
        if internal
        else ""
    )
    made = f"Made by tacit {__version__} on {datetime.now(UTC):%Y-%m-%d} from {count(len(runs), 'run')}"
    source = "whole run folders" if internal else "what stands in shareable/, and nothing else"
    return f"""<!doctype html>
<html lang="en"{' class="internal"' if internal else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="tacit {__version__}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
:root{{{variables("light")}}}
@media (prefers-color-scheme: dark){{:root{{{variables("dark")}}}}}
@media print{{:root{{{variables("light")}}}}}
{resources.files("tacit.reporting").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#summary">Skip to the content</a>
<header><h1>{escape(title)}</h1><p>{made}: {source}.</p>{banner}</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>{body}</main>
<footer><p>Only sound private training has an epsilon here; where there is none, rows tell of the triples they were
trained on. Attacks are lower bounds: what they did not find may still be there.</p></footer>
</body>
</html>
"""


def _glance(runs: Sequence[Facts], internal: bool) -> str:
    head = ["Run", "Recipe", "Guarantee", "Sent by parties", "Given to them"]
    if internal:
        head += ["Test MRR", "Hits@10", "Strongest attack (AUC)", "Audit"]
    rows = []
    for run in runs:
        promise = f"epsilon {run.epsilon:.3g}" if run.epsilon is not None else "none"
        row = [
            run.name,
            run.recipe or "one graph",
            promise,
            sized(sum(run.traffic.sent)),
            sized(sum(run.traffic.received)),
        ]
        if (inside := run.inside) is not None:
            test = inside.metrics.get("test")
            found = strongest(inside)
            reached = "-" if found is None else f"{found[1]['auc']['value']:.3f} ({found[0]['attack']})"
            row += [
                number(test, "mrr"),
                number(test, "hits10"),
                reached,
                status_of(inside.audit) if inside.audit is not None else "-",
            ]
        rows.append(row)
    return table("The runs of this report", head, rows)


def _utility(runs: Sequence[Facts]) -> str:
    """Bars of test MRR, and the course of validation."""
    shown = [(run.name, run.inside) for run in runs if run.inside is not None and run.inside.metrics.get("test")]
    if not shown:
        return ""
    most = max(inside.metrics["test"].mrr for _, inside in shown) or 1.0
    wide = 150 + 6 * max(len(name) for name, _ in shown)
    panel = Panel(wide, 8, 700 - wide, 30 * len(shown), (0, most * 1.12), (0, len(shown)))
    panel.grid([(x, f"{x:g}") for x in ticks(0, most * 1.1)], [])
    for place, (name, inside) in enumerate(shown):
        low = len(shown) - place - 1
        value = inside.metrics["test"].mrr
        panel.bar(0, value, low + 0.22, low + 0.78, COLOURS[0])
        panel.text(name, -8, 30 * place + 19, anchor="end")
        panel.text(f"{value:.3f}", (700 - wide) * value / (most * 1.12) + 5, 30 * place + 19)
    text = (
        "<p>Mean reciprocal rank of the true answer among all entities of the party that asks, filtered, on test "
        "triples that no training saw. 1 is perfect.</p>"
    )
    text += figure(
        drawn(
            720,
            30 * len(shown) + 34,
            "Test MRR of each run",
            [panel],
            "; ".join(f"{name} {inside.metrics['test'].mrr:.3f}" for name, inside in shown),
        ),
        "Test MRR",
    )
    rows = []
    for name, inside in shown:
        for whose, found in [("all", inside.metrics["test"]), *inside.by_party.items()]:
            rows.append(
                [
                    name,
                    whose,
                    *(f"{getattr(found, key):.3f}" for key in ("mrr", "hits1", "hits3", "hits10")),
                    f"{found.mr:.1f}",
                    f"{found.count:,}",
                ]
            )
    numbers = table(
        "Test ranks by party", ["Run", "Party", "MRR", "Hits@1", "Hits@3", "Hits@10", "Mean rank", "Questions"], rows
    )
    return text + details("By party", numbers) + _course(shown)


def _course(shown: Sequence[tuple[str, Inside]]) -> str:
    courses = [(name, inside.course) for name, inside in shown if len(inside.course) > 1]
    if not courses:
        return ""
    last = max(at for _, course in courses for at, _ in course)
    top = max(mrr for _, course in courses for _, mrr in course) * 1.08 or 1.0
    panel = Panel(52, 10, 500, 230, (0, last), (0, top))
    panel.grid([(x, f"{x:g}") for x in ticks(0, last)], [(y, f"{y:g}") for y in ticks(0, top)])
    for place, (name, course) in enumerate(courses):
        panel.series(course, COLOURS[place % 7], dashed=dash(place), marks=False)
        key(panel, place, name, 520)
    panel.text("round, or epoch", 500, 262, anchor="end")
    rows = [[name, str(at), f"{mrr:.4f}"] for name, course in courses for at, mrr in course]
    return figure(
        drawn(760, 280, "Validation MRR over the training", [panel]),
        "Validation MRR by round or epoch",
        table("Validation MRR", ["Run", "Round or epoch", "MRR"], rows),
    )


def _frontier(runs: Sequence[Facts]) -> str:
    """MRR by epsilon, of runs on the same graphs."""
    text = ""
    groups: dict[tuple[str, ...], list[Facts]] = {}
    for run in runs:
        if run.inside is not None and run.inside.metrics.get("test"):
            groups.setdefault(run.inside.same, []).append(run)
    for together in groups.values():
        private = sorted((r for r in together if r.epsilon is not None), key=lambda r: float(r.epsilon or 0))
        if not private:
            continue
        plain = [run for run in together if run.epsilon is None and "simulated_epsilon" not in run.privacy]
        worth = {run.name: run.inside.metrics["test"].mrr for run in together if run.inside is not None}
        low, high = (float(private[n].epsilon or 1) for n in (0, -1))
        panel = Panel(52, 10, 480, 230, (low / 1.6, high * 1.6), (0, max(worth.values()) * 1.1 or 1.0), logarithmic="x")
        marks = [e for e in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if low / 1.6 <= e <= high * 1.6]
        panel.grid([(e, f"{e:g}") for e in marks], [(y, f"{y:g}") for y in ticks(0, max(worth.values()) * 1.1)])
        for place, run in enumerate(plain):
            ends = [(low / 1.6, worth[run.name]), (high * 1.6, worth[run.name])]
            panel.series(ends, COLOURS[(place + 1) % 7], dashed=dash(place + 1), marks=False)
            key(panel, place + 1, f"{run.name}, no guarantee", 500)
        panel.points([(float(run.epsilon or 0), worth[run.name]) for run in private], COLOURS[0], 5)
        key(panel, 0, "private", 500, dot=True)
        panel.text("epsilon", 480, 262, anchor="end")
        rows = [
            [run.name, "none" if run.epsilon is None else f"{run.epsilon:.3g}", f"{worth[run.name]:.4f}"]
            for run in together
        ]
        text += figure(
            drawn(760, 280, "Test MRR by epsilon", [panel]),
            "Test MRR by epsilon, runs on the same graphs",
            table("MRR by epsilon", ["Run", "Epsilon", "Test MRR"], rows),
        )
    return text


def _attacks(runs: Sequence[Facts]) -> str:
    text = ""
    for run in runs:
        inside = run.inside
        assert inside is not None
        rows, curves = [], []
        for about in inside.attacks:
            who = ADVERSARIES.get(about["adversary"], about["adversary"])
            if about["nothing"]:
                rows.append([about["attack"], who, about["targets"], "nothing to attack", "-", "-", "-", "-"])
                continue
            way, last = best(about)
            rates = [f"{last['tpr'][rate]['value']:.3f}" if rate in last["tpr"] else "-" for rate in ("0.01", "0.001")]
            rows.append(
                [
                    about["attack"],
                    who,
                    about["targets"],
                    way,
                    f"{last['auc']['value']:.3f} ({last['auc']['low']:.3f}-{last['auc']['high']:.3f})",
                    *rates,
                    f"{about['ways'][way]['best']['f1']:.3f}",
                ]
            )
            if way in about.get("roc", {}):
                curves.append((f"{about['attack']}, {about['adversary']}, {about['targets']}", about["roc"][way]))
        more = _reconstructed(inside) + _critical(inside)
        if not rows and not more:
            continue
        text += f"<h3>{escape(run.name)}</h3>"
        if curves:
            text += _roc(run.name, curves)
        if rows:
            text += table(
                f"Is this triple in the training set? {run.name}",
                ["Attack", "Who", "Targets", "Way", "AUC (95% limits)", "True positives at 1%", "at 0.1%", "Best F1"],
                rows,
            )
        text += more
    if not text:
        return "<p>No attack was run: <code>tacit attack RUN --attack cip,si --targets existing,held</code>.</p>"
    words = "; ".join(f"<b>{name}</b> {escape(what)}" for name, what in ATTACKS.items())
    return (
        "<p>The best way of each attack, chosen after the fact, in the last round that was attacked. AUC: how often a "
        "member scores above another triple; 0.5 is chance. Always saying yes has an F1 of 0.667. What they do: "
        f"{words}.</p>{text}"
    )


def _roc(name: str, curves: Sequence[tuple[str, Any]]) -> str:
    panel = Panel(52, 10, 300, 300, (0, 1), (0, 1))
    shares = [(x, f"{x:g}") for x in (0, 0.25, 0.5, 0.75, 1)]
    panel.grid(shares, shares)
    panel.series([(0, 0), (1, 1)], GREY, dashed="2 4", marks=False)
    for place, (label, (false, true)) in enumerate(curves):
        panel.series(list(zip(false, true, strict=True)), COLOURS[place % 7], dashed=dash(place), marks=False)
        key(panel, place, label, 320)
    panel.text("false positives", 300, 332, anchor="end")
    return figure(
        drawn(
            760,
            345,
            f"ROC curves of the attacks on {name}",
            [panel],
            "True positives by false positives. The numbers are in the table below.",
        ),
        "True positives by false positives; the diagonal is chance",
    )


def _reconstructed(inside: Inside) -> str:
    found = inside.found.get("reconstruction", [])
    rows = [
        [
            row["victim"],
            f"{row['leak']:g}",
            *(f"{row[key]:.3f}" for key in ("err", "trr")),
            *(f"{row['control'][key]:.3f}" for key in ("err", "trr")),
        ]
        for row in found
        if row.get("err") is not None
    ]
    text = "".join(
        f"<p>Reconstruction: nothing to attack: {escape(reason)}.</p>"
        for reason in dict.fromkeys(row["nothing"] for row in found if row.get("nothing"))
    )
    if rows:
        text += table(
            "Reconstruction by the server and a party",
            [
                "Victim",
                "Names given away",
                "Entities named",
                "Triples found",
                "Entities, before training",
                "Triples, before training",
            ],
            rows,
        )
    return text


def _critical(inside: Inside) -> str:
    about = inside.found.get("critical")
    if about is None:
        return ""
    rows = [
        [name, f"{about[name]['median']:g}", f"{about[name]['top10']:.0%}"]
        for name in ("private", "plain")
        if name in about
    ]
    return table(
        f"Ranks of {about['statements']} confidential statements", ["Model", "Median rank", "In the top 10"], rows
    )


def _audits(runs: Sequence[Facts]) -> str:
    rows = []
    for run in runs:
        audit = None if run.inside is None else run.inside.audit
        if audit is not None:
            claimed = claim_of(audit)
            rows.append(
                [
                    run.name,
                    audit.get("party") or "-",
                    "none" if claimed is None else f"{claimed:.3g}",
                    f"{audit['lower_bound']:.3g}",
                    f"{audit['confidence']:.0%}",
                    f"{audit['canaries']:,}",
                    status_of(audit),
                ]
            )
    if not rows:
        return ""
    return (
        "<p>Canaries were put in by fair coins, and guessed from all that was released. Below the measured bound "
        "epsilon cannot be; a bound above the claim would refute it.</p>"
        + table(
            "One-run audits",
            ["Run", "Party", "Claimed epsilon", "Measured, at least", "Confidence", "Canaries", "Status"],
            rows,
        )
    )


def _guarantees(runs: Sequence[Facts]) -> str:
    """Word by word; runs of which the same is said together."""
    text, told = "", dict[str, list[str]]()
    for run in runs:
        claim = run.privacy
        if run.epsilon is None:
            why = SIMULATION if "simulated_epsilon" in claim else claim.get("why", "")
            told.setdefault(str(why), []).append(run.name)
            continue
        keys = ("unit", "neighbours", "accountant", "composition", "covers")
        rows = [[key, str(claim[key])] for key in keys if key in claim]
        if "mechanism" in claim:
            rows.append(["mechanism", ", ".join(f"{k} {v}" for k, v in claim["mechanism"].items() if v is not None)])
        text += f"<h3>{escape(run.name)}</h3><p>{escape(in_words(dict(claim)))}</p>"
        text += details("The statement", table(f"Guarantee of {run.name}", ["", ""], rows))
    for why, names in told.items():
        text += f"<h3>{escape(', '.join(names))}</h3><p>None. {escape(why)}</p>"
    return text


def _sent(runs: Sequence[Facts]) -> str:
    text = ""
    for run in runs:
        traffic = run.traffic
        if not traffic.messages:
            continue
        names = [run.party(p) for p in range(len(traffic.sent))]
        most = max([*traffic.sent, *traffic.received]) or 1
        wide = 24 + 7 * max(map(len, names))
        panel = Panel(wide, 30, 440 - wide, 34 * len(names), (0, most * 1.1), (0, len(names)))
        panel.grid([(x, sized(x)) for x in ticks(0, most * 1.1, 3)], [])
        for place, name in enumerate(names):
            low = len(names) - place - 1
            panel.bar(0, traffic.sent[place], low + 0.5, low + 0.82, COLOURS[0])
            panel.bar(0, traffic.received[place], low + 0.16, low + 0.48, COLOURS[2])
            panel.text(name, -8, 34 * place + 21, anchor="end")
        key(panel, 0, "sent", 0, dot=True, down=-10)
        key(panel, 2, "received", 80, dot=True, down=-10)
        rows = [[name, sized(traffic.sent[p]), sized(traffic.received[p])] for p, name in enumerate(names)]
        kinds = [[kind, f"{many:,}", sized(size)] for kind, (many, size) in sorted(traffic.kinds.items())]
        rounds = f" in {count(traffic.rounds, 'round')}" if traffic.rounds else ""
        text += f"<div><h3>{escape(run.name)}</h3><p>{count(traffic.messages, 'message')}{rounds}.</p>"
        text += (
            figure(
                drawn(460, 34 * len(names) + 54, f"Bytes by party, {run.name}", [panel]),
                "Bytes by party and direction",
                table("Bytes by party", ["Party", "Sent", "Received"], rows)
                + table("To the server", ["Kind", "Messages", "Bytes"], kinds),
            )
            + "</div>"
        )
    return f'<div class="pairs">{text}</div>' if text else ""


def _maps(runs: Sequence[Facts]) -> str:
    text = ""
    for run in runs:
        cloud = run.inside.cloud if run.inside is not None else run.cloud
        if cloud is not None:
            whose = f", {cloud.whose}" if cloud.whose else ""
            some = f" {len(cloud.places):,} of them are shown." if len(cloud.places) < cloud.of else ""
            text += (
                f"<div><h3>{escape(run.name + whose)}</h3>"
                + figure(
                    _map(cloud, run.name),
                    f"{cloud.of:,} entity rows on the plane that shows most of them "
                    f"({cloud.shown:.0%} of the variance).{some}",
                )
                + "</div>"
            )
    return f'<div class="pairs">{text}</div>' if text else ""


def _map(cloud: Cloud, name: str) -> str:
    low, high = cloud.places.min(0), cloud.places.max(0)
    panel = Panel(10, 10, 460, 360, (float(low[0]), float(high[0])), (float(low[1]), float(high[1])))
    for group in sorted({int(g) for g in cloud.group}, reverse=True):
        places = cloud.places[cloud.group == group]
        panel.points([(float(x), float(y)) for x, y in places], COLOURS[group % 7], 2.2)
        if cloud.groups:
            key(panel, group, cloud.groups[group], 230 * (group % 2), dot=True, down=390 + 20 * (group // 2))
    below = 20 * ((len(cloud.groups) + 1) // 2)
    return drawn(480, 390 + below, f"Map of the entities of {name}", [panel])


def _relations(runs: Sequence[Facts]) -> str:
    text = ""
    for run in runs:
        if run.inside is not None and run.inside.by_relation:
            rows = [
                [
                    name,
                    f"{found.mrr:.3f}",
                    f"{found.hits1:.3f}",
                    f"{found.hits10:.3f}",
                    f"{found.mr:.1f}",
                    f"{found.count:,}",
                ]
                for name, found in run.inside.by_relation
            ]
            head = ["Relation", "MRR", "Hits@1", "Hits@10", "Mean rank", "Questions"]
            text += details(run.name, table(f"Test ranks by relation, {run.name}", head, rows), open_it=len(runs) == 1)
    return text


def _published(runs: Sequence[Facts]) -> str:
    rows = []
    for run in runs:
        for theirs in run.inside.published if run.inside is not None else ():
            assert run.inside is not None
            test = run.inside.metrics["test"]
            hits = theirs["hits10"]
            rows.append(
                [
                    run.name,
                    theirs["dataset"],
                    theirs["paper"],
                    f"{test.mrr:.3f}",
                    f"{theirs['mrr']:.3f}",
                    f"{test.hits10:.3f}",
                    "-" if hits is None else f"{hits:.3f}",
                ]
            )
    if not rows:
        return ""
    head = ["Run", "Dataset", "Source", "Our MRR", "Published MRR", "Our Hits@10", "Published Hits@10"]
    return "<p>Of the same benchmark, scorer, recipe and number of parties. Other settings may differ.</p>" + table(
        "Published figures", head, rows
    )


def _settings(runs: Sequence[Facts]) -> str:
    text = ""
    for run in runs:
        inside = run.inside
        assert inside is not None
        about = {
            key: inside.config[key] for key in ("recipe", "settings", "federation", "origin") if key in inside.config
        }
        about = about or {"settings": inside.settings.json()}
        shown = json.dumps(about | {"environment": inside.environment}, indent=2, ensure_ascii=False)
        text += details(run.name, f'<pre tabindex="0">{escape(shown)}</pre>')
    return text
