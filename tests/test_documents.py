"""What we show people works: every example runs, every command and every link in the documents is checked.

Of each page all commands are parsed by the real command line, and all Python is run. The pages in docs/howto are run as
they stand, block by block, by a shell. A block that cannot be run has a comment before it that says why:

    <!-- not run: it needs two machines -->
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import typer

import tacit
from tacit.cli import app
from tacit.cli.audit import MEANS
from tacit.datasets import clinic
from tacit.federated import Federation
from tacit.graph import SPLITS
from tacit.parties import pool
from tacit.privacy.budget import Holding
from tacit.recipes import warn_of
from tacit.settings import REGISTRIES, Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app)


def name(path):
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """Code in a document. `skipped`: why it is not run."""

    page: str
    line: int
    language: str
    text: str
    skipped: str | None = None


def blocks(page, text):
    """Fenced blocks, in order; lines that are indented by four are blocks too, where no list is."""
    found, opened, kept, skipped = [], None, [], None
    for number, line in enumerate(text.splitlines(), 1):
        if opened is not None:
            if line.strip() == "```":
                found.append(Block(page, *opened, "\n".join(kept), skipped))
                opened, skipped = None, None
            else:
                kept.append(line)
        elif fence := re.fullmatch(r"```(\w*)", line):
            opened, kept = (number, fence[1]), []
        elif told := re.fullmatch(r"<!-- not run: (.+) -->", line):
            skipped = told[1]
        elif line.startswith("    tacit "):
            found.append(Block(page, number, "", line.strip()))
        elif line.strip():
            skipped = None
    assert opened is None, f"{page}: a block is not closed"
    return found


def prose(text):
    """A document without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def commands(block):
    """Each `tacit ...` of a block as words: comments left out, continued lines joined, up to what the shell takes."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("tacit "):
            continue
        parts = shlex.shlex(line.lstrip(), posix=True, punctuation_chars=True)
        parts.whitespace_split = True
        words = list(parts)
        cut = next((i for i, word in enumerate(words) if set(word) <= set("();<>|&")), len(words))
        yield words[1:cut]


def parsed(words):
    """Parse a command as the command line would, and do nothing."""
    context, command = COMMANDS.make_context("tacit", words), COMMANDS
    while isinstance(command, click.Group):
        called, command, words = command.resolve_command(context, words)
        context = command.make_context(called, words, parent=context)
    return context


def complaint(words):
    """What the command line has against a command; None: nothing."""
    try:
        parsed(words)
    except click.ClickException as error:
        return error.format_message()
    return None


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_commands_in_documents_are_understood(page):
    for block in blocks(name(page), page.read_text()):
        for words in commands(block):
            assert (why := complaint(words)) is None, f"{block.page}:{block.line}: tacit {' '.join(words)}: {why}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_commands_named_in_sentences_exist_with_their_options(page):
    for code in re.findall(r"`tacit ([^`]+)`", prose(page.read_text())):
        place, *words = re.split(r"[\s=]+", code)
        if place.startswith("-"):
            continue
        command = COMMANDS.commands.get(place)
        assert command is not None, f"{name(page)}: tacit {code}"
        if isinstance(command, click.Group) and words:
            command = command.commands.get(words[0].rstrip(","))
            assert command is not None, f"{name(page)}: tacit {code}"
        options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        unknown = [word for word in words if word.startswith("--") and word not in options]
        assert not unknown, f"{name(page)}: tacit {code}: there is no {unknown}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_toml_in_documents_can_be_read(page):
    for block in blocks(name(page), page.read_text()):
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize(
    "line",
    [
        "tacit trian hospital.tsv",
        "tacit train hospital.tsv --dimension 64",
        "tacit train hospital.tsv --dim many  # a comment",
        "tacit budget shut study",
        "tacit predict runs/first \\\n  --heads aspirin",
        "tacit data inspect a.tsv b.tsv > out",
    ],
)
def test_a_command_that_does_not_exist_is_found(line):
    [block] = blocks("page", f"```\n{line}\n```\n")
    [words] = commands(block)
    assert complaint(words)


def hospital(folder):
    """The graph that documents speak of. One of its drugs has a name that is known."""
    whole = pool(clinic("small"))
    drug = next(head for head, relation, _ in whole.named("train") if relation == "treats")
    rows = ["\t".join(triple).replace(drug, "aspirin") for split in SPLITS for triple in whole.named(split)]
    (folder / "hospital.tsv").write_text("\n".join(rows) + "\n")


def shell(folder):
    """What commands are run with: this tacit, and a home of its own."""
    (folder / "bin").mkdir()
    command = folder / "bin" / "tacit"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tacit "$@"\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TACIT_HOME": str(folder / "home")}


def ran(call, folder, environment):
    """A call that has ended; if it hangs, whatever it started ends with it."""
    with subprocess.Popen(
        call,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(call, process.returncode, out, err)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


TRAINED = """
import tacit
graph = tacit.partition(tacit.read_graph("hospital.tsv"), by="triples", parts=1)[0]
"""
BEFORE = {
    "docs/training.md": TRAINED,
    "docs/attacks.md": """
import tacit
from tacit.datasets import clinic
run = tacit.federate(clinic("small"), "fede", dim=8, rounds=5)
""",
    "docs/budget.md": TRAINED
    + """
from tacit.privacy.budget import Holding
Holding.begin("study", epsilon=8, delta=1e-6)
""",
    "docs/keys.md": """
from pathlib import Path
from tacit.federation.keys import Identity, Roster
keeper, north, south = (Identity.new(name) for name in ("keeper", "north", "south"))
north.save(Path("north.key"))
roster = Roster.begin(keeper).enrol(keeper, "north", north.public).enrol(keeper, "south", south.public)
roster.save(Path("roster.json"))
""",
}
"""What a page's Python takes for granted."""
AS_WHOLE = {"README.md"}
"""Pages whose Python has a test of its own; how-to pages are followed as a whole."""


def pythons():
    for page in DOCUMENTS:
        code = [block for block in blocks(name(page), page.read_text()) if block.language == "python"]
        if code and name(page) not in AS_WHOLE and page.parent.name != "howto":
            yield pytest.param(code, id=name(page))


@pytest.mark.slow
@pytest.mark.parametrize("code", list(pythons()))
def test_python_in_documents_runs(code, tmp_path):
    environment = shell(tmp_path)
    hospital(tmp_path)
    for block in code:
        compile(block.text, f"{block.page}:{block.line}", "exec")
    text = "\n".join([BEFORE.get(code[0].page, ""), *(block.text for block in code if block.skipped is None)])
    done = ran([sys.executable, "-c", text], tmp_path, environment)
    assert done.returncode == 0, f"{code[0].page}: {done.stderr}"


LONG = {"docs/howto/operator.md", "docs/howto/researcher.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.full] if name(page) in LONG else [])
        for page in sorted((ROOT / "docs" / "howto").glob("*.md"))
    ],
)
def test_how_to_pages_can_be_followed(page, tmp_path):
    """In order, in a folder with hospital.tsv; a block that fails ends the test with what it said."""
    environment, work = shell(tmp_path), tmp_path / "work"
    work.mkdir()
    hospital(work)
    followed = [b for b in blocks(name(page), page.read_text()) if b.skipped is None and b.language in ("", "python")]
    assert any("tacit " in block.text for block in followed)
    port = free_port()
    for block in followed:
        text = block.text.replace(":14222", f":{port}")
        call = [sys.executable, "-c", text] if block.language else ["bash", "-euo", "pipefail", "-c", text]
        done = ran(call, work, environment)
        assert done.returncode == 0, f"{block.page}:{block.line}: {done.stdout[-500:]}{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example, tmp_path):
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == []
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    hospital(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "parts" / "parties.json").is_file()
    assert (tmp_path / "runs" / "first" / "config.json").is_file()


@pytest.mark.slow
def test_the_five_commands_of_the_readme(tmp_path):
    """On a graph that was never seen here, as they stand."""
    [text] = re.findall(
        r"## Your own graph in five commands.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert [line.split()[1] for line in text.splitlines()] == ["data", "train", "evaluate", "predict", "report"]
    environment, work = shell(tmp_path), tmp_path / "work"
    work.mkdir()
    hospital(work)
    done = ran(["bash", "-euo", "pipefail", "-c", text], work, environment)
    assert done.returncode == 0, done.stderr
    assert "epsilon 4" in done.stdout
    assert "epsilon 4" in (work / "report.html").read_text()


def test_the_settings_in_the_documentation_are_the_defaults():
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    written = tomllib.loads(text)
    assert Settings.make(written) == Settings()
    nothing = {"scorer.init_scale", "training.steps", "training.checkpoint_every"}  # None has no place in TOML
    everything = {f"{s}.{k}" for s, keys in Settings().json().items() if isinstance(keys, dict) for k in keys}
    everything.add("privacy.name")  # without privacy nothing is said of it
    assert everything - nothing == {f"{s}.{k}" for s, keys in written.items() if isinstance(keys, dict) for k in keys}
    for registry in REGISTRIES.values():
        for name in registry:
            assert name in text


def anchors(text):
    """The places in a page that can be linked to, as mkdocs names them."""
    found, seen = set(), {}
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        plain = unicodedata.normalize("NFKD", shown).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
    return found


def dead_links(document, text):
    """Links within the project that lead nowhere."""
    for path, anchor in re.findall(
        r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        target = document.parent / path if path else document
        if not target.exists():
            yield path
        elif anchor and anchor not in anchors(text if not path else target.read_text()):
            yield f"{path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_between_documents_lead_somewhere(document):
    assert not list(dead_links(document, document.read_text()))


def test_links_that_lead_nowhere_are_found():
    text = (
        "# A `b`: c\n## Same\n## Same\n[x](#a-b-c) [y](#same_1) [z](#same_2) [u](docs/nothing.md) [v](docs/data.md#no)"
    )
    assert list(dead_links(ROOT / "README.md", text)) == ["#same_2", "docs/nothing.md", "docs/data.md#no"]


def test_the_pictures_of_threats_are_those_that_the_program_draws(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import threats

    page = (ROOT / "docs" / "threats.md").read_text()
    assert {path.stem for path in (ROOT / "docs" / "images").glob("threat-*.svg")} == {
        f"threat-{name}" for name in threats.PICTURES
    }
    for name, picture in threats.PICTURES.items():
        ElementTree.fromstring(picture.drawn())
        assert (ROOT / "docs" / "images" / f"threat-{name}.svg").read_text() == picture.drawn()
        assert f"images/threat-{name}.svg" in page
        for box in picture.boxes:
            assert max(map(len, box.lines)) <= 33, f"{name}: {box.name} is too wide"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kinds", "settings"),
    [
        ("local", set(), {}),
        ("fede", {("names", "entity"), ("places", "entity"), ("rows", "entity")}, {}),
        ("fedr", {("names", "relation"), ("places", "relation"), ("rows", "relation")}, {}),
        ("private_fede", {(kind, part) for kind in ("names", "places") for part in ("entity", "relation")}
         | {("marginals", "relation")}, {"privacy": {"epsilon": 4.0}}),
        ("private_fede", {("names", "entity"), ("places", "entity"), ("rows", "entity")},
         {"privacy": {"epsilon": 4.0, "name": "dpsgd"}}),
    ],
)  # fmt: skip
def test_threats_page_says_what_is_sent(recipe, kinds, settings):
    run = tacit.federate(clinic("small"), recipe, dim=4, negatives=4, rounds=1, settings=settings)
    assert {(record.kind, record.part) for record in run.transcript.records} == kinds


def test_threats_page_is_right_that_sizes_tell_nothing_under_secure_sums_and_private_names():
    run = tacit.federate(
        clinic("small"), "fedr", dim=4, negatives=4, rounds=2, settings={"federation": {"secure": True}}
    )
    sizes = {}
    for record in run.transcript.records:
        assert record.kind != "names"
        place = (record.round, record.phase, record.kind, record.receiver < 0)
        sizes.setdefault(place, set()).add(record.size)
    assert all(len(found) == 1 for found in sizes.values())


def test_every_page_has_its_place_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page not in menu]


def test_figures_show_the_results_that_are_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    for name, (table, draw) in figures.FIGURES.items():
        image = ROOT / "docs" / "images" / f"{name}.svg"
        rows = list(figures.Results(figures.RESULTS / f"{table}.jsonl"))
        assert draw(rows) == image.read_text() if rows else not image.exists(), f"draw {name} again"


def test_the_architecture_page_names_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path.name for path in (ROOT / "src" / "tacit").rglob("*.py") if not path.name.startswith("__")]
    assert not [name for name in modules if f"  {name} " not in page]


def test_whatever_trains_needs_numpy_and_torch_alone():
    """A GPU box or an air-gapped hospital may have nothing else."""
    code = """
import sys
for name in ("pyarrow", "pyoxigraph", "typer", "rich", "backports"):
    sys.modules[name] = None
import tacit
from tacit import clinic, cohort, draws, evaluation, graph, kernels, parties, prediction, run, settings, training
hospitals = clinic.clinic("small", 1)
assert len(tacit.pool(hospitals).train) > 1000
assert len(tacit.partition(tacit.pool(hospitals), "triples", 2)) == 2
assert tacit.inspect(hospitals[0]).entities
try:
    tacit.read_graph("x.tsv")
except ImportError as error:
    assert "pyarrow" in str(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


PRIVATE = ("train", "hospital.tsv", "--privacy", "dpsgd", "--epsilon", 4)
FEDERATED = ("federate", "clinic-small", "--recipe")
PITFALLS = {
    "sparse": (*PRIVATE, "--optimizer", "sparse-adam"),
    "filtered": (*PRIVATE, "--set", "negatives.name=independent", "--set", "negatives.filtered=true"),
    "own": (*PRIVATE, "--set", "negatives.scope=own"),
    "bernoulli": (*PRIVATE, "--set", "negatives.sides=bernoulli"),
    "subsampling": (*PRIVATE, "--set", "training.subsampling=true"),
    "k-vs-all": (*PRIVATE, "--loss", "k-vs-all", "--set", "negatives.name=all"),
    "statistics": (*PRIVATE, "--scorer", "transm"),
    "no groups": (*PRIVATE, "--set", "privacy.unit=group", "--set", "privacy.group=20"),
    "no marks": (*PRIVATE, "--privacy", "confidential"),
    "typing": ("train", "hospital.tsv", "--set", "scorer.nrom=2"),
    "looks": ("train", "leaky", *PRIVATE[2:], "--epochs", 4, "--every", 1, "--set", "privacy.noise_follows=paid",
              "--set", "privacy.noise_falls=0.8"),
    "conversion": ("data", "convert", "marked", "--format", "nt", "--out", "converted"),
    "two holdings": ("budget", "open", "other", "--epsilon", 2, "--delta", "1e-6", "--graph", "hospital.tsv"),
    "too little": ("train", "hospital.tsv", "--epsilon", 4, "--budget", "study"),
    "simulation": ("train", "hospital.tsv", "--epsilon", 1, "--budget", "study", "--set", "privacy.noise=seeded"),
    "weights": (*FEDERATED, "private_fede", *PRIVATE[2:], "--set", "federation.aggregation=weighted"),
    "pooled": (*FEDERATED, "central", "--epsilon", 4),
    "names": (*FEDERATED, "fedr", "--set", "federation.vocabulary=private"),
    "held twice": ("federate", "two", "--recipe", "private_fede", "--epsilon", 4),
}  # fmt: skip
"""Commands that run into what the page of pitfalls says is refused."""


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """Data in which every pitfall is."""
    folder = tmp_path_factory.mktemp("trap")
    hospital(folder)
    graph = tacit.read_graph(folder / "hospital.tsv")
    rows = (folder / "hospital.tsv").read_text().splitlines(keepends=True)
    (folder / "leaky").mkdir()
    for split, lines in (("train", rows[:2300]), ("valid", rows[2290:2500]), ("test", rows[2500:])):
        (folder / "leaky" / f"{split}.tsv").write_text("".join(lines))
    tacit.write_graph(tacit.mark(graph, tacit.select(graph, relations=["takes"])), folder / "marked")
    tacit.write_parties(tacit.Parties(("a", "b"), (graph, graph), None, {}), folder / "two")
    Holding.begin("study", epsilon=2, delta=1e-6, graph=graph, home=folder / "home" / "holdings")
    return folder


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_pitfalls_are_refused_in_the_words_of_their_page(pitfall, trap, mistaken, monkeypatch):
    monkeypatch.setenv("TACIT_HOME", str(trap / "home"))
    said = mistaken(*PITFALLS[pitfall], cwd=trap).removeprefix("error: ").splitlines()[0]
    said = re.sub(r"^(this may not be done under privacy|federation): ", "", said)
    if pitfall == "typing":
        said = said.partition(" There are")[0]
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    assert f"`{said}`" in page or f"`{said.removesuffix('.')}`" in page, said


def test_pitfalls_are_warned_of_in_the_words_of_their_page(trap, tmp_path, caplog):
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    warn_of(Federation(secure=True, fraction=0.5), "relation", 0.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    graph = tacit.read_graph(trap / "leaky")
    turned = [(tail, f"is {relation} of", head) for split in SPLITS for head, relation, tail in graph.named(split)]
    with open(tmp_path / "train.tsv", "w") as train:
        train.writelines("\t".join(triple) + "\n" for triple in [*graph.named("train"), *dict.fromkeys(turned)])
    shutil.copy(trap / "leaky" / "valid.tsv", tmp_path)
    found = tacit.inspect(tacit.read_graph(tmp_path)).warnings
    assert len(found) == 2
    numbers = re.compile(r"[\d,.]+%?")
    for text in (*said, *found, MEANS["holds"]):
        assert numbers.sub("", text) in numbers.sub("", page)


def test_every_public_name_is_there():
    for name in tacit.__all__:
        assert getattr(tacit, name).__module__.startswith("tacit.")
    assert set(tacit.__all__) <= set(dir(tacit))
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = tacit.colour
