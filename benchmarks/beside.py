"""A way to time another repository's code beside ours, by hand: seconds per epoch of commands that train.

    python benchmarks/beside.py --theirs "CMD with {epochs}" --epochs 1 4 [--ours "CMD with {epochs}"] [--repeat 3]

Each command is run with few epochs and with many. The difference in time, divided by the difference in epochs, is what
an epoch takes: starting, loading and compiling are in both, and drop out. Rounds are interleaved, so that a machine
that is busy for a while is busy for both; of each length the best time counts. Turn off in the commands whatever is
not training (evaluation, checkpoints) as far as it goes with the epochs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import environment

FIELD = "{epochs}"
LAST_LINES = 20


def filled(template: str, epochs: int) -> str:
    """The command line with its number of epochs. Other braces stay as they are: JSON and shells have theirs."""
    return template.replace(FIELD, str(epochs))


def seconds_of(command: str, *, cwd: Path | None, shell: bool) -> float:
    """How long a command runs; one that fails ends this program, with what it said last."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command if shell else shlex.split(command),
            cwd=cwd,
            shell=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise SystemExit(f"could not be run: {command}\n{error}") from error
    took = time.perf_counter() - began
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()[-LAST_LINES:] or ["(it wrote no error)"]
        raise SystemExit("\n".join([f"ended with exit code {done.returncode}: {command}", *said]))
    return took


def per_epoch(label: str, took: dict[int, list[float]]) -> float:
    """Seconds per epoch from the best times of the short and of the long run."""
    few, many = sorted(took)
    short, long = min(took[few]), min(took[many])
    if long <= short:
        raise SystemExit(
            f"{label}: {many} epochs took {long:.3f} s, and {few} took {short:.3f} s, which is not less:"
            " an epoch is lost in the noise. Use more epochs (--epochs), or more rounds (--repeat)."
        )
    return (long - short) / (many - few)


def checked(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> dict[str, tuple[str, Path | None]]:
    """The commands by label, each with the folder to run it in; ends with a sentence where something is amiss."""
    few, many = chosen.epochs
    if min(few, many) < 1:
        parser.error(f"--epochs: at least 1, not {min(few, many)}")
    if few == many:
        parser.error(f"--epochs: two different numbers, not {few} twice, since it is their difference that is timed")
    if chosen.repeat < 1:
        parser.error(f"--repeat: at least 1, not {chosen.repeat}")
    if chosen.cwd is not None and not chosen.cwd.is_dir():
        parser.error(f"--cwd: there is no folder {chosen.cwd}")
    given: dict[str, tuple[str, Path | None]] = {chosen.label: (chosen.theirs, chosen.cwd)}
    if chosen.ours is not None:
        if chosen.label == "ours":
            parser.error("--label: some other name than ours, which is the label of --ours")
        given["ours"] = (chosen.ours, None)
    for option, template in (("--theirs", chosen.theirs), ("--ours", chosen.ours)):
        if template is not None and FIELD not in template:
            parser.error(f"{option}: the command has to say {FIELD} where the number of epochs goes: {template}")
        if template is not None and not chosen.shell:
            try:
                shlex.split(template)
            except ValueError as error:
                parser.error(f"{option}: {error}: {template}")
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--theirs", "--short", required=True, metavar="CMD", help="the other's command, with {epochs} in it"
    )
    parser.add_argument("--ours", default=None, metavar="CMD", help="our command for the same, with {epochs} in it")
    parser.add_argument("--epochs", type=int, nargs=2, default=(1, 4), metavar=("FEW", "MANY"))
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the best of each length counts")
    parser.add_argument("--cwd", type=Path, default=None, metavar="DIR", help="the folder the other's command runs in")
    parser.add_argument("--label", default="theirs", help="the name of the other in the table")
    parser.add_argument("--shell", action="store_true", help="run the commands by a shell, for pipes and variables")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json")
    chosen = parser.parse_args()
    commands = checked(parser, chosen)
    lengths = sorted(chosen.epochs)
    took: dict[str, dict[int, list[float]]] = {label: {n: [] for n in lengths} for label in commands}
    for _ in range(chosen.repeat):
        for label, (template, cwd) in commands.items():
            for epochs in lengths:
                took[label][epochs].append(seconds_of(filled(template, epochs), cwd=cwd, shell=chosen.shell))
    rows: list[dict[str, Any]] = []
    for label, (template, cwd) in commands.items():
        each = per_epoch(label, took[label])
        once = min(took[label][lengths[0]]) - lengths[0] * each
        row: dict[str, Any] = {"what": label, "command": template, "cwd": None if cwd is None else str(cwd)}
        row |= {"seconds_per_epoch": each, "seconds_beside": once}
        row["runs"] = [{"epochs": n, "seconds": seconds} for n, seconds in took[label].items()]
        rows.append(row)
    ratio = rows[0]["seconds_per_epoch"] / rows[1]["seconds_per_epoch"] if len(rows) > 1 else None
    heads = (*(f"{n} epoch{'s' if n > 1 else ''}" for n in lengths), "beside", "s/epoch", "ratio")
    wide = max(12, *(len(label) + 2 for label in commands))
    print(f"{'':{wide}}" + "".join(f"{head:>14}" for head in heads))
    for row in rows:
        best = [min(run["seconds"]) for run in row["runs"]]
        line = "".join(f"{n:14.4f}" for n in (*best, row["seconds_beside"], row["seconds_per_epoch"]))
        of_ours = row["seconds_per_epoch"] / rows[-1]["seconds_per_epoch"]
        print(f"{row['what']:{wide}}{line}" + ("" if ratio is None else f"{of_ours:14.2f}"))
    if chosen.out is not None:
        result = {
            "schema": "tacit.benchmark/1",
            "benchmark": "beside",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "epochs": lengths,
            "repeat": chosen.repeat,
            "shell": chosen.shell,
            "rows": rows,
            "ratio": ratio,
            "environment": environment(),
        }
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
