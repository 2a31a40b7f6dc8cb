"""Wrong input at every command, as someone new to it would give it: one message that helps, exit code 2, no trace."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tacit import federate, train, tune, write_graph
from tacit.clinic import clinic
from tacit.federation.keys import Identity, Public, Roster, make
from tacit.ledger.cbor import CID
from tacit.ledger.ledger import Ledger
from tacit.ledger.record import Genesis, Model
from test_cli import LEAVES

SMALL = clinic("small", 1)
KEYS = "--key coordinator.key --roster roster.json"
NORTH = "--key north.key --roster roster.json"
OPEN = "--open --model m --entity 4"
AT = "tls://127.0.0.1:1/x --ca ca.pem"
LOUD = "--mode published --set pairing.validation=none"
VOTES = "ledger graph.tsv --key north.key --epsilon 1 --trainer pate"
PLAN = "--n 1000 --batch 100 --delta 1e-5"

# Each command's mistakes: what is typed after it, and what the message has to say.
WRONG = {
    "data inspect": {
        "absent.tsv": "absent.tsv: no such file or folder",
        "clinic-smal": "Did you mean clinic-small?",
        "''": "an empty path",
        "taken": "nothing to read here; the folder holds notes.txt",
        "empty.tsv": "empty.tsv: found no statement",
        "binary.tsv": "binary.tsv:1",
        "graph.tsv --columns 1,2": "Name 3 to 5 different ones",
        "fb15k-237 --data nowhere": "nowhere/fb15k-237: no such folder",
    },
    "data partition": {
        "absent.tsv --out o": "absent.tsv: no such file",
        "graph.tsv --parts -3 --out o": "--parts",
        "graph.tsv --by entities --share nan --out o": "not nan",
        "graph.tsv --out taken": "exists already",
        "graph.tsv --out graph.tsv/o": "Choose another --out",
        "graph.tsv run --by given --alignment taken --out o": "nothing to read here",
    },
    "data convert": {
        "absent.tsv --out o": "absent.tsv: no such file",
        "graph.tsv --format docx --out o": "tsv or nt",
        "graph.tsv": "--out",
        "graph.tsv --out taken --force": "exists already",
        "clinic-small --out o": "one graph is needed here",
    },
    "data import": {
        "absent.toml --out o": "Mappings that come with tacit",
        "bad.toml --out o": "bad.toml: cannot be read as TOML",
        "taken --out o": "taken: Is a directory",
        "binary.tsv --out o": "cannot be read as TOML",
        "mimic-iii --out o": "--source",
        "mimic-iii --source graph.tsv --out o": "not a database",
        "clinic": "--dry-run",
    },
    "data mark": {
        "graph.tsv --out o": "Say what to mark",
        "graph.tsv --relation nothing --out o": "no such name: 'nothing'",
        "graph.tsv --match 'head=(' --out o": "no regular expression",
        "graph.tsv --share 3 --out o": "from 0 to 1",
        "graph.tsv --triples empty.tsv --out o": "no statement",
    },
    "train": {
        "absent.tsv": "absent.tsv: no such file",
        "graph.tsv --scorer transx --out o": "Did you mean 'transr'",
        "graph.tsv --learning-rate nan --out o": "optimizer.learning_rate",
        "graph.tsv --epsilon 0 --out o": "epsilon is a number above 0",
        "graph.tsv --epsilon 1 --budget nobody --out o": "there is no holding 'nobody'",
        "graph.tsv --config bad.toml --out o": "line 1",
        "graph.tsv --config binary.tsv --out o": "cannot be read as TOML",
        "graph.tsv --out taken": "exists already",
        "graph.tsv --out /proc/o": "/proc/o cannot be made in /proc",
        "--resume taken": "is no run",
        "--resume half": "the folder is not whole",
        "--resume torn": "torn/config.json: cannot be read as JSON",
        "--resume federation": "tacit federate --resume",
    },
    "tune": {
        "absent.tsv": "absent.tsv: no such file",
        "graph.tsv --out o": "no validation triples",
        "clinic-small --pool --scorers transx --out o": "no scorer 'transx'",
        "clinic-small --pool --privacy dpsgd --epsilon 1 --out o": "--public PATH",
        "--resume run": "tacit train --resume",
        "--resume search": "trials.jsonl: is damaged",
    },
    "evaluate": {
        "absent": "is no run",
        "half": "the folder is not whole",
        "unfinished": "tacit train --resume unfinished",
        "cut": "no whole safetensors file",
        "federation": "--party",
        "run --split dev": "train, valid or test",
        "run --probe binary.tsv": "no UTF-8 text",
        "search": "written by tacit tune",
    },
    "predict": {
        "absent --head a --relation b": "is no run",
        "run --head a": "two of head, relation and tail",
        "run --head nothing --relation b": "no such name: 'nothing'",
        "run --head a --relation b --top 0": "--top",
    },
    "export": {
        "absent --out o": "is no run",
        "run --out o --format xls": "not 'xls'",
        "run --out taken": "exists already",
        "unfinished --out o": "not finished",
    },
    "federate": {
        "absent": "absent: no such file or folder",
        "graph.tsv": "--by triples --parts 5",
        "clinic-small --recipe fedx --out o": "not 'fedx'",
        "clinic-small --rounds -1 --out o": "rounds is at least 1",
        "clinic-small --config bad.toml --out o": "bad.toml",
        "clinic-small --transport pigeon --out o": "not 'pigeon'",
        "clinic-small --out taken": "exists already",
        "--resume run": "tacit train --resume",
    },
    "attack": {
        "absent": "is no run",
        "half": "the folder is not whole",
        "federation --attack magic": "not 'magic'",
        "federation --victim nobody": "There are: riverside",
        "federation --count -5": "not -5",
    },
    "audit": {
        "absent": "is no run",
        "half": "the folder is not whole",
        "run --canaries 0": "canaries are at least 2",
        "run --guesses 3": "even number",
        "run --confidence 2": "below 1",
    },
    "flaws": {
        "--only 99": "there is no flaw 99",
        "--only 5": "There are: 1, 2, 3",
        "--only one": "not a valid integer",
    },
    "report": {
        "absent": "is no run",
        "good.tsv": "is no run",
        "half --internal": "half",
        "run --out taken": "is there already",
        "run --out absent/report.html": "absent: no such folder",
    },
    "serve": {
        f"absent.toml {KEYS}": "absent.toml: No such file",
        f"bad.toml {KEYS}": "bad.toml: cannot be read as TOML",
        f"lonely.toml {KEYS}": "lonely.toml: a federation has two parties or more",
        "plan.toml --key north.pub --roster roster.json": "It is a public one",
        "plan.toml --key coordinator.key --roster binary.tsv": "is no roster",
        f"plan.toml {KEYS} --listen nonsense": "--listen is an address and a port",
        f"plan.toml {KEYS} --wait -1": "--wait",
        f"plan.toml {KEYS} --least 0": "--least",
        f"plan.toml {KEYS} --out taken": "exists already",
        f"plan.toml {KEYS} --out graph.tsv": "exists already",
    },
    "join": {
        f"plan.toml graph.tsv {NORTH}": "by --broker, or at --socket",
        f"plan.toml absent.tsv {NORTH} --broker tls://127.0.0.1:1": "absent.tsv: no such file",
        f"plan.toml graph.tsv {NORTH} --broker nonsense --out o": "not 'nonsense'",
        f"plan.toml graph.tsv {NORTH} --broker tls://127.0.0.1:1 --ca binary.tsv --out o": "no certificate",
        f"plan.toml graph.tsv {KEYS} --broker tls://127.0.0.1:1 --out o": "none of the parties",
        f"plan.toml graph.tsv {NORTH} --broker tls://127.0.0.1:1 --patience -1": "--patience",
    },
    "peer start": {
        f"{NORTH} --broker tls://127.0.0.1:1": "Say what this peer learns",
        f"absent.tsv {NORTH} --broker tls://127.0.0.1:1 --out o": "absent.tsv: no such file",
        f"clinic-small {NORTH} --broker tls://127.0.0.1:1 --out o": "one graph is needed here",
        f"graph.tsv {NORTH} --broker tls://127.0.0.1:1 --mode loud --out o": "not 'loud'",
        f"graph.tsv {NORTH} --broker tls://127.0.0.1:1 --out o": "set privacy.epsilon",
        f"graph.tsv {NORTH} --broker tls://127.0.0.1:1 --set pairing.training=1 --out o": "'pairing.trainings'",
        f"graph.tsv {NORTH} --broker tls://127.0.0.1:1 --peers north --out o": "two peers or more",
        f"graph.tsv {NORTH} --broker tls://127.0.0.1:1 --peers north,nobody --out o": "There are: coordinator, north",
        f"graph.tsv {NORTH} {LOUD} --broker tls://127.0.0.1:1 --links graph.tsv --out o": "be used as an alignment",
        f"graph.tsv {NORTH} {LOUD} --broker nonsense --out o": "not 'nonsense'",
        f"graph.tsv {NORTH} {LOUD} --broker tls://127.0.0.1:1 --ca binary.tsv --out o": "no certificate",
        f"graph.tsv {NORTH} {LOUD} --broker tls://127.0.0.1:1 --out taken": "exists already",
        f"graph.tsv {NORTH} {LOUD} --broker tls://127.0.0.1:1 --out run": "tacit train --resume",
        f"--resume run {NORTH} --broker tls://127.0.0.1:1": "tacit train --resume",
        f"--resume taken {NORTH} --broker tls://127.0.0.1:1": "is no peer's folder",
        f"--resume taken --dim 3 {NORTH} --broker tls://127.0.0.1:1": "dim cannot change it",
        "graph.tsv --key north.pub --roster roster.json --broker tls://127.0.0.1:1": "It is a public one",
    },
    "peer broker": {
        "--roster absent.json": "absent.json: No such file",
        "--roster binary.tsv": "is no roster",
        "--roster roster.json --listen nonsense": "--listen is an address and a port",
        "--roster roster.json --peers north": "two peers or more",
        "--roster roster.json --meeting a/b": "cannot be the name of a federation",
        "--roster roster.json --listen 0.0.0.0:4222": "needs the names by which parties reach it",
    },
    "peer meet": {
        "absent": "absent: no such file or folder",
        "graph.tsv --out o": "tacit data partition",
        "clinic-small --mode loud --out o": "not 'loud'",
        "clinic-small --out o": "set privacy.epsilon",
        "clinic-small --mode published --set pairing.ppat.shards=3 --out o": "50 shards or more",
        "clinic-small --mode published --set pairing.virtual=public --out o": "tacit data mark",
        "clinic-small --config bad.toml --out o": "bad.toml",
        "clinic-small --out taken": "exists already",
    },
    "reproduce": {
        "nothing": "no such folder here",
        "table --configs graph.tsv": "no such folder",
        "table --configs taken": "holds no cell",
        "table --configs cells": "cells/bad.toml: cannot be read as TOML",
    },
    "demo": {
        "--out taken": "exists already",
        "--out graph.tsv/o": "Choose another --out",
        "--seed -1": "--seed",
    },
    "budget open": {
        "x --epsilon 1": "--delta",
        "x --epsilon nan --delta 1e-6": "epsilon is a number above 0",
        "x --epsilon 1 --delta 2": "below 1",
        "../x --epsilon 1 --delta 1e-6": "a holding's name",
        "x --epsilon 1 --delta 1e-6 --graph absent.tsv": "absent.tsv: no such file",
    },
    "budget show": {
        "nobody": "there is no holding 'nobody'",
        "../x": "a holding's name",
        "--home graph.tsv": "graph.tsv is no folder",
    },
    "budget plan": {
        f"{PLAN} --epsilon 1": "either epochs or steps",
        f"{PLAN} --epochs 1 --epsilon -1": "epsilon is a number above 0",
        f"{PLAN} --epochs 1e300 --epsilon 1": "of a size that can be, not 1e+300",
        "--n 1000 --batch 100 --epochs 1 --epsilon 1": "--delta",
        f"{PLAN} --epochs 1 --epsilon 1 --budget nobody": "there is no holding 'nobody'",
    },
    "budget close": {
        "": "NAME",
        "nobody": "there is no holding 'nobody'",
        "../x": "a holding's name",
    },
    "keys new": {
        "../x": "cannot be the name of a party",
        "north": "exists already",
        "x --out graph.tsv": "graph.tsv",
    },
    "keys enrol": {
        "roster.json absent.pub --keeper keeper.key --yes": "absent.pub: No such file",
        "roster.json north.key --keeper keeper.key --yes": "begins like a private key",
        "roster.json north.pub --keeper keeper.pub --yes": "It is a public one",
        "graph.tsv north.pub --keeper keeper.key --yes": "is no roster",
        "new.json north.pub --keeper keeper.key": "--fingerprint",
        "nowhere/new.json north.pub --keeper keeper.key --yes": "make it first",
    },
    "keys rotate": {
        "absent.json north.key": "absent.json: No such file",
        "roster.json binary.tsv": "is no private key",
        "roster.json north.pub": "--keeper",
    },
    "keys revoke": {
        "absent.json north --keeper keeper.key": "absent.json: No such file",
        "roster.json nobody --keeper keeper.key": "There are: coordinator, north, south",
        "roster.json north --keeper north.key": "is kept by keeper",
    },
    "keys list": {
        "absent.json": "absent.json: No such file",
        "binary.tsv": "is no roster",
        "roster.json --at-least 99": "rolled back",
        "roster.json --at-least -1": "--at-least",
    },
    "ledger init": {
        f"new {OPEN} --key absent.key": "absent.key: No such file",
        f"new {OPEN} --key north.pub": "It is a public one",
        f"new {OPEN} --key north.key --entity 0": "--entity",
        f"new {OPEN} --key north.key --quorum 1": "'quorum' is more than half of 5 seats",
        f"new {OPEN} --key north.key --standing 1": "'standing' is at least the quorum",
        f"new {OPEN} --key north.key --task weather": "'task' is link prediction or entity classification",
        f"new {OPEN} --key north.key --parents -1": "'parents' is a whole number from 1",
        "new --key north.key --model m --entity 4": "by --roster, or everybody by --open",
        "new --key north.key --model m --entity 4 --roster binary.tsv": "is no roster",
        "new --key keeper.key --model m --entity 4 --roster roster.json": "keeper begins the ledger and is not",
        f"taken {OPEN} --key north.key": "exists already",
        f"ledger {OPEN} --key north.key": "is a ledger already",
        "ledger --key north.key --model drugs --entity 5": "which there is already",
        "ledger --key keeper.key --model m --entity 4": "which is not admitted",
        "broken --key north.key --model m --entity 4": "no whole log",
        f"new {OPEN} --key north.key --log nonsense": "a ledger's address is such as tls://",
        f"new {OPEN} --key north.key --log nats://127.0.0.1:1/x": "is without TLS",
        f"new {OPEN} --key north.key --log tls://127.0.0.1:1/x": "needs the broker's ca.pem",
        f"new {OPEN} --key north.key --log tls://127.0.0.1:1/x --ca binary.tsv": "is no certificate",
        f"new {OPEN} --key north.key --replicas 9 --log {AT}": "--replicas",
        f"taken {OPEN} --key north.key --log {AT}": "exists already",
        f"ledger --key north.key --model m --entity 4 --log {AT}": "where it is was said when it began",
        "ledger --key north.key --model m --entity 4 --blobs ipfs:": "where it is was said when it began",
        f"new {OPEN} --key north.key --log evm:nonsense": "a log on a chain is such as evm:https://",
        f"new {OPEN} --key north.key --log evm:http://example.org": "http://example.org is without TLS",
        f"new {OPEN} --key north.key --log evm:http://127.0.0.1:1": "costs gas: say which account pays, by --account",
        f"new {OPEN} --key north.key --log evm:http://127.0.0.1:1 --account north.key": "is no account of a chain",
        f"new {OPEN} --key north.key --log evm:http://127.0.0.1:1 --account absent": "absent: No such file",
        f"new {OPEN} --key north.key --confirmations -1 --log evm:http://127.0.0.1:1": "--confirmations",
        f"new {OPEN} --key north.key --blobs folder": "weights are at peers by ipfs:",
        f"new {OPEN} --key north.key --blobs ipfs:/ip4/1.2.3.4": "the address of a peer is such as /ip4/",
    },
    "ledger publish": {
        "absent run --key north.key": "absent: is no ledger",
        "ledger absent --key north.key": "absent: is no run",
        "ledger run --key north.key": "only what was trained privately is published",
        "ledger federation --key north.key": "only what was trained privately is published",
        "ledger run --key binary.tsv": "is no private key",
        "ledger run --key north.key --model nothing": "There are: drugs",
        "ledger run --key north.key --parent nonsense": "'nonsense' is no address",
        "ledger federation --key north.key --reveal-for-ever": "federation",
    },
    "ledger verify": {
        "absent": "absent: is no ledger",
        "graph.tsv": "graph.tsv: is no ledger",
        "broken": "broken/log.sqlite: is no whole log",
        "ledger --genesis nonsense": "'nonsense' is no address",
        f"ledger --genesis {CID.of(b'')}": "ledger: is the ledger",
    },
    "provider start": {
        "absent graph.tsv --key north.key --without-privacy": "absent: is no ledger",
        "ledger absent.tsv --key north.key --without-privacy": "absent.tsv: no such file",
        "ledger graph.tsv --key north.key": "say how much privacy your updates may cost (--epsilon)",
        "ledger graph.tsv --key north.key --epsilon 1 --without-privacy": "(--without-privacy)",
        "ledger graph.tsv --key north.key --without-privacy --set privacy.epsilon=1": "leave out --without-privacy",
        "ledger graph.tsv --key north.key --epsilon 1 --set privacy.noise=seeded": "without seeded noise",
        "ledger graph.tsv --key binary.tsv --without-privacy": "is no private key",
        "ledger graph.tsv --key north.key --without-privacy --model nothing": "There are: drugs",
        "ledger graph.tsv --key north.key --without-privacy --dim 5": "rows of 4 and 4 numbers",
        "ledger graph.tsv --key north.key --without-privacy --defence magic": "Not 'magic'",
        "ledger graph.tsv --key north.key --without-privacy --defence mean --defence median": "takes one mean",
        "ledger graph.tsv --key north.key --without-privacy --updates 0": "--updates",
        "ledger graph.tsv --key north.key --without-privacy --out taken": "exists already",
        "ledger graph.tsv --key north.key --epsilon 1 --validation own": "is public or none",
        "ledger graph.tsv --key north.key --epsilon 1 --budget nobody": "there is no holding 'nobody'",
        "ledger graph.tsv --key north.key --epsilon 1 --set privacy.name=marginals": "use dpsgd, adafest or",
        "ledger clinic-small --key north.key --without-privacy": "holds 3 parties",
        "ledger graph.tsv --key north.key --epsilon 1 --trainer magic": "--trainer is own or pate",
        "ledger graph.tsv --key north.key --epsilon 1 --public graph.tsv": "--public is for votes",
        f"{VOTES}": "name it by --public",
        f"{VOTES} --public absent.tsv": "absent.tsv: no such file",
        f"{VOTES} --public graph.tsv": "is the private graph itself",
        f"{VOTES} --public clinic-small": "holds 3 parties",
        f"{VOTES} --public public.tsv --teachers 1": "--teachers",
        f"{VOTES} --public public.tsv --teachers 999999": "teachers are at most 10,000",
        f"{VOTES} --public public.tsv --votes 30000": "ask fewer",
        f"{VOTES} --public public.tsv --candidates other.tsv": "a name that the public graph does not have",
        f"{VOTES} --public public.tsv --candidates public.tsv": "there are 0 questions",
        f"{VOTES} --public public.tsv --validation own": "validation is public or none",
        f"{VOTES} --public public.tsv --set privacy.name=dpsgd": "leave out settings of privacy",
        f"{VOTES} --public public.tsv --without-privacy": "say how much privacy",
        "ledger graph.tsv --key north.key --trainer pate --public public.tsv --without-privacy": "(--epsilon)",
    },
    "ledger show": {
        "absent": "absent: is no ledger",
        "taken": "taken: is no ledger",
        "broken --dot": "no whole log",
        "ledger --model nothing": "There are: drugs",
        "far": "the key that logs in to its broker, nowhere.key, is not there: say which by --key",
    },
    "ledger follow": {
        "absent": "absent: is no ledger",
        "broken": "no whole log",
        "ledger --until 0": "--until",
        "ledger --minutes -1": "--minutes",
        "far --key north.pub": "It is a public one",
    },
    "ledger join": {
        "new --log tls://127.0.0.1:1/x --genesis nonsense --key north.key": "'nonsense' is no address",
        f"new --log tls://127.0.0.1:1/x --genesis {CID.of(b'')} --key north.pub": "It is a public one",
        f"new --log nonsense --genesis {CID.of(b'')} --key north.key": "a ledger's address is such as tls://",
        f"new --log tls://127.0.0.1:1/x --genesis {CID.of(b'')} --key north.key": "needs the broker's ca.pem",
        f"taken --log tls://127.0.0.1:1/x --genesis {CID.of(b'')} --key north.key": "exists already",
        f"new --log tls://127.0.0.1:1/x --genesis {CID.of(b'')}": "say your private key, by --key",
        f"new --log evm:nonsense --genesis {CID.of(b'')}": "a log on a chain is such as evm:https://",
        f"new --log evm:http://127.0.0.1:1#x --genesis {CID.of(b'')}": "a log on a chain is such as evm:https://",
        f"new --log evm:https://127.0.0.1:1 --genesis {CID.of(b'')} --blobs ipfs:x": "the address of a peer is such as",
    },
    "ledger share": {
        "absent": "absent: is no ledger",
        "ledger": "its weights are not at peers",
        "peers --listen nonsense": "--listen is an address and a port",
        "peers --listen 0.0.0.0:4001": "needs the names by which others reach it: say --host",
        "peers --host a/b": "'a/b' is no name of a host",
        "peers --listen 192.0.2.1:4001": "This peer could not start at 192.0.2.1:4001",
    },
    "ledger account": {
        "north.key": "is no account of a chain",
        "open.account": "others may read this private key",
        "taken": "Is a directory",
        "absent/new.account": "absent",
    },
    "ledger revoke": {
        "absent --key north.key": "absent: is no ledger",
        "ledger nobody --key north.key": "There are: north",
        "ledger north --key south.key": "which is not admitted",
        "ledger --key north.pub": "It is a public one",
    },
    "ledger serve": {
        "new drugs --roster binary.tsv": "is no roster",
        "new a/b --roster roster.json": "a ledger's name at a broker has letters",
        "new drugs --roster roster.json --listen nonsense": "--listen is an address and a port",
        "new drugs --roster roster.json --listen 0.0.0.0:4222": "needs the names by which",
        "new drugs --roster roster.json --room -1": "--room is a number of GB above 0",
    },
}
CASES = [(command, words) for command, mistakes in WRONG.items() for words in mistakes]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with whatever could be meant by mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "graph.tsv").write_text("".join(f"e{i}\tr{i % 3}\te{i * 7 % 50}\n" for i in range(200)))
    (folder / "empty.tsv").touch()
    (folder / "public.tsv").write_text("".join(f"e{i}\tr{i % 3}\te{i * 11 % 50}\n" for i in range(100)))
    (folder / "other.tsv").write_text("stranger\tr0\te1\n")
    (folder / "binary.tsv").write_bytes(bytes(range(256)) * 8)
    (folder / "bad.toml").write_text("[scorer\n")
    (folder / "plan.toml").write_text('parties = ["north", "south"]\n[scorer]\ndim = 4\n')
    (folder / "lonely.toml").write_text('parties = ["north"]\n')
    for name, file in (("taken", "notes.txt"), ("cells", "bad.toml")):
        (folder / name).mkdir()
        (folder / name / file).write_text("[scorer\n")
    run = folder / "run"
    train(SMALL[0], dim=4, epochs=1, out=run)
    for name in ("half", "torn", "unfinished", "cut"):
        shutil.copytree(run, folder / name)
    shutil.rmtree(folder / "half" / "private")
    (folder / "torn" / "config.json").write_text('{"schema": "tacit.run/1", "sett')
    (folder / "unfinished" / "private" / "model.safetensors").unlink()
    model = folder / "cut" / "private" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:50])
    federate(SMALL, recipe="fede", rounds=1, settings={"scorer": {"dim": 4}}, out=folder / "federation")
    tune(SMALL[0], trials=1, dim=4, epochs=1, batch=512, out=folder / "search")
    (folder / "search" / "private" / "trials.jsonl").write_text("what is this\n")
    keeper, _, _ = make("keeper", folder)
    roster = Roster.begin(keeper)
    for name in ("coordinator", "north", "south"):
        roster = roster.enrol(keeper, name, Public.load(make(name, folder)[2]).public)
    roster.save(folder / "roster.json")
    assert Identity.load(folder / "north.key").name == "north"
    north = Identity.load(folder / "north.key")
    ledger = Ledger.begin(folder / "ledger", north, Genesis("ledger", keys=(("north", north.public),)))
    ledger.open_model(north, Model(ledger.genesis, "drugs", entity=4, relation=4))
    shutil.copytree(folder / "ledger", folder / "broken")
    (folder / "broken" / "log.sqlite").write_bytes(bytes(range(256)) * 40)
    shutil.copytree(folder / "ledger", folder / "far")
    far = json.loads((folder / "ledger" / "ledger.json").read_text())
    told = far | {"log": "tls://127.0.0.1:1/x", "key": "nowhere.key"}
    (folder / "far" / "ledger.json").write_text(json.dumps(told))
    shutil.copytree(folder / "ledger", folder / "peers")
    (folder / "peers" / "ledger.json").write_text(json.dumps(far | {"blobs": "ipfs:"}))
    (folder / "peers" / "peer.key").write_bytes(bytes(32))
    (folder / "open.account").write_text("1" * 64)
    (folder / "open.account").chmod(0o644)
    write_graph(SMALL[0], folder / "graph")
    return folder


@pytest.mark.parametrize(("command", "words"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_mistake_is_told_and_leaves_no_trace(place, mistaken, monkeypatch, command, words):
    monkeypatch.setenv("TACIT_HOME", str(place / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    before = sorted(place.rglob("*"))
    told = mistaken(*command.split(), *shlex.split(words), cwd=place)
    assert WRONG[command][words] in " ".join(told.split())
    assert len(told.splitlines()) <= 24
    assert sorted(path for path in place.rglob("*") if path.name not in ("lock", "tacit.log")) == [
        path for path in before if path.name not in ("lock", "tacit.log")
    ]


def test_every_command_has_its_mistakes():
    assert {" ".join(names) for names in LEAVES} == set(WRONG)
    assert all(len(mistakes) >= 3 for mistakes in WRONG.values())


def test_a_folder_without_permission(tmp_path):
    """As another user where this one is allowed everything."""
    if os.geteuid() == 0:
        pytest.skip("the superuser may write anywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    (tmp_path / "graph.tsv").write_text("a\tr\tb\n")
    (tmp_path / "secret.tsv").write_text("a\tr\tb\n")
    (tmp_path / "secret.tsv").chmod(0)
    for words in (["convert", "graph.tsv", "--out", "locked/o"], ["inspect", "secret.tsv"]):
        done = subprocess.run([sys.executable, "-m", "tacit", "data", *words], cwd=tmp_path, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 2
        assert "ermission denied" in done.stderr
