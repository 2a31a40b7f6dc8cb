"""How long a ledger of 100,000 records takes: to verify, to open again, to ask, to add to.

    python benchmarks/ledger.py                 (--records 1000 for a quick look)

Records are updates of several models by several providers, each made from two that came before, as the newest are
chosen; each claims its privacy. They are put into the log at once, without weights, which would be another's measure.
Seconds are by the clock and of the processor, for a machine may have other things to do. Floors: verifying a signature
is Ed25519 by OpenSSL and nothing else; hashing is SHA-256 of the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from measure import row, write

from tacit.federation.keys import Identity
from tacit.ledger.cbor import CID
from tacit.ledger.ledger import Ledger
from tacit.ledger.record import PURPOSE, Claim, Genesis, Model, Record, Update
from tacit.privacy.events import Sampled, Segment

Took = tuple[float, float]
"""Seconds by the clock, and of the processor."""
RESULTS = Path(__file__).parent / "results" / "ledger.json"


def fill(ledger: Ledger, providers: list[Identity], models: int, count: int) -> list[Record]:
    """Sign `count` updates and put them into the log, without asking whether they may stand there."""
    opened = [
        ledger.open_model(providers[0], Model(ledger.genesis, f"model {n}", entity=128, relation=128)).cid
        for n in range(models)
    ]
    claim = Claim((Segment(Sampled(0.01, (1.1,)), 300),))
    last: dict[CID, list[CID]] = {model: [] for model in opened}
    records = []
    for n in range(count):
        model = opened[n % models]
        parents = tuple(sorted(last[model])) or (model,)
        update = Update(model, parents, CID.of(n.to_bytes(8, "big")), 1 << 20, claim)
        record = Record.sign(providers[n * 7 % len(providers)], update)
        last[model] = [*last[model], record.cid][-2:]
        records.append(record)
    ledger.log.append([(str(record.cid), record.data) for record in records])
    return records


def seconds(work: Callable[[], Any]) -> tuple[Took, Any]:
    began = time.perf_counter(), time.process_time()
    found = work()
    return (time.perf_counter() - began[0], time.process_time() - began[1]), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--providers", type=int, default=20)
    parser.add_argument("--out", type=Path, help="Default: benchmarks/results/ledger.json, for 100,000 records.")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def tell(what: str, took: Took, count: int = 1, of: int = 0) -> None:
        """`of`: only so many were timed."""
        wall, cpu = (each / (of or count) * count for each in took)
        rows.append({"what": what, "seconds": wall, "cpu_seconds": cpu, "cpu_us_each": cpu / count * 1e6})
        row(what, (wall, cpu, cpu / count * 1e6), 14)

    providers = [Identity.new(f"provider-{n}") for n in range(options.providers)]
    keys = tuple((who.name, who.public) for who in providers)
    row("", ("seconds", "of CPU", "us each"), 14)
    with tempfile.TemporaryDirectory() as folder:
        place, count = Path(folder) / "ledger", options.records
        ledger = Ledger.begin(place, providers[0], Genesis("benchmark", keys=keys))
        took, records = seconds(lambda: fill(ledger, providers, options.models, count))
        tell("signed and put into the log", took, count)
        size = sum(len(record.data) for record in records)

        loaded = {who.public: Ed25519PublicKey.from_public_bytes(who.public) for who in providers}
        meant = f"tacit/{PURPOSE}\0".encode()
        few = records[: min(count, 20_000)]
        took, _ = seconds(lambda: [loaded[r.by].verify(r.data[-64:], meant + r.data[1:-66]) for r in few])
        tell("floor: signatures alone", took, count, len(few))
        took, _ = seconds(lambda: [hashlib.sha256(r.data).digest() for r in records])
        tell("floor: hashes alone", took, count)
        took, _ = seconds(lambda: [Record.decode(r.data).cid for r in few])
        tell("decoded strictly", took, count, len(few))

        took, found = seconds(lambda: Ledger.load(place))
        assert not found.faults
        assert len(found.dag.nodes) == count
        tell("opened for the first time: all verified", took, count)
        took, again = seconds(lambda: Ledger.load(place))
        assert again.head == found.head
        assert not again.faults
        tell("opened again: signatures remembered", took, count)

        branch = next(iter(again.dag.branches.values()))
        took, tips = seconds(lambda: [each.tips for each in again.dag.branches.values()])
        tell("tips of every model", took)
        newest = tips[0][-1].cid
        took, above = seconds(lambda: again.dag.ancestors(newest))
        tell(f"all {len(above):,} ancestors of a tip", took)
        took, made = seconds(lambda: again.dag.descends(newest, branch.nodes[0].cid))
        assert made
        tell("whether a tip comes from the first", took)
        took, drawing = seconds(lambda: list(again.dag.dot()))
        tell(f"drawn, in {len(drawing):,} lines", took, count)

        claim = records[0].body.privacy if isinstance(records[0].body, Update) else None
        for after in (0, count):  # the same in an empty ledger and in this one
            other = again
            if not after:
                other = Ledger.begin(Path(folder) / "empty", providers[0], Genesis("empty", keys=keys))
                other.open_model(providers[0], Model(other.genesis, "model 0", entity=128, relation=128))
            chosen, added = other.dag.branch("model 0"), []
            for n in range(50):
                parents = tuple(sorted(node.cid for node in chosen.tips[-2:])) or (chosen.cid,)
                update = Update(chosen.cid, parents, CID.of(n.to_bytes(9, "big")), 1 << 20, claim)
                added.append(seconds(partial(other.publish, providers[1], update))[0])
            tell(f"added after {after:,}, on the disk (median)", sorted(added)[25])
    target = options.out or (RESULTS if options.records == 100_000 else None)
    write(target, "cpu", rows, benchmark="ledger", records=count, models=options.models,
          providers=options.providers, bytes=size)  # fmt: skip


if __name__ == "__main__":
    main()
