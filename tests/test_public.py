"""Ledgers on networks that nobody owns: a real chain (anvil), real peers over bitswap, Helia."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("libp2p", reason="the extra ipfs is not installed")
from ledgers import CLAIM, KEYS, WHO, Operated, Providers, roster, rows, tacit
from networks import Anvil, Helia, environment, until
from tacit.cli import app
from tacit.clinic import clinic
from tacit.errors import BadInput, BadValue, Refused, TacitError
from tacit.federation.letters import Away
from tacit.ledger import evm, ipfs, unixfs
from tacit.ledger.blobs import BlobFolder, Withheld
from tacit.ledger.cbor import CID, DAG_CBOR, DAG_PB, RAW
from tacit.ledger.evm import Account, Declined, EvmLog, calldata, entries_of, log_address, split_place
from tacit.ledger.ipfs import Peer, Swarm
from tacit.ledger.jetstream import Remote
from tacit.ledger.ledger import BLOBS, RECORDS, Ledger
from tacit.ledger.log import SqliteLog
from tacit.ledger.provider import Provider, Terms
from tacit.ledger.public import Public, reach
from tacit.ledger.record import Genesis, Model, Record
from tacit.settings import Settings

try:
    evm._packages()
except TacitError as error:
    pytest.skip(str(error), allow_module_level=True)

GENESIS = b"the first"
ABOUT = CID.of(GENESIS, DAG_CBOR)


def entry(text):
    data = text.encode()
    return str(CID.of(data, DAG_CBOR)), data


# -- files as blocks ---------------------------------------------------------------------------------------------------


def test_addresses_as_helia_gives_them():
    """Of bytes that count up: what Helia's own importer said."""
    data = bytes(range(256)) * 16_384
    assert unixfs.address_of(data[: 1 << 20]) == CID.of(data[: 1 << 20])
    assert str(unixfs.address_of(data)) == KNOWN[len(data)]
    assert str(unixfs.address_of(data + b"x")) == KNOWN[len(data) + 1]


KNOWN = {
    4_194_304: "bafybeicl75dxls2qe2aqjf37ksqumvpvaon6l44n3zhvabnnear5avp6tu",
    4_194_305: "bafybeiewfpma5myezoj27l24rmdcq7w5hripzdhvm6n7wvb4zemf6g7o7i",
}


@given(st.integers(0, 400), st.integers(2, 5))
def test_blocks_come_together_again(size, width):
    data = os.urandom(size)
    blocks = list(unixfs.blocks_of(data, leaf=10, width=width))
    assert all(CID.of(block, cid.codec) == cid for cid, block in blocks)
    known = dict(blocks)

    def whole(cid):
        if cid.codec == RAW:
            return known[cid]
        links = _links(known[cid])
        assert len(links) <= width
        return b"".join(map(whole, links))

    assert whole(blocks[-1][0]) == data


def _links(block):
    return [
        CID(value) for tag, link in unixfs._fields(block) if tag == 2 for at, value in unixfs._fields(link) if at == 1
    ]


NODE = unixfs.encode_node([unixfs.Child(CID.of(bytes((n,))), 5000, 5000) for n in range(3)])


@given(st.integers(0, len(NODE) * 8 - 1))
def test_a_node_with_a_changed_bit_is_refused_or_has_other_children(bit):
    changed = bytearray(NODE)
    changed[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(Refused):
        assert unixfs.decode_node(bytes(changed)) != unixfs.decode_node(NODE)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_node_or_refused(data):
    with contextlib.suppress(Refused):
        assert unixfs.encode_node(unixfs.decode_node(data)) == data


def test_files_of_countless_tiny_blocks_are_refused():
    small = [unixfs.Child(CID.of(b"x"), 1, 1)] * 3
    with pytest.raises(Refused, match="next to nothing"):
        unixfs.decode_node(unixfs.encode_node(small))
    with pytest.raises(Refused, match="next to nothing"):
        unixfs.decode_node(unixfs.encode_node([unixfs.Child(CID.of(b"x"), 0, 1)]))


# -- a log on a chain --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain():
    with Anvil() as found:
        yield found


@pytest.fixture
def log(chain, tmp_path, monkeypatch):
    """A function that makes a log of somebody's on the chain; each test begins a ledger of its own."""
    monkeypatch.setattr(evm, "PAUSE", 0.02)
    begin, own = chain.node.head(), os.urandom(8).hex()
    genesis = entry(own)
    with contextlib.ExitStack() as opened:

        def make(confirmations=0, pays=True, keep=None, **other):
            account = chain.account(tmp_path / os.urandom(4).hex()) if pays else None
            found = EvmLog(f"{chain.place}#{begin}", CID.parse(genesis[0]), account=account,
                           confirmations=confirmations, **{"patience": 2, "settled": 20} | other)  # fmt: skip
            opened.enter_context(contextlib.closing(found))
            if keep is not None:
                found.keep(keep)
            return found

        make.genesis = genesis
        yield make


def shown(log, start=0):
    return [each.data.decode() for each in log.read(start)][0 if start else 1 :]


NO_PLACES = ["evm:", "evm:rpc", "evm:ftp://x", "https://x", "evm:https://", "evm:https://x#y", "evm:https://x#-1"]


@pytest.mark.parametrize("place", NO_PLACES)
def test_places_that_are_none(place):
    with pytest.raises(BadValue, match="a log on a chain is such as"):
        split_place(place)


def test_places():
    assert split_place("evm:https://rpc.example.org/v3/secret#12") == ("https://rpc.example.org/v3/secret", 12)
    assert split_place("evm:http://127.0.0.1:8545") == ("http://127.0.0.1:8545", 0)
    with pytest.raises(BadValue, match=r"http://rpc.example.org is without TLS"):
        split_place("evm:http://rpc.example.org/secret")
    assert split_place("evm:http://rpc.example.org", plain=True) == ("http://rpc.example.org", 0)


def test_accounts(tmp_path):
    made = Account.new(tmp_path / "a")
    assert Account(tmp_path / "a").address == made.address
    assert made.address.startswith("0x")
    with pytest.raises(TacitError, match="exists already"):
        Account.new(tmp_path / "a")
    (tmp_path / "a").chmod(0o644)
    with pytest.raises(TacitError, match="others may read"):
        Account(tmp_path / "a")
    for text, reason in (("nonsense", "64 hexadecimal"), ("0" * 64, "out of range"), ("f" * 64, "out of range")):
        (tmp_path / "b").write_text(text)
        (tmp_path / "b").chmod(0o600)
        with pytest.raises(TacitError, match=reason):
            Account(tmp_path / "b")


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_calldata_comes_back(contents):
    found = [(str(CID.of(each, DAG_CBOR)), each) for each in contents]
    assert entries_of(calldata(found)) == found
    assert entries_of(calldata(found)[1:]) == []
    assert entries_of(calldata(found) + b"x") == []


@given(st.binary(max_size=100))
def test_any_calldata_is_entries_or_nothing(data):
    for each in entries_of(evm.MARK + data):
        assert isinstance(each[0], str)


def test_nobody_is_believed_where_a_ledger_begins(chain, log):
    """Anybody may send anything to the address: what is before the genesis does not count, what is no entry neither."""
    with pytest.raises(Refused, match="does not show the transaction"):
        log(settled=0.3).append([entry("too early")])
    own = log()
    own.append([log.genesis])
    to, mine = log_address(own.genesis), own.account

    def send(data):
        fields = {"to": evm._packages()[0].Web3.to_checksum_address(to), "value": 1, "data": data, "gas": 200_000,
                  "chainId": own.chain, "gasPrice": 10**11,
                  "nonce": int(chain.node.ask("eth_getTransactionCount", mine.address, "pending"), 16)}  # fmt: skip
        chain.node.ask("eth_sendRawTransaction", mine.sign(fields)[1])

    for data in (b"", b"hello", evm.MARK, evm.MARK + b"\x81\x01", calldata([entry("a")]) + b"\0"):
        send(data)
    liar = calldata([entry("x")])[:-1] + b"y"  # an address of other bytes: the ledger names it, and ignores it
    send(liar)
    own.append([entry("b")])
    assert shown(own) == ["y", "b"]
    assert next(own.read(1)).name == entry("x")[0]
    # whoever begins at another block before the genesis comes to the same
    with contextlib.closing(EvmLog(f"{chain.place}#0", own.genesis, confirmations=0)) as other:
        assert list(other.read()) == list(own.read())


def test_what_cannot_be_added(chain, log, tmp_path):
    own = log()
    with pytest.raises(BadValue, match="stands under its address"):
        own.append([("a", b"x")])
    with pytest.raises(BadValue, match="120,000 bytes can be added at once"):
        own.append([entry("x" * 130_000)])
    with pytest.raises(TacitError, match="say which account pays"):
        log(pays=False).append([entry("x")])
    poor = EvmLog(chain.place, ABOUT, account=Account.new(tmp_path / "poor"), confirmations=0)
    with contextlib.closing(poor), pytest.raises(TacitError, match=r"The account 0x\w+ cannot pay"):
        poor.append([entry("x")])
    with pytest.raises(BadValue, match="from 0 to 10,000"):
        EvmLog(chain.place, confirmations=-1)
    with pytest.raises(Refused, match="is a node of the chain 31337, where the ledger is on 1"):
        EvmLog(chain.place, chain=1)


@pytest.mark.slow
def test_a_package_that_lets_everything_nest_deeper_does_not():
    """Else deep JSON, which a node may send as well as a peer, would end the process."""
    program = """
import json, sys
from tacit.ledger.evm import _packages
before = sys.getrecursionlimit()
_packages()
assert sys.getrecursionlimit() == before
try:
    json.loads("[" * 100_000)
except RecursionError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_what_may_be_a_secret_in_a_nodes_address_is_kept_and_not_told(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(evm, "PAUSE", 0.02)
    port, account = chain.port, chain.account(tmp_path / "own.account")
    WHO[0].save(tmp_path / "own.key")
    node = f"evm:http://user:pass@127.0.0.1:{port}/?key=hidden"
    for name, more in (("a", ("--json",)), ("b", ())):
        done = CliRunner().invoke(app, [
            "ledger", "init", str(tmp_path / name), "--key", str(tmp_path / "own.key"), "--open", "--model", "m",
            "--entity", "3", "--log", node, "--account", str(account.path), "--confirmations", "0",
            "--most-fee", "150", *more,
        ])  # fmt: skip
        assert done.exit_code == 0, done.output
        manifest = json.loads((tmp_path / name / "ledger.json").read_text())
        block = manifest["log"].partition("#")[2]
        assert manifest["log"] == f"{node}#{block}"
        assert stat.S_IMODE((tmp_path / name / "ledger.json").stat().st_mode) == 0o600
        assert manifest["most_fee"] == 150
        assert "hidden" not in done.output
        assert "pass@" not in done.output
        if more:
            assert json.loads(done.output)["log"] == f"evm:http://127.0.0.1:{port}#{block}"
        else:
            words = " ".join(done.output.split())
            assert f"It is joined with --log 'evm:NODE#{block}'" in words
            assert f"Yours is at http://127.0.0.1:{port};" in words
    with Ledger.load(tmp_path / "a") as ledger:
        assert ledger._remote.chain.most_fee == 150
        assert "hidden" not in ledger.place


def test_who_reads_needs_no_account_though_the_folder_remembers_one(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(evm, "PAUSE", 0.02)
    account = chain.account(tmp_path / "own.account")
    place = reach(chain.place, who=lambda: WHO[0], account=account.path, confirmations=0)
    with Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("drugs", keys=KEYS), place) as ledger:
        ledger.open_model(WHO[0], Model(ledger.genesis, "drugs", entity=3, relation=3))
    account.path.rename(tmp_path / "elsewhere")
    with Ledger.load(tmp_path / "ledger") as again:
        assert again.verify().faults == []
        with pytest.raises(TacitError, match=r"own.account: the account that pays is not there: put it back, or say"):
            again.publish_rows(WHO[0], "drugs", rows(tmp_path, 1), CLAIM)
        (tmp_path / "elsewhere").rename(account.path)
        again.publish_rows(WHO[0], "drugs", rows(tmp_path, 1), CLAIM)


def test_nodes_that_are_none(tmp_path):
    with pytest.raises(Away, match=r"http://127.0.0.1:1 does not answer"):
        EvmLog("evm:http://127.0.0.1:1/secret", patience=0.1)
    import http.server

    class Says(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.says)

        def log_message(self, *words):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Says) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        place = f"evm:http://127.0.0.1:{server.server_port}"
        for says in (b"<html>", b"[]", b"{}", b'{"result": 5}', b'{"result": "0x"}', b"[" * 100_000):
            server.says = says
            with pytest.raises(Refused, match=r"no node of a chain|is no number"):
                EvmLog(place, patience=0.1)
        for code, kind in ((-32005, Away), (-32000, Away), (-32601, Declined)):
            server.says = json.dumps({"error": {"code": code, "message": "not now"}}).encode()
            with pytest.raises(kind, match=r"127.0.0.1:\d+ refuses eth_chainId: not now"):
                EvmLog(place, patience=0.1)
        node = evm.Node(place.removeprefix("evm:"), patience=0.1)
        for code, kind in ((-32005, Away), (-32000, Declined)):
            server.says = json.dumps({"error": {"code": code, "message": "not now"}}).encode()
            with pytest.raises(kind, match="refuses eth_sendRawTransaction"):
                node.send("0x")
        for says in (b'[{"id": 1}, {"id": null}]', b"[1, 2]"):
            server.says = says
            with pytest.raises(Refused, match="no node of a chain"):
                node.blocks([1, 2])
        node.close()
        server.shutdown()
        thread.join()


def test_what_is_read_is_kept(chain, log, tmp_path, monkeypatch):
    own = log(keep=tmp_path / "kept")
    own.append([log.genesis])
    for n in range(3):
        own.append([entry(f"n{n}")])
    assert shown(own) == ["n0", "n1", "n2"]
    again = log(keep=tmp_path / "kept")
    asked = []
    blocks = evm.Node.blocks

    def notes(self, numbers, **how):
        asked.append(how)
        return blocks(self, numbers, **how)

    monkeypatch.setattr(evm.Node, "blocks", notes)
    assert shown(again) == ["n0", "n1", "n2"]
    assert asked == [{}]  # the last block, by its hash, and no other
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(BadInput, match="delete it"):
        again.keep(tmp_path / "noise")
    SqliteLog(tmp_path / "other", create=True)
    with pytest.raises(BadInput, match="another kind of file"):
        again.keep(tmp_path / "other")


def test_a_file_of_what_was_read_that_is_damaged_or_full_or_held(chain, log, tmp_path):
    kept = tmp_path / "kept"
    own = log(keep=kept)
    own.append([log.genesis])
    own.append([entry("a")])
    # another process holds it
    with contextlib.closing(sqlite3.connect(kept, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        own._base.execute("PRAGMA busy_timeout = 20")
        with pytest.raises(Away, match=r"kept: another process holds it \(database is locked\)"):
            shown(own)
        other.execute("ROLLBACK")
    assert shown(own) == ["a"]
    # there is no room
    log().append([entry("x" * 50_000)])
    [pages] = own._base.execute("PRAGMA page_count").fetchone()
    own._base.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(TacitError, match=r"kept: cannot be written \(database or disk is full\): see that there is"):
        shown(own)
    own._base.execute("PRAGMA max_page_count = 1000000")
    assert shown(own) == ["a", "x" * 50_000]
    # its first page is whole
    own.close()
    data = kept.read_bytes()
    kept.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    again = log(keep=kept)
    with pytest.raises(BadInput, match=r"kept: is damaged \(.*\): delete it, and the chain is read again"):
        shown(again)
    kept.unlink()
    assert shown(log(keep=kept)) == ["a", "x" * 50_000]


def test_nothing_is_told_before_it_is_deep_enough_and_a_reorganisation_of_depth_3_changes_nothing_that_was(
    chain, log, tmp_path
):
    writer, reader = log(), log(confirmations=3, keep=tmp_path / "kept")
    writer.append([log.genesis])
    for n in range(4):
        writer.append([entry(f"n{n}")])
    assert shown(writer) == ["n0", "n1", "n2", "n3"]  # who is content with no confirmations sees it at once
    assert shown(reader) == ["n0"]
    chain.reorganise(3)  # n1, n2 and n3 are gone
    assert shown(reader) == ["n0"]
    late = log()
    late.append([entry("m1")])
    late.append([entry("m2")])
    late.append([entry("m3")])
    assert shown(late) == ["n0", "m1", "m2", "m3"]
    assert shown(reader) == ["n0"]
    chain.mine(3)
    assert shown(reader) == ["n0", "m1", "m2", "m3"]
    assert shown(log(confirmations=3)) == ["n0", "m1", "m2", "m3"]
    with pytest.raises(Refused, match=r"record 2 \(bafy\w+\) was read, and is there no more: history was rewritten"):
        shown(writer)
    with pytest.raises(Refused, match="history was rewritten"):  # and it stays so
        shown(writer)


def test_a_reader_goes_back_to_the_last_block_that_is_there(chain, log, tmp_path):
    own = log(keep=tmp_path / "kept")
    own.append([log.genesis])
    for n in range(4):
        own.append([entry(f"n{n}")])
    assert shown(own) == ["n0", "n1", "n2", "n3"]
    chain.reorganise(3)
    again = log(keep=tmp_path / "kept")  # another process, which has told nothing of it yet
    assert shown(again) == ["n0"]
    again.append([entry("n1")])
    assert shown(again) == ["n0", "n1"]


def test_the_same_records_in_other_blocks_are_the_same_log(chain, log):
    own = log()
    own.append([log.genesis])
    for n in range(3):
        own.append([entry(f"n{n}")])
    assert shown(own) == ["n0", "n1", "n2"]
    chain.reorganise(3)
    other = log()
    for n in range(3):
        other.append([entry(f"n{n}")])
    assert shown(own) == ["n0", "n1", "n2"]


@pytest.mark.slow
def test_who_adds_waits_until_it_is_deep_enough_and_sends_again_what_a_chain_lost(chain, log):
    own, found = log(confirmations=3), []
    log().append([log.genesis])
    chain.mine(3)
    adding = threading.Thread(target=lambda: found.append(own.append([entry("mine")])))
    adding.start()
    until(lambda: shown(log()) == ["mine"])
    chain.reorganise(3)
    until(lambda: shown(log()) == ["mine"])  # it was lost, and sent again
    chain.mine(2)
    time.sleep(0.3)
    assert found == []
    chain.mine(1)
    adding.join(20)
    assert found == [1]
    assert shown(own) == ["mine"]
    assert len(own.receipts) == 1
    assert own.receipts[0].gas > 21_000


def test_who_adds_says_if_it_does_not_become_deep_enough(chain, log):
    own = log(confirmations=5, settled=0.5)
    with pytest.raises(Away, match=r"may not have been added: the transaction 0x\w+ is not 5 blocks deep after 0.5"):
        own.append([log.genesis])


@pytest.mark.slow
def test_a_node_that_lost_blocks_is_not_believed(log, tmp_path, chain):
    own = log(keep=tmp_path / "kept")
    own.append([log.genesis])
    chain.mine(3)
    assert shown(own) == []
    number, known = own._last()
    own._base.execute("DELETE FROM blocks WHERE number > ?", (number,))
    own._base.execute("INSERT INTO blocks VALUES (?, ?)", (number + 50, known))
    with pytest.raises(Away, match="it is behind, or lost blocks"):
        list(own.read())


class Balanced:
    """A node that is many servers, in the way of a real one: what a function says of a method is said instead."""

    def __init__(self, node):
        self.node, self.name, self.patience, self.instead, self.sent = node, "balanced", 0.2, {}, []

    def ask(self, method, *words):
        return self.instead.get(method, self.node.ask)(method, *words)

    def send(self, raw):
        self.sent.append(raw)
        self.instead.get("send", self.node.send)(raw)

    def head(self):
        return self.instead.get("head", self.node.head)()

    def blocks(self, numbers, *, whole=False):
        return self.node.blocks(numbers, whole=whole)

    def close(self):
        self.node.close()


def balanced(log):
    log.node = Balanced(log.node)
    return log


def test_a_transaction_is_sent_once_whatever_servers_that_are_behind_say(chain, log):
    own = balanced(log())
    own.append([log.genesis])
    own.append([entry("first")])
    left, number = [6], len(own.node.sent)

    def late(method, *words):  # the receipt is not there yet, where the transaction is: its number is used up
        left[0] -= 1
        if left[0] > 0:
            return None
        return own.node.node.ask(method, *words)

    own.node.instead["eth_getTransactionReceipt"] = late
    assert own.append([entry("once")]) == 2
    assert left[0] <= 0
    assert len(set(own.node.sent[number:])) == 1
    assert shown(own) == ["first", "once"]
    # it stands, and then a server that has not heard of it is asked to read
    del own.node.instead["eth_getTransactionReceipt"]
    heads = iter([0] * 5)

    def behind():
        return own.node.node.head() - (next(heads, None) is not None) * 3

    own.append([entry("again")])
    own.node.instead["head"] = behind
    assert own.append([entry("seen late")]) == 4
    assert next(heads, None) is None
    assert shown(own) == ["first", "once", "again", "seen late"]
    # a number that another transaction has: nobody took this one, so it is signed anew at once
    used = [True]

    def stale(method, *words):
        return hex(int(own.node.node.ask(method, *words), 16) - (words[1] == "pending" and bool(used) and used.pop()))

    own.node.instead["eth_getTransactionCount"] = stale
    assert own.append([entry("anew")]) == 5


def test_a_transaction_that_cannot_stand_any_more_is_signed_anew(chain, log):
    """Another one of the same account took its number, while nobody knew."""
    own = balanced(log())
    own.append([log.genesis])
    mine, sent = own.account, len(own.node.sent)

    def lost(raw):
        del own.node.instead["send"]
        price = {"gas": 30_000, "gasPrice": 10**11, "chainId": own.chain, "value": 0, "to": mine.address}
        own.node.node.send(mine.sign(price | {"nonce": own._used(mine)})[1])
        raise Away("no answer")

    own.node.instead["send"] = lost
    found = []
    adding = threading.Thread(target=lambda: found.append(own.append([entry("twice")])))
    adding.start()
    until(lambda: len(own.node.sent) > sent + 3)
    assert len(set(own.node.sent[sent:])) == 1  # some server may still show a receipt
    chain.mine(evm.FURTHER)
    adding.join(20)
    assert found == [1]
    assert len(set(own.node.sent[sent:])) == 2
    assert shown(own) == ["twice"]


def test_nobody_pays_more_than_was_allowed(chain, log):
    own = balanced(log())
    own.append([log.genesis])
    number = chain.node.ask("eth_getTransactionReceipt", own.receipts[-1].transaction)
    assert int(number["effectiveGasPrice"], 16) <= 200 * evm.GWEI
    signed, sign = [], own.account.sign
    own.account.sign = lambda fields: signed.append(fields) or sign(fields)
    own.node.instead["eth_gasPrice"] = lambda *words: hex(200 * evm.GWEI + 1)
    with pytest.raises(Away, match=r"asks 200 gwei for a unit of gas, where 200 are the most .* Nothing was sent"):
        own.append([entry("dear")])
    for base in (201 * evm.GWEI, 10**15):
        own.node.instead = {"eth_getBlockByNumber": lambda *words, base=base: {"baseFeePerGas": hex(base)}}
        with pytest.raises(Away, match="are the most that you pay"):
            own.append([entry("dear")])
    assert signed == []
    for price, block, name in ((190, {"baseFeePerGas": hex(150 * evm.GWEI)}, "maxFeePerGas"), (190, {}, "gasPrice")):
        own.node.instead = {
            "eth_getBlockByNumber": lambda *words, block=block: block,
            "eth_gasPrice": lambda *words, price=price: hex(price * evm.GWEI),
        }
        own._signed(own.account, b"x")
        assert signed[-1][name] == 200 * evm.GWEI  # what it costs now, and room for more as far as is allowed
    for none in (0, -1, float("nan"), 1e10):
        with pytest.raises(BadValue, match="a unit of gas may cost"):
            log(most_fee=none)


def test_what_a_node_cannot_tell_now_is_awaited(chain, log):
    own = balanced(log())
    own.append([log.genesis])

    def limits(times):
        left = iter(range(times))

        def limited(method, *words):
            if next(left, None) is not None:
                raise Away("balanced refuses it: too many requests.")
            return own.node.node.ask(method, *words)

        return limited

    own.node.instead["eth_getTransactionReceipt"] = limits(3)
    assert own.append([entry("a")]) == 1
    own.settled = 0.3
    own.node.instead["eth_getTransactionReceipt"] = limits(10**6)
    with pytest.raises(Away, match=r"may not have been added.* The node said last: .*too many requests"):
        own.append([entry("b")])


# -- weights at peers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def peers(folder, *listen, wait=5.0):
    """Peers that listen, and one more that knows them all."""
    with contextlib.ExitStack() as opened:
        found = []
        for name in listen:
            found.append(opened.enter_context(contextlib.closing(Swarm(wait=wait))))
            (folder / name).mkdir()
            found[-1].keep(folder / name)
        known = [address for each in found for address in each.listen()]
        reader = opened.enter_context(contextlib.closing(Swarm(known, wait=wait)))
        (folder / "reader").mkdir()
        reader.keep(folder / "reader")
        yield reader, *found


@pytest.mark.slow
def test_large_weights_come_in_blocks_from_whoever_has_them(tmp_path):
    with peers(tmp_path, "a", "b", "c") as (reader, a, b, c):
        data = os.urandom(3 * unixfs.LEAF + 5)
        cid = b.put(data)
        assert cid.codec == DAG_PB
        assert reader.address(data) == cid
        assert reader.get(cid, len(data)) == data
        assert reader.get(cid, len(data)) == data
        with pytest.raises(Refused, match="more than 1,000 bytes"):
            reader.get(cid, 1000)
        # what was fetched is kept, and given on; two blocks here, two there
        blocks = [each for each, _ in unixfs.blocks_of(data)]
        for swarm, gone in ((a, blocks[:2]), (c, blocks[2:4]), (b, blocks)):
            for each, block in unixfs.blocks_of(data):
                swarm.store.put(block, each.codec)
            for each in gone:
                swarm.store._path(each).unlink()
        shutil.rmtree(tmp_path / "reader" / "blobs")
        assert reader.get(cid, len(data)) == data
        # a peer that is away, and one whose address is wrong, are no hindrance
        a.close()
        shutil.rmtree(tmp_path / "reader" / "blobs")
        for each, block in unixfs.blocks_of(data):
            c.store.put(block, each.codec)
        assert reader.get(cid, len(data)) == data


@pytest.mark.slow
def test_a_withheld_block_times_out_and_is_named(tmp_path, monkeypatch):
    with peers(tmp_path, "a", "b", wait=1.0) as (reader, a, b):
        data = os.urandom(4 * unixfs.LEAF)
        cid = a.put(data)
        missing = [each for each, _ in unixfs.blocks_of(data)][2]
        a.store._path(missing).unlink()
        named = rf"the weights {cid}: the block {missing}, 3 of 4, did not come: 2 of 2 peers were reached"
        with pytest.raises(Withheld, match=f"{named}; 2 do not have it; ask their provider"):
            reader.get(cid, len(data))
        # whoever has it and says nothing at all
        a.put(data)
        heed = a._peer._heed
        a._peer._heed = lambda *words: None
        began = time.monotonic()
        with pytest.raises(Withheld, match=f"{named}; 1 do not have it, 1 gave nothing in 1 seconds"):
            reader.get(cid, len(data))
        assert 1 <= time.monotonic() - began < 15
        a._peer._heed = heed
        assert reader.get(cid, len(data)) == data  # and what came before did not have to come again
        b.close()
        with pytest.raises(Withheld, match=r"1 of 2 peers were reached; 1 do not have it; /ip4/127.0.0.1/tcp/\d+/p2p/"):
            reader.get(CID.of(b"nothing"), 10)


@pytest.mark.slow
def test_peers_that_lie_are_not_believed(tmp_path):
    with peers(tmp_path, "liar", "honest", wait=2.0) as (reader, liar, honest):
        cid = honest.put(b"hello")
        liar._peer._give = lambda each: b"hallo"
        assert reader.get(cid, 5) == b"hello"
        only = Swarm(liar._peer.addresses, wait=0.5)
        (tmp_path / "only").mkdir()
        only.keep(tmp_path / "only")
        with contextlib.closing(only), pytest.raises(Withheld, match=r"1 gave nothing in 0.5 seconds"):
            only.get(cid, 5)
        assert list(only.store) == []
        # a root that says other sizes than its blocks have, which is right by its address
        leaf = os.urandom(5000)
        liar._peer._give = liar._given
        liar.store.put(leaf)
        for size, reason in ((5001, "another size than"), (5000, "have another address"), (1 << 40, "more than 9,999")):
            root = unixfs.encode_node([unixfs.Child(CID.of(leaf), size, size)])
            with pytest.raises(Refused, match=reason):
                reader.get(liar.store.put(root, DAG_PB), 9999)
        with pytest.raises(Refused, match="is no node of a file"):
            reader.get(liar.store.put(b"junk", DAG_PB), 9999)


def test_one_file_has_one_address(tmp_path):
    """The same bytes in other blocks are refused, before those are fetched if their sizes say so."""
    swarm = Swarm()
    swarm.keep(tmp_path)
    data = os.urandom(2 * unixfs.LEAF + 10_000)
    cid, store = swarm.put(data), swarm.store
    assert swarm.get(cid, len(data)) == data

    def node(*children, more=0):
        return store.put(unixfs.encode_node([replace(each, total=each.total + more) for each in children]), DAG_PB)

    def leaves(*sizes):
        cuts = list(itertools.accumulate(sizes, initial=0))
        pieces = [data[start:end] for start, end in itertools.pairwise(cuts)]
        return [unixfs.Child(store.put(each), len(each), len(each)) for each in pieces]

    whole = leaves(unixfs.LEAF, unixfs.LEAF, 10_000)
    assert node(*whole) == cid
    below = unixfs.Child(node(*whole[:2]), 2 * unixfs.LEAF, 2 * unixfs.LEAF)
    for other in (
        node(*leaves(unixfs.LEAF, unixfs.LEAF - 5000, 15_000)),
        node(*leaves(10_000, unixfs.LEAF, unixfs.LEAF)),
        node(*leaves(*[50_000] * (len(data) // 50_000), len(data) % 50_000)),
        node(*whole[:2], *(replace(each, size=each.size // 2) for each in whole[2:] * 2)),
        node(below, whole[2]),
        node(unixfs.Child(cid, len(data), len(data))),
    ):
        with pytest.raises(Refused, match=rf"the block {other} is not cut as a file of this size is"):
            swarm.get(other, len(data))
    other = node(*whole, more=1)
    with pytest.raises(Refused, match=rf"the weights {other} have another address in the one form of a file: {cid}"):
        swarm.get(other, len(data))


@examples(max_examples=12)
@given(st.integers(0, 70_000))
def test_files_of_several_levels_are_read(size):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module in (unixfs, ipfs):
            patch.setattr(module, "LEAF", 4096)
            patch.setattr(module, "WIDTH", 2)
        patch.setattr(unixfs.blocks_of, "__defaults__", (4096, 2))
        swarm = Swarm()
        swarm.keep(folder)
        data = os.urandom(size)
        assert swarm.get(swarm.put(data), size) == data


@pytest.mark.slow
def test_who_gives_slowly_is_not_awaited_for_ever(tmp_path, monkeypatch):
    """Each block comes within its time, and all of them together do not."""
    monkeypatch.setattr(ipfs, "AT_ONCE", 1)
    monkeypatch.setattr(ipfs, "DIAL", 1.0)
    monkeypatch.setattr(ipfs, "SLOWEST", 10 << 20)
    with peers(tmp_path, "a", wait=0.7) as (reader, a):
        data = os.urandom(12 * unixfs.LEAF)
        cid, give = a.put(data), a._peer._give
        a._peer._give = lambda each: time.sleep(0.5) or give(each)
        began = time.monotonic()
        with pytest.raises(Withheld, match=r"blocks came so slowly that the rest was not awaited after 3 seconds"):
            reader.get(cid, len(data))
        assert time.monotonic() - began < 8
        there = len(list(reader.store))
        assert there > 2
        a._peer._give = give
        assert reader.get(cid, len(data)) == data  # it goes on with what came


@pytest.mark.slow
def test_noise_on_a_stream_stops_nothing(tmp_path):
    """Messages that are none, too large, or cut short: that stream ends, and the next one is heard."""
    import trio
    from multiaddr import Multiaddr

    with peers(tmp_path, "a") as (reader, a):
        cid = a.put(b"hello")
        assert reader.get(cid, 5) == b"hello"
        peer = reader._peer

        async def noise(data):
            from libp2p.peer.peerinfo import info_from_p2p_addr

            info = info_from_p2p_addr(Multiaddr(a._peer.addresses[0]))
            stream = await peer._host.new_stream(info.peer_id, [ipfs.PROTOCOL])
            with contextlib.suppress(Exception):
                await stream.write(data)
                with trio.move_on_after(0.2):
                    await stream.read(1)
                await stream.reset()

        for data in (b"\xff" * 10, b"\x05junk!", b"\xff\xff\xff\xff\x0f", b"\x20cut short", os.urandom(5000)):
            peer._call(lambda data=data: noise(data))
        shutil.rmtree(tmp_path / "reader" / "blobs")
        assert reader.get(cid, 5) == b"hello"


class Deaf(Peer):
    """Asks, and takes no answer."""

    def __init__(self):
        super().__init__(os.urandom(32), lambda cid: None, None)

    async def _hear(self, stream):
        await self._trio.sleep_forever()

    async def reach(self, address):
        info = await self._resolved(address)
        await self._host.connect(info)
        return info.peer_id

    def wants(self, address, *cids):
        async def ask():
            peer = await self.reach(address)
            for cid in cids:
                await self._say(peer, self._want(cid))
            return self._host.get_id()

        return self._call(ask)

    def begins(self, address, count, size):
        """Streams with the beginning of a message that never ends."""

        async def begin():
            peer = await self.reach(address)
            for _ in range(count):
                with contextlib.suppress(Exception):
                    stream = await self._host.new_stream(peer, [ipfs.PROTOCOL])
                    await stream.write(unixfs.varint(1 << 20) + bytes(size))
            return self._host.get_id()

        return self._call(begin)


@pytest.fixture
def deaf(monkeypatch):
    """A function that makes peers that take nothing: no window is opened for more than what fits into it at first."""
    from libp2p.stream_muxer.yamux.yamux import YamuxStream

    async def nothing(*words, **more):
        pass

    monkeypatch.setattr(YamuxStream, "send_window_update", nothing)
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(contextlib.closing(Deaf()))


@pytest.mark.slow
def test_who_asks_and_takes_nothing_costs_no_memory_and_is_left(tmp_path, monkeypatch, deaf):
    for name, value in (("WAITING", 20), ("GRACE", 2.0), ("SLOWEST", 1 << 30), ("FORGETS", 0.2)):
        monkeypatch.setattr(ipfs, name, value)
    with peers(tmp_path, "a") as (reader, a):
        honest, large = a.put(b"hello"), [a.put(os.urandom(unixfs.LEAF)) for _ in range(3)]
        given, most, peer = [], [], a._peer
        give, heed = peer._give, peer._heed
        peer._give = lambda cid: given.append(cid) or give(cid)
        peer._heed = lambda *words: heed(*words) or most.append(max(map(len, peer._waiting.values()), default=0))
        own = deaf().wants(peer.addresses[0], *large * 30, *(CID.of(bytes((n,))) for n in range(50)))
        until(lambda: len(most) == 140)
        assert given == large[:1]  # one answer is under way, and no other is made
        assert max(most) == len(peer._waiting[own]) == 20
        assert peer._answering.borrowed_tokens == 1
        assert reader.get(honest, 5) == b"hello"  # somebody else is not kept waiting
        assert own in peer._waiting
        until(lambda: own not in peer._waiting)
        until(lambda: own not in peer._host.get_connected_peers())
        until(lambda: own not in peer._locks and own not in peer._streams)
        assert given == [large[0], honest]
        assert peer._answering.borrowed_tokens == 0


@pytest.mark.slow
def test_many_who_take_nothing_hold_no_more_answers_than_are_made_at_a_time(tmp_path, monkeypatch, deaf):
    for name, value in (("ANSWERS", 2), ("GRACE", 0.3), ("SLOWEST", 1 << 30)):
        monkeypatch.setattr(ipfs, name, value)
    with peers(tmp_path, "a") as (reader, a):
        honest, large = a.put(b"hello"), a.put(os.urandom(unixfs.LEAF))
        given, give = [], a._peer._give
        a._peer._give = lambda cid: given.append(cid) or give(cid)
        for _ in range(5):
            deaf().wants(a._peer.addresses[0], large)
        assert reader.get(honest, 5) == b"hello"  # each has its turn
        assert given == [large] * 5 + [honest]
        until(lambda: a._peer._answering.borrowed_tokens == 0)


@pytest.mark.slow
def test_halves_of_messages_do_not_fill_the_memory(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr(ipfs, "HELD", 100_000)
    monkeypatch.setattr(ipfs, "STREAMS", 3)
    with peers(tmp_path, "a") as (reader, a):
        cid, peer = a.put(b"hello"), a._peer
        one, two = deaf(), deaf()
        many = one.begins(peer.addresses[0], 8, 10)
        until(lambda: peer._heard.get(many) == 3)
        large = two.begins(peer.addresses[0], 3, 60_000)
        until(lambda: peer._heard.get(large) == 1)  # the others were broken off
        assert 60_000 < peer._held < 100_000
        assert reader.get(cid, 5) == b"hello"
        one.close()
        two.close()
        until(lambda: peer._held == 0 and not set(peer._heard) & {many, large})


@pytest.mark.slow
def test_a_peer_is_reached_by_the_name_of_its_host(tmp_path):
    with contextlib.closing(Swarm()) as own:
        own.keep(tmp_path / "own")
        cid = own.put(b"hello")
        found = own.listen("0.0.0.0", 0, ["localhost", "127.0.0.1"])
        assert [each.split("/tcp/")[0] for each in found] == ["/dns/localhost", "/ip4/127.0.0.1"]
        for n, address in enumerate([*found, found[0].replace("/dns/", "/dns4/")]):
            with contextlib.closing(Swarm([address])) as reader:
                reader.keep(tmp_path / str(n))
                assert reader.get(cid, 5) == b"hello"
        with contextlib.closing(Swarm([found[0].replace("localhost", "nowhere.invalid")])) as reader:
            reader.keep(tmp_path / "lost")
            with pytest.raises(Withheld, match=r"0 of 1 peers were reached; /dns/nowhere.invalid/"):
                reader.get(cid, 5)


def test_peers_of_wrong_addresses(tmp_path):
    for address in ("nonsense", "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/udp/1/quic/p2p/12D3KooWEkRerimEJAEsCdiS8fZC"):
        with pytest.raises(BadValue, match="the address of a peer is such as"):
            Swarm([address])
    assert ipfs.split_peers("ipfs:") == []
    swarm = Swarm()
    with pytest.raises(TacitError, match="no folder yet"):
        swarm.put(b"x")
    swarm.keep(tmp_path)
    (tmp_path / "peers").write_text("# ours\n\nnonsense\n")
    with pytest.raises(BadValue, match="the address of a peer"):
        swarm.get(CID.of(b"x"), 5)
    (tmp_path / "peers").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"peers: is no text \(UTF-8\): write the address of a peer into each line"):
        swarm.get(CID.of(b"x"), 5)
    (tmp_path / "peer.key").write_bytes(b"short")
    with pytest.raises(TacitError, match="is no key of a peer"):
        swarm.listen()


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TacitError, match=r"This peer could not start at 127.0.0.1"):
            Peer(bytes(32), lambda cid: None, taken.getsockname())


@pytest.mark.slow
def test_helia_reads_our_weights_and_we_read_its(tmp_path):
    """A table as large as FB15k-237's, by another program's IPFS: the same address, the same bytes, both ways."""
    with Helia() as helia, peers(tmp_path, "a") as (_, a):
        table = os.urandom(14_541 * 128 * 4)
        (tmp_path / "table").write_bytes(table)
        told = helia.ask(add=str(tmp_path / "table"))
        assert told["cid"] == str(unixfs.address_of(table))
        (tmp_path / "from-helia").mkdir()
        with contextlib.closing(Swarm(helia.addresses)) as reader:
            reader.keep(tmp_path / "from-helia")
            for _ in range(2):  # once more on the same connection
                shutil.rmtree(tmp_path / "from-helia" / "blobs", ignore_errors=True)
                assert reader.get(CID.parse(told["cid"]), len(table)) == table
        other = os.urandom(2_500_000)
        helia.ask(get=str(a.put(other)), peer=a._peer.addresses[0], into=str(tmp_path / "got"), wait=60)
        assert (tmp_path / "got").read_bytes() == other
        small = a.put(b"hello")
        helia.ask(get=str(small), peer=a._peer.addresses[0], into=str(tmp_path / "got"), wait=60)
        assert (tmp_path / "got").read_bytes() == b"hello"


# -- ledgers -----------------------------------------------------------------------------------------------------------


def test_rows_without_privacy_are_refused_on_a_public_network(tmp_path):
    place = Public(None, Swarm())
    with Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("drugs", keys=KEYS), place) as ledger:
        ledger.open_model(WHO[0], Model(ledger.genesis, "drugs", entity=3, relation=3))
        with pytest.raises(Refused, match="is on a public network, and these rows claim no privacy"):
            ledger.publish_rows(WHO[0], "drugs", rows(tmp_path, 1), None)
        assert list(ledger.blobs.store) == []
        ledger.publish_rows(WHO[0], "drugs", rows(tmp_path, 1), CLAIM)
        ledger.publish_rows(WHO[0], "drugs", rows(tmp_path, 2), None, reveal=True)
        assert ledger.public
    with Ledger.load(tmp_path / "ledger") as again:  # log in the folder, weights at peers
        assert again.verify().faults == []
        assert [node.update.privacy for node in again.dag.branch("drugs").nodes] == [CLAIM, None]
        assert again.public


def test_places_of_ledgers_that_cannot_be(tmp_path):
    def who():
        raise AssertionError

    assert reach(None, who=who) is None
    with pytest.raises(BadValue, match="weights are at peers by ipfs:"):
        reach(None, "http://x", who=who)
    with pytest.raises(BadValue, match="neither the log nor the weights"):
        Public(None, None)
    (tmp_path / "account").write_text("x")
    with pytest.raises(TacitError, match="--account goes with --log evm:"):
        reach("tls://x:1/y", who=who, account=tmp_path / "account")
    with pytest.raises(TacitError, match="is no account of a chain"):
        reach("evm:http://127.0.0.1:1", who=who, account=tmp_path / "account")


def test_without_the_extras_it_is_said_which(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "web3", None)
    with pytest.raises(TacitError, match=r'pip install "tacit-kg\[evm\]"'):
        EvmLog("evm:http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "libp2p", None)
    with pytest.raises(TacitError, match=r'pip install "tacit-kg\[ipfs\]"'):
        Peer(bytes(32), lambda cid: None, None)


class Consortium(Providers):
    """A chain, and providers, each with an account and a peer of its own."""

    def __init__(self, root, anvil, names, updates=0):
        super().__init__(root, names, updates)
        self.shares = []
        for each in WHO[: len(names)]:
            (root / each.name).mkdir()
            each.save(root / each.name / "own.key")
            anvil.account(root / each.name / "own.account")

    def share(self):
        """Everybody gives what it has to everybody; their addresses."""
        said = [self.root / name / "shared" for name in self.names]
        for file in said:
            with open(file, "w") as out:
                self.shares.append(subprocess.Popen(
                    [sys.executable, "-m", "tacit", "ledger", "share", "ledger", "--listen", "127.0.0.1:0", "--json"],
                    cwd=file.parent, stdout=out, env=environment(),
                ))  # fmt: skip
        until(lambda: all(file.read_text().endswith("\n") for file in said))
        addresses = [json.loads(file.read_text())["addresses"][0] for file in said]
        for file, own in zip(said, addresses, strict=True):
            others = [address for address in addresses if address != own]
            (file.parent / "ledger" / "peers").write_text("\n".join(others) + "\n")
        return addresses

    def close(self):
        super().close()
        for process in self.shares:
            process.kill()
            process.wait()


@pytest.mark.full
def test_four_providers_on_a_chain_that_is_killed_and_reorganised_come_to_the_same_as_in_a_folder(tmp_path):
    names = [each.name for each in WHO[:4]]
    with (
        Anvil(every=0.5, state=tmp_path / "state.json") as anvil,
        contextlib.closing(Consortium(tmp_path, anvil, names, updates=6)) as consortium,
    ):
        roster().save(tmp_path / "roster.json")
        deep = ("--confirmations", "6")
        told = json.loads(tacit(
            "ledger", "init", "ledger", "--key", "own.key", "--roster", "../roster.json", "--model", "drugs",
            "--entity", "8", "--log", anvil.place, "--blobs", "ipfs:", "--account", "own.account", *deep, "--json",
            cwd=tmp_path / names[0],
        ))  # fmt: skip
        joining = ("--log", told["log"], "--genesis", told["genesis"], *deep)
        for name in names[1:]:
            tacit("ledger", "join", "ledger", *joining, "--blobs", "ipfs:", "--account", "own.account",
                  cwd=tmp_path / name)  # fmt: skip
        addresses = consortium.share()
        for name in names:
            consortium.start(name)
        consortium.goes_on(2)
        anvil.kill()  # by SIGKILL: it has what it had a second ago at the latest
        time.sleep(1)
        anvil.start()
        consortium.goes_on()
        anvil.reorganise(3)
        consortium.kill(names[0])
        consortium.goes_on()
        consortium.start(names[0])
        ended = consortium.end()
        assert all(each["published"] == 6 and 0 < each["epsilon"] <= 2 for each in ended.values())
        # a newcomer, who has no key and no account, reads it all, and fetches all weights
        peers = "ipfs:" + ",".join(addresses)
        tacit("ledger", "join", "new", *joining, "--blobs", peers, "--json", cwd=tmp_path)
        verified = json.loads(tacit("ledger", "verify", "new", "--json", cwd=tmp_path))
        assert verified["faults"] == []
        with Ledger.load(tmp_path / "new") as new:
            state, head = new.dag.json(), new.head
            assert verified["head"] == head
            standing = {update["update"] for update in state["models"][0]["updates"]}
            assert len(standing) == 4 * 6
            whose = {str(cid): new.dag.provider(node.by) for cid, node in new.dag.nodes.items()}
            for name in names:
                assert set(consortium.published(name)) <= standing
                taken = {whose[cid] for look in consortium.looks(name) for cid in look["taken"]}
                assert len(taken - {name}) >= 2  # rows that came from others' peers
            embed(new, tmp_path / "embedded")
            embedded = Ledger.load(tmp_path / "embedded")
            assert not embedded.public
            assert (embedded.head, embedded.dag.json()) == (head, state)
            assert embedded.verify().faults == []
            for node in new.dag.nodes.values():
                assert embedded.rows(node).entity.equal(new.rows(node).entity)
        for name in names:
            with Ledger.load(tmp_path / name / "ledger") as own:
                assert (own.head, own.faults) == (head, [])


def embed(ledger, folder):
    """The same records and weights in a folder."""
    shutil.copytree(ledger.folder, folder, ignore=shutil.ignore_patterns("peer*", "chain*", "seen", BLOBS))
    manifest = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(json.dumps({key: manifest[key] for key in ("schema", "genesis", "contents")}))
    SqliteLog(folder / RECORDS, create=True).append([(each.name, each.data) for each in ledger.log.read()])
    store = BlobFolder(folder / BLOBS)
    for node in ledger.dag.nodes.values():
        assert store.put(ledger.blobs.get(node.update.weights, node.update.size)) == node.update.weights


@pytest.mark.slow
@pytest.mark.parametrize("network", ["broker", "broker and peers", "chain and peers"])
def test_the_same_turns_make_the_same_ledger_wherever_it_is(tmp_path, network, monkeypatch):
    """Four providers take turns, each with a folder of its own: every record and every row, to the bit."""
    monkeypatch.setattr(evm, "PAUSE", 0.02)
    (tmp_path / "folder").mkdir()
    expected = turns(tmp_path / "folder")
    assert len(expected[1]) == 3 * 4
    with contextlib.ExitStack() as opened:
        if network == "chain and peers":
            anvil = opened.enter_context(Anvil())
            who = {each.name: anvil.account(tmp_path / f"{each.name}.account") for each in WHO[:4]}
            genesis = Record.sign(WHO[0], FIRST).cid

            def log(each):
                return EvmLog(f"{anvil.place}#0", genesis, account=who[each.name], confirmations=0)
        else:
            broker = opened.enter_context(Operated(tmp_path / "broker", roster(), "drugs"))

            def log(each):
                return Remote(broker.place, each, ca=broker.ca)

        def place(each):
            return Public(log(each), Swarm()) if network.endswith("peers") else log(each)

        assert turns(tmp_path, place) == expected


FIRST = Genesis("drugs", keys=KEYS)


def turns(root, place=None):
    """The ledger's head, and the rows of each update, after three turns of four providers who train privately."""
    settings = Settings.make({
        "scorer": {"dim": 4}, "negatives": {"name": "pool", "count": 2, "scope": "vocabulary"},
        "training": {"epochs": 1, "batch": 256, "device": "cpu"},
        "privacy": {"name": "dpsgd", "sigma": 3.0, "noise": "seeded"},
    })  # fmt: skip
    with contextlib.ExitStack() as opened:
        ledger = Ledger.begin(root / "0", WHO[0], FIRST, place and place(WHO[0]))
        ledgers = [opened.enter_context(ledger)]
        ledger.open_model(WHO[0], Model(ledger.genesis, "drugs", entity=4, relation=4))
        for n, who in enumerate(WHO[1:4], 1):
            found = Ledger.join(root / str(n), place(who), ledger.genesis) if place else Ledger.load(root / "0")
            ledgers.append(opened.enter_context(found))
        if isinstance(ledger.blobs, Swarm):
            addresses = [each.blobs.listen()[0] for each in ledgers]
            for n, each in enumerate(ledgers):
                (each.folder / "peers").write_text("\n".join(addresses[:n] + addresses[n + 1 :]) + "\n")
        made = []
        for n, each in enumerate(ledgers):
            each.publish_rows = partial(each.publish_rows, reveal=True)  # noise of a seed: none of them claims anything
            terms = Terms(epochs=1, updates=3, noise="seeded")
            made.append(Provider(each, "drugs", WHO[n], clinic("demo")[n], settings, terms, number=n))
        for _ in range(3):
            for one in made:
                assert one.step().update is not None
        ledger.refresh()
        assert sum(len(node.parents) > 1 for node in ledger.dag.nodes.values()) >= 6  # of others' too
        return ledger.head, [
            ledger.blobs.get(node.update.weights, node.update.size) for node in ledger.dag.nodes.values()
        ]


@pytest.mark.slow
def test_the_commands_on_a_chain_with_peers(tmp_path):
    """From an account to verified weights, with the peer that gives them a process of its own."""
    with Anvil(every=0.5) as anvil:
        Consortium(tmp_path, anvil, [WHO[0].name])
        home = tmp_path / WHO[0].name
        told = json.loads(tacit("ledger", "account", "new.account", "--json", cwd=tmp_path))
        assert told["new"]
        assert told["address"] in tacit("ledger", "account", "new.account", cwd=tmp_path)
        anvil.node.ask("anvil_setBalance", told["address"], hex(10**20))
        told = json.loads(tacit(
            "ledger", "init", "ledger", "--key", "own.key", "--open", "--model", "drugs", "--entity", "3", "--log",
            anvil.place, "--blobs", "ipfs:", "--account", "../new.account", "--confirmations", "1", "--json", cwd=home,
        ))  # fmt: skip
        with open(tmp_path / "shared", "w") as said:
            sharing = subprocess.Popen([sys.executable, "-m", "tacit", "ledger", "share", "ledger", "--listen",
                                        "127.0.0.1:0", "--json"], cwd=home, stdout=said, env=environment())  # fmt: skip
        try:
            with Ledger.load(home / "ledger") as ledger:
                ledger.publish_rows(WHO[0], "drugs", rows(tmp_path, 5), CLAIM)
            until(lambda: (tmp_path / "shared").read_text().endswith("\n"))
            [address] = json.loads((tmp_path / "shared").read_text())["addresses"]
            joined = json.loads(tacit(
                "ledger", "join", "new", "--log", told["log"], "--genesis", told["genesis"], "--confirmations", "1",
                "--blobs", f"ipfs:{address}", "--json", cwd=tmp_path,
            ))  # fmt: skip
            assert joined["places"] == 3
            lines = tacit("ledger", "follow", "new", "--until", "3", "--weights", "--json", cwd=tmp_path).splitlines()
            assert [json.loads(line)["kind"] for line in lines] == ["genesis", "model", "update"]
            sharing.terminate()
            assert sharing.wait(20) == 143
            # nobody has them any more but who fetched them
            assert json.loads(tacit("ledger", "verify", "new", "--json", cwd=tmp_path))["faults"] == []
            shutil.rmtree(tmp_path / "new" / "blobs")
            faults = json.loads(tacit("ledger", "verify", "new", "--json", cwd=tmp_path, code=2))["faults"]
            assert "did not come: 0 of 1 peers were reached" in faults[0]["reason"]
        finally:
            sharing.kill()
            sharing.wait()
