"""What a run means to who is no engineer: who shared what, what is guaranteed, what is not, what attackers managed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tacit.reporting.facts import Facts, Inside
from tacit.reporting.markup import count, share_of, sized, times

RECIPES = {
    "local": "Each party trained alone.",
    "central": "All parties' triples were put in one place and trained on there.",
    "fede": "In every round each party sent its entity rows to the server, which gave the mean back.",
    "fedr": "In every round each party sent its relation rows to the server, which gave the mean back; entity rows "
    "stayed at home.",
    "private_fede": "Parties sent entity rows, or counts, that carry noise; the server gave the mean, or sum, back.",
    "private_fedr": "Parties sent relation rows, or counts, that carry noise; the server gave the mean, or sum, back.",
    "dpkge": "Confidential statements were trained on with noise, the others without.",
}
ATTACKS = {
    "si": "clusters the relation vectors of every pair of entities",
    "cip": "compares what it is given with what it had",
    "cia": "turns a tail round and watches who turns it back",
    "counts": "reads the noisy counts that a triple adds to",
    "lira": "compares with federations of its own that have the triple, and that do not",
    "trajectory": "judges the course of a score over rounds by federations of its own",
    "blind": "looks at nothing that was sent",
}
ADVERSARIES = {
    "server": "the server",
    "party": "another party",
    "server+party": "the server with a party",
    "outsider": "an outsider",
}
SIMULATION = "The noise was seeded, so that others can repeat the run: it is a simulation."
MAY_LEAVE = "Nothing was sent to anyone. shareable/ holds a model that may be handed out."
FOR_OWNERS = (
    "Attacks are measured with the triples at hand, so what they found is for the owners: ask them for the internal "
    "report."
)
TARGETS = {
    "existing": "against triples that no one holds",
    "canaries": "random triples, half of them planted",
    "held": "against true triples of another party",
}


def summary(runs: Sequence[Facts], internal: bool) -> str:
    return '<div class="cards">' + "".join(_card(run, internal) for run in runs) + "</div>"


def _card(run: Facts, internal: bool) -> str:
    entries = [
        ("Who shared what", _shared(run)),
        ("What is guaranteed", _guaranteed(run)),
        ("What is not", _not(run)),
        ("What attackers managed", _managed(run) if internal else FOR_OWNERS),
    ]
    body = "".join(f"<dt>{escape(term)}</dt><dd>{text}</dd>" for term, text in entries)
    return f"<article><h3>{escape(run.name)} {_badge(run)}</h3><dl>{body}</dl></article>"


def _badge(run: Facts) -> str:
    if run.epsilon is not None:
        return f'<span class="badge good">epsilon {run.epsilon:.3g}</span>'
    if "simulated_epsilon" in run.privacy:
        return '<span class="badge">simulation</span>'
    return '<span class="badge bad">no guarantee</span>'


def _shared(run: Facts) -> str:
    words = [RECIPES.get(run.recipe or "", "")]
    traffic = run.traffic
    if not traffic.messages:
        words.append("Nothing was sent to anyone." if not run.model else MAY_LEAVE)
        return escape(" ".join(words).strip())
    parties = sum(1 for size in traffic.sent if size)
    kinds = ", ".join(kind for kind, _ in sorted(traffic.kinds.items(), key=lambda item: -item[1][1])[:4])
    rounds = f" over {count(traffic.rounds, 'round')}" if traffic.rounds else ""
    words.append(
        f"{count(parties, 'party', 'parties')} sent {sized(sum(traffic.sent))} to the server and got "
        f"{sized(sum(traffic.received))} back{rounds} ({kinds})."
    )
    if learns := run.privacy.get("the_server_learns_of_each_party"):
        words.append(f"The server learns of each party: {learns}.")
    return escape(" ".join(words).strip())


def _guaranteed(run: Facts) -> str:
    claim = run.privacy
    if run.epsilon is None:
        if "simulated_epsilon" in claim:
            return f"Nothing. {SIMULATION}"
        return escape(f"Nothing. {claim.get('why', '')}".strip())
    epsilon, delta = run.epsilon, float(claim["delta"])
    return escape(
        f"Differential privacy for {claim['unit']}: epsilon {epsilon:.3g} at delta {delta:g}. Leave that out, and the "
        f"chance of whatever anyone concludes from what left changes by a factor of at most {times(epsilon)}, but for "
        f"a remainder of {delta:g}. At worst, someone who knows all else, and finds it as likely in as not, can "
        f"be right {share_of(_certainty(epsilon, delta))} of the time; a coin is right 50%."
    )


def _certainty(epsilon: float, delta: float) -> float:
    """How often at most a guess is right of which of two neighbouring graphs it was, if each is as likely."""
    odds = math.exp(min(epsilon, 50.0))
    return min(1.0, (odds + delta) / (1 + odds))


def _not(run: Facts) -> str:
    listed = run.privacy.get("not_covered")
    if run.epsilon is None or not listed:
        return "Everything: rows, sums and scores tell of the triples, and no one has bounded how much."
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in listed) + "</ul>"


def _managed(run: Facts) -> str:
    inside = run.inside
    assert inside is not None
    words = []
    tried = [about for about in inside.attacks if about["ways"] and about["attack"] != "blind"]
    if (found := strongest(inside)) is not None:
        strong, last = found
        chance = last["auc"]["value"]
        words.append(
            f"The strongest of {count(len(tried), 'membership attack')} was {strong['attack']} by "
            f"{ADVERSARIES.get(strong['adversary'], strong['adversary'])} "
            f"({TARGETS.get(strong['targets'], strong['targets'])}): asked for a member and another triple, it picks "
            f"the member {chance:.0%} of the time; a coin, 50%. {_risk(last)}"
        )
        blind = [
            about
            for about in inside.attacks
            if about["attack"] == "blind" and about["targets"] == strong["targets"] and about["ways"]
        ]
        if blind:
            words.append(f"Who looks at nothing that was sent: {best(blind[0])[1]['auc']['value']:.0%}.")
    for reason in dict.fromkeys(str(about["nothing"]) for about in inside.attacks if about["nothing"]):
        who = {ADVERSARIES.get(a["adversary"], a["adversary"]) for a in inside.attacks if a["nothing"] == reason}
        words.append(f"Nothing to attack for {' and '.join(sorted(who))}: {reason}.")
    rates = [row for row in inside.found.get("reconstruction", []) if row.get("err") is not None]
    if rates:
        most = max(rates, key=lambda row: (row["leak"], row["err"]))
        words.append(
            f"The server with a party that gives away {most['leak']:.0%} of its names can name {most['err']:.0%} of "
            f"{most['victim']}'s entities and {most['trr']:.0%} of its triples."
        )
    if inside.audit is not None:
        words.append(_audited(inside.audit))
    if not words and run.recipe == "local":
        return "Nothing was sent, so there is nothing for others to attack."
    if not words:
        return "No one has attacked it yet: <code>tacit attack</code>, <code>tacit audit</code>."
    return " ".join(escape(word) for word in words)


def _risk(last: dict[str, Any]) -> str:
    rate = last["tpr"].get("0.01")
    return (
        "" if rate is None else f"Accusing one other in a hundred wrongly, it finds {rate['value']:.0%} of the members."
    )


def claim_of(audit: Any) -> float | None:
    """What an audit stands beside; of a simulation nothing, for it claims nothing."""
    return None if audit["simulation"] or audit["claimed"] is None else float(audit["claimed"])


def status_of(audit: Any) -> str:
    """What an audit came to."""
    return f"{audit['status']}{', of a simulation' if audit['simulation'] else ''}"


def _audited(audit: Any) -> str:
    claimed = claim_of(audit)
    told = "nothing claimed" if claimed is None else f"claimed {claimed:.3g}"
    return (
        f"An audit with {audit['canaries']:,} canaries measured an epsilon of at least {audit['lower_bound']:.3g} "
        f"({told}): {status_of(audit)}."
    )


def strongest(inside: Inside) -> tuple[Any, dict[str, Any]] | None:
    """The membership attack with the largest AUC and what it reached, as `tacit.attacks.attack.Findings` chooses it."""
    tried = [about for about in inside.attacks if about["ways"] and about["attack"] != "blind"]
    tried = [about for about in tried if about["targets"] != "existing"] or tried
    if not tried:
        return None
    found = max(tried, key=lambda about: best(about)[1]["auc"]["value"])
    return found, best(found)[1]


def best(about: Any) -> tuple[str, dict[str, Any]]:
    """The way with the largest AUC in the last round, and what it reached."""
    way = max(about["ways"], key=lambda name: about["ways"][name]["last"]["auc"]["value"])
    return way, about["ways"][way]["last"]
