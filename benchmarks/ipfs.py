"""How long a table takes between two peers, and between a peer and a Helia node; and how many bytes.

    python benchmarks/ipfs.py                    (scripts/install-npm helia, for the rows with Helia)

The table is as large as the entities of FB15k-237, 14,541 rows of 128 float32. Peers are processes of their own on one
machine, so this is what the programs take, not a network. Whatever is fetched is verified block by block, kept on the
disk, and compared with what was put. Bytes are those of bitswap's messages, both ways, without what encryption adds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from measure import row, write

from tacit.ledger.cbor import CID
from tacit.ledger.ipfs import Swarm
from tacit.ledger.unixfs import address_of, blocks_of

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "ipfs.json"
HELIA = ROOT / "build" / "npm" / "helia"


class Program:
    """A process that answers a line of JSON with a line of JSON."""

    def __init__(self, *command: str):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addresses = self._read()["addresses"]

    def ask(self, **words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found = dict(json.loads(self._process.stdout.readline()))
        if "error" in found:
            raise SystemExit(f"it did not work: {found['error']}")
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(folder: Path) -> None:
    """A peer that gives what is put into its folder."""
    swarm = Swarm()
    swarm.keep(folder)
    with closing(swarm):
        print(json.dumps({"addresses": swarm.listen()}), flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            cid = swarm.put(Path(json.loads(line)["add"]).read_bytes())
            print(json.dumps({"cid": str(cid), "seconds": time.perf_counter() - began}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=14_541)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Default: benchmarks/results/ipfs.json, for the default table.")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    table = _table(options.rows, options.width)
    rows: list[dict[str, Any]] = []
    row("", ("seconds", "fastest", "MB/s", "bytes"), 14)

    def tell(what: str, work: Callable[[], int], repeat: int = options.repeat) -> None:
        """`work` returns how many bytes went over the line."""
        took = []
        for _ in range(repeat):
            began = time.perf_counter()
            count = work()
            took.append(time.perf_counter() - began)
        middle = statistics.median(took)
        rows.append({"what": what, "seconds": middle, "fastest": min(took), "bytes": count, "repeat": repeat})
        row(what, (middle, min(took), len(table) / middle / 1e6, f"{count:,}"), 14)

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "table").write_bytes(table)
        wanted = address_of(table)
        blocks = list(blocks_of(table))
        tell("floor: SHA-256 of it", lambda: 0 * len(hashlib.sha256(table).digest()))
        tell("cut, and its address", lambda: 0 * len(address_of(table)))

        def put() -> int:
            shutil.rmtree(folder / "own", ignore_errors=True)
            swarm = Swarm()
            swarm.keep(folder / "own")
            assert swarm.put(table) == wanted
            return 0

        tell("published: cut, on the disk", put)

        def fetches(what: str, addresses: list[str]) -> None:
            reader = Swarm(addresses)

            def fetch(swarm: Swarm) -> int:
                shutil.rmtree(folder / "reader", ignore_errors=True)
                swarm.keep(folder / "reader")
                before = swarm.traffic
                assert swarm.get(wanted, len(table)) == table
                return swarm.traffic - before

            def first() -> int:
                with closing(Swarm(addresses)) as swarm:
                    return fetch(swarm)

            tell(f"fetched from {what}, with connecting", first)
            with closing(reader):
                tell(f"fetched from {what}", lambda: fetch(reader))

        peer = Program(sys.executable, __file__, "--serve", str(folder / "peer"))
        with closing(peer):
            assert peer.ask(add=str(folder / "table"))["cid"] == str(wanted)
            fetches("a peer", peer.addresses)
            if (HELIA / "package.json").is_file():
                with closing(Program("node", str(ROOT / "tests" / "helia.mjs"), str(HELIA))) as helia:
                    # the same address by another program
                    assert helia.ask(add=str(folder / "table"))["cid"] == str(wanted)
                    fetches("Helia", helia.addresses)

                def by_helia() -> int:
                    with closing(Program("node", str(ROOT / "tests" / "helia.mjs"), str(HELIA))) as fresh:
                        told = fresh.ask(get=str(wanted), peer=peer.addresses[0], into=str(folder / "got"), wait=60)
                    assert CID.parse(str(wanted)) == address_of((folder / "got").read_bytes())
                    taken.append(told["seconds"])
                    return 0

                taken: list[float] = []
                for _ in range(options.repeat):
                    by_helia()
                middle = statistics.median(taken)
                rows.append({"what": "fetched by Helia from a peer, with connecting", "seconds": middle,
                             "fastest": min(taken), "repeat": options.repeat})  # fmt: skip
                row("fetched by Helia, with connecting", (middle, min(taken), len(table) / middle / 1e6), 14)
            else:
                print("Helia is not installed (scripts/install-npm helia): its rows are left out")
    default = (options.rows, options.width) == (14_541, 128)
    about = {"rows_of_table": options.rows, "width": options.width, "bytes": len(table), "blocks": len(blocks),
             "bytes_of_blocks": sum(len(block) for _, block in blocks), "address": str(wanted)}  # fmt: skip
    write(options.out or (RESULTS if default else None), "cpu", rows, benchmark="ipfs", **about)


def _table(count: int, width: int) -> bytes:
    """Rows of numbers, the same each time."""
    made = torch.empty(count, width).normal_(generator=torch.Generator().manual_seed(0))
    return bytes(made.numpy().tobytes())


if __name__ == "__main__":
    main()
