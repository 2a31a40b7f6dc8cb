"""The report: what it may be made of, what it says, that it is a page anyone can read, in a real browser."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tacit
from strategies import names
from tacit import datasets
from tacit.attacks.attack import attack_federation, write_found
from tacit.attacks.reconstruction import attack_reconstruction
from tacit.attacks.trial import Plot
from tacit.errors import BadInput, TacitError
from tacit.federated import FederatedRun, Federation
from tacit.graph import Graph
from tacit.reporting.drawing import Panel, ticks
from tacit.reporting.facts import gather, published_figures
from tacit.reporting.markup import share_of
from tacit.reporting.page import page
from tacit.reporting.words import _certainty
from tacit.run import Run
from tacit.settings import Settings

ROOT = Path(__file__).parent.parent
SMALL = {"scorer": "transe", "dim": 8, "seed": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs that share rows, rows under masks, noisy counts, noisy rows; and a simulation."""
    home = tmp_path_factory.mktemp("runs")
    hospitals = datasets.clinic("small")
    kept = {"federation": {"keep_every": 2}}
    fede = tacit.federate(hospitals, "fede", rounds=4, out=home / "fede", settings=kept, **SMALL)
    masked = {"federation": {"secure": True}}
    tacit.federate(hospitals, "fedr", rounds=2, out=home / "secure", settings=masked, **SMALL)
    tacit.federate(hospitals, "private_fede", epsilon=4, out=home / "private", **SMALL)
    tacit.train(hospitals[0], epsilon=4, privacy="dpsgd", epochs=2, out=home / "rows", **SMALL)
    seeded = {"privacy": {"noise": "seeded"}}
    tacit.train(hospitals[0], epsilon=4, epochs=2, out=home / "seeded", settings=seeded, **SMALL)
    attack_federation(fede, ["cip", "si"], ["existing", "held"], plot=Plot(targets=60))
    write_found(fede, "reconstruction", {"found": attack_reconstruction(fede, leaks=[0.5, 1.0])})
    return {path.name: path for path in sorted(home.iterdir())}


def text_of(*folders: Path, internal: bool = False) -> str:
    return page(gather(list(folders), internal=internal), internal=internal)


class Tags(HTMLParser):
    """Refuses what is opened and not closed; gathers ids, links and what is fetched."""

    VOID = {"meta", "link", "br", "circle", "path", "rect", "polyline"}

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a":
            self.links.append(given["href"])
        self.fetched += [given[key] for key in ("src", "srcset", "data", "poster") if key in given]
        if tag == "link":
            self.fetched.append(given["href"])
        assert not [key for key in given if key.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    found = Tags()
    found.feed(text)
    assert not found.open
    return found


# -- what it may be made of --------------------------------------------------------------------------------------------


def test_a_report_for_others_needs_shareable_and_reads_nothing_else(runs, tmp_path):
    whole = text_of(*runs.values())
    for name, path in runs.items():
        (tmp_path / name).mkdir()
        shutil.copytree(path / "shareable", tmp_path / name / "shareable")
    assert text_of(*(tmp_path / name for name in runs)) == whole
    assert text_of(*(tmp_path / name / "shareable" for name in runs)) == whole


def test_a_report_for_others_has_no_name_and_no_score_of_the_parties(runs):
    text = text_of(*runs.values())
    hospitals = datasets.clinic("small")
    for name in {*hospitals.names, *(n for graph in hospitals for n in graph.relations)}:
        assert name not in text
    assert not any(entity in text for graph in hospitals for entity in graph.entities if len(entity) > 6)
    for path in (runs["fede"], runs["private"]):
        for metrics in FederatedRun.open(path).metrics.values():
            assert f"{metrics.mrr:.3f}" not in text
    assert "AUC" not in text


def test_only_sound_runs_have_an_epsilon(runs):
    for internal in (False, True):
        for name, path in runs.items():
            shown = re.findall(r"epsilon[ :]+(?:of )?(?:at least )?([0-9.]+)", text_of(path, internal=internal))
            claimed = json.loads((path / "shareable" / "privacy.json").read_text())["epsilon"]
            assert bool(shown) == (name in ("private", "rows")), name
            assert all(float(each) == pytest.approx(claimed, rel=0.01) for each in shown)


def test_a_simulation_is_called_one(runs):
    text = text_of(runs["seeded"])
    assert "it is a simulation" in text
    assert '<span class="badge">simulation</span>' in text


def test_an_audit_of_a_simulation_stands_beside_no_claim(runs, tmp_path):
    copied = tmp_path / "seeded"
    shutil.copytree(runs["seeded"], copied)
    found = tacit.audit(copied, canaries=100, guesses=20, seed=1)
    assert found.simulation
    text = text_of(copied, internal=True)
    assert "nothing claimed" in text
    assert "of a simulation" in text
    assert f"claimed {found.claimed:.3g}" not in text


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_internal_report_has_what_was_measured(runs):
    text = text_of(*runs.values(), internal=True)
    for name in ("fede", "secure", "private"):
        run = FederatedRun.open(runs[name])
        assert f"{run.metrics['test'].mrr:.3f}" in text
        for metrics in run.by_party["test"]:
            assert f"{metrics.mrr:.3f}" in text
    for relation in datasets.clinic("small")[0].relations:
        assert relation in text
    found = json.loads((runs["fede"] / "private" / "attacks" / "cip-party-existing.json").read_text())
    best = max(way["last"]["auc"]["value"] for way in found["ways"].values())
    assert f"{best:.3f}" in text
    assert "Not to be handed out".lower() in text.lower()


def test_bytes_by_party_are_those_of_the_transcript(runs):
    run = FederatedRun.open(runs["fede"])
    [facts] = gather([runs["fede"]], internal=False)
    told = run.communication()["parties"]
    assert [told[name]["sent"] for name in run.parties.names] == list(facts.traffic.sent)
    assert [told[name]["received"] for name in run.parties.names] == list(facts.traffic.received)
    assert facts.traffic.rounds == 4
    assert sum(size for _, size in facts.traffic.kinds.values()) == run.communication()["to_server"]


def test_ranks_by_relation_are_those_of_all_questions(runs):
    for name in ("fede", "rows"):
        [facts] = gather([runs[name]], internal=True)
        assert facts.inside is not None
        whole = facts.inside.metrics["test"]
        each = facts.inside.by_relation
        assert sum(m.count for _, m in each) == whole.count
        assert sum(m.mrr * m.count for _, m in each) / whole.count == pytest.approx(whole.mrr)


def test_a_map_is_the_plane_with_the_most_variance(runs):
    [facts] = gather([runs["rows"]], internal=True)
    assert facts.inside is not None
    rows = Run.open(runs["rows"]).model.tables.entity.double().numpy()
    rows = rows - rows.mean(0)
    values = np.sort(np.linalg.eigvalsh(rows.T @ rows))[::-1]
    cloud = facts.inside.cloud
    assert cloud is not None
    assert cloud.shown == pytest.approx(values[:2].sum() / values.sum())
    assert (cloud.places**2).sum(0) == pytest.approx(values[:2])


def test_a_map_of_counts_alone_is_left_out(runs):
    [facts] = gather([runs["private"]], internal=True)
    assert facts.inside is not None
    assert facts.inside.cloud is None


def test_published_figures_stand_beside_runs_of_the_same_kind(runs, monkeypatch):
    run = Run.open(runs["rows"])
    plain = tacit.train(run.graph, scorer="transe", dim=8, epochs=1)
    known = replace(datasets.BENCHMARKS["fb15k-237"], fingerprint=run.graph.fingerprint)
    monkeypatch.setitem(datasets.BENCHMARKS, "fb15k-237", known)
    [facts, private] = gather([plain, run], internal=True)
    assert facts.inside is not None
    assert private.inside is not None
    assert {figure["paper"] for figure in facts.inside.published} == {"LibKGE"}
    assert private.inside.published == ()
    assert "0.313" in page([facts], internal=True)


def test_published_figures_are_those_of_the_benchmarks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import published
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert list(published_figures()) == published.figures()


def test_runs_without_a_folder_can_be_reported(tmp_path):
    hospitals = datasets.clinic("small")
    run = tacit.federate(hospitals, "fede", rounds=1, **SMALL)
    for internal in (False, True):
        out = tacit.report([run], tmp_path / "page.html", internal=internal)
        assert "fede" in out.read_text()
        assert (out.stat().st_mode & 0o777) == (0o600 if internal else 0o644)


def test_what_an_epsilon_lets_a_guesser_reach():
    """Of randomised response, which is as good as epsilon allows: it is right so often."""
    for epsilon in (0.1, 1.0, 4.0):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert _certainty(epsilon, 0.0) == pytest.approx(truth)
        assert truth < _certainty(epsilon, 1e-3) < truth + 1e-3
    assert _certainty(60.0, 1e-5) == 1.0


@given(st.floats(0, 1))
def test_a_share_is_never_shown_as_all_or_nothing_unless_it_is(value):
    shown = share_of(value)
    assert shown.endswith("%")
    assert (shown in ("0%", "100%")) == (value in (0, 1))
    if shown[0].isdigit():
        assert float(shown[:-1]) == pytest.approx(100 * value, abs=0.5)


# -- a page anyone can read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True])
def test_the_page_is_whole_and_fetches_nothing(runs, internal):
    text = text_of(*runs.values(), internal=internal)
    found = parsed(text)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert found.fetched == ["data:,"]
    assert "script" not in found.tags
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text


@given(names)
def test_names_are_never_markup(name):
    hospitals = datasets.clinic("small")
    first = hospitals[0]
    nasty = f'<script>alert("{name}")</script>&amp;'
    some = [*list(first.named("train"))[:30], (nasty, nasty + "'", "x")]
    graph = Graph.from_triples(some, test=[("x", nasty + "'", nasty)])
    run = tacit.train(graph, scorer="distmult", dim=2, epochs=1)
    text = page(gather([run], internal=True), internal=True, title=nasty)
    assert "script" not in parsed(text).tags


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_round_and_between(low, size, about):
    found = ticks(low, low + size, about)
    assert found == sorted(set(found))
    assert len(found) <= 2 * about + 2
    assert all(low - 1e-6 * size <= x <= low + size + 1e-6 * size for x in found)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_place_on_a_panel_is_in_proportion(x, y):
    panel = Panel(10, 20, 300, 200, (1, 100), (-1, 1), logarithmic="x")
    across, down = panel.at(10 ** (2 * x), 2 * y - 1)
    assert across == pytest.approx(10 + 300 * x, abs=0.06)
    assert down == pytest.approx(20 + 200 * (1 - y), abs=0.06)


# -- wrong input -------------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused_by_name(runs, tmp_path):
    with pytest.raises(BadInput, match="is no run"):
        gather([tmp_path], internal=False)
    with pytest.raises(TacitError, match="nothing to report"):
        gather([], internal=False)
    copied = tmp_path / "run"
    shutil.copytree(runs["fede"], copied)
    journal = copied / "shareable" / "transcript.jsonl"
    journal.write_text(journal.read_text() + '{"size": "large"}\n')
    lines = len(journal.read_text().splitlines())
    with pytest.raises(BadInput, match="no record of a message") as refused:
        gather([copied], internal=False)
    assert refused.value.problems[0].line == lines


def test_an_unfinished_run_is_refused_only_from_inside(tmp_path):
    settings = Settings.make({"scorer": {"name": "transe", "dim": 8}})
    FederatedRun.create("fede", datasets.clinic("small"), settings, Federation(rounds=2), tmp_path / "run")
    gather([tmp_path / "run"], internal=False)
    with pytest.raises(TacitError, match="not finished"):
        gather([tmp_path / "run"], internal=True)


@pytest.mark.slow
def test_the_command(runs, tmp_path):
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tacit", "report", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    done = run(runs["fede"], runs["private"], "--internal", "--json")
    assert json.loads(done.stdout)["out"] == "report.html"
    before = (tmp_path / "report.html").read_bytes()
    again = run(runs["fede"])
    assert (again.returncode, (tmp_path / "report.html").read_bytes()) == (2, before)
    assert "--force" in again.stderr
    assert run(runs["fede"], "--force").returncode == 0
    assert (tmp_path / "report.html").read_bytes() != before
    for wrong in (["nowhere"], [tmp_path], [runs["fede"], "--out", "no/such/folder.html"], []):
        refused = run(*wrong, "--force")
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


# -- in a real browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if not (shutil.which("chromium") and (driver := shutil.which("chromedriver"))):
        pytest.skip("Chromium and its driver are not installed: scripts/install-chromium")
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
                 "disable-component-update", "disable-sync", "disable-quic", "disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = selenium.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    home = tmp_path_factory.mktemp("pages")
    return [
        tacit.report(list(runs.values()), home / f"{internal}.html", internal=internal) for internal in (False, True)
    ]


def look(browser, path: Path, *, scheme: str = "light", width: int = 1100, media: str = "") -> None:
    wanted = {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(path.as_uri())


@pytest.mark.slow
def test_the_browser_has_nothing_to_complain_of_and_asks_for_nothing(browser, pages):
    for path in pages:
        look(browser, path)
        assert browser.get_log("browser") == []
        said = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = {m["params"]["request"]["url"] for m in said if m["method"] == "Network.requestWillBeSent"}
        assert path.as_uri() in asked
        assert all(url == path.as_uri() or url.startswith("data:") for url in asked)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_the_page_is_never_wider_than_the_screen(browser, pages, width):
    for path in pages:
        look(browser, path, width=width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


CONTRAST = """
function parts(c) { return c.match(/[0-9.]+/g).map(Number); }
function light(c) { const [r, g, b] = parts(c).slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4); }); return 0.2126*r + 0.7152*g + 0.0722*b; }
function behind(e) { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    const p = parts(c); if (p.length < 4 || p[3] > 0) return c; } return "rgb(255,255,255)"; }
let worst = [99, ""];
for (const e of document.querySelectorAll("h1,h2,h3,p,dt,dd,li,a,th,td,caption,summary,figcaption,.badge,text,pre")) {
    const s = getComputedStyle(e), ink = e.tagName == "text" ? s.fill : s.color;
    const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (e.textContent.trim() && !e.matches(".skip") && ratio < worst[0]) worst = [ratio, e.tagName + e.textContent];
}
return worst;
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "media"), [("light", ""), ("dark", ""), ("dark", "print")])
def test_words_stand_out_by_day_by_night_and_on_paper(browser, pages, scheme, media):
    for path in pages:
        look(browser, path, scheme=scheme, media=media)
        ratio, where = browser.execute_script(CONTRAST)
        assert ratio >= 4.5, where


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard(browser, pages):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    look(browser, pages[1])
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.current_url.endswith("#summary")
    wanted = "a[href], summary, [tabindex]"
    for _ in browser.find_elements(By.CSS_SELECTOR, wanted):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        at = browser.switch_to.active_element
        if at.get_attribute("class") == "skip" or at.tag_name == "body":
            break  # once round
        if at.tag_name == "summary":
            at.send_keys(Keys.ENTER)
    assert all(each.get_attribute("open") is not None for each in browser.find_elements(By.TAG_NAME, "details"))


@pytest.mark.slow
def test_a_screen_reader_hears_names_for_everything(browser, pages):
    look(browser, pages[1])
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("heading", "link", "table", "image", "region", "navigation"):
        assert named.get(role), role
        assert all(named[role]), role
    assert named["heading"][0].startswith("Tacit")
    assert len(named["main"]) == len(named["navigation"]) == 1


@pytest.mark.slow
def test_every_sheet_of_the_internal_report_is_marked(browser, pages):
    for path, marked in zip(pages, (False, True), strict=True):
        look(browser, path)
        before = browser.execute_script("return getComputedStyle(document.body, '::before').content")
        assert (before == '"INTERNAL"') == marked
        found = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
        assert found.startswith(b"%PDF")
        assert len(found) > 10_000
