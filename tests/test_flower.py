"""Letters by way of Flower: in pieces, to a party's door, over a grid that loses, errs and lies; and the real thing."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason='Flower is not installed: pip install "tacit-kg[flower]"')

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from tacit import correspondence, door, flower
from tacit.cli import app as commands
from tacit.coordinator import Coordinator
from tacit.correspondence import Correspondence, attend
from tacit.door import Closed, Door, hand_over
from tacit.errors import TacitError
from tacit.federated import read_plan
from tacit.federation.letters import Letter
from tacit.files import write_graph
from tacit.flower import GridPost, packed, relayed, unpacked
from tacit.participant import Participant
from tacit.tensors import load_tensors
from test_letters import KEYS, NAMES, QUICK, ROSTER, SMALL, check_the_same, plan

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here():
    """A folder whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def _quickly(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    for module, name, seconds in ((correspondence, "POKE", 0.05), (flower, "POLL", 0.01), (flower, "REST", 0.05)):
        monkeypatch.setattr(module, name, seconds)


# -- pieces ------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(1, 30))
def test_a_letter_in_pieces_is_the_same_letter(letter, piece):
    before, flower.PIECE = flower.PIECE, piece
    try:
        content = packed(letter)
        assert unpacked(content) == letter
        assert len(content) == 1 + -(-len(letter) // piece)
    finally:
        flower.PIECE = before


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"letter": {"pieces": 1}},
        {"letter": {"pieces": -1}},
        {"letter": {"pieces": 1.0}, "piece-0": {"bytes": b"a"}},
        {"letter": {"pieces": 10**9}},
        {"letter": {"pieces": 0}, "piece-0": {"bytes": b"a"}},
        {"letter": {"pieces": 1}, "piece-0": {"bytes": "a"}},
        {"letter": {"pieces": 1}, "piece-0": {"bytes": b""}},
        {"letter": {"pieces": 1}, "piece-1": {"bytes": b"a"}},
    ],
)
def test_what_is_no_letter_in_pieces_is_refused(content):
    with pytest.raises(TacitError, match="no letter"):
        unpacked(RecordDict({name: ConfigRecord(values) for name, values in content.items()}))


# -- the door ----------------------------------------------------------------------------------------------------------


def answering(path, answers):
    """A door that answers letters as `answers` says, in a thread; None: not at all."""
    opened = Door(path, largest=1000)

    def serve():
        with opened:
            while answers:
                if (came := opened.receive(5)) is None:
                    return
                if (answer := answers.pop(0)) is not None:
                    opened.send(None, answer + came[1])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_letters_are_handed_in_one_by_one(here):
    thread = answering(here / "s", [b"1", b"2", None, b"4"])
    assert stat.S_IMODE((here / "s").stat().st_mode) == 0o600
    long = b"b" * 900
    assert [hand_over(here / "s", letter) for letter in (b"a", long, b"c", b"")] == [b"1a", b"2" + long, b"", b"4"]
    thread.join(5)
    assert not (here / "s").exists(), "a door that is shut is gone"
    with pytest.raises(Closed, match="start tacit join --socket"):
        hand_over(here / "s", b"a")


def test_what_is_too_long_or_cut_off_does_not_stop_a_door(here, monkeypatch):
    monkeypatch.setattr(door, "HURRY", 0.3)
    with Door(here / "s", largest=1000) as opened:
        for bad in (b"\xff" * 8, (2000).to_bytes(8, "big"), b"\0\0", (5).to_bytes(8, "big") + b"ab"):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(here / "s"))
                caller.sendall(bad)
                if bad == b"\0\0":
                    caller.shutdown(socket.SHUT_WR)
                assert opened.receive(1) is None
        assert opened.receive(0.01) is None
        with socket.socket(socket.AF_UNIX) as caller:  # one who does not wait
            caller.connect(str(here / "s"))
            caller.sendall((1).to_bytes(8, "big") + b"x")
        assert opened.receive(1) == ("", b"x")
        opened.send(None, b"y" * 100)


def test_a_door_takes_the_place_of_a_dead_one_only(here):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(here / "s"))
    with Door(here / "s"):
        with pytest.raises(TacitError, match="another process answers there"):
            Door(here / "s")
    (here / "s").write_text("mine")
    with pytest.raises(TacitError, match="is no socket"):
        Door(here / "s")
    assert (here / "s").read_text() == "mine"
    with pytest.raises(TacitError, match="too long"):
        Door(here / ("s" * 120))
    with pytest.raises(TacitError, match="cannot be a socket"):
        Door(here / "nowhere" / "s")


def test_a_party_that_ends_in_the_middle_is_told_of(here):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(here / "s"))
        listening.listen()
        thread = threading.Thread(target=lambda: listening.accept()[0].close())
        thread.start()
        with pytest.raises(Closed, match=r"did not answer to the end|does not answer"):
            hand_over(here / "s", b"a")
        thread.join(5)


def at_the_door(here, name, wanted, stopped=None, **options):
    """A party in a thread, at its door."""

    def attending():
        one = Participant(wanted, SMALL[NAMES.index(name)], KEYS[name], ROSTER, here / name)
        try:
            with Door(here / f"{name}.s") as opened:
                attend(one, opened, KEYS[name], ROSTER, "coordinator", knocks=False, **{"patience": 60} | options)
        except Exception as error:  # noqa: BLE001 - it is looked at
            (stopped if stopped is not None else {})[name] = error
        finally:
            one.close()

    thread = threading.Thread(target=attending, daemon=True)
    thread.start()
    while thread.is_alive() and not (here / f"{name}.s").exists():
        time.sleep(0.01)
    return thread


def test_a_party_at_its_door_answers_the_coordinator_alone_and_nothing_old(here):
    wanted, name, stopped = plan("fede"), NAMES[0], {}
    thread = at_the_door(here, name, wanted, stopped, patience=2)
    hello = Letter("ask", "coordinator", name, "ab", 1, 2, {"asked": "hello", "protocol": 0, "plan": {}})

    def asked(letter, key="coordinator"):
        data = hand_over(here / f"{name}.s", letter.seal(KEYS[key]))
        return Letter.open(data, ROSTER, "coordinator") if data else None

    for letter, key in ((hello, "stranger"), (Letter("ask", NAMES[1], name, "ab", 1, 2, {}), NAMES[1])):
        assert asked(letter, key) is None
    assert hand_over(here / f"{name}.s", b"nothing") == b""
    poke = Letter("poke", "coordinator", name, "ab", 1, 2)
    assert asked(poke).kind == "unknown"
    assert asked(Letter("ask", "coordinator", name, "ab", 1, 3, {"asked": "go on", "id": "1"})).says == {"lost": True}
    again = Letter("poke", "coordinator", name, "ab", 1, 3)
    assert asked(again).says == {"lost": True}, "the last answer is kept"
    assert asked(hello) is None, "what is older is not answered"
    declined = asked(Letter("ask", "coordinator", name, "ab", 1, 4, {"asked": "hello", "protocol": 0, "plan": {}}))
    assert "speaks version 0" in declined.says["declined"]
    thread.join(10)
    assert "speaks version 0" in str(stopped[name])


# -- over a grid -------------------------------------------------------------------------------------------------------


class Grid:
    """As Flower's: each node takes one message at a time, a ClientApp for each. `meddle` may change a reply."""

    def __init__(self, here, meddle=lambda name, reply: [reply]):
        self.here, self.meddle, self.replies, self.pushed, self.lock = here, meddle, {}, 0, threading.Lock()
        self.nodes = [SimpleNamespace(node_id=i + 2, name=name, status="online") for i, name in enumerate(NAMES)]
        self.busy = {name: threading.Lock() for name in NAMES}

    def get_nodes(self):
        return self.nodes

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            self.pushed += 1
            message.metadata.__dict__["_message_id"] = f"m{self.pushed}"
            numbers.append(f"m{self.pushed}")
            threading.Thread(target=self._work, args=(message,), daemon=True).start()
        return numbers

    def _work(self, message):
        name = next(node.name for node in self.nodes if node.node_id == message.metadata.dst_node_id)
        with self.busy[name]:
            try:
                found = relayed(message, SimpleNamespace(node_config={"socket": str(self.here / f"{name}.s")}))
            except TacitError as error:
                found = Message(Error(2, str(error)), reply_to=message)
        for reply in self.meddle(name, found):
            with self.lock:
                self.replies[message.metadata.message_id] = reply

    def pull_messages(self, numbers):
        with self.lock:
            return [self.replies.pop(number) for number in numbers if number in self.replies]


def by_grid(here, wanted, grid, seconds=60.0, **options):
    post = GridPost(grid, NAMES, seconds)
    letters = Correspondence(post, KEYS["coordinator"], ROSTER, NAMES, parties_knock=False)
    one = Coordinator(wanted, here / "coordinator", letters, **options).run()
    post.settle(5)
    return one, letters, post


@pytest.mark.slow
@pytest.mark.usefixtures("_quickly")
@pytest.mark.parametrize("kind", ["quiet", "lost", "errors", "forged"])
def test_a_federation_over_a_grid_learns_what_it_would_in_one_process(here, kind):
    """Whatever happens to answers: they are asked for again, and only a party's own count."""
    wanted, count = plan("fede"), dict.fromkeys(NAMES, 0)

    def meddle(name, reply):
        count[name] += 1
        if kind == "quiet" or count[name] % 3:
            return [reply]
        if kind == "lost":
            return []
        if kind == "errors":
            return [SimpleNamespace(metadata=reply.metadata, has_error=lambda: True, error=Error(5, "it is gone"))]
        other = NAMES[NAMES.index(name) - 1]  # an answer of another party, and one in this party's name
        sealed = unpacked(reply.content)
        if not sealed:
            return [reply]
        letter = Letter.open(sealed, ROSTER, "coordinator")
        forged = Letter("answer", name if count[name] % 2 else other, "coordinator", letter.run, letter.life,
                        letter.number, {"lost": True})  # fmt: skip
        content = packed(forged.seal(KEYS[other]))
        return [SimpleNamespace(metadata=reply.metadata, has_error=lambda: False, content=content)]

    threads = [at_the_door(here, name, wanted) for name in NAMES]
    one, letters, post = by_grid(here, wanted, Grid(here, meddle), seconds=1.0 if kind == "lost" else 60.0)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a goodbye ends it"
    check_the_same(here, one, wanted)
    assert (letters.refused > 0) == (kind == "forged")
    assert (post.errors > 0) == (kind == "errors")
    assert post.sent_bytes > 0
    assert post.received_bytes > 0


@pytest.mark.usefixtures("_quickly")
def test_a_party_that_comes_late_or_comes_back_is_asked_again(here):
    """Its SuperNode is there, and its process is not; then its process fails, and is started again."""
    wanted = plan("fede")
    threads = [at_the_door(here, name, wanted) for name in NAMES[1:]]
    failing, stopped = threading.Event(), {}
    late = NAMES[0]

    def first():
        time.sleep(0.5)
        one = Participant(wanted, SMALL[0], KEYS[late], ROSTER, here / late)
        usual = one.answer

        def answer(asked, says, messages):
            if asked == "begin" and not failing.is_set():
                failing.set()
                raise TacitError("the disk is full")
            return usual(asked, says, messages)

        one.answer = answer
        try:
            with Door(here / f"{late}.s") as opened:
                attend(one, opened, KEYS[late], ROSTER, "coordinator", knocks=False, patience=60)
        except TacitError as error:
            stopped[late] = error
        one.close()
        time.sleep(0.5)
        threads.append(at_the_door(here, late, wanted))

    starter = threading.Thread(target=first, daemon=True)
    starter.start()
    one, _, post = by_grid(here, wanted, Grid(here))
    starter.join(20)
    for thread in threads:
        thread.join(20)
    assert "disk is full" in str(stopped[late])
    assert post.errors > 0
    check_the_same(here, one, wanted)


@pytest.mark.usefixtures("_quickly")
def test_one_letter_at_a_time_to_a_node_of_the_right_name_that_is_there(here):
    grid = Grid(here)
    post = GridPost(grid, NAMES, 60.0)
    held = threading.Event()
    grid.meddle = lambda name, reply: [reply] if held.wait(5) else []
    thread = answering(here / f"{NAMES[0]}.s", [b"1"])
    post.send(NAMES[0], b"a")
    post.send(NAMES[0], b"b")
    assert grid.pushed == 1
    assert post.receive(0.05) is None
    held.set()
    assert post.receive(5) == (NAMES[0], b"1a")
    thread.join(5)
    grid.nodes[1].status = "offline"
    grid.nodes.append(SimpleNamespace(node_id=99, name=NAMES[2], status="online"))
    post._looked = float("-inf")
    post.send(NAMES[1], b"a")
    post.send(NAMES[2], b"a")
    assert grid.pushed == 1, "not to who is not there, and not to one of two of the same name"


# -- what is written ---------------------------------------------------------------------------------------------------


def written_plan(path, recipe="fede", **federation):
    """QUICK, as a file; and the plan that it is."""
    lines = [f'recipe = "{recipe}"', f"parties = {json.dumps(list(NAMES))}"]
    for section, values in (QUICK | {"federation": QUICK["federation"] | federation}).items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")
    return read_plan(path)


def written_keys(folder):
    for name in (*NAMES, "coordinator"):
        KEYS[name].save(folder / f"{name}.key")
    ROSTER.save(folder / "roster.json")


def tacit(*words):
    from typer.testing import CliRunner

    return CliRunner().invoke(commands, [str(word) for word in words])


def test_the_folder_that_is_written(here):
    written_plan(here / "plan.toml")
    written_keys(here)
    words = ("federate", "--transport", "flower", "--config", here / "plan.toml", "--key", here / "coordinator.key",
             "--roster", here / "roster.json", "--out", here / "f")  # fmt: skip
    done = tacit(*words, "--json", "--host", "link.example.org", "--listen", "0.0.0.0:8123")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["parties"] == list(NAMES)
    told = (here / "f" / "COMMANDS.md").read_text()
    assert "--superlink link.example.org:8123" in told
    assert "--host 0.0.0.0 --port 8123" in told
    assert 'address = "127.0.0.1:8123"' in (here / "f" / "flwr" / "cli" / "config.toml").read_text()
    assert stat.S_IMODE((here / "f" / "superlink" / "server.key").stat().st_mode) == 0o600
    for name in NAMES:
        there = {path.name for path in (here / "f" / "parties" / name).iterdir()}
        assert there == {"plan.toml", "ca.pem", "node-config.toml"}
    assert not list((here / "f").rglob("*coordinator.key"))
    (here / "f" / "run").mkdir()
    for more, reason in (((), "exists already"), (("--force",), "holds 'run', which is none of ours")):
        again = tacit(*words, *more)
        assert reason in str(again.exception)
    (here / "f" / "run").rmdir()
    assert tacit(*words, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--rounds", "3"], "rounds belongs there"),
        (["--listen", "nowhere"], "--listen is an address"),
        (["--transport", "pigeons"], "in-process or flower"),
        (["--transport", "in-process"], "is for --transport flower"),
        (["--key", "NAME"], "not in the roster"),
    ],
)
def test_what_cannot_be_written_is_said(here, change, reason):
    written_plan(here / "plan.toml")
    written_keys(here)
    KEYS["stranger"].save(here / "stranger.key")
    change = [str(here / "stranger.key") if word == "NAME" else word for word in change]
    done = tacit("federate", "--transport", "flower", "--config", here / "plan.toml", "--key",
                 here / "coordinator.key", "--roster", here / "roster.json", "--out", here / "f", *change)  # fmt: skip
    assert re.search(reason, str(done.exception))
    assert not (here / "f").exists()


def test_join_needs_one_way_for_letters(here):
    written_plan(here / "plan.toml")
    written_keys(here)
    words = ("join", here / "plan.toml", "clinic-small", "--key", here / f"{NAMES[0]}.key", "--roster",
             here / "roster.json")  # fmt: skip
    for more in ((), ("--broker", "tls://b:1", "--socket", here / "s")):
        assert "one of the two" in str(tacit(*words, *more).exception)


def test_without_flower_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    for make in (flower.client_app, flower.server_app, lambda: GridPost(None, (), 1.0)):
        with pytest.raises(TacitError, match=re.escape('pip install "tacit-kg[flower]"')):
            make()


def test_the_client_app_starts_without_torch():
    code = "import sys; from tacit.flower import client_app; client_app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=180, check=False).returncode == 0


# -- the real thing ----------------------------------------------------------------------------------------------------


def blocks(text, heading):
    """The commands under a heading of COMMANDS.md, in their order."""
    [part] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```sh\n(.*?)```", part, re.DOTALL | re.MULTILINE)


def free_ports(count):
    opened = [socket.socket() for _ in range(count)]
    for each in opened:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


class Machines:
    """Processes that are started by the commands of COMMANDS.md, each in its folder; all are ended in the end."""

    def __init__(self, exports):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = clean | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.exports, self.running = exports, {}

    def start(self, name, command, folder):
        with open(folder / f"{name.replace(' ', '-')}.log", "wb") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-c", f"{self.exports}\n{self._last_replaces_the_shell(command)}"], cwd=folder, env=self.env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    @staticmethod
    def _last_replaces_the_shell(command):
        """So that the process that is stopped is the program's own."""
        if command.startswith("export"):
            return command
        words = re.match(r'((?:\w+="[^"]*" )*)(.*)', command, re.DOTALL)
        return f"{words[1].replace('FLWR_HOME', 'export FLWR_HOME')}\nexec {words[2]}"

    def do(self, command, folder, seconds=60):
        done = subprocess.run(["bash", "-ec", f"{self.exports}\n{command}"], cwd=folder, env=self.env, timeout=seconds,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        return done.stdout

    def stop(self):
        for last in (False, True):  # SuperNodes sign off while there is a SuperLink
            ending = [one for name, one in self.running.items() if (name == "superlink") == last and one.poll() is None]
            for one in ending:
                one.terminate()
            for one in ending:
                try:
                    one.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(one.pid, 9)
                    one.wait(5)


def stop_after_a_round(machines, run, center):
    """Start the run, and stop it in the middle of its second round."""
    first, health = machines.start("run", run, center), center / "run" / "health.json"
    while not health.is_file() or '"round 2"' not in health.read_text():
        assert first.poll() is None, log_of(center, "run")
        time.sleep(0.2)
    home = 'export FLWR_HOME="$PWD/flwr/cli"\n'
    [there] = json.loads(machines.do(home + "flwr list tacit --format json", center))["runs"]
    machines.do(home + f"flwr stop {there['run-id']} tacit", center)
    first.wait(60)
    assert not (center / "run" / "private" / "metrics.json").is_file()


def log_of(folder, name):
    return (folder / f"{name.replace(' ', '-')}.log").read_text(errors="replace")


@pytest.mark.parametrize(
    ("recipe", "more", "interrupted"),
    [
        pytest.param("fede", {}, False, marks=pytest.mark.full, id="fede"),
        pytest.param("fede", {}, True, marks=pytest.mark.full, id="fede-interrupted"),
        pytest.param("fedr", {"rounds": 1, "secure": True}, False, marks=pytest.mark.full, id="secure-fedr"),
    ],
)
def test_a_federation_by_flower_learns_what_it_would_in_one_process(here, recipe, more, interrupted):
    """A SuperLink, three SuperNodes over TLS with keys of their own, and three parties, by the commands as written."""
    (home := here / "home").mkdir()
    wanted = written_plan(home / "plan.toml", recipe, **more)
    written_keys(home)
    link_port, stranger_port, *node_ports = free_ports(2 + len(NAMES))
    done = tacit("federate", "--transport", "flower", "--config", home / "plan.toml", "--key",
                 home / "coordinator.key", "--roster", home / "roster.json", "--out", home / "f", "--listen",
                 f"127.0.0.1:{link_port}")  # fmt: skip
    assert done.exit_code == 0, done.exception
    center = home / "f"
    told = (center / "COMMANDS.md").read_text()
    [exports] = re.findall(r"^```sh\n(.*?)```", told.split("## Coordinator")[0], re.DOTALL | re.MULTILINE)
    machines = Machines(exports)
    superlink, register, run = blocks(told, "Coordinator")
    try:
        machines.start("superlink", superlink, center)
        party_commands = {}
        for name, graph, port in zip(NAMES, SMALL, node_ports, strict=True):
            shutil.copytree(center / "parties" / name, folder := here / name)
            for file in (f"{name}.key", "roster.json"):
                shutil.copy(home / file, folder / file)
            write_graph(graph, folder / "graph")
            make_key, join, node = blocks(told, name)
            party_commands[name] = (folder, join, re.sub(r"--port \d+", f"--port {port}", node))
            machines.do(make_key, folder)
            shutil.copy(folder / "node_key.pub", center / "nodes" / f"{name}.pub")
        for _ in range(300):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", link_port)) == 0:
                    break
            assert machines.running["superlink"].poll() is None, log_of(center, "superlink")
            time.sleep(0.1)
        machines.do(register, center, 90)
        began = time.monotonic()
        for name, (folder, join, node) in party_commands.items():
            machines.start(f"join {name}", join, folder)
            machines.start(f"node {name}", node, folder)
        shutil.copytree(center / "parties" / NAMES[0], stranger := here / "stranger")
        machines.do(blocks(told, NAMES[0])[0], stranger)
        node = re.sub(r"--port \d+", f"--port {stranger_port}", party_commands[NAMES[0]][2])
        refused = machines.start("stranger", node, stranger)
        if interrupted:
            stop_after_a_round(machines, run, center)
        printed = machines.do(run, center, 400)
        seconds = time.monotonic() - began
        assert (center / "run" / "private" / "metrics.json").is_file(), printed
        for name in NAMES:
            assert machines.running[f"join {name}"].wait(60) == 0, log_of(here / name, f"join {name}")
        assert refused.wait(60) != 0
        assert "Failed to activate SuperNode" in log_of(stranger, "stranger")
    finally:
        machines.stop()
    shutil.copytree(center / "run", here / "all" / "coordinator")
    for name in NAMES:
        shutil.copytree(here / name / "run", here / "all" / name)
    places = None
    if more.get("secure"):
        places = [load_tensors(here / "all" / name / "private" / "places.safetensors")[0]["places"] for name in NAMES]
    check_the_same(here / "all", None, wanted, places)
    events = [json.loads(line) for line in (center / "run" / "private" / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "round":
            print({key: event[key] for key in ("round", "seconds", "given", "sent")})
    print(f"{seconds:.1f} s from the start of the parties to the end", printed)
