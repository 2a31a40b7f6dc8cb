"""What records cost on a chain: bytes of calldata and gas, by kind; and what the addresses alone would.

    python benchmarks/chain.py                   (scripts/install-npm anvil)

A ledger of eight providers on anvil, which counts gas as Ethereum does. An update claims its privacy and has two
parents; a verdict is on a batch of ten. Prices are not: they change by the hour, and from chain to chain by a thousand.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from measure import row, write

from tacit.federation.keys import Identity
from tacit.ledger.cbor import CID
from tacit.ledger.evm import MARK, Account, EvmLog, Node
from tacit.ledger.ledger import Ledger
from tacit.ledger.public import Public
from tacit.ledger.record import Beacon, Body, Claim, Genesis, Model, Record, Update, Verdict
from tacit.privacy.events import Sampled, Segment

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "chain.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--providers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    programs = list((ROOT / "build" / "npm" / "anvil").glob("node_modules/@foundry-rs/anvil-*/bin/anvil*"))
    if not programs:
        raise SystemExit("anvil is not installed: scripts/install-npm anvil")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chain = subprocess.Popen([programs[0], "--port", str(port), "--silent"])
    try:
        measure(f"http://127.0.0.1:{port}", options.providers, options.out)
    finally:
        chain.kill()
        chain.wait()


def measure(url: str, count: int, out: Path) -> None:
    rows: list[dict[str, Any]] = []
    who = [Identity.new(f"provider-{n}") for n in range(count)]
    claim = Claim((Segment(Sampled(0.01, (1.1,)), 300),))
    row("", ("record", "calldata", "gas", "seconds"), 12)
    with tempfile.TemporaryDirectory() as home, closing(Node(url)) as node:
        pays = Account.new(Path(home) / "account")
        node.ask("anvil_setBalance", pays.address, hex(10**20))
        log = EvmLog(f"evm:{url}", account=pays, confirmations=0)
        genesis = Genesis("benchmark", keys=tuple((each.name, each.public) for each in who))
        with Ledger.begin(Path(home) / "ledger", who[0], genesis, Public(log, None)) as ledger:

            def tell(what: str, size: int, began: float | None = None) -> None:
                paid = log.receipts[-1]
                took = None if began is None else time.perf_counter() - began
                rows.append({"what": what, "record": size, "calldata": paid.size, "gas": paid.gas, "seconds": took})
                row(what, (f"{size:,}", f"{paid.size:,}", f"{paid.gas:,}", took), 12)

            def add(what: str, body: Body) -> Record:
                began = time.perf_counter()
                record = ledger.publish(who[0], body)
                tell(what, len(record.data), began)
                return record

            tell(f"genesis with {count} keys", len(Record.sign(who[0], genesis).data))
            model = add("model", Model(ledger.genesis, "drugs", entity=128, relation=128)).cid
            add("beacon", Beacon(model, 0, bytes(range(32))))
            first = [
                ledger.publish(who[n % count], Update(model, (model,), CID.of(bytes((n,))), 7_500_000, claim)).cid
                for n in range(2)
            ]
            add("update, private, of two parents", Update(model, tuple(sorted(first)), CID.of(b"x"), 7_500_000, claim))
            # A verdict has to come at its time: what it costs is counted without a place for it.
            verdict = Record.sign(
                who[0], Verdict(model, 2, tuple(sorted(CID.of(bytes((n,)), 0x71) for n in range(10))))
            )
            log.append([(str(verdict.cid), verdict.data)])
            tell("verdict on ten updates", len(verdict.data))
            alone = int(node.ask("eth_estimateGas", {"from": pays.address, "to": "0x" + "11" * 20,
                                                     "data": "0x" + (MARK + b"\x81" + b"\xd8\x2a\x58\x25\x00"
                                                                     + CID.of(b"x")).hex()}), 16)  # fmt: skip
            rows.append({"what": "an address alone, for comparison", "record": 0, "calldata": 46, "gas": alone})
            row("an address alone, for comparison", ("0", "46", f"{alone:,}"), 12)
            node.ask("anvil_mine", hex(1000))
            began = time.perf_counter()
            ledger.refresh()
            took = time.perf_counter() - began
            rows.append({"what": "1,000 empty blocks read", "seconds": took})
            row("1,000 empty blocks read", ("", "", "", took), 12)
            whole = 21_000 + 40 * 14_541 * 128 * 4
            rows.append({"what": "a table of 14,541 x 128 as calldata, at 40 gas a byte", "gas": whole})
            row("a table as calldata, reckoned", ("", "", f"{whole:,}"), 12)
    write(out, "cpu", rows, benchmark="chain", providers=count)


if __name__ == "__main__":
    main()
