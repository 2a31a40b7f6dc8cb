"""Federations of real processes over a real broker, with TLS: each has its own folder, key and graph, and is killed,
stopped, put back, lied to. What they learn is what one process learns.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tacit.clinic import clinic
from tacit.federation.keys import Identity, Roster
from tacit.files import write_graph
from tacit.parties import partition, pool
from tacit.run import Run
from tacit.tensors import load_tensors

pytest.importorskip("nats", reason="the extra nats is not installed")
from tacit.federated import Plan, split_settings
from tacit.federation.broker import Broker, nkey_of, subject
from test_letters import federate_in_process
from test_nats import until

if shutil.which("nats-server") is None and not (Path(sys.executable).parent / "nats-server").exists():
    pytest.skip("nats-server is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

SMALL = clinic("small")
QUICK = {"scorer": {"dim": 4}, "negatives": {"count": 4}, "training": {"batch": 64, "device": "cpu"},
         "optimizer": {"learning_rate": 0.02}, "evaluation": {"every": 2},
         "federation": {"rounds": 3, "local_epochs": 1}}  # fmt: skip
PATIENCE = 120.0


class Scene:
    """Folders of a coordinator and of parties, with nothing in common but what they were sent."""

    def __init__(self, tmp_path, recipe="fede", parties=SMALL, settings=None, **sections):
        self.root, self.parties, self.recipe = tmp_path, parties, recipe
        self.settings = {key: (QUICK.get(key, {}) | sections.get(key, {})) for key in QUICK.keys() | sections.keys()}
        self.keeper = Identity.new("keeper")
        self.keys = {name: Identity.new(name) for name in (*parties.names, "coordinator")}
        self.roster = Roster.begin(self.keeper)
        for name, key in self.keys.items():
            self.roster = self.roster.enrol(self.keeper, name, key.public)
        self.port, self.address = free_port(), ""
        self.address = f"tls://127.0.0.1:{self.port}"
        self.running = []
        for name, key in self.keys.items():
            home = self.home(name)
            home.mkdir()
            key.save(home / "own.key")
            self.roster.save(home / "roster.json")
            (home / "plan.toml").write_text(toml({"recipe": recipe, "name": "trial", "parties": list(parties.names)})
                                            + toml(self.settings))  # fmt: skip

    @property
    def plan(self):
        return Plan(self.recipe, self.parties.names, *split_settings({"name": "trial"} | self.settings))

    def home(self, name):
        return self.root / name

    def _start(self, name, *words, limit=None):
        home = self.home(name)
        command = [sys.executable, "-m", "tacit", *words]
        if limit is not None:
            command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "-", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TACIT_HOME": str(home)}
        with open(home / "said", "ab") as said, open(home / "errors", "ab") as errors:
            process = subprocess.Popen(command, cwd=home, stdout=said, stderr=errors, env=environment)
        self.running.append(process)
        return process

    def serve(self, *options):
        own = () if "--broker" in options else ("--listen", f"127.0.0.1:{self.port}", "--broker-folder", "broker")
        return self._start("coordinator", "serve", "plan.toml", "--key", "own.key", "--roster", "roster.json",
                           "--out", "run", "--json", *own, *options)  # fmt: skip

    def join(self, name, *options, limit=None):
        self.write_graph(name)
        certificate = self.home("coordinator") / "broker" / "ca.pem"
        until(certificate.exists)
        shutil.copy(certificate, self.home(name) / "ca.pem")
        return self._start(name, "join", "plan.toml", "graph", "--key", "own.key", "--roster", "roster.json",
                           "--broker", self.address, "--ca", "ca.pem", "--out", "run", "--json", *options,
                           limit=limit)  # fmt: skip

    def write_graph(self, name):
        if not (self.home(name) / "graph").exists():
            write_graph(self.parties[self.parties.names.index(name)], self.home(name) / "graph")

    def errors(self, name):
        return (self.home(name) / "errors").read_text()

    def events(self, name):
        return [json.loads(line) for line in self.errors(name).splitlines() if line.startswith('{"time"')]

    def rounds(self, name="coordinator"):
        """How many rounds it has told of."""
        where = self.home(name) / "errors"
        if not where.exists():
            return 0
        return max((e["round"] for e in self.events(name) if e["event"] == "round"), default=0)

    def end(self, process, code=0, seconds=PATIENCE):
        try:
            found = process.wait(seconds)
        except subprocess.TimeoutExpired:
            found = "still running"
        told = {name: self.errors(name)[-1500:] for name in self.keys if (self.home(name) / "errors").exists()}
        assert found == code, (process.args[-20:], told)

    def check_the_same(self):
        """The same rows and models as in one process."""
        places = None
        if self.plan.names_are_private:
            places = [load_tensors(self.home(name) / "run" / "private" / "places.safetensors")[0]["places"]
                      for name in self.parties.names]  # fmt: skip
        whole = federate_in_process(self.plan, places, self.parties)
        [rows] = load_tensors(self.home("coordinator") / "run" / "private" / "rows.safetensors")[0].values()
        torch.testing.assert_close(rows, whole["star.table"], atol=1e-6, rtol=0)
        for number, name in enumerate(self.parties.names):
            run = Run.open(self.home(name) / "run")
            for part in ("entity", "relation"):
                mine = getattr(run.model.tables, part)
                torch.testing.assert_close(mine, whole[f"model.{number}.{part}"], atol=1e-6, rtol=0)

    def close(self):
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        for folder in self.root.glob("*/broker"):
            if (pid := folder / "nats.pid").is_file() or (pid := next(folder.glob("*pid*"), None)) is not None:
                kill(int(pid.read_text()))


def kill(pid):
    try:
        if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def toml(values):
    plain = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    sections = [f"[{key}]\n{toml(value)}" for key, value in values.items() if isinstance(value, dict)]
    return "\n".join([*plain, *sections]) + "\n"


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def scene(tmp_path):
    made = []

    def make(*args, **options):
        made.append(Scene(tmp_path, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run_through(here, *options):
    """All of them to the end."""
    server = here.serve(*options)
    parties = [here.join(name) for name in here.parties.names]
    for process in (server, *parties):
        here.end(process, seconds=600)


# -- the same as in one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "sections"),
    [
        ("fede", {}),
        ("fedr", {"federation": {"rounds": 3, "secure": True}}),
        ("private_fede", {"privacy": {"name": "dpsgd", "sigma": 1.0, "noise": "seeded"},
                          "negatives": {"count": 4, "scope": "vocabulary"}}),
    ],
    ids=["fede", "fedr, secure sums, private names", "private fede"],
)  # fmt: skip
def test_processes_learn_what_one_process_does(scene, recipe, sections):
    """No two graphs are on the disk at a time: each is deleted when its party has read it."""
    here = scene(recipe, **sections)
    assert here.plan.names_are_private == (recipe == "fedr")
    server, parties = here.serve(), []
    for name in here.parties.names:
        parties.append(here.join(name))
        until(lambda name=name: (here.home(name) / "errors").exists() and "ready" in here.errors(name))
        shutil.rmtree(here.home(name) / "graph")
    for process in (server, *parties):
        here.end(process)
    here.check_the_same()
    assert not list(here.home("coordinator").rglob("*graph*"))


# -- faults ------------------------------------------------------------------------------------------------------------

LONG = {"federation": {"rounds": 12, "local_epochs": 30}, "evaluation": {"every": 4}}


def test_a_party_that_is_killed_comes_back(scene):
    here = scene(**LONG)
    server = here.serve()
    first, *others = [here.join(name) for name in here.parties.names]
    for number in (2, 5):
        until(lambda number=number: here.rounds() >= number)
        first.kill()
        first.wait()
        first = here.join(here.parties.names[0])
    for process in (server, first, *others):
        here.end(process)
    here.check_the_same()


def test_a_coordinator_that_is_killed_goes_on(scene):
    here = scene(**LONG)
    server = here.serve()
    parties = [here.join(name) for name in here.parties.names]
    for number in (2, 6):
        until(lambda number=number: here.rounds() >= number)
        server.kill()
        server.wait()
        server = here.serve()
    for process in (server, *parties):
        here.end(process)
    here.check_the_same()
    journal = (here.home("coordinator") / "run/private/metrics.jsonl").read_text()
    rounds = [e["round"] for e in map(json.loads, journal.splitlines()) if e["event"] == "round"]
    assert rounds == list(range(1, 13)), "no round counts twice"


def test_a_secure_federation_goes_on_after_kills(scene):
    here = scene("fedr", federation={"rounds": 6, "local_epochs": 30, "secure": True}, evaluation={"every": 3})
    server = here.serve()
    first, *others = [here.join(name) for name in here.parties.names]
    until(lambda: here.rounds() >= 2)
    first.kill()
    first.wait()
    first = here.join(here.parties.names[0])
    until(lambda: here.rounds() >= 4)
    server.kill()
    server.wait()
    server = here.serve()
    for process in (server, first, *others):
        here.end(process)
    here.check_the_same()


@pytest.mark.full
def test_who_is_too_slow_is_named_or_left_out(scene):
    here = scene(**LONG)
    server = here.serve("--deadline", "3")
    slow, *others = [here.join(name) for name in here.parties.names]
    until(lambda: here.rounds() >= 2)
    slow.send_signal(signal.SIGSTOP)
    here.end(server, 3)
    assert f"{here.parties.names[0]}: no rows of round" in here.errors("coordinator").replace("\n", " ")
    server = here.serve("--deadline", "3", "--least", "2")
    until(lambda: any(e.get("absent") for e in here.events("coordinator")))
    slow.send_signal(signal.SIGCONT)
    for process in (server, slow, *others):
        here.end(process)
    whole = json.loads((here.home("coordinator") / "run/private/metrics.json").read_text())
    assert whole["rounds"] == 12
    assert not whole["did_not_confirm"]


class Meddler(Broker):
    """A broker that loses letters, and lets in someone who reads, doubles, delays and spoils them."""

    mole = Identity.new("mole")

    def _configuration(self):
        ways = [subject(self.federation, way, name) for name in self.parties for way in ("up", "down")]
        lossy = ", ".join(f'"{way}": [{{destination: "{way}", weight: 80%}}, {{destination: lost, weight: 20%}}]'
                          for way in ways)  # fmt: skip
        found = super()._configuration().replace("publish: { allow: [", 'publish: { allow: ["lost", ')
        assert "users" in found
        head, _, tail = found.partition("users")
        at = tail.index("[") + 1
        mole = f'\n    {{nkey: {nkey_of(self.mole.public)}, permissions: {{publish: ">", subscribe: ">"}}}}'
        return f"mappings: {{ {lossy} }}\n{head}users{tail[:at]}{mole}{tail[at:]}"


async def _meddling(broker, stop, seed):
    """Double, spoil and repeat what passes by."""
    import ssl

    from nats.aio.client import Client

    draw, seen = random.Random(seed), []
    client = Client()
    client._public_nkey = nkey_of(broker.mole.public)
    context = ssl.create_default_context(cafile=str(broker.ca))
    sign = lambda nonce: __import__("base64").b64encode(broker.mole.answer(nonce))  # noqa: E731
    await client.connect(broker.address, tls=context, tls_handshake_first=True, signature_cb=sign)
    done = 0

    async def heard(message):
        nonlocal done
        if draw.random() < 0.5 or done > 3000:
            return
        done += 1
        spoilt = bytearray(message.data)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        seen.append((message.subject, message.data))
        for where, data in ((message.subject, bytes(spoilt)), draw.choice(seen[-200:]), draw.choice(seen)):
            await client.publish(where, data)

    await client.subscribe(f"tacit.{broker.federation}.>", cb=heard)
    while not stop.is_set():
        await asyncio.sleep(0.05)
    await client.close()
    return done


@pytest.mark.full
def test_letters_that_are_lost_doubled_late_and_spoilt_on_the_way(scene):
    import threading

    here = scene(federation={"rounds": 8, "local_epochs": 10}, evaluation={"every": 4})
    home, stop, found = here.home("coordinator"), threading.Event(), []
    with Meddler(home / "broker", here.roster, "coordinator", here.parties.names, federation="trial",
                 port=here.port) as broker:  # fmt: skip
        thread = threading.Thread(target=lambda: found.append(asyncio.run(_meddling(broker, stop, 1))))
        thread.start()
        server = here.serve("--broker", here.address, "--ca", "broker/ca.pem")
        parties = [here.join(name) for name in here.parties.names]
        try:
            for process in (server, *parties):
                here.end(process)
        finally:
            stop.set()
            thread.join(20)
    assert found[0] > 20, "there was something to meddle with"
    here.check_the_same()


def test_a_party_that_is_put_back_to_an_older_state_is_refused(scene):
    here = scene(**LONG)
    server, name = here.serve(), here.parties.names[0]
    first, *_ = [here.join(each) for each in here.parties.names]
    until(lambda: here.rounds() >= 2)
    first.kill()
    first.wait()
    shutil.copytree(here.home(name) / "run", here.home(name) / "old")
    first = here.join(name)
    until(lambda: here.rounds() >= 6)
    first.kill()
    first.wait()
    shutil.rmtree(here.home(name) / "run")
    (here.home(name) / "old").rename(here.home(name) / "run")
    first = here.join(name)
    here.end(first, 2)
    here.end(server, 3)
    for who in (name, "coordinator"):
        assert "put back to an older state" in here.errors(who).replace("\n", " ")


def test_a_broker_that_is_killed_is_started_again(scene):
    here = scene(**LONG)
    server = here.serve()
    parties = [here.join(name) for name in here.parties.names]
    until(lambda: here.rounds() >= 3)
    [pid] = (here.home("coordinator") / "broker").glob("*pid*")
    kill(int(pid.read_text()))
    for process in (server, *parties):
        here.end(process)
    here.check_the_same()


@pytest.mark.full
def test_a_full_disk_stops_a_party_and_loses_nothing(scene):
    """A limit on the size of files stands for the disk: writing fails in the same place, with another number."""
    here = scene(scorer={"dim": 32}, **LONG)
    server = here.serve()
    first, *others = [here.join(name) for name in here.parties.names[1:]]
    name = here.parties.names[0]
    full = here.join(name, limit=60)  # blocks of 1,024 bytes: room for the graph, and not for a checkpoint
    here.end(full, 2)
    assert "File too large" in here.errors(name)
    again = here.join(name)
    for process in (server, first, *others, again):
        here.end(process)
    here.check_the_same()


def test_no_budget_is_lost_when_a_private_party_is_killed(scene):
    """What it may have released twice is taken from its holding twice, before it goes on."""
    from tacit.privacy.budget import Holding

    here = scene("private_fede", privacy={"name": "dpsgd", "epsilon": 2.0}, federation={"rounds": 6, "local_epochs": 4},
                 negatives={"count": 4, "scope": "vocabulary"})  # fmt: skip
    name = here.parties.names[0]
    here.end(here._start(name, "budget", "open", "study", "--epsilon", "8", "--delta", "1e-5"))
    server = here.serve()
    first, *others = [here.join(name, "--budget", "study"), *(here.join(each) for each in here.parties.names[1:])]
    until(lambda: here.rounds(name) >= 2)
    first.kill()
    first.wait()
    first = here.join(name, "--budget", "study")
    for process in (server, first, *others):
        here.end(process)
    holding = Holding.load("study", here.home(name) / "holdings")
    kinds = [entry.kind for entry in holding.entries]
    run = Run.open(here.home(name) / "run")
    assert kinds.count("reserve") == 2, "once for all of it, once for what is done again"
    assert run.epsilon > Run.open(here.home(here.parties.names[1]) / "run").epsilon
    assert run.epsilon < 8
    told = json.loads((here.home("coordinator") / "run/private/metrics.json").read_text())
    assert told["metrics"] == {}
    assert all(found == {} for found in told["parties"].values())
    journal = (here.home("coordinator") / "run/private/metrics.jsonl").read_text()
    assert all(e["loss"] == [None] * 3 for e in map(json.loads, journal.splitlines()) if e["event"] == "round")


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_a_stranger_gets_nowhere(scene):
    """With a key that nobody enrolled, and a roster of its own making that says otherwise."""
    here = scene()
    server, name = here.serve(), here.parties.names[0]
    stranger, own = Identity.new(name), Identity.new("keeper")
    forged = Roster.begin(own)
    for each, key in here.keys.items():
        forged = forged.enrol(own, each, stranger.public if each == name else key.public)
    home = here.home(name)
    for file in ("own.key", "roster.json"):
        (home / file).rename(home / f"kept.{file}")
    stranger.save(home / "own.key")
    forged.save(home / "roster.json")
    here.end(here.join(name), 2)
    assert "roster" in here.errors(name) or "enrol" in here.errors(name)
    for file in ("own.key", "roster.json"):
        (home / f"kept.{file}").replace(home / file)
    parties = [here.join(each) for each in here.parties.names]
    for process in (server, *parties):
        here.end(process)
    here.check_the_same()


def test_who_is_revoked_is_shut_out_at_once(scene):
    here = scene(federation={"rounds": 5000, "local_epochs": 30}, evaluation={"patience": 5000})
    server = here.serve("--deadline", "3")
    first, *_ = [here.join(name) for name in here.parties.names]
    until(lambda: here.rounds() >= 2)
    here.roster.revoke(here.keeper, here.parties.names[0]).save(here.home("coordinator") / "roster.json")
    here.end(first, 2)
    here.end(server, 3)
    assert here.parties.names[0] in here.errors("coordinator")


def test_plain_text_needs_a_flag_that_says_what_it_means(scene):
    here = scene()
    server = here.serve("--plain")
    until(lambda: "whoever sees the network" in here.errors("coordinator"))
    name = here.parties.names[0]
    here.write_graph(name)
    words = ["join", "plan.toml", "graph", "--key", "own.key", "--roster", "roster.json", "--out", "run", "--broker"]
    here.end(here._start(name, *words, f"nats://127.0.0.1:{here.port}"), 2)
    assert "--plain" in here.errors(name) or "plain" in here.errors(name)
    here.end(here._start(name, *words, f"tls://127.0.0.1:{here.port}"), 2)
    server.terminate()
    here.end(server, 143)


# -- many, and long ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_twenty_parties(scene):
    here = scene(parties=partition(pool(clinic("demo")), "triples", 20, seed=1), federation={"rounds": 3})
    run_through(here, "--wait", "300")
    here.check_the_same()


@pytest.mark.full
def test_two_hundred_rounds_with_someone_killed_every_few_seconds(scene):
    here = scene(federation={"rounds": 200, "local_epochs": 10}, evaluation={"every": 20, "patience": 100})
    draw, killed = random.Random(7), {"coordinator": 0, "party": 0, "broker": 0}
    processes = {"coordinator": here.serve()} | {name: here.join(name) for name in here.parties.names}
    until(lambda: here.rounds() >= 1)
    began = time.monotonic()
    while processes["coordinator"].poll() is None and time.monotonic() - began < 900:
        time.sleep(draw.uniform(2, 5))
        if here.rounds() >= 195:
            break
        who = draw.choice([*processes, "broker"])
        if who == "broker":
            for pid in (here.home("coordinator") / "broker").glob("*pid*"):
                kill(int(pid.read_text()))
            killed["broker"] += 1
            continue
        processes[who].kill()
        processes[who].wait()
        processes[who] = here.serve() if who == "coordinator" else here.join(who)
        killed["coordinator" if who == "coordinator" else "party"] += 1
    for process in processes.values():
        here.end(process, seconds=600)
    here.check_the_same()
    assert min(killed.values()) >= 2, killed
