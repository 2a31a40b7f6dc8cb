"""Run folders to one page of HTML that needs nothing else: for a privacy officer first, then for whoever checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tacit.errors import BadInput
from tacit.federated import FederatedRun
from tacit.folders import write_whole
from tacit.reporting.facts import gather
from tacit.reporting.page import page
from tacit.run import Run


def report(
    runs: Sequence[str | Path | Run | FederatedRun], out: str | Path, *, internal: bool = False, title: str = ""
) -> Path:
    """Write one self-contained page on some runs.

    Parameters
    ----------
    runs
        Runs, or their folders. Without `internal` what stands in `shareable/` is enough, and nothing else is read.
    out
        The file. What stood there is replaced at once, or kept if anything fails.
    internal
        For the owners: scores, attacks and audits too, which were measured with the triples at hand. The page says on
        every sheet that it is not to be handed out.
    title
        What the page is called.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise BadInput(f"{out.parent}: no such folder to write {out.name} into.")
    if out.is_dir():
        raise BadInput(f"{out}: is a folder; expected the name of a file.")
    text = page(gather(runs, internal=internal), internal=internal, title=title)
    write_whole(out, text.encode(), mode=0o600 if internal else 0o644)
    return out
