"""A ledger on networks that nobody owns: its log on a chain, its weights at peers that speak IPFS's protocol.

Either can be had without the other: a log on a chain with weights in the folder, to be handed on by other ways; or
weights at peers and the log in a file, or at a broker. What is put there is public, and can never be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tacit.errors import BadValue, TacitError, excerpt
from tacit.federation.keys import Identity
from tacit.ledger import evm, ipfs
from tacit.ledger.blobs import Blobs
from tacit.ledger.cbor import CID
from tacit.ledger.evm import Account, EvmLog
from tacit.ledger.ipfs import Swarm
from tacit.ledger.jetstream import Remote
from tacit.ledger.log import BegunLog

CHAIN, BLOCKS = "chain.sqlite", "blobs"
"""What was read of the chain, and blocks by their addresses."""


class Public:
    """Where a ledger's log and weights are, if at least one of them is on a public network.

    Parameters
    ----------
    log
        On a chain, or at a broker; None: in the folder.
    swarm
        Peers that have the weights; None: they are at the broker, or in the folder.
    """

    public = True

    def __init__(self, log: EvmLog | Remote | None, swarm: Swarm | None):
        if swarm is None and not isinstance(log, EvmLog):
            raise BadValue("neither the log nor the weights of this ledger are on a public network")
        self._log, self.swarm = log, swarm

    @property
    def chain(self) -> EvmLog | None:
        return self._log if isinstance(self._log, EvmLog) else None

    @property
    def log(self) -> BegunLog | None:
        return self._log.log if isinstance(self._log, Remote) else self._log

    @property
    def blobs(self) -> Blobs | None:
        return self.swarm or (self._log.blobs if isinstance(self._log, Remote) else None)

    @property
    def place(self) -> str | None:
        return None if self._log is None else self._log.place

    def make(self, replicas: int = 1) -> None:
        if isinstance(self._log, Remote):
            self._log.make(replicas)

    def check(self) -> None:
        if isinstance(self._log, Remote):
            self._log.check()

    def settle(self, folder: Path) -> None:
        """The folder in which its reader keeps what it has read."""
        if self.chain is not None:
            self.chain.keep(folder / CHAIN)
        if self.swarm is not None:
            self.swarm.keep(folder)

    def remember(self, draft: Path) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if isinstance(self._log, Remote):
            told = self._log.remember(draft)
        elif self._log is not None:
            told = {"log": self._log.address, "chain": self._log.chain, "confirmations": self._log.confirmations,
                    "most_fee": self._log.most_fee, "plain": self._log.plain}  # fmt: skip
            if self._log.account is not None:
                told["account"] = str(self._log.account.path.resolve())
        if self.swarm is not None:
            told["blobs"] = ipfs.SCHEME
            self.swarm.remember(draft)
        return told

    def close(self) -> None:
        for each in (self._log, self.swarm):
            if each is not None:
                each.close()


def reach(
    log: str | None,
    blobs: str | None = None,
    *,
    who: Callable[[], Identity],
    genesis: CID | None = None,
    ca: Path | None = None,
    plain: bool = False,
    account: Path | None = None,
    confirmations: int = evm.CONFIRMATIONS,
    most_fee: float = evm.MOST_FEE,
    chain: int | None = None,
    peers: Sequence[str] = (),
) -> Remote | Public | None:
    """Where a ledger is by what was said of it: a broker, a chain, peers. None: in its folder.

    `who` is asked for a key if a broker has to be logged in to.
    """
    if blobs is not None and not blobs.startswith(ipfs.SCHEME):
        raise BadValue(f"weights are at peers by ipfs:, else in the folder or at the broker; not {excerpt(blobs)}")
    found = None if blobs is None else Swarm([*ipfs.split_peers(blobs), *peers])
    if log is None:
        return None if found is None else Public(None, found)
    if not log.startswith(evm.SCHEME):
        if account is not None:
            raise TacitError("an account pays on a chain: --account goes with --log evm:...")
        remote = Remote(log, who(), ca=ca, plain=plain)
        return remote if found is None else Public(remote, found)
    # What is wrong with an account is said before a ledger is begun, or joined; whoever only reads one needs none.
    pays = account if account is None or chain is not None else Account(account)
    chained = EvmLog(log, genesis, account=pays, confirmations=confirmations, most_fee=most_fee, chain=chain,
                     plain=plain)  # fmt: skip
    return Public(chained, found)
