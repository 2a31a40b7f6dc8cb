"""Holdings: whatever is killed, raced or tampered with, nothing that was promised is forgotten."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tacit import Graph, write_graph
from tacit.cli import app
from tacit.errors import BadInput, BadValue, TacitError
from tacit.privacy import accountant
from tacit.privacy.budget import Entry, Holding, account, cost, explain, home_folder, names, plan
from tacit.privacy.events import Gaussian, Sampled, SampledCurve, Segment, joined
from test_cli import tacit as process

GRAPH = Graph.from_triples([(f"e{i}", "r", f"e{i + 1}") for i in range(20)], [("e0", "s", "e5")], [("e1", "s", "e5")])
ORDER = 4.0
WHOLE = accountant.allowed(ORDER, 8, 1e-5)


def share(part: float, count: int = 1) -> Segment:
    """Releases that take this part of the budget of (8, 1e-5), together."""
    return Segment(Gaussian((ORDER * count / (2 * part * WHOLE)) ** 0.5), count)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def held(home):
    return Holding.begin("study", epsilon=8, delta=1e-5, graph=GRAPH, home=home)


def lines(home, name="study"):
    return (home / name / "entries.jsonl").read_bytes().splitlines(keepends=True)


def write(home, changed, name="study"):
    (home / name / "entries.jsonl").write_bytes(b"".join(changed))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_a_holding_says_what_is_left(home, held):
    assert (held.epsilon, held.delta, held.order, held.closed, held.number) == (8, 1e-5, ORDER, False, 0)
    assert held.left() == WHOLE
    first = held.reserve([share(0.5, 10)], run="first", why="to see", graph=GRAPH)
    assert (first.number, first.head) == (1, held.head)
    assert held.left() == pytest.approx(WHOLE / 2)
    assert held.limits() == ((ORDER, held.left()),)
    assert held.spent == (share(0.5, 10),)
    held.settle(1, [Segment(share(0.5, 10).event, 4)])
    assert held.left() == pytest.approx(0.8 * WHOLE)
    second = held.reserve([share(0.1)], run="second", party="north")
    again = Holding.load("study", home)
    assert (again.entries, again.charges, again.spent) == (held.entries, held.charges, held.spent)
    again.check_quote(first.number, first.head)
    again.check_quote(second.number, second.head)
    for number, head in ((1, second.head), (17, first.head), (-1, again.head)):
        with pytest.raises(BadInput, match="a run quotes entry"):
            again.check_quote(number, head)
    told = account(again)
    assert [run["state"] for run in told["runs"]] == ["settled", "reserved"]
    assert sum(run["share"] for run in told["runs"]) == pytest.approx(told["used"]["share"]) == pytest.approx(0.3)
    assert told["used"]["epsilon"] == accountant.converted(ORDER, cost(ORDER, again.spent), 1e-5)
    assert "first (entry 1, settled): 20.0%" in explain(again)
    assert "to see" in explain(again)
    assert again.entries[0].body["neighbours"] == "add or remove one triple"
    assert again.entries[3].body["party"] == "north"
    json.dumps(told)


def test_nothing_beyond_the_cap(home, held):
    held.reserve([share(0.6)], run="a")
    with pytest.raises(TacitError, match=r"40.0% of the budget of the holding 'study' .* this would take 41.0%"):
        held.reserve([share(0.41)], run="b")
    with pytest.raises(TacitError, match="would take"):
        held.reserve([share(0.2), Segment(Sampled(0.5, (0.5,)), 100)], run="b")
    with pytest.raises(TacitError, match="delta of its own"):
        held.reserve([Segment(SampledCurve(0.001, 0.001, 1e-9))], run="b")
    small = Holding.begin("small", epsilon=0.05, delta=1e-6, home=home)  # whose order is too high for the general bound
    with pytest.raises(TacitError, match="not known at the order"):
        small.reserve([Segment(SampledCurve(0.001, 0.001))], run="b")
    with pytest.raises(BadValue, match=r"releases of one kind|whole number of times"):
        held.reserve([Segment(Gaussian(1e9), 1 << 80)], run="b")
    with pytest.raises(BadValue, match="control character"):
        held.reserve([share(0.1)], run="a\nb")
    assert Holding.load("study", home).number == 1
    held.reserve([share(0.4 - 1e-9)], run="the rest")
    with pytest.raises(TacitError, match=r"0\.1%"):
        held.reserve([share(0.01)], run="c")


@pytest.mark.slow
def test_the_noise_that_limits_allow_can_be_reserved(held):
    for _ in range(3):
        left = held.left()
        target = accountant.Target(8, 1e-5, limits=((ORDER, left / 2),))
        sigma = accountant.noise_for(target, lambda s: [Segment(Gaussian(s), 50)])
        held.reserve([Segment(Gaussian(sigma), 50)], run="half of what is left")
        assert left / 2 <= held.left() <= left / 2 * 1.01
    target = accountant.Target(8, 1e-5, limits=held.limits())
    sigma = accountant.noise_for(target, lambda s: [Segment(Gaussian(s))])
    held.reserve([Segment(Gaussian(sigma))], run="the rest")


def test_no_release_gives_budget_back():
    """The divergence of a tiny rate is rounded, at some orders below 0."""
    for order in (2.0, 2.9, 3.0, 5.5):
        assert cost(order, [Segment(Sampled(1e-12, (1e6,)), 1 << 40)]) >= 0


def test_a_settlement_only_lowers(held):
    reserved = [Segment(Gaussian(10.0), 5), Segment(Sampled(0.1, (2.0,)), 7)]
    number = held.reserve(reserved, run="a").number
    for wrong in ([Segment(Gaussian(10.0), 6)], [Segment(Gaussian(9.0), 1)], [Segment(Gaussian(10.0), 3)] * 2):
        with pytest.raises(TacitError, match="were used"):
            held.settle(number, wrong)
    for nothing in (0, 2, -1):
        with pytest.raises(TacitError, match="is no reservation"):
            held.settle(nothing, [])
    held.settle(number, [Segment(Gaussian(10.0), 2)] * 2)
    assert held.spent == (Segment(Gaussian(10.0), 4),)
    held.settle(number, [Segment(Gaussian(10.0), 4)])  # by a run that did not hear of it
    assert held.number == 2
    with pytest.raises(TacitError, match="settled already"):
        held.settle(number, [])
    other = held.reserve(reserved, run="b").number
    held.settle(other, [])
    assert held.entries[-1].body["void"] is True
    assert held.spent == (Segment(Gaussian(10.0), 4),)


def test_a_reservation_is_with_one_folder(home, held):
    """Who resumes has a token that holds, and gets another; only a holding in which a run resumed has new entries."""
    given = held.reserve([share(0.1)], run="one")
    assert b"tacit.budget/2" not in b"".join(lines(home))
    first = held.resume(given.number, tokens=["older", given.head], token="a")
    held.check_quote(first.number, first.head)
    held = Holding.load("study", home)
    with pytest.raises(TacitError, match="another copy of this run's folder"):
        held.resume(given.number, tokens=[given.head], token="b")
    held.resume(given.number, tokens=[given.head, "a"], token="c")
    held.check_token(given.number, ["a", "c"])
    with pytest.raises(TacitError, match="no reservation"):
        held.resume(first.number, tokens=["a"], token="d")
    assert held.spent == (share(0.1),)
    held.settle(given.number, [share(0.1)])
    for try_again in (lambda: held.check_token(given.number, ["c"]),
                      lambda: held.resume(given.number, tokens=["c"], token="d")):  # fmt: skip
        with pytest.raises(TacitError, match="is settled: that run has ended"):
            try_again()
    kinds = [entry.kind for entry in Holding.load("study", home).entries]
    assert kinds == ["open", "reserve", "resume", "resume", "settle"]


def test_closed_is_closed(home, held):
    number = held.reserve([share(0.5)], run="a").number
    held.close()
    with pytest.raises(TacitError, match="is closed"):
        held.reserve([share(0.1)], run="b")
    with pytest.raises(TacitError, match="closed already"):
        Holding.load("study", home).close()
    held.settle(number, [])
    assert Holding.load("study", home).closed
    with pytest.raises(TacitError, match="belong to the holding 'study'"):  # nor does it set its statements free
        Holding.begin("other", epsilon=8, delta=1e-5, graph=GRAPH, home=home)


def test_only_the_owner_can_read_it(home, held):
    held.reserve([share(0.1)], run="a", graph=Graph.from_triples([("new", "r", "new")]))
    old = os.umask(0)
    try:
        Holding.begin("open", epsilon=8, delta=1e-5, home=home)
    finally:
        os.umask(old)
    for path in (home, *home.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in (home / "study").iterdir()} == {"entries.jsonl", "key", "statements"}
    assert {path.name for path in home.iterdir()} == {"heads.jsonl", "lock", "open", "salt", "study"}
    record = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert not [name for name in GRAPH.entities if f'"{name}"'.encode() in record]  # no hash looks so


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "../x"}, "letters, digits"),
        ({"name": ".x"}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"name": "salt"}, "letters, digits"),
        ({"epsilon": 0}, "epsilon is a number above 0"),
        ({"epsilon": float("nan")}, "epsilon is a number above 0"),
        ({"epsilon": float("inf")}, "epsilon is a number above 0"),
        ({"delta": 0}, "delta is above 0"),
        ({"delta": 1}, "delta is above 0"),
        ({"epsilon": 0.01, "delta": 1e-9}, "too small"),
    ],
)
def test_wrong_openings(home, given, message):
    wanted = {"name": "x", "epsilon": 8, "delta": 1e-5} | given
    with pytest.raises(BadValue, match=message):
        Holding.begin(wanted.pop("name"), **wanted, home=home)
    assert names(home) == []


def test_where_holdings_are(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_HOME", str(tmp_path))
    assert home_folder() == tmp_path / "holdings"
    Holding.begin("a", epsilon=1, delta=1e-5)
    assert names() == ["a"]
    with pytest.raises(TacitError, match="exists already"):
        Holding.begin("a", epsilon=1, delta=1e-5)
    with pytest.raises(TacitError, match="There are: a"):
        Holding.load("b")
    monkeypatch.delenv("TACIT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert home_folder() == tmp_path / "me" / ".tacit" / "holdings"
    with pytest.raises(TacitError, match="There is none yet"):
        Holding.load("a")
    assert names() == []
    assert not (tmp_path / "me").exists()


# -- statements --------------------------------------------------------------------------------------------------------


def test_one_changed_row_stays_with_its_holding(home, held):
    rows = [*GRAPH.named("train"), ("new", "r", "e1")]
    held.reserve([share(0.5)], run="a", graph=Graph.from_triples(rows[1:]))
    assert Holding.load("study", home).left() == pytest.approx(WHOLE / 2)
    assert len((home / "study" / "statements").read_bytes()) == 16 * 23
    for row in (rows[-1], rows[0]):
        with pytest.raises(TacitError, match=r"1 of these 2 statements belong to the holding 'study'"):
            Holding.begin("b", epsilon=8, delta=1e-5, graph=Graph.from_triples([row, ("x", "y", "z")]), home=home)


def test_no_statement_has_two_budgets(home, held):
    other = Holding.begin("other", epsilon=8, delta=1e-5, home=home)
    mixed = Graph.from_triples([("x", "y", "z"), ("e1", "r", "e2")], [], [("e0", "s", "e5")])
    with pytest.raises(TacitError, match="2 of these 3 statements belong to the holding 'study'"):
        other.reserve([share(0.1)], run="a", graph=mixed)
    assert other.number == 0
    other.reserve([share(0.1)], run="a", graph=Graph.from_triples([("x", "y", "z"), ("e2", "r", "e1")]))
    with pytest.raises(TacitError, match="1 of these 1 statements belong to the holding 'other'"):
        held.reserve([share(0.1)], run="b", graph=Graph.from_triples([("x", "y", "z")]))


def test_names_do_not_run_together(home):
    Holding.begin("a", epsilon=8, delta=1e-5, graph=Graph.from_triples([("ab", "c", "d")]), home=home)
    for k, triple in enumerate([("a", "bc", "d"), ("ab", "cd", "d"), ("a", "b", "cd"), ("d", "c", "ab")]):
        Holding.begin(f"b{k}", epsilon=8, delta=1e-5, graph=Graph.from_triples([triple]), home=home)
    assert len(names(home)) == 5


def test_what_statements_are_compared_with_cannot_be_lost(home, held):
    mine = Holding.begin("mine", epsilon=8, delta=1e-5, home=home)
    new = Graph.from_triples([("x", "y", "z")])
    salt, kept = (home / "salt").read_bytes(), (home / "study" / "statements").read_bytes()
    (home / "study" / "statements").write_bytes(kept[16:])
    with pytest.raises(BadInput, match="other statements than were registered"):
        mine.reserve([share(0.1)], run="a", graph=new)
    with pytest.raises(BadInput, match="other statements than were registered"):
        Holding.load("study", home)
    (home / "study" / "statements").write_bytes(kept)
    (home / "salt").write_bytes(bytes(32))
    with pytest.raises(BadInput, match="is another than when"):
        mine.reserve([share(0.1)], run="a", graph=new)
    (home / "salt").unlink()
    with pytest.raises(BadInput, match="salt: is missing"):
        mine.reserve([share(0.1)], run="a", graph=new)
    with pytest.raises(BadInput, match="salt: is missing"):
        Holding.begin("third", epsilon=8, delta=1e-5, home=home)
    (home / "salt").write_bytes(salt)
    shutil.move(home / "study", home / ".study")
    with pytest.raises(BadInput, match="was deleted"):
        mine.reserve([share(0.1)], run="a", graph=GRAPH)
    shutil.move(home / ".study", home / "study")
    mine.reserve([share(0.1)], run="a", graph=new)


# -- tampering ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def used(home, held):
    """With five entries."""
    held.reserve([share(0.3)], run="a")
    held.reserve([share(0.3)], run="b")
    held.settle(1, [])
    held.reserve([share(0.1)], run="c")
    return held


def refused(home, line, message=""):
    with pytest.raises(BadInput) as error:
        Holding.load("study", home)
    if line is not None:
        assert f"entries.jsonl:{line}: found" in str(error.value)
    assert message in str(error.value)
    with pytest.raises(BadInput):
        Holding(*(lambda h: (h.name, h.home, h._chain))(_remembered)).reserve([share(0.01)], run="x")


_remembered = None


@pytest.fixture(autouse=True)
def _remember(request):
    global _remembered
    _remembered = request.getfixturevalue("used") if "used" in request.fixturenames else None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"run":"b"', b'"run":"B"'),
        (b'"count":1', b'"count":0'),
        (b'"count":1', b'"count": 1'),
        (b'"kind":"reserve"', b'"kind":"close"'),
        (b'"number":2', b'"number":3'),
        (b'"number":2', b'"number":2.0'),
        (b'"time":"20', b'"time":"19'),
        (b'"schema":"tacit.budget/1"', b'"schema":"tacit.budget/0"'),
        (b'"schema":"tacit.budget/1"', b'"schema":"tacit.budget/2"'),
        (b'"schema":"tacit.budget/1"', b'"schema":"tacit.budget/3"'),
        (b'"why":""', b'"why":"","why":""'),
        (b"{", b"["),
        (b'"body":', b'"more":1,"body":'),
        (b'"run"', b'"\xff"'),
    ],
)
def test_a_changed_entry_is_named(home, used, old, new):
    found = lines(home)
    assert found[2].count(old) >= 1
    found[2] = found[2].replace(old, new, 1)
    write(home, found)
    refused(home, None if b"/3" in new else 3, "reads up to" if b"/3" in new else "")


@pytest.mark.parametrize("field", ["previous", "hash", "signature"])
def test_every_digit_of_a_link_counts(home, used, field):
    found = lines(home)
    for k in (0, 31, 63):
        entry = json.loads(found[2])
        digit = entry[field][k]
        changed = found[2].replace(entry[field].encode(), (entry[field][:k] + ("1" if digit == "0" else "0")
                                                           + entry[field][k + 1 :]).encode())  # fmt: skip
        write(home, [*found[:2], changed, *found[3:]])
        refused(home, 3)


def test_lines_deleted_swapped_or_added(home, used):
    found = lines(home)
    for line, changed in [
        (2, [found[0], *found[2:]]),
        (1, found[1:]),
        (2, [found[0], found[2], found[1], *found[3:]]),
        (3, [*found[:2], found[1], *found[2:]]),
        (6, [*found, found[-1]]),
        (6, [*found, b"\n"]),
        (3, [*found[:2], b"\n", *found[2:]]),
    ]:
        write(home, changed)
        refused(home, line)
    for cut in range(5):
        write(home, found[:cut])
        refused(home, None, "rolled back")
    write(home, [*found[:-1], found[-1][:-1]])  # as if it had been torn
    refused(home, None, "rolled back")
    write(home, found)
    assert Holding.load("study", home).number == 4


def test_a_signature_by_another_key(home, used):
    found, stranger = lines(home), Ed25519PrivateKey.generate()
    last = Entry(**{k: v for k, v in json.loads(found[-1]).items() if k != "schema"})
    write(home, [*found[:-1], last.signed(stranger).line()])
    refused(home, 5, "signature")
    write(home, found)
    (home / "study" / "key").write_bytes(stranger.private_bytes_raw())
    with pytest.raises(BadInput, match="not the key"):
        used.reserve([share(0.01)], run="x")
    (home / "study" / "key").write_bytes(b"short")
    with pytest.raises(BadInput, match="cannot be read as a key"):
        used.reserve([share(0.01)], run="x")


def test_who_has_the_key_cannot_rewrite_what_was_witnessed(home, used):
    key = Ed25519PrivateKey.from_private_bytes((home / "study" / "key").read_bytes())
    entries = list(used.entries[:2])
    for old in used.entries[2:]:
        body = old.body | ({"segments": []} if old.kind == "reserve" else {})
        entries.append(Entry(old.number, old.kind, old.time, body, entries[-1].hash).signed(key))
    write(home, [entry.line() for entry in entries])
    refused(home, None, "entry 2 is another than heads.jsonl has seen")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("open", {}, "opened once"),
        ("reserve", {"run": "x", "why": "", "segments": [{"event": "laplace", "count": 1}]}, "laplace"),
        ("reserve", {"run": "x", "segments": []}, "why"),
        ("settle", {"reservation": 1, "segments": []}, "settled already"),
        ("settle", {"reservation": 2, "segments": [{"event": "gaussian", "sigma": 0.1, "count": 1}]}, "were used"),
        ("settle", {"reservation": 9, "segments": []}, "9"),
        ("resume", {"reservation": 1, "previous": "", "token": "x"}, "where it is not"),
        ("resume", {"reservation": 2, "previous": "", "token": "x"}, "where it is not"),
        ("resume", {"reservation": 9, "previous": "", "token": "x"}, "9"),
        ("gift", {}, "gift"),
    ],
)
def test_signed_nonsense_is_refused(home, used, kind, body, message):
    key = Ed25519PrivateKey.from_private_bytes((home / "study" / "key").read_bytes())
    write(home, [*lines(home), Entry(5, kind, "2030-01-01T00:00:00+00:00", body, used.head).signed(key).line()])
    refused(home, 6, message)


def test_an_older_copy_is_noticed(home, used, tmp_path):
    shutil.copytree(home / "study", tmp_path / "copy")
    head = used.reserve([share(0.05)], run="d").head
    shutil.rmtree(home / "study")
    shutil.copytree(tmp_path / "copy", home / "study")
    refused(home, None, "was rolled back: it ends with entry 4, and heads.jsonl has seen entry 5")
    # With the witness rolled back as well only a run that quotes the record can tell.
    witness = (home / "heads.jsonl").read_bytes().splitlines(keepends=True)
    (home / "heads.jsonl").write_bytes(b"".join(witness[:-1]))
    with pytest.raises(BadInput, match="a run quotes entry 5"):
        Holding.load("study", home).check_quote(5, head)


def test_a_deleted_holding_is_noticed(home, used):
    shutil.move(home / "study", home.parent / "copy")
    refused(home, None, "was deleted")
    with pytest.raises(BadInput, match="was deleted"):
        Holding.begin("study", epsilon=8, delta=1e-5, home=home)
    (home / "study").mkdir()
    refused(home, None, "was deleted")
    with pytest.raises(BadInput, match="was deleted"):
        Holding.begin("study", epsilon=8, delta=1e-5, home=home)
    assert names(home) == ["study"]


def test_a_holding_under_another_name_is_noticed(home, used):
    shutil.copytree(home / "study", home / "other")
    with pytest.raises(BadInput):
        Holding.load("other", home)
    shutil.rmtree(home / "other")
    fresh = home.parent / "fresh"
    Holding.begin("study", epsilon=8, delta=1e-5, home=fresh)
    (fresh / "study").rename(fresh / "other")
    with pytest.raises(BadInput, match="is the record of 'study'"):
        Holding.load("other", fresh)


def test_a_witness_that_was_cut_or_changed_is_noticed(home, used):
    path = home / "heads.jsonl"
    seen = path.read_bytes().splitlines(keepends=True)
    for changed in (seen[:-2], [], [*seen[:1], *seen[2:]], [seen[1], seen[0], *seen[2:]], [b"{}\n", *seen]):
        path.write_bytes(b"".join(changed))
        refused(home, None, "heads.jsonl")
    path.unlink()
    refused(home, None, "it was rolled back")
    path.write_bytes(b"".join([*seen[:2], seen[2].replace(b'"hash":"', b'"hash":"0', 1), *seen[3:]]))
    refused(home, None, "rolled back")
    path.write_bytes(b"".join(seen[:-1]))  # killed before the witness saw the last entry
    assert Holding.load("study", home).number == 4
    Holding.load("study", home).reserve([share(0.01)], run="d")
    assert path.read_bytes().splitlines(keepends=True)[:5] == seen
    assert len(path.read_bytes().splitlines()) == 6


def test_a_torn_line_is_passed_over_and_cut_off(home, used):
    path, seen = home / "study" / "entries.jsonl", home / "heads.jsonl"
    whole, heads = path.read_bytes(), seen.read_bytes()
    for torn in (b"{", lines(home)[1][:-1], b"\xff\x00"):
        path.write_bytes(whole + torn)
        seen.write_bytes(heads + torn)
        assert Holding.load("study", home).entries == used.entries
    Holding.load("study", home).reserve([share(0.01)], run="after")
    assert path.read_bytes().startswith(whole)
    assert (len(path.read_bytes().splitlines()), len(seen.read_bytes().splitlines())) == (6, 6)
    assert Holding.load("study", home).charges[-1].run == "after"


# -- killed and raced --------------------------------------------------------------------------------------------------

KILLED = """
    import itertools, os, signal, sys
    from pathlib import Path
    from tacit.graph import Graph
    from tacit.privacy.budget import Holding
    from tacit.privacy.events import Gaussian, Segment

    from tacit.privacy.budget import cost

    cost(4.0, [Segment(Gaussian(1.0))])  # loads the accountant, once
    base = Path(sys.argv[1])
    graph = Graph.from_triples([("a", "r", "b")])
    more = Graph.from_triples([("a", "r", "b"), ("b", "r", "c")])
    real = {name: getattr(os, name) for name in
            ("open", "write", "fsync", "ftruncate", "rename", "replace", "link", "unlink", "mkdir")}
    real["fsync"] = lambda file: None  # a process that is killed needs none, and thousands take long

    def child(home, last, half):
        said = real["open"](home.with_suffix(".said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        calls = itertools.count()

        def deadly(name):
            def call(*given, **options):
                if next(calls) == last:
                    if half and name == "write":
                        real["write"](given[0], given[1][: len(given[1]) // 2])
                    elif half:
                        real[name](*given, **options)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real[name](*given, **options)
            return call

        for name in real:
            setattr(os, name, deadly(name))
        say = lambda text: real["write"](said, text.encode() + b"\\n")
        held = Holding.begin("h", epsilon=8, delta=1e-5, graph=graph, home=home)
        say("begin")
        say(f"reserve {held.reserve([Segment(Gaussian(10.0), 5)], run='a', graph=more).number}")
        say(f"reserve {held.reserve([Segment(Gaussian(20.0), 3)], run='b').number}")
        held.settle(1, [Segment(Gaussian(10.0), 2)])
        say("settle")

    for last in itertools.count():
        codes = []
        for half in (False, True):
            pid = os.fork()
            if not pid:
                child(base / f"{last}-{int(half)}", last, half)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if codes == [0, 0]:
            print(last)
            break
        assert codes == [-9, -9], codes
"""


def script(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_at_any_call_nothing_acknowledged_is_forgotten(tmp_path):
    """SIGKILL before, in the middle of and after every call that writes, opens, renames or syncs."""
    last = int(script(KILLED, tmp_path))
    assert last > 60
    more = Graph.from_triples([("b", "r", "c")])
    states = set()
    for k in range(last + 1):
        for half in (0, 1):
            home = tmp_path / f"{k}-{half}"
            said = (tmp_path / f"{k}-{half}.said").read_text().split("\n")
            if "begin" not in said and "h" not in names(home):
                Holding.begin("h", epsilon=8, delta=1e-5, graph=more, home=home)
            held = Holding.load("h", home)
            reserved = {charge.number for charge in held.charges}
            assert {int(n) for n in re.findall(r"reserve (\d)", "\n".join(said))} <= reserved
            counts = {segment.event.sigma: segment.count for segment in held.spent}
            if "reserve 1" in said:
                assert counts[10.0] >= 2
                assert counts[10.0] == 5 or "reserve 2" in said
            if "reserve 2" in said:
                assert counts[20.0] == 3
            if "settle" in said:
                assert counts[10.0] == 2
            states.add((held.number, len(said)))
            before = held.spent
            number = held.reserve([Segment(Gaussian(30.0))], run="next", graph=more).number
            if 1 in reserved:
                held.settle(1, [Segment(Gaussian(10.0), 2)])
            again = Holding.load("h", home)
            assert again.number >= number
            assert set(again.spent) >= {Segment(Gaussian(30.0)), *(s for s in before if s.event.sigma == 20.0)}
            assert len((home / "heads.jsonl").read_bytes().splitlines()) == again.number + 1
            with pytest.raises(TacitError, match="belong to the holding 'h'"):
                Holding.begin("other", epsilon=8, delta=1e-5, graph=more, home=home)
    assert {number for number, _ in states} == {0, 1, 2, 3}


RACE = """
    import os, sys
    from pathlib import Path
    from tacit.errors import TacitError
    from tacit.privacy.budget import Holding
    from tacit.privacy.events import Gaussian, Segment

    from tacit.privacy.budget import cost

    base, sigma = Path(sys.argv[1]), float(sys.argv[2])
    cost(4.0, [Segment(Gaussian(1.0))])  # loads the accountant, once
    for turn in range(10):
        home = base / str(turn)
        Holding.begin("h", epsilon=8, delta=1e-5, home=home)
        ready, go = os.pipe()
        pids = []
        for racer in range(4):
            if not (pid := os.fork()):
                os.close(go)
                held = Holding.load("h", home)
                os.read(ready, 1)
                try:
                    held.reserve([Segment(Gaussian(sigma))], run=str(racer))
                except TacitError:
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        os.close(go)
        os.close(ready)
        print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""


@pytest.mark.slow
def test_two_processes_never_both_take_the_last(tmp_path):
    results = script(RACE, tmp_path, share(0.7).event.sigma).split("\n")
    assert results == ["[0, 1, 1, 1]"] * 10 + [""]
    for turn in range(10):
        assert len(Holding.load("h", tmp_path / str(turn)).charges) == 1


def test_what_is_written_is_synced_in_order(home, held, monkeypatch):
    """Entry, then witness: a machine that loses power in between has spent."""
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(Path(f"/proc/self/fd/{file}").resolve()), real(file)))
    held.reserve([share(0.1)], run="a", graph=Graph.from_triples([("x", "y", "z")]))
    entry, witness = (home / "study" / "entries.jsonl").resolve(), (home / "heads.jsonl").resolve()
    assert synced[0] == entry.with_name("statements.next")
    assert synced.index(entry.with_name("statements.next")) < synced.index(entry)
    assert witness in synced[synced.index(entry) + 1 :]
    assert synced[-1] == entry.parent


def test_two_that_look_at_the_same_record(home, held):
    other = Holding.load("study", home)
    held.reserve([share(0.6)], run="a")
    with pytest.raises(TacitError, match=r"40\.0%"):
        other.reserve([share(0.6)], run="b")
    assert other.left() == held.left()
    other.reserve([share(0.3)], run="b")
    assert [charge.run for charge in other.charges] == ["a", "b"]


def test_a_lock_that_was_deleted_is_made_again(home, held):
    (home / "lock").unlink()
    held.reserve([share(0.6)], run="a")
    assert Holding.load("study", home).number == 1


# -- against a model ---------------------------------------------------------------------------------------------------

SIGMAS = (0.8, 1.5, 4.0, 20.0)
reservations = st.lists(st.tuples(st.sampled_from(SIGMAS), st.integers(0, 6)), max_size=3)
settlements = st.tuples(st.just("settle"), st.integers(0, 5), reservations)
acts = st.lists(st.tuples(st.just("reserve"), reservations) | settlements, max_size=8)


@settings(max_examples=40)
@given(acts)
def test_any_order_of_reservations_and_settlements(tmp_path_factory, sequence):
    home = tmp_path_factory.mktemp("home")
    held = Holding.begin("h", epsilon=8, delta=1e-5, home=home)
    model: dict[int, tuple[dict[float, int], bool]] = {}

    def total(counts):
        return sum(ORDER * n / (2 * sigma**2) for sigma, n in counts.items())

    def counted(pairs):
        found: dict[float, int] = {}
        for sigma, n in pairs:
            found[sigma] = found.get(sigma, 0) + n
        return {sigma: n for sigma, n in found.items() if n}

    for act, *given_ in sequence:
        segments = [Segment(Gaussian(sigma), n) for sigma, n in given_[-1]]
        wanted = counted(given_[-1])
        if act == "reserve":
            fits = sum(total(counts) for counts, _ in model.values()) + total(wanted) <= WHOLE
            try:
                number = held.reserve(segments, run="x").number
                assert fits
                model[number] = (wanted, False)
            except TacitError:
                assert not fits
        elif model:
            number = sorted(model)[given_[0] % len(model)]
            had, done = model[number]
            fine = wanted == had if done else all(n <= had.get(sigma, 0) for sigma, n in wanted.items())
            try:
                held.settle(number, segments)
                assert fine
                model[number] = (wanted, True)
            except TacitError:
                assert not fine
        held = Holding.load("h", home)
        assert cost(ORDER, held.spent) == pytest.approx(sum(total(counts) for counts, _ in model.values()))
        assert held.spent == joined(Segment(Gaussian(s), n) for counts, _ in model.values() for s, n in counts.items())


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_what_a_holding_takes(home, held):
    made = plan(n=100_000, batch=500, epochs=10, holding=held)
    assert [row.batch for row in made.rows] == [500, 2000, 8000, 32_000, 100_000]
    assert [row.steps for row in made.rows] == [2000, 500, 125, 32, 10]
    assert all(row.fits and row.share <= 1 and row.epsilon <= 8 for row in made.rows)
    signals = [row.signal for row in made.rows]
    assert signals == sorted(signals)  # the batch is the lever
    row = made.rows[0]
    before = plan(n=100_000, batch=500, steps=2000, epsilon=8, delta=1e-5)
    assert before.rows == made.rows
    assert before.once == made.once == pytest.approx((ORDER / (2 * WHOLE)) ** 0.5, rel=2e-3)
    held.reserve([Segment(Sampled(row.rate, (row.sigma,)), row.steps)], run="as planned")
    assert held.left() / WHOLE < 0.02
    with pytest.raises(TacitError):
        held.reserve([Segment(Sampled(row.rate, (row.sigma,)), row.steps)], run="again")
    less = plan(n=100_000, batch=500, epochs=10, holding=held).rows[0]
    assert less.fits
    assert less.sigma > 2 * row.sigma
    json.dumps(made.json())


def test_a_plan_from_noise_says_what_is_spent(held):
    made = plan(n=1000, batch=10, steps=1000, sigma=1.0, delta=1e-5)
    row = made.rows[0]
    assert row.epsilon == pytest.approx(2.101, abs=0.01)  # Renyi divergences; the distribution of losses: 1.828
    assert (row.fits, row.share) == (None, None)
    assert plan(n=1000, batch=10, steps=1000, sigma=1.0, holding=held).rows[0].fits is True
    assert plan(n=1000, batch=10, steps=1000, sigma=0.3, holding=held).rows[0].fits is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": None}, "either epochs or steps"),
        ({"steps": 5}, "either epochs or steps"),
        ({"epochs": 0}, "above 0"),
        ({"n": 0}, "at least 1 triple"),
        ({"batch": 0}, "at least 1 triple"),
        ({"delta": None}, "delta is above 0"),
        ({"sigma": -1}, "sigma"),
        ({"epsilon": None}, "say what it may cost"),
        ({"epsilon": -1}, "epsilon is a number above 0"),
    ],
)
def test_wrong_plans(given, message):
    with pytest.raises(BadValue, match=message):
        plan(**({"n": 1000, "batch": 10, "epochs": 1, "epsilon": 8, "delta": 1e-5} | given))


# -- the command line --------------------------------------------------------------------------------------------------


def tacit(*arguments, code=0, env=None):
    """The command, without the seconds that a process takes to start."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    if isinstance(done.exception, TacitError):
        assert code == 2
        return SimpleNamespace(stdout=done.stdout, stderr=str(done.exception))
    assert done.exit_code == code, done.exception
    return done


@pytest.mark.slow
def test_the_command_as_a_process(tmp_path):
    env = {"TACIT_HOME": str(tmp_path)}
    assert "Opened study" in process("budget", "open", "study", "--epsilon", 8, "--delta", 1e-5, env=env).stdout
    assert (
        "exists already" in process("budget", "open", "study", "--epsilon", 8, "--delta", 1e-5, env=env, code=2).stderr
    )


def test_the_commands(tmp_path):
    home = ("--home", tmp_path / "home")
    assert "There is no holding" in tacit("budget", "show", *home).stdout
    write_graph(GRAPH, tmp_path / "graph")
    opened = tacit("budget", "open", "study", "--epsilon", 8, "--delta", 1e-5, "--graph", tmp_path / "graph", *home)
    assert "Opened study" in opened.stdout
    again = tacit(
        "budget", "open", "two", "--epsilon", 8, "--delta", 1e-5, "--graph", tmp_path / "graph", *home, code=2
    )
    assert "22 of these 22 statements belong to the holding 'study'" in again.stderr
    number = Holding.load("study", tmp_path / "home").reserve([share(0.25)], run="[bold]first").number
    told = json.loads(tacit("budget", "show", "study", "--json", *home).stdout)
    assert told["used"]["share"] == pytest.approx(0.25)
    assert [entry["kind"] for entry in told["entries"]] == ["open", "reserve"]
    assert told["entries"][number]["hash"] == told["head"]
    shown = tacit("budget", "show", "study", *home).stdout
    assert "[bold]first" in shown
    assert "25.0%" in shown
    asked = ("--n", 10_000, "--batch", 100, "--epochs", 2, "--budget", "study", *home)
    made = json.loads(tacit("budget", "plan", *asked, "--json").stdout)
    assert made["rows"][0]["share"] == pytest.approx(0.75, abs=0.02)
    shown = tacit("budget", "plan", *asked)
    assert "signal" in shown.stdout
    assert json.loads(tacit("budget", "close", "study", "--json", *home).stdout)["closed"] is True
    assert "closed" in tacit("budget", "show", *home).stdout
    (tmp_path / "home" / "study" / "entries.jsonl").unlink()
    broken = tacit("budget", "show", "--json", *home, code=2)
    assert "was deleted" in broken.stderr
    assert "was deleted" in json.loads(broken.stdout)["holdings"][0]["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["open", "x", "--epsilon", 0, "--delta", 1e-5], "above 0"),
        (["open", "x/y", "--epsilon", 1, "--delta", 1e-5], "letters, digits"),
        (["open", "x", "--epsilon", 1], "--delta"),
        (["open", "x", "--epsilon", 1, "--delta", 1e-5, "--graph", "clinic-small"], "parties"),
        (["open", "x", "--epsilon", 1, "--delta", 1e-5, "--graph", "clinic-small", "--party", "no"], "no party"),
        (["open", "x", "--epsilon", 1, "--delta", 1e-5, "--party", "no"], "--graph"),
        (["show", "x"], "no holding 'x'"),
        (["close", "x"], "no holding 'x'"),
        (["plan", "--n", 10, "--batch", 2, "--epochs", 1, "--epsilon", 1], "--delta"),
        (["plan", "--n", 10, "--batch", 2, "--epsilon", 1, "--delta", 1e-5], "either epochs or steps"),
        (["plan", "--n", 10, "--batch", 2, "--epochs", 1, "--budget", "x"], "no holding 'x'"),
    ],
)
def test_wrong_input_is_one_message(tmp_path, arguments, message):
    done = tacit("budget", *arguments, "--json", code=2, env={"TACIT_HOME": str(tmp_path)})
    assert message in done.stderr
    assert done.stdout == ""
    assert not any(Path(tmp_path).rglob("entries.jsonl"))
