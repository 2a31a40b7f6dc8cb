"""The ledger: one form for every record, lies refused with a reason, whatever is tampered with found and ignored."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import shutil
import sqlite3
import struct
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from ledgers import known
from tacit import train
from tacit.cli import app
from tacit.clinic import clinic
from tacit.errors import BadInput, BadValue, Refused, TacitError
from tacit.federation.keys import Identity, Roster, make
from tacit.ledger import cbor
from tacit.ledger.blobs import BlobFolder, Rows, Withheld
from tacit.ledger.cbor import CID, DAG_CBOR, RAW
from tacit.ledger.committee import GAP, Committee, chain, drawn, own_number, safe_seats
from tacit.ledger.dag import Dag
from tacit.ledger.ledger import WIDTH, Ledger, claim_of
from tacit.ledger.log import MARK, SqliteLog
from tacit.ledger.record import LARGEST, PURPOSE, Beacon, Claim, Genesis, Model, Record, Revocation, Update, Verdict
from tacit.privacy.events import Gaussian, Sampled, Segment
from tacit.tensors import load_tensors, parse_tensors, save_tensors
from test_cli import tacit

WHO = [known(f"provider-{n}") for n in range(6)]
STRANGER = known("stranger")
KEYS = tuple((who.name, who.public) for who in WHO)
CLAIM = Claim((Segment(Sampled(0.01, (1.1, 2.0)), 300), Segment(Gaussian(4.0))), holding=bytes(range(32)))
GENESIS = Record.sign(WHO[0], Genesis("tests", keys=KEYS))
MODEL = Record.sign(WHO[0], Model(GENESIS.cid, "drugs", entity=3, relation=2, batch=4))
OTHER = Record.sign(WHO[1], Model(GENESIS.cid, "genes", entity=4, relation=4, parents=1, committee=0, quorum=0))


def weights(seed=0, entity=3, relation=2, names=("a", "b"), rows=None):
    """A file of rows, as bytes."""
    rows = torch.full((len(names), entity), float(seed)) if rows is None else rows
    text = {"schema": "tacit.shared/1", "entities": "\n".join(names), "relations": "treats"}
    path = Path(weights.folder) / "rows.safetensors"
    save_tensors(path, {"entity": rows, "relation": torch.ones(1, relation)}, text)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _folder(tmp_path_factory):
    weights.folder = tmp_path_factory.mktemp("rows")


def update(who, parents, n=0, model=MODEL, **changed):
    given = {"weights": CID.of(n.to_bytes(4, "big")), "size": 100, "privacy": None} | changed
    return Record.sign(who, Update(model.cid, tuple(sorted(each.cid for each in parents)), **given))


def filled(*records):
    dag = Dag(GENESIS.cid)
    for record in (GENESIS, MODEL, OTHER, *records):
        dag.add(record.data)
    return dag


@pytest.fixture
def ledger(tmp_path):
    """A ledger with a model and five updates with weights, one after the other."""
    found = Ledger.begin(tmp_path / "ledger", WHO[0], Genesis("tests", keys=KEYS))
    found.open_model(WHO[0], Model(found.genesis, "drugs", entity=3, relation=2))
    for n in range(5):
        tips = [node.cid for node in found.dag.branch("drugs").tips]
        found.publish_rows(WHO[n], "drugs", weights(n), CLAIM, tips)
    assert not found.faults
    return found


# -- one form in bytes -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 64), (1 << 64) - 1) | st.text(max_size=30) | st.binary(max_size=30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.builds(CID.of, st.binary(max_size=4), st.sampled_from([RAW, DAG_CBOR])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=30), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
def test_values_come_back_as_they_were(value):
    data = cbor.encode(value)
    back = cbor.decode(data)
    assert back == value
    assert cbor.encode(back) == data


@given(VALUES, st.data())
def test_bytes_that_are_read_are_the_one_form(value, data):
    """Whatever is changed: either it is refused, or it is what `encode` would have written."""
    found = bytearray(cbor.encode(value))
    at = data.draw(st.integers(0, len(found)))
    found[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        read = cbor.decode(bytes(found))
    except Refused:
        return
    assert cbor.encode(read) == found


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(Refused):
        assert cbor.encode(cbor.decode(data)) == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("1817", "shortest form"),
        ("1900ff", "shortest form"),
        ("1a0000ffff", "shortest form"),
        ("1b00000000ffffffff", "shortest form"),
        ("5801ff", "shortest form"),
        ("9fff", "leaves a length open"),
        ("5f4101ff", "leaves a length open"),
        ("f93c00", "less than 64 bits"),
        ("fa3f800000", "less than 64 bits"),
        ("f7", "does not know"),
        ("fb7ff8000000000000", "no number"),
        ("fb7ff0000000000000", "no number"),
        ("a2616201616102", "out of order"),
        ("a2626161016162" + "02", "out of order"),
        ("a2616101616102", "out of order"),
        ("a10101", "no text"),
        ("c101", "no link"),
        ("d82a4100", "no link"),
        ("d82a582500" + "00" * 36, "no address"),
        ("61ff", "not UTF-8"),
        ("", "cut short"),
        ("6261", "cut short"),
        ("9bffffffffffffffff", "cut short"),
        ("bb00000000ffffffff", "shortest form"),
        ("fb00", "cut short"),
        ("81" * 17 + "00", "deep"),
        ("0000", "1 bytes too many"),
    ],
)
def test_other_forms_are_refused(data, reason):
    with pytest.raises(Refused, match=reason):
        cbor.decode(bytes.fromhex(data))


def test_what_has_no_form_is_refused():
    for value in (float("nan"), float("inf"), 1 << 64, -(1 << 64) - 1, {1: 2}, {1, 2}, "\ud800", object()):
        with pytest.raises(BadValue):
            cbor.encode(value)
    deep = []
    for _ in range(20):
        deep = [deep]
    with pytest.raises(BadValue, match="deep"):
        cbor.encode(deep)


def test_known_answers():
    """Of RFC 8949's appendix, and of the text of a CID as everybody writes it."""
    known = {0: "00", 23: "17", 24: "1818", 1000000: "1a000f4240", (1 << 64) - 1: "1bffffffffffffffff", -1: "20",
             -1000: "3903e7", 1.1: "fb3ff199999999999a", "IETF": "6449455446", "\u6c34": "63e6b0b4"}  # fmt: skip
    for value, expected in known.items():
        assert cbor.encode(value).hex() == expected
    assert cbor.encode([1, [2, 3]]).hex() == "8201820203"
    assert cbor.encode({"b": [2, 3], "a": 1}).hex() == "a26161016162820203"
    assert cbor.encode(False).hex() + cbor.encode(True).hex() + cbor.encode(None).hex() == "f4f5f6"
    hello = CID.of(b"hello")
    assert str(hello) == "bafkreibm6jg3ux5qumhcn2b3flc3tyu6dmlb4xa7u5bf44yegnrjhc4yeq"
    assert CID.parse(str(hello)) == hello
    assert hello[4:] == hashlib.sha256(b"hello").digest()
    assert cbor.encode(hello).hex() == "d82a582500" + hello.hex()


@pytest.mark.parametrize("text", ["", "b", "z123", "bafk", str(CID.of(b"x")).upper(), str(CID.of(b"x")) + "a", "b!!!"])
def test_texts_that_are_no_address(text):
    with pytest.raises(Refused, match="address"):
        CID.parse(text)


@given(VALUES)
def test_as_the_package_writes_it(value):
    dag_cbor = pytest.importorskip("dag_cbor")
    multiformats = pytest.importorskip("multiformats")

    def theirs(value):
        if isinstance(value, CID):
            codec = "raw" if value.codec == RAW else "dag-cbor"
            return multiformats.CID("base32", 1, codec, ("sha2-256", bytes(value[4:])))
        if isinstance(value, list):
            return [theirs(each) for each in value]
        return {key: theirs(each) for key, each in value.items()} if isinstance(value, dict) else value

    assert cbor.encode(value) == dag_cbor.encode(theirs(value))
    assert theirs(cbor.decode(dag_cbor.encode(theirs(value)))) == theirs(value)


# -- records -----------------------------------------------------------------------------------------------------------

SOME = update(WHO[1], [MODEL], privacy=CLAIM)
BODIES = [
    GENESIS.body,
    Genesis("anybody", "open"),
    MODEL.body,
    SOME.body,
    Beacon(MODEL.cid, 3, bytes(32)),
    Verdict(MODEL.cid, 2, (SOME.cid,), ((GENESIS.cid, "too far from the others"),)),
    Revocation(GENESIS.cid, bytes(32)),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)
def test_records_come_back_as_they_were(body):
    record = Record.sign(WHO[2], body)
    back = Record.decode(record.data)
    back.verify()
    assert back == record
    assert back.body == body
    assert back.cid == CID.of(record.data, DAG_CBOR)


def test_a_changed_bit_anywhere_is_noticed():
    """Of every byte one bit: the record cannot be read any more, or its signature is wrong."""
    for at in range(len(SOME.data)):
        data = bytearray(SOME.data)
        data[at] ^= 1 << at % 8
        with pytest.raises(Refused):
            Record.decode(bytes(data)).verify()


def raw(content, signature=None):
    body = cbor.encode(content)
    return b"\x82" + body + b"\x58\x40" + (WHO[1].sign(PURPOSE, body) if signature is None else signature)


CONTENT = cbor.decode(SOME.data)[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00" * (LARGEST + 1), "65,536 are the most"),
        (cbor.encode([1, 2, 3]), "no record"),
        (cbor.encode({}), "no record"),
        (cbor.encode([{}, b""]), "no signature"),
        (raw({}), "the schema 'None'"),
        (raw(CONTENT | {"schema": "tacit.ledger/2"}), "this version of tacit reads tacit.ledger/1"),
        (raw(CONTENT | {"kind": "gift"}), "of the kind"),
        (raw(CONTENT | {"kind": ["gift"]}), "of the kind"),
        (raw(CONTENT | {"note": ""}), "other fields"),
        (raw({key: value for key, value in CONTENT.items() if key != "size"}), "other fields"),
        (raw(CONTENT | {"by": b"short"}), "'by' has 32 bytes"),
        (raw(CONTENT | {"by": "text"}), "'by' has 32 bytes"),
        (raw(CONTENT | {"size": -1}), "'size' is a whole number"),
        (raw(CONTENT | {"size": True}), "'size' is a whole number"),
        (raw(CONTENT | {"size": 1 << 40}), "'size' is a whole number"),
        (raw(CONTENT | {"parents": []}), "from 1 to 64 parents"),
        (raw(CONTENT | {"parents": 7}), "is a list"),
        (raw(CONTENT | {"parents": [MODEL.cid] * 2}), "not in order, or twice"),
        (raw(CONTENT | {"parents": ["x"]}), "address of a record"),
        (raw(CONTENT | {"parents": [CID.of(b"")]}), "address of a record"),
        (raw(CONTENT | {"weights": MODEL.cid}), "address of weights"),
        (raw(CONTENT | {"weights": bytes(CID.of(b""))}), "address of weights"),
        (raw(CONTENT | {"privacy": 3.0}), "a claim of privacy"),
        (raw(CONTENT | {"privacy": CLAIM.content() | {"epsilon": 0.1}}), "a claim of privacy"),
        (raw(CONTENT | {"privacy": CLAIM.content() | {"releases": [{"event": "magic", "count": 1}]}}), "magic"),
        (raw(CONTENT | {"privacy": CLAIM.content() | {"releases": [{"event": "gaussian", "sigma": 0.0, "count": 1}]}}),
         "sigma is a number above 0"),
        (raw(CONTENT | {"privacy": CLAIM.content() | {"unit": 7}}), "'unit' is text"),
        (SOME.data + b"\x00", "too many"),
        (SOME.data[:-1], "cut short"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_is_no_record_is_refused_with_the_reason(data, reason):
    with pytest.raises(Refused, match=reason):
        Record.decode(data)


@pytest.mark.parametrize(
    ("make_it", "reason"),
    [
        (lambda: Genesis("x"), "admits nobody"),
        (lambda: Genesis("x", "open", KEYS), "everybody is admitted"),
        (lambda: Genesis("x", "by invitation"), "'admission' is"),
        (lambda: Genesis("", "open"), "name of a ledger"),
        (lambda: Genesis("x\n", "open"), "control character"),
        (lambda: Genesis("x" * 101, "open"), "100 are the most"),
        (lambda: Genesis("x", keys=(KEYS[0], KEYS[0])), "twice"),
        (lambda: Genesis("x", keys=(KEYS[0], ("other", KEYS[0][1]))), "a key twice"),
        (lambda: replace(MODEL.body, task="weather"), "'task' is"),
        (lambda: replace(MODEL.body, entity=0), "'entity' is"),
        (lambda: replace(MODEL.body, quorum=2), "more than half"),
        (lambda: replace(MODEL.body, quorum=6), "more than half"),
        (lambda: replace(MODEL.body, standing=2), "at least the quorum, 3"),
        (lambda: replace(MODEL.body, parents=65), "'parents' is"),
        (lambda: Beacon(MODEL.cid, -1, bytes(32)), "'batch' is"),
        (lambda: Beacon(MODEL.cid, 1, bytes(31)), "'value' has"),
        (lambda: Verdict(MODEL.cid, 1), "on 1 to"),
        (lambda: Verdict(MODEL.cid, 1, (SOME.cid,), ((SOME.cid, "no"),)), "both"),
        (lambda: Verdict(MODEL.cid, 1, (), ((SOME.cid, "x" * 201),)), "200 are the most"),
    ],
)
def test_what_cannot_be_said_is_refused_with_the_reason(make_it, reason):
    with pytest.raises(Refused, match=reason):
        make_it()


# -- what may stand in a ledger ----------------------------------------------------------------------------------------


def forged(record, **changed):
    """Somebody else's words under one's own signature."""
    content = cbor.decode(record.data)[0] | changed
    body = cbor.encode(content)
    return b"\x82" + body + b"\x58\x40" + STRANGER.sign(PURPOSE, body)


FIRST = update(WHO[1], [MODEL], 1)
FOREIGN = update(WHO[1], [OTHER], 2, OTHER)
LIES = {
    "a forged signature": (forged(FIRST, size=7), "not of the key"),
    "a signature for another purpose": (
        (lambda body: b"\x82" + body + b"\x58\x40" + WHO[1].sign("roster", body))(FIRST.data[1:-66]), "not of the key"),
    "a key that is not admitted": (update(STRANGER, [MODEL], 3).data, "not admitted"),
    "a model of a stranger": (Record.sign(STRANGER, replace(MODEL.body, name="x")).data, "not admitted"),
    "an unknown model": (update(WHO[1], [MODEL], 3, SOME).data, "not in this ledger"),
    "a parent of another model": (update(WHO[1], [FOREIGN], 3).data, "of another model"),
    "another model as parent": (update(WHO[1], [OTHER], 3).data, "is no update"),
    "the genesis as parent": (update(WHO[1], [GENESIS], 3).data, "is no update"),
    "an unknown parent": (update(WHO[1], [SOME], 3).data, "not in the ledger before it"),
    "the model beside others": (update(WHO[1], [MODEL, FIRST], 3).data, "beside others"),
    "too many parents": (
        Record.sign(WHO[1], Update(MODEL.cid, tuple(sorted(CID.of(bytes((n,)), DAG_CBOR) for n in range(3))),
                                   CID.of(b""), 1)).data, "3 parents, where 2 are the most"),
    "weights too large": (update(WHO[1], [MODEL], 3, size=(1 << 30) + 1).data, "1,073,741,824 are the most"),
    "the same record": (FIRST.data, "already"),
    "a second genesis": (Record.sign(WHO[1], Genesis("mine", "open")).data, "begins once"),
    "a model of another ledger": (
        Record.sign(WHO[1], Model(SOME.cid, "x", entity=3, relation=2)).data, "of another ledger"),
    "a name that there is": (Record.sign(WHO[1], replace(MODEL.body, entity=9)).data, "which there is already"),
    "another form": (FIRST.data[:-66] + b"\x59\x00\x40" + FIRST.data[-64:], "shortest form"),
    "a beacon where there is no committee": (
        Record.sign(WHO[1], Beacon(OTHER.cid, 0, bytes(32))).data, "this model has none"),
    "a verdict without a seat": (
        Record.sign(WHO[1], Verdict(MODEL.cid, 0, (FIRST.cid,))).data, "no seat in the committee of batch 0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_the_reason_and_leaves_no_trace(lie):
    data, reason = LIES[lie]
    dag = filled(FIRST, FOREIGN)
    before, size = dag.json(), len(dag)
    with pytest.raises(Refused, match=reason):
        dag.add(data)
    assert (dag.json(), len(dag)) == (before, size)
    dag.add(update(WHO[2], [FIRST], 9).data)  # and it goes on


def test_a_ledger_begins_with_its_genesis():
    with pytest.raises(Refused, match="before the genesis"):
        Dag().add(MODEL)
    with pytest.raises(Refused, match="another ledger"):
        Dag(MODEL.cid).add(GENESIS)
    anybody = Record.sign(STRANGER, Genesis("open to all", "open"))
    dag = Dag()
    dag.add(anybody)
    dag.add(Record.sign(Identity.new("newcomer"), Model(anybody.cid, "m", entity=1, relation=1)))
    assert len(dag.branch("m").nodes) == 0


def test_a_revoked_key_is_refused_from_there_on_and_what_it_signed_before_stands():
    mine = update(WHO[2], [MODEL], 1)
    dag = filled(mine)
    for who, key, genesis, reason in (
        (WHO[3], WHO[2].public, GENESIS.cid, "only who began the ledger may"),
        (STRANGER, STRANGER.public, GENESIS.cid, "not admitted"),
        (WHO[0], STRANGER.public, GENESIS.cid, "never admitted"),
        (WHO[0], WHO[2].public, MODEL.cid, "of another ledger"),
    ):
        with pytest.raises(Refused, match=reason):
            dag.add(Record.sign(who, Revocation(genesis, key)).data)
    assert not dag.revoked
    dag.add(Record.sign(WHO[0], Revocation(GENESIS.cid, WHO[2].public)).data)  # by who began it
    dag.add(Record.sign(WHO[3], Revocation(GENESIS.cid, WHO[3].public)).data)  # by itself
    for record in (
        update(WHO[2], [mine], 2),
        Record.sign(WHO[3], Model(GENESIS.cid, "new", entity=1, relation=1)),
        Record.sign(WHO[3], Beacon(MODEL.cid, 0, bytes(32))),
        Record.sign(WHO[2], Revocation(GENESIS.cid, WHO[2].public)),
    ):
        with pytest.raises(Refused, match="which was revoked before"):
            dag.add(record.data)
    with pytest.raises(Refused, match="revokes a key that was revoked before"):
        dag.add(Record.sign(WHO[0], Revocation(GENESIS.cid, WHO[3].public)).data)
    assert mine.cid in dag.branch("drugs").open_ends
    dag.add(update(WHO[1], [mine], 2).data)  # and may be built on
    assert dag.json()["revoked"] == ["provider-2", "provider-3"]
    dag.add(Record.sign(WHO[0], Revocation(GENESIS.cid, WHO[0].public)).data)  # whoever began it too, and then nobody
    with pytest.raises(Refused, match="which was revoked before"):
        dag.add(Record.sign(WHO[0], Revocation(GENESIS.cid, WHO[1].public)).data)


def test_there_are_no_cycles():
    """A record names others by their hashes, so the last of a ring cannot be written; out of order it is refused."""
    second = update(WHO[2], [FIRST], 2)
    third = update(WHO[3], [second], 3)
    dag = filled()
    for early in (third, second):
        with pytest.raises(Refused, match="not in the ledger before it"):
            dag.add(early)
    for record in (FIRST, second, third):
        dag.add(record)
    assert dag.ancestors(third.cid) == {FIRST.cid, second.cid}


# -- tips and ancestry -------------------------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Updates of two models, each with parents among those before."""
    records = {MODEL.cid: [], OTHER.cid: []}
    found = []
    for n in range(draw(st.integers(0, 12))):
        model = draw(st.sampled_from([MODEL, OTHER]))
        before = records[model.cid]
        most = min(len(before), model.body.parents)
        parents = draw(st.lists(st.sampled_from(before), max_size=most, unique_by=id)) if before else []
        record = update(WHO[n % 6], parents or [model], n, model)
        before.append(record)
        found.append(record)
    return found


@given(histories())
def test_tips_and_ancestry_as_defined(records):
    dag = filled(*records)
    parents = {record.cid: set(record.body.parents) for record in records}
    for model in (MODEL, OTHER):
        mine = [record for record in records if record.body.model == model.cid]
        built_on = set().union(*(parents[record.cid] for record in mine)) if mine else set()
        branch = dag.branches[model.cid]
        assert [node.cid for node in branch.tips] == [record.cid for record in mine if record.cid not in built_on]
        assert [node.number for node in branch.nodes] == list(range(len(mine)))

    def above(cid):
        return set().union(*({each} | above(each) for each in parents.get(cid, ()) if each in parents))

    for record in records:
        assert dag.ancestors(record.cid) == above(record.cid)
        for other in records:
            assert dag.descends(record.cid, other.cid) == (other.cid in above(record.cid))


def test_several_models_on_one_ledger_do_not_mix():
    dag = filled(FIRST, FOREIGN)
    assert [node.cid for node in dag.branch("drugs").tips] == [FIRST.cid]
    assert [node.cid for node in dag.branch("genes").tips] == [FOREIGN.cid]
    assert dag.branch(str(OTHER.cid)) is dag.branch("genes")
    with pytest.raises(TacitError, match="There are: drugs, genes"):
        dag.branch("weather")


def test_what_a_provider_claims_adds_up_and_one_update_without_makes_it_nothing():
    second = update(WHO[1], [FIRST], 2, privacy=CLAIM)
    third = update(WHO[1], [SOME], 5, privacy=CLAIM)
    other = update(WHO[1], [third], 6, privacy=Claim((Segment(Gaussian(9.0)),), "one confidential triple"))
    both = filled(SOME, third, other).claimed(WHO[1].public)
    assert both["one confidential triple"] == (Segment(Gaussian(9.0)),)
    claimed = both[CLAIM.unit]
    assert {segment.event: segment.count for segment in claimed} == {Sampled(0.01, (1.1, 2.0)): 600, Gaussian(4.0): 2}
    assert filled(FIRST, second).claimed(WHO[1].public) is None


def test_the_graph_is_drawn():
    dag = filled(FIRST, FOREIGN, update(WHO[2], [FIRST], 4))
    lines = list(dag.dot())
    assert lines[0] == "digraph ledger {"
    assert lines[-1] == "}"
    assert f'  "{FIRST.cid}" -> "{MODEL.cid}";' in lines
    assert sum("->" in line for line in lines) == 3
    odd = Record.sign(WHO[0], replace(MODEL.body, name='a "quoted" \\ name'))
    dag.add(odd)
    assert f'  "{odd.cid}" [label="a \\"quoted\\" \\\\ name", shape=oval];' in list(dag.dot([dag.branches[odd.cid]]))
    assert json.loads(json.dumps(dag.json()))["models"][0]["tips"]


# -- committees --------------------------------------------------------------------------------------------------------

RULE = Model(GENESIS.cid, "reviewed", entity=3, relation=2, committee=3, quorum=2, standing=2, batch=2)
REVIEWED = Record.sign(WHO[0], RULE)


class Play:
    """A model whose committees are played through."""

    def __init__(self, serve=WHO):
        self.dag = Dag(GENESIS.cid)
        self.records = []
        self.last = REVIEWED
        for record in (GENESIS, REVIEWED):
            self.add(record)
        for who in serve:
            self.add(self.beacon(who, 0))

    def add(self, record):
        self.dag.add(record.data)
        self.records.append(record)
        return record

    def beacon(self, who, batch):
        return Record.sign(who, Beacon(REVIEWED.cid, batch, own_number(who, REVIEWED.cid, batch)))

    def update(self, who):
        self.last = self.add(update(who, [self.last], len(self.records), REVIEWED))
        return self.last

    @property
    def committee(self) -> Committee:
        return self.dag.branches[REVIEWED.cid].committee

    def stand(self, batch, serve=WHO):
        for who in serve:
            self.add(self.beacon(who, batch))

    def to_batch(self, batch, serve=WHO):
        """Go on until a batch is open."""
        while self.committee.batch < batch:
            if self.committee.updates % RULE.batch == 0 and self.committee.batch >= 1:
                self.stand(self.committee.batch + 1, serve)
            self.update(WHO[0])


def seated(play, batch):
    """Who sits, as identities."""
    return [next(who for who in WHO if who.public == key) for key in play.committee.seats[batch]]


def test_committees_are_drawn_from_those_who_stood():
    play = Play()
    play.to_batch(4, WHO[:4])
    assert play.committee.seats[1] == ()
    for batch in (2, 3, 4):
        seats = seated(play, batch)
        assert len(set(seats)) == 3
        assert set(seats) <= set(WHO[:4])
    again = Dag(GENESIS.cid)
    for record in play.records:
        again.add(record.data)
    assert again.branches[REVIEWED.cid].committee.seats == play.committee.seats


def test_the_draw_is_even_and_does_not_depend_on_the_order():
    counts = dict.fromkeys((who.public for who in WHO), 0)
    for n in range(3000):
        numbers = {who.public: hashlib.sha256(bytes((place,)) + n.to_bytes(4, "big")).digest()
                   for place, who in enumerate(WHO)}  # fmt: skip
        seats = drawn(MODEL.cid, 5, numbers, 2)
        assert seats == drawn(MODEL.cid, 5, dict(reversed(numbers.items())), 2)
        for key in seats:
            counts[key] += 1
    assert max(abs(count - 1000) for count in counts.values()) < 130  # five deviations


@given(st.integers(1, 381), st.data())
def test_a_third_is_never_a_quorum_and_cannot_prevent_one(admitted, data):
    seats, liars = safe_seats(admitted), data.draw(st.integers(0, admitted // 3))
    quorum = seats // 2 + 1
    Model(GENESIS.cid, "any", entity=3, relation=2, committee=seats, quorum=quorum, standing=quorum)
    assert liars < quorum
    assert seats <= admitted
    assert seats - liars >= quorum


@given(st.integers(0, 1 << 64))
@settings(max_examples=20)
def test_whoever_closes_a_batch_when_the_lot_suits_him_has_no_safe_quorum(seed):
    """Three of nine see all numbers, withhold what they like and close when they like. With 5 seats they have their
    quorum; with as many as are safe, never.
    """
    keys = [hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(9)]
    numbers, liars, found = {key: hashlib.sha256(key).digest() for key in keys}, set(keys[:3]), {5: 0, 7: 0}
    for honest in range(2, 7):
        for shown in itertools.product((False, True), repeat=3):
            mine = [key for key, yes in zip(keys, shown, strict=False) if yes]
            stood = {key: numbers[key] for key in (*mine, *keys[3 : 3 + honest])}
            for seats in found:
                if len(stood) >= 5:
                    found[seats] = max(found[seats], len(liars & set(drawn(MODEL.cid, 5, stood, seats))))
    assert found[5] >= 3
    assert found[7] <= 3 < safe_seats(9) // 2 + 1 == 4


def test_ones_number_changes_the_draw():
    numbers = {who.public: bytes((n,)) * 32 for n, who in enumerate(WHO)}
    other = [drawn(MODEL.cid, 5, numbers | {WHO[0].public: bytes((n,)) * 32}, 2) for n in range(50)]
    assert len(set(other)) > 5
    assert len({drawn(MODEL.cid, batch, numbers, 2) for batch in range(50)}) > 5


def test_numbers_are_a_chain_that_cannot_be_foreseen_or_chosen():
    numbers = [own_number(WHO[0], MODEL.cid, batch, 20) for batch in range(21)]
    assert len(set(numbers)) == 21
    for batch in range(20):
        assert chain(MODEL.cid, numbers[batch + 1], 1) == numbers[batch]
    assert own_number(WHO[0], OTHER.cid, 3, 20) != numbers[3]
    with pytest.raises(Refused, match="none for batch 21"):
        own_number(WHO[0], MODEL.cid, 21, 20)


def test_wrong_numbers_are_refused():
    play = Play(WHO[:5])
    play.update(WHO[0])
    with pytest.raises(Refused, match="began in batch 0: it is bound from batch 2"):
        play.add(play.beacon(WHO[1], 1))
    with pytest.raises(Refused, match="it is time for those of batch 1"):
        play.add(play.beacon(WHO[1], 2))
    with pytest.raises(Refused, match="has one already"):
        play.add(Record.sign(WHO[1], Beacon(REVIEWED.cid, 0, bytes(32))))
    with pytest.raises(Refused, match="never begun"):
        play.add(play.beacon(WHO[5], 1))
    play.to_batch(1)
    with pytest.raises(Refused, match="made up"):
        play.add(Record.sign(WHO[1], Beacon(REVIEWED.cid, 2, bytes(32))))
    play.add(play.beacon(WHO[1], 2))
    with pytest.raises(Refused, match="stands in the ledger"):
        play.add(play.beacon(WHO[1], 2))
    play.add(play.beacon(WHO[5], 0))  # too late for batch 2
    with pytest.raises(Refused, match="bound from batch 3"):
        play.add(play.beacon(WHO[5], 2))


@given(st.integers(2, 3 * GAP))
@settings(max_examples=10)
def test_who_was_away_for_long_comes_back_step_by_step(away):
    """What a number costs to check does not grow with the ledger."""
    model = replace(RULE, batch=1, standing=1, committee=1, quorum=1)
    committee, key = Committee(MODEL.cid, model), WHO[0].public

    def number(batch):
        return Beacon(MODEL.cid, batch, own_number(WHO[0], MODEL.cid, batch))

    committee.add_beacon(number(0), key)
    for n in range(away):
        committee.add_update(CID.of(bytes((n & 255, n >> 8))), key)
    steps = committee.to_stand(key)
    assert steps[-1] == away + 1
    assert len(steps) == 1 + away // GAP
    for batch in steps:
        for other in {*steps, away, away + 2} - {batch}:
            with pytest.raises(Refused):
                committee.check_beacon(number(other), key)
        committee.check_beacon(number(batch), key)
        committee.add_beacon(number(batch), key)
    committee.add_update(CID.of(b"last"), key)
    assert committee.seats[away + 1] == (key,)


def test_nothing_is_reckoned_for_who_did_not_sign(monkeypatch):
    play = Play()
    play.to_batch(1)
    hashed, unsigned = [], forged(play.beacon(WHO[0], 2))
    monkeypatch.setattr("tacit.ledger.committee.chain", lambda *words: hashed.append(words))
    with pytest.raises(Refused, match="signature"):
        play.dag.check(unsigned)
    assert not hashed


def test_who_skips_a_batch_comes_back_and_who_withholds_is_not_drawn():
    play = Play()
    play.to_batch(3, WHO[:3])
    assert {who.name for who in seated(play, 3)} == {who.name for who in WHO[:3]}
    play.update(WHO[0])
    play.stand(4)
    play.to_batch(4)
    assert len(play.committee.seats[4]) == 3


def test_who_fills_a_batch_in_a_hurry_is_not_alone_in_the_next_draw():
    """One liar stands, and goes on before anybody else could: there is no committee, rather than his."""
    play = Play()
    play.to_batch(1)
    play.stand(2, WHO[5:])
    while play.committee.batch < 2:
        play.update(WHO[5])
    assert play.committee.seats[2] == ()
    mine = play.update(WHO[4])
    with pytest.raises(Refused, match="no seat"):
        play.add(verdict(WHO[5], 2, rejected=[mine]))
    play.stand(3)
    play.to_batch(3)
    assert len(play.committee.seats[3]) == 3  # and it goes on


def verdict(who, batch, accepted=(), rejected=()):
    pairs = tuple(sorted((record.cid, "too far away") for record in rejected))
    return Record.sign(who, Verdict(REVIEWED.cid, batch, tuple(sorted(r.cid for r in accepted)), pairs))


@pytest.fixture
def reviewed():
    """Batch 2 is full: an honest update and then a bad one, by providers who have no seat."""
    play = Play()
    play.to_batch(2)
    outside = [who for who in WHO if who.public not in play.committee.seats[2]]
    return play, play.update(outside[0]), play.update(outside[1])


def test_a_quorum_decides_and_what_is_rejected_is_no_tip(reviewed):
    play, good, bad = reviewed
    branch = play.dag.branches[REVIEWED.cid]
    one, two, three = seated(play, 2)
    assert play.committee.due(one.public) == (good.cid, bad.cid)
    assert [node.cid for node in branch.tips] == [bad.cid]
    play.add(verdict(one, 2, [good], [bad]))
    assert play.committee.due(one.public) == ()
    assert play.dag.outcome(bad.cid) == play.dag.outcome(good.cid) == "undecided"
    play.add(verdict(two, 2, [good], [bad]))
    assert (play.dag.outcome(good.cid), play.dag.outcome(bad.cid)) == ("accepted", "rejected")
    assert [node.cid for node in branch.tips] == [good.cid]
    assert any("dashed" in line for line in play.dag.dot())
    play.add(verdict(three, 2, [bad]))  # a liar alone changes nothing
    assert play.dag.outcome(bad.cid) == "rejected"
    assert branch.committee.votes(bad.cid) == (1, 2)


def test_what_is_built_on_rejected_updates_stays_and_their_parents_are_tips_again(reviewed):
    play, good, bad = reviewed
    child = play.update(WHO[0])
    for member in seated(play, 2)[:2]:
        play.add(verdict(member, 2, rejected=[bad]))
    assert [node.cid for node in play.dag.branches[REVIEWED.cid].tips] == [good.cid, child.cid]


def test_absent_and_lying_members_stop_nothing(reviewed):
    play, good, bad = reviewed
    one, *_ = seated(play, 2)
    play.add(verdict(one, 2, [bad], [good]))  # one lies, the others are absent
    assert play.dag.outcome(good.cid) == play.dag.outcome(bad.cid) == "undecided"
    play.to_batch(5, WHO[:2])  # and later committees are not even full
    assert len(play.committee.seats[5]) == 2
    assert not play.dag.nodes[good.cid].rejected


def test_votes_that_do_not_count(reviewed):
    play, good, bad = reviewed
    one, two, _ = seated(play, 2)
    outside = next(who for who in WHO if who not in seated(play, 2))
    play.add(verdict(one, 2, [good]))
    for vote, reason in (
        (verdict(outside, 2, [good]), "no seat"),
        (verdict(one, 3, [good]), "no seat"),
        (verdict(one, 2, rejected=[good]), "has voted before"),
        (verdict(two, 2, [REVIEWED]), "no update of batch 2"),
        (verdict(two, 2, [Record.sign(WHO[0], BODIES[4])]), "no update of batch 2"),
    ):
        with pytest.raises(Refused, match=reason):
            play.add(vote)
    play.add(verdict(one, 2, rejected=[bad]))
    assert play.committee.votes(good.cid) == (1, 0)


def test_nobody_judges_an_update_of_his_own():
    play = Play()
    play.to_batch(2)
    member = seated(play, 2)[0]
    mine = play.update(member)
    with pytest.raises(Refused, match="the member's own"):
        play.add(verdict(member, 2, [mine]))


# -- the log -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_broker(folder):
    """A function that makes a connection of somebody's to a ledger that has not begun."""
    pytest.importorskip("nats", reason="the extra nats is not installed")
    from ledgers import Operated, roster
    from tacit.ledger.jetstream import Remote

    with contextlib.ExitStack() as open_, Operated(folder / "broker", roster(), "drugs") as broker:

        def connect(n=0):
            found = open_.enter_context(Remote(broker.place, WHO[n], ca=broker.ca))
            found.make()
            return found

        yield broker, connect


@contextlib.contextmanager
def sqlite_logs(folder):
    SqliteLog(folder / "log", create=True)
    yield lambda n=0: SqliteLog(folder / "log")


@contextlib.contextmanager
def stream_logs(folder):
    with at_broker(folder) as (_, connect):
        yield lambda n=0: connect(n).log


@contextlib.contextmanager
def chain_logs(folder):
    if find_spec("web3") is None:
        pytest.skip("the extra evm is not installed")
    from networks import Anvil
    from tacit.ledger.evm import EvmLog

    with Anvil() as anvil, contextlib.ExitStack() as open_:

        def connect(n=0):
            pays = anvil.account(folder / f"{n}.account")
            genesis = CID.of(b"1", DAG_CBOR)  # the first that is added
            found = EvmLog(anvil.place, genesis, account=pays, confirmations=0)
            return open_.enter_context(contextlib.closing(found))

        yield connect


LOGS = {"sqlite": sqlite_logs, "jetstream": stream_logs, "chain": chain_logs}


def named(kind, text, data):
    """What an entry is called: on a chain it is the address of its bytes."""
    return (str(CID.of(data, DAG_CBOR)) if kind == "chain" else text), data


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOGS)
def test_every_log_keeps_the_order_and_adds_all_or_nothing(tmp_path, kind):
    with LOGS[kind](tmp_path) as opened:
        log, other = opened(0), opened(1)
        assert list(log.read()) == list(log.read(7)) == []
        one, two, none = (named(kind, *each) for each in (("a", b"1"), ("b", b"2"), ("", b"")))
        assert log.append([one, two]) == 0
        assert other.append([one]) == 2  # the same again is another entry
        assert log.append([]) == 3
        assert other.append([none]) == 3
        shown = [(each.position, (each.name, each.data)) for each in other.read(1)]
        assert shown == [(1, two), (2, one), (3, none)]
        with pytest.raises(TacitError):
            log.append([named(kind, "c", b"3"), ("d", None), named(kind, "e", b"5")])
        assert list(log.read(4)) == []
        many = [named(kind, f"n{n}", bytes((n % 256,)) * (n % 90)) for n in range(700)]
        assert log.append(many) == 4
        assert [(each.name, each.data) for each in other.read(4)] == many
        assert [each.position for each in log.read()] == list(range(704))

        def write(log, tag):
            for n in range(15):
                first, second = f"{tag}{n}", f"{tag}{n}'"
                log.append([named(kind, first, first.encode()), named(kind, second, second.encode())])

        threads = [threading.Thread(target=write, args=each) for each in ((log, "l"), (other, "o"))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
        found = list(log.read(704))
        assert found == list(other.read(704))
        assert [each.position for each in found] == list(range(704, 764))
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert second.data == first.data + b"'"  # what was added at once stands together


def test_a_log_in_a_file_is_only_added_to(tmp_path):
    SqliteLog(tmp_path / "log", create=True).append([("a", b"1")])
    with sqlite3.connect(tmp_path / "log") as base:
        for words in ("DELETE FROM entries", "UPDATE entries SET data = x'00'"):
            with pytest.raises(sqlite3.DatabaseError, match="only added to"):
                base.execute(words)
    base.close()
    with pytest.raises(TacitError, match="exists already"):
        SqliteLog(tmp_path / "log", create=True)


def test_files_that_are_no_log(tmp_path):
    with pytest.raises(TacitError, match="no such file"):
        SqliteLog(tmp_path / "absent")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(BadInput, match="no whole log"):
        SqliteLog(tmp_path / "noise")
    base = sqlite3.connect(tmp_path / "other")
    base.execute("CREATE TABLE entries (x)")
    base.commit()
    with pytest.raises(BadInput, match="is no log of a ledger"):
        SqliteLog(tmp_path / "other")
    base.execute(f"PRAGMA application_id = {MARK}")
    base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(BadInput, match="newer tacit"):
        SqliteLog(tmp_path / "other")


def _write(path, tag, barrier):
    barrier.wait()
    log = SqliteLog(path)
    for n in range(20):
        log.append([(f"{tag}{n}", b"x"), (f"{tag}{n}'", b"y")])


@pytest.mark.slow
def test_several_processes_write_one_log(tmp_path):
    log = SqliteLog(tmp_path / "log", create=True)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    both = [context.Process(target=_write, args=(tmp_path / "log", tag, barrier)) for tag in "ab"]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
        assert each.exitcode == 0
    found = list(log.read())
    assert [each.position for each in found] == list(range(80))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert second.name == first.name + "'"  # what was added at once stands together


def test_a_log_cut_short_while_it_was_written_is_as_before(ledger):
    """A journal that was never committed: SQLite takes it back."""
    base = sqlite3.connect(ledger.log.path, isolation_level=None)
    base.execute("BEGIN IMMEDIATE")
    base.execute("INSERT INTO entries VALUES (99, 'half', x'00')")
    base.close()
    assert Ledger.load(ledger.folder).head == ledger.head


# -- weights -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_blobs(folder):
    def spoil(data, other):
        [path] = [path for path in folder.glob("??/*") if path.read_bytes() == data]
        path.unlink() if other is None else path.write_bytes(other)

    yield BlobFolder(folder), spoil


@contextlib.contextmanager
def stream_blobs(folder):
    with at_broker(folder) as (broker, connect):
        from ledgers import rewrite
        from tacit.ledger.jetstream import blob_stream

        def spoil(data, other):
            def change(number, subject, headers, there):
                if other is None:
                    return None
                return headers, other if there == data else there

            rewrite(broker, blob_stream("drugs"), change)

        yield connect().blobs, spoil


@contextlib.contextmanager
def peer_blobs(folder):
    from tacit.ledger.ipfs import Swarm

    swarm = Swarm()
    swarm.keep(folder)
    with folder_blobs(folder / "blobs") as (_, spoil):
        yield swarm, spoil


@contextlib.contextmanager
def other_peers_blobs(folder):
    """All weights are at another peer; none are kept here."""
    pytest.importorskip("libp2p", reason="the extra ipfs is not installed")
    from tacit.ledger.ipfs import Swarm

    class Elsewhere(Swarm):
        def put(self, data):
            return theirs.put(data)

        def get(self, cid, largest):
            shutil.rmtree(folder / "own", ignore_errors=True)
            return super().get(cid, largest)

    theirs = Swarm()
    theirs.keep(folder / "theirs")
    (folder / "theirs").mkdir()
    with contextlib.closing(theirs), contextlib.closing(Elsewhere(theirs.listen(), wait=5)) as own:
        own.keep(folder / "own")
        with folder_blobs(folder / "theirs" / "blobs") as (_, spoil):
            yield own, spoil


BLOBS = {"folder": folder_blobs, "object store": stream_blobs, "peer": peer_blobs, "another peer": other_peers_blobs}


@pytest.mark.parametrize("kind", BLOBS)
def test_weights_are_given_as_they_were_put_or_not_at_all(tmp_path, kind):
    with BLOBS[kind](tmp_path) as (blobs, spoil):
        cid = blobs.put(b"hello")
        assert blobs.put(b"hello") == cid == CID.of(b"hello")
        assert blobs.get(cid, 5) == blobs.get(cid, 500) == b"hello"
        assert blobs.get(blobs.put(b""), 0) == b""
        with pytest.raises(Refused, match="more than 4 bytes"):
            blobs.get(cid, 4)
        with pytest.raises(Withheld, match="ask their provider"):
            blobs.get(CID.of(b"other"), 5)
        assert blobs.address(b"hello") == cid
        spoil(b"hello", b"hallo")
        # Another peer does not give what is not what it should be.
        with pytest.raises(Withheld if kind == "another peer" else Refused, match=r"other bytes|do not have it"):
            blobs.get(cid, 5)
        assert blobs.put(b"hello") == cid  # and is mended
        assert blobs.get(cid, 5) == b"hello"
        spoil(b"hello", None)
        with pytest.raises(Withheld):
            blobs.get(cid, 5)


def test_rows_are_checked_before_anybody_uses_them():
    rows = Rows.of(weights(2.0), MODEL.body)
    assert rows.entity.tolist() == [[2.0] * 3] * 2
    assert (rows.entities, rows.relations) == (("a", "b"), ("treats",))
    for data, reason in (
        (b"", "no whole safetensors"),
        (weights()[:-1], "no whole safetensors"),
        (weights(entity=4), "entity rows of 4 numbers, where the model has 3"),
        (weights(relation=1), "relation rows of 1 numbers"),
        (weights(float("nan")), "not finite"),
        (weights(names=("a", "a")), "a name for each"),
        (weights(names=("a", "")), "a name for each"),
        (weights(names=("a",), rows=torch.ones(2, 3)), "a name for each"),
        (weights(names=("\n" * 100_000, "b")), "have 2 entity rows, and not a name for each"),
        (weights(rows=torch.ones(6)), "no entity rows"),
        (weights(rows=torch.ones(2, 3, dtype=torch.int64)), "no entity rows"),
        (weights().replace(b"tacit.shared/1", b"tacit.shared/9"), "expected the schema"),
    ):
        with pytest.raises(Refused, match=reason):
            Rows.of(data, MODEL.body)


@given(st.data())
def test_any_bytes_are_rows_or_refused(data):
    found = bytearray(weights())
    at = data.draw(st.integers(0, len(found) - 1))
    found[at : at + data.draw(st.integers(1, 3))] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(Refused):
        assert Rows.of(bytes(found), MODEL.body).entity.isfinite().all()


def test_tensors_are_read_alike_from_files_and_from_bytes(tmp_path):
    path = tmp_path / "x"
    save_tensors(path, {"a": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0, 4)}, {"b": "c"})
    (one, words), (two, same) = load_tensors(path), parse_tensors(path.read_bytes())
    assert words == same == {"b": "c"}
    assert {name: each.tolist() for name, each in one.items()} == {name: each.tolist() for name, each in two.items()}
    header = b'{"__metadata__":[1]}    '
    with pytest.raises(BadInput, match="not text"):
        parse_tensors(struct.pack("<Q", len(header)) + header)


@given(
    st.integers(9, 30_000),
    st.sampled_from(["1e308", "9" * 300, "-1", "2.0", "true", "281474976710657", '"3"', "null", "[1]"]),
)
def test_shapes_that_no_tensor_has_are_refused_at_once(axes, odd):
    """To multiply tens of thousands of numbers with a thousand bits would take hours."""
    for shape in (f"[{odd}]", f"[{','.join([odd] * axes)}]", f"[{','.join(['1'] * axes)}]"):
        header = f'{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[0,1]}}}}'.encode()
        began = time.process_time()
        with pytest.raises(BadInput, match="has a shape that no tensor has"):
            parse_tensors(struct.pack("<Q", len(header)) + header + b"0")
        assert time.process_time() - began < 60


# -- a ledger on disk --------------------------------------------------------------------------------------------------


def tamper(ledger, words, *values):
    """Change the log as whoever has the file can."""
    base = sqlite3.connect(ledger.log.path)
    for what in ("update", "delete"):
        base.execute(f"DROP TRIGGER IF EXISTS no_{what}")
    base.execute(words, values)
    base.commit()
    base.close()


def entry(ledger, position):
    return next(each for each in ledger.log.read(position))


def test_a_newcomer_comes_to_the_same_state_from_the_log_alone(ledger, tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("ledger.json", "log.sqlite"):
        shutil.copy(ledger.folder / name, tmp_path / "copy")
    newcomer = Ledger.load(tmp_path / "copy", ledger.genesis)
    assert (newcomer.head, newcomer.dag.json(), newcomer.faults) == (ledger.head, ledger.dag.json(), [])
    faults = newcomer.verify().faults  # it has no weights yet
    assert len(faults) == 5
    assert all("not here" in fault.reason for fault in faults)


def test_reading_on_comes_to_the_same_as_reading_from_the_beginning(ledger):
    reader = Ledger.load(ledger.folder)
    ledger.publish_rows(WHO[5], "drugs", weights(7), None)
    assert reader.head != ledger.head
    reader.refresh()
    assert (reader.head, reader.dag.json()) == (ledger.head, ledger.dag.json())
    assert Ledger.load(ledger.folder).dag.json() == ledger.dag.json()


def test_every_stored_record_that_is_changed_is_found_named_and_ignored(ledger, tmp_path):
    for position in range(1, len(ledger)):
        for before in (True, False):  # by a reader who has seen it before, and by one who has not
            copy = tmp_path / f"copy-{position}-{before}"
            shutil.copytree(ledger.folder, copy)
            if not before:
                (copy / "seen").unlink()
            there = entry(ledger, position)
            changed = there.data[:-1] + bytes((there.data[-1] ^ 1,))
            tamper(Ledger.load(copy) if before else _unread(copy), "UPDATE entries SET data = ? WHERE position = ?",
                   changed, position)  # fmt: skip
            found = Ledger.load(copy)
            assert f"record {position} ({there.name})" == found.faults[0].where
            assert ("history was rewritten" if before else "holds other bytes") in found.faults[0].reason
            assert CID.parse(there.name) not in found.dag
            assert len(found.dag) == position  # what came after was built on it
            assert [fault.where for fault in found.verify().faults[: len(found.faults)]] == [
                fault.where for fault in found.faults
            ]


def _unread(folder):
    """A ledger that was not read."""
    return Ledger(folder, CID.of(b""), SqliteLog(folder / "log.sqlite"), BlobFolder(folder / "blobs"))


def test_a_forged_record_under_its_own_address_is_refused_by_its_signature(ledger):
    there = entry(ledger, 4)
    data = forged(Record.decode(there.data), size=3)
    (ledger.folder / "seen").unlink()
    tamper(ledger, "UPDATE entries SET data = ?, name = ? WHERE position = 4", data, str(CID.of(data, DAG_CBOR)))
    assert "not of the key" in Ledger.load(ledger.folder).faults[0].reason


def test_rewritten_history_is_noticed_by_who_has_read_it(ledger):
    """Another record, rightly signed by who is admitted, in the place of one that was there."""
    record = Record.sign(WHO[1], replace(Record.decode(entry(ledger, 3).data).body, size=50))
    was = entry(ledger, 3).name
    tamper(ledger, "UPDATE entries SET data = ?, name = ? WHERE position = 3", record.data, str(record.cid))
    found = Ledger.load(ledger.folder)
    assert found.rewritten
    assert found.faults[0].where == f"record 3 ({record.cid})"
    assert f"not what was read here before, {was}: history was rewritten" in found.faults[0].reason
    assert found.verify().rewritten
    with pytest.raises(Refused, match="Nothing is added to it"):
        found.publish(WHO[1], replace(MODEL.body, genesis=found.genesis, name="new"))


@pytest.mark.parametrize(("position", "where"), [(6, "record 6"), (3, "records 3 to 3")])
def test_records_that_are_gone_are_noticed(ledger, position, where):
    tamper(ledger, "DELETE FROM entries WHERE position = ?", position)
    found = Ledger.load(ledger.folder)
    assert found.rewritten
    assert found.faults[0].where == where


def test_a_place_far_beyond_the_end_is_no_trap(ledger):
    tamper(ledger, "INSERT INTO entries VALUES (?, 'x', x'00')", (1 << 62) + 7)
    found = Ledger.load(ledger.folder)
    assert len(found.faults) == 1
    found.refresh()
    assert len(found) == len(found.dag) == len(ledger)


def test_a_record_that_is_swapped_with_another_is_noticed(ledger):
    one, two = entry(ledger, 5), entry(ledger, 6)
    for position, there in ((5, two), (6, one)):
        tamper(ledger, "UPDATE entries SET data = ?, name = ? WHERE position = ?", there.data, there.name, position)
    assert len(Ledger.load(ledger.folder).faults) == 2


def test_another_genesis_is_refused(ledger):
    with pytest.raises(Refused, match="is the ledger"):
        Ledger.load(ledger.folder, MODEL.cid)
    tamper(ledger, "DELETE FROM entries WHERE position = 0")
    with pytest.raises(BadInput, match="does not hold the genesis"):
        Ledger.load(ledger.folder)
    manifest = json.loads((ledger.folder / "ledger.json").read_text())
    (ledger.folder / "ledger.json").write_text(json.dumps(manifest | {"genesis": "nonsense"}))
    with pytest.raises(Refused, match="no address"):
        Ledger.load(ledger.folder)


def test_junk_in_the_log_is_named_and_the_rest_stands(ledger):
    """Whoever can write to the log can put anything there: everybody ignores it alike."""
    junk = [("x", b"junk"), (str(CID.of(b"junk", DAG_CBOR)), b"junk"), ("", b"")]
    stranger = update(STRANGER, [MODEL], 3)
    again = entry(ledger, 2)
    ledger.log.append([*junk, (str(stranger.cid), stranger.data), (again.name, again.data)])
    ledger.publish_rows(WHO[5], "drugs", weights(8), CLAIM)
    reasons = [fault.reason for fault in ledger.faults]
    assert len(reasons) == 5
    assert "not admitted" in reasons[3]
    assert "already" in reasons[4]
    reader = Ledger.load(ledger.folder)
    assert (reader.dag.json(), reader.faults) == (ledger.dag.json(), ledger.faults)
    assert not reader.rewritten


def test_changed_and_withheld_weights_are_named(ledger):
    nodes = ledger.dag.branch("drugs").nodes
    paths = {path.name: path for path in ledger.folder.glob("blobs/??/*")}
    assert ledger.rows(nodes[1]).entity[0, 0] == 1
    first, second, third = (paths[str(node.update.weights)] for node in nodes[:3])
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes() + b"\0")
    third.unlink()
    found = ledger.verify()
    assert [fault.where for fault in found.faults] == [f"update {node.cid} by provider-{n}"
                                                       for n, node in enumerate(nodes[:3])]  # fmt: skip
    assert [word in fault.reason for word, fault in
            zip(("other bytes", "more than", "not here"), found.faults, strict=True)] == [True] * 3  # fmt: skip
    for node, kind in zip(nodes[:3], (Refused, Refused, Withheld), strict=True):
        with pytest.raises(kind):
            ledger.rows(node)
    assert ledger.rows(nodes[3]).entity[0, 0] == 3


def test_weights_of_another_model_are_refused_when_published_and_when_read(ledger):
    with pytest.raises(Refused, match="entity rows of 9 numbers, where the model has 3"):
        ledger.publish_rows(WHO[0], "drugs", weights(entity=9), CLAIM)
    data = weights(entity=9)
    cid = ledger.blobs.put(data)
    branch = ledger.dag.branch("drugs")
    record = ledger.publish(WHO[1], Update(branch.cid, (branch.cid,), cid, len(data), CLAIM))
    with pytest.raises(Refused, match="entity rows of 9"):
        ledger.rows(ledger.dag.nodes[record.cid])
    assert len(ledger.verify().faults) == 1


@pytest.mark.parametrize("fault", ["lost", "changed", "another"])
def test_a_record_that_the_log_does_not_show_is_said(ledger, monkeypatch, fault):
    append, body = ledger.log.append, Revocation(ledger.genesis, WHO[3].public)
    if fault == "another":
        Ledger.load(ledger.folder).publish(WHO[3], body)
        refresh, times = ledger.refresh, []  # it comes in between
        monkeypatch.setattr(ledger, "refresh", lambda: times.append(1) or (len(times) > 1 and refresh()))
    else:
        monkeypatch.setattr(ledger.log, "append", lambda entries: fault == "changed" and append([("x", b"x")]))
    reason = {"another": "came before this one.*revoked before", "lost": "is not read there", "changed": "not read"}
    with pytest.raises(Refused, match=reason[fault]):
        ledger.publish(WHO[0], body)


def test_what_is_refused_is_not_put_into_the_log(ledger):
    before = ledger.head
    for who, changed, reason in (
        (STRANGER, {}, "not admitted"),
        (WHO[0], {"parents": [SOME.cid]}, "not in the ledger"),
    ):
        with pytest.raises(Refused, match=reason):
            ledger.publish_rows(who, "drugs", weights(50), CLAIM, **changed)
    assert CID.of(weights(50)) not in {CID.parse(name) for name in ledger.blobs}
    ledger.refresh()
    assert ledger.head == before


def test_signatures_are_verified_once_and_again_when_asked(ledger, monkeypatch):
    calls = []
    verify = Record.verify
    monkeypatch.setattr(Record, "verify", lambda record: (calls.append(record.cid), verify(record))[1])
    reader = Ledger.load(ledger.folder)
    assert calls == []
    assert not reader.verify().faults
    assert len(calls) == len(ledger)
    seen = ledger.folder / "seen"
    assert seen.stat().st_size == WIDTH * len(ledger)
    seen.write_bytes(seen.read_bytes()[: WIDTH * 3 + 5])  # cut off while it was written
    calls.clear()
    Ledger.load(ledger.folder)
    assert len(calls) == len(ledger) - 3
    seen.write_bytes(seen.read_bytes()[: WIDTH * 5] + bytes(WIDTH * 2))  # the same, after a power failure
    calls.clear()
    assert not Ledger.load(ledger.folder).faults
    assert len(calls) == len(ledger) - 5
    assert seen.stat().st_size == WIDTH * len(ledger)


def test_what_seen_says_is_not_believed_by_verify(ledger):
    """Whoever can write to the folder can say that a forged record was found right."""
    data = forged(Record.decode(entry(ledger, 6).data), size=3)
    tamper(ledger, "UPDATE entries SET data = ?, name = ? WHERE position = 6", data, str(CID.of(data, DAG_CBOR)))
    seen = bytearray((ledger.folder / "seen").read_bytes())
    seen[6 * WIDTH : 7 * WIDTH] = hashlib.sha256(data).digest() + b"\1"
    (ledger.folder / "seen").write_bytes(seen)
    assert not Ledger.load(ledger.folder).faults
    assert "not of the key" in Ledger.load(ledger.folder).verify().faults[0].reason


def test_a_ledger_that_cannot_be_written_to_can_be_read(ledger, monkeypatch):
    (ledger.folder / "seen").unlink()

    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr("fcntl.flock", refuse)
    assert Ledger.load(ledger.folder).head == ledger.head


def test_the_founder_has_to_be_admitted(tmp_path):
    with pytest.raises(TacitError, match="not admitted to it"):
        Ledger.begin(tmp_path / "x", STRANGER, Genesis("x", keys=KEYS))
    assert not (tmp_path / "x").exists()
    with pytest.raises(TacitError, match="is no ledger"):
        Ledger.load(tmp_path)


@pytest.mark.slow
def test_a_provider_that_is_killed_leaves_a_whole_ledger(ledger):
    """Weights come before their record, and a record is there whole or not at all."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_publish, args=(ledger.folder, weights(11)))
    child.start()
    had, waited = len(ledger), 0
    while len(ledger) < had + 5 and waited < 600:
        time.sleep(0.1)
        waited += 1
        ledger.refresh()
    child.kill()
    child.join(60)
    found = Ledger.load(ledger.folder)
    assert len(found) >= had + 5
    assert found.faults == found.verify().faults == []
    found.publish_rows(WHO[0], "drugs", weights(12), CLAIM)


def _publish(folder, data):
    found = Ledger.load(folder)
    while True:
        tips = [node.cid for node in found.dag.branch("drugs").tips]
        found.publish_rows(WHO[1], "drugs", data, CLAIM, tips[-2:])


def test_adding_one_reads_nothing_but_what_is_new(ledger, monkeypatch):
    """What makes it cost the same in a large ledger."""
    starts, read = [], SqliteLog.read
    monkeypatch.setattr(SqliteLog, "read", lambda log, start=0: (starts.append(start), read(log, start))[1])
    had = len(ledger)
    ledger.publish_rows(WHO[5], "drugs", weights(9), CLAIM)
    assert starts == [had, had]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    hospital = clinic("small", 1)[0]
    keeper, _, _ = make("keeper", tmp_path)
    roster = Roster.begin(keeper)
    for name in ("north", "south"):
        roster = roster.enrol(keeper, name, make(name, tmp_path)[0].public)
    roster.save(tmp_path / "roster.json")
    private = {"epsilon": 4.0, "delta": 1e-5, "name": "dpsgd"}
    train(hospital, dim=4, epochs=1, settings={"privacy": private}, out=tmp_path / "private")
    train(hospital, dim=4, epochs=1, settings={"privacy": private | {"noise": "seeded"}}, out=tmp_path / "simulated")
    train(hospital, dim=4, epochs=1, out=tmp_path / "plain")

    def say(*words, code=0):
        done = CliRunner().invoke(get_command(app), ["ledger", *words])
        if isinstance(done.exception, TacitError):  # `main` makes exit code 2 of it
            return str(done.exception)
        assert done.exit_code == code
        return done.output

    shown = say("init", "ledger", "--key", "north.key", "--roster", "roster.json", "--model", "drugs", "--entity", "4")
    genesis = str(Ledger.load(tmp_path / "ledger").genesis)
    assert f"ledger is the ledger {genesis}" in shown
    more = json.loads(say("init", "ledger", "--key", "south.key", "--model", "genes", "--entity", "8", "--json"))
    assert more["genesis"] == genesis
    first = json.loads(say("publish", "ledger", "private", "--key", "north.key", "--model", "drugs", "--json"))
    words = ("publish", "ledger", "private", "--key", "south.key", "--model", "drugs", "--parent", first["update"])
    assert "update 1 of drugs, made from 1 others" in say(*words)
    for run in ("plain", "simulated"):
        assert "only what was trained privately is published" in say(
            "publish", "ledger", run, "--key", "north.key", "--model", "drugs", code=2
        ).replace("\n", " ")
    ledger = Ledger.load(tmp_path / "ledger")
    [one, two] = ledger.dag.branch("drugs").nodes
    assert ledger.dag.branch("drugs").model.committee == safe_seats(len(ledger.dag.rules.keys)) == 1
    say("init", "open", "--key", "north.key", "--open", "--model", "m", "--entity", "4", "--blobs", "ipfs:")
    assert "only what was trained" in say("publish", "open", "plain", "--key", "north.key")
    assert "made from 0 others" in say("publish", "open", "plain", "--key", "north.key", "--reveal-for-ever")
    assert "made from 0 others" in say("publish", "open", "private", "--key", "north.key", "--reveal-for-ever")
    shown = Ledger.load(tmp_path / "open")
    assert [node.update.privacy is None for node in shown.dag.branch("m").nodes] == [True, False]
    assert shown.rows(shown.dag.branch("m").nodes[0]).entities == tuple(hospital.entities)
    assert "not private" in say("show", "open")
    statement = json.loads((tmp_path / "private" / "shareable" / "privacy.json").read_text())
    assert [segment.json() for segment in one.update.privacy.releases] == [
        Segment.of(each).json() for each in statement["releases"][0]
    ]
    assert claim_of(statement) == two.update.privacy
    assert (two.update.privacy.unit, two.update.privacy.holding) == (statement["unit"], b"")
    quoted = claim_of(statement | {"budget": {"name": "x", "number": 3, "head": "ab" * 32}})
    assert quoted.holding == bytes.fromhex("ab" * 32)
    for changed, reason in (
        ({"cap": {}}, "do not tell that cap"),
        ({"releases": [[], []]}, "of one provider"),
        ({"unit": 3}, "'unit' is text"),
        ({"budget": {"head": "x"}}, "no whole statement"),
    ):
        with pytest.raises(TacitError, match=reason):
            claim_of(statement | changed)
    assert ledger.rows(one).entity.shape == (len(hospital.entities), 4)
    told = json.loads(say("verify", "ledger", "--genesis", genesis, "--json"))
    assert told["faults"] == []
    assert told["records"] == {"genesis": 1, "model": 2, "update": 2}
    assert told["head"] == ledger.head
    assert "Nothing is wrong with it." in say("verify", "ledger")
    shown = say("show", "ledger")
    assert str(two.cid)[:8] in shown  # a narrow terminal breaks an address apart
    assert str(two.cid) in say("show", "ledger", "--json")
    assert "their word" in shown
    assert "epsilon" not in shown
    lines = [json.loads(line) for line in say("follow", "ledger", "--until", "5", "--weights", "--json").splitlines()]
    assert [line["kind"] for line in lines] == ["genesis", "model", "model", "update", "update"]
    assert lines[4]["record"] == str(two.cid)
    assert lines[4]["privacy"]["releases"] == json.loads(
        json.dumps([segment.json() for segment in two.update.privacy.releases])
    )
    assert say("follow", "ledger", "--new", "--minutes", "0") == ""
    assert f"4 update of drugs by south: {two.cid}" in say("follow", "ledger", "--minutes", "0.01")
    assert "only who began the ledger may" in say("revoke", "ledger", "north", "--key", "south.key", code=2)
    assert "Revoked the key of south" in say("revoke", "ledger", "south", "--key", "north.key")
    assert "which was revoked" in say("publish", "ledger", "private", "--key", "south.key", "--model", "drugs", code=2)
    assert "Revoked: south" in say("show", "ledger")
    assert json.loads(say("show", "ledger", "--model", "drugs", "--json"))["models"][0]["tips"] == [str(two.cid)]
    assert say("show", "ledger", "--dot").startswith("digraph ledger {")
    [blob] = (tmp_path / "ledger" / "blobs").glob("??/*")
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x7f")
    assert "2 faults, each ignored" in tacit("ledger", "verify", "ledger", cwd=tmp_path, code=2).stdout
    assert len(json.loads(say("verify", "ledger", "--json", code=2))["faults"]) == 2
