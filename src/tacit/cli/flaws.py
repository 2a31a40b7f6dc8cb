"""`tacit flaws`: what is wrong with the published mechanisms, shown."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer

from tacit.cli import show
from tacit.cli.options import AsJson
from tacit.errors import TacitError


def flaws(
    only: Annotated[list[int] | None, typer.Option("--only", help="The number of a flaw; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the papers claim of their mechanisms, and what can be measured or computed.

    Each number is made anew: exact where a distribution can be written down, by an accountant where two accounts of one
    release are compared, and a lower bound with 95% confidence where thousands of real steps are looked at.

    Example:
      tacit flaws --only 1 --only 8
    """
    from tacit.privacy.counterexamples import FLAWS

    known = [int((each.__doc__ or "").partition(":")[0]) for each in FLAWS]
    if wrong := [number for number in only or () if number not in known]:
        raise TacitError(f"there is no flaw {wrong[0]} that can be run. There are: {', '.join(map(str, known))}.")
    found = [each() for each, number in zip(FLAWS, known, strict=True) if not only or number in only]
    if as_json:
        listed = [asdict(flaw) | {"found": flaw.found if math.isfinite(flaw.found) else None, "refuted": flaw.refuted}
                  for flaw in found]  # fmt: skip
        print(json.dumps({"flaws": listed}))
        return
    rows = [(str(f.number), f.mechanism, f.claim, f"{f.claimed:.4g}", f"{f.found:.4g}", f.how) for f in found]
    show.table("", "mechanism", "what", "claimed", "found", "how", rows=rows,
               title="Published mechanisms: claimed, and found")  # fmt: skip
    show.say("That is why none of them claims an epsilon here. What is sound in their place: docs/published.md.")
