"""The server of a federation in a process of its own: it asks, the parties answer (`tacit.participant`).

It holds the shared rows and no triple. Its folder:

    config.json          the plan: recipe, parties, settings
    health.json          what it is doing, who is there; written anew whenever that changes
    shareable/           transcript.jsonl, once it is finished: every message's kind, ends, size
    private/             agreed.json (what parties told before round 1), metrics.jsonl, transcript.jsonl, places,
                         checkpoints/, metrics.json, rows.safetensors: the shared rows in the end

It saves after every round. Killed and started again, it asks once more for what was under way; parties that have done
it already say so, and nothing is averaged twice.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from tacit import __version__
from tacit.errors import Refused, TacitError
from tacit.evaluation.ranking import Metrics, weighted
from tacit.federated import Patience, Plan
from tacit.federation.aggregation import Result
from tacit.federation.messages import SERVER, VERSION, Message
from tacit.federation.secure import SumFailed
from tacit.federation.secured import Secured
from tacit.federation.star import Center, both_ways, checked, shared_by
from tacit.federation.transcript import Transcript
from tacit.federation.transport import Talk, going
from tacit.federation.vocabulary import MOST_HIDDEN, joined_names, placed_names
from tacit.folders import PRIVATE, new_folder, read_json, seal, write_json, write_whole
from tacit.kept import Kept
from tacit.participant import NOISES, SCORES, Says
from tacit.privacy.privatizers import Sound
from tacit.privacy.shared import added_counts
from tacit.recipes import SHARED, warn_of
from tacit.run import CONFIG, SHAREABLE, no_claim
from tacit.tensors import load_tensors, save_tensors
from tacit.training import Event, listed

LOG = logging.getLogger(__name__)
SCHEMA = "tacit.coordinator/1"
ATTEMPTS = 5
"""Of a talk that fails because someone has gone in the middle of it."""
ANSWERED: dict[str, dict[str, type]] = {"begin": {"rounds": int, "named": bool, "counted": bool}}
"""What an answer has to say."""
LAST = 60.0
"""Seconds to wait for the last answers, of which only the metrics are wanted."""
End = TypeVar("End")


class Stopped(TacitError):
    """The federation cannot go on as it is: why. What there is of it is kept."""


@dataclass(frozen=True)
class Ask:
    """What one party is asked."""

    asked: str
    says: Mapping[str, Any]
    messages: Sequence[Message] = ()


@dataclass(frozen=True)
class Answer:
    """What it says. declined: why it will not; lost: it was started again, and knows nothing of this."""

    says: Says = field(default_factory=dict)
    messages: Sequence[Message] = ()
    declined: str | None = None
    lost: bool = False


class Exchange(Protocol):
    """What brings questions to parties, by name, and answers back."""

    life: int

    def ask(self, run: str, asks: Mapping[str, Ask], seconds: float) -> dict[str, Answer]:
        """Answers of those who gave one in time."""

    def end(self, run: str) -> None:
        """Tell parties that nothing more will be asked."""


class Coordinator:
    """The server's side.

    Parameters
    ----------
    wait
        Seconds to wait for all parties before round 1, or when it goes on.
    deadline
        Seconds that a party has for an answer.
    least
        The fewest parties that make a round count, if the others do not answer in time; default: all that take part.
        Of secure sums the threshold decides.
    """

    def __init__(
        self,
        plan: Plan,
        path: Path,
        exchange: Exchange,
        *,
        wait: float = 600.0,
        deadline: float = 600.0,
        least: int | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ):
        self.plan, self.path, self.exchange, self.on_event = plan, path, exchange, on_event
        self.wait, self.deadline, self.least = wait, deadline, least
        self.part, settings = SHARED[plan.recipe], plan.settings
        self.aggregation = checked(plan.federation.how(plan.parties, self.part, {}), settings.scorer, settings.dim,
                                   self.part, plan.names_are_private)  # fmt: skip
        if settings.privacy.sound and self.aggregation.needs_counts:
            raise TacitError('exact counts of triples are not private: set federation.aggregation = "mean"')
        self.patience = Patience(settings.evaluation.patience)
        self.finished, self.validated = False, 0
        self.took = [0] * len(plan.parties)
        """The last round of which each party's rows were taken."""
        self.silent: set[str] = set(plan.parties)
        self.transcript = plan.federation.transcript()
        self.center: Center | None = None
        self.metrics: dict[str, Metrics] = {}
        self.run_id = ""
        self._talks = self._bound = self._written = 0
        self._noise: dict[str, float] = {}
        self._save: Callable[[int], None] = lambda number: None
        self._journals: dict[str, Any] = {}

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self) -> Coordinator:
        """From the beginning or from the last checkpoint, to the end."""
        self._open_folder()
        privacy = self.plan.settings.privacy
        with ExitStack() as opened:
            if self._was_ended():  # and then killed before it had told everyone, who may be gone by now
                self._make_center()
                opened.enter_context(self._kept.training(self))
                return self._end()
            facts = self._meet_parties()
            if isinstance(privacy, Sound) and (not privacy.trains or privacy.prior_share):
                if not all(answer.says["counted"] for answer in facts.values()):
                    self._health("adding up noisy counts")
                    self._converse("marginals", self._counting)
                if isinstance(privacy, Sound) and not privacy.trains:
                    return self._end()
            self._agree_on_names(facts)
            self._journals, self._save = opened.enter_context(self._kept.training(self))
            assert self.center is not None
            if self.aggregation.needs_counts:
                self._converse("counts", self.center.hear_counts)
            self._rounds(self.center)
            return self._end()

    def _rounds(self, center: Center) -> None:
        """Rounds until there are enough of them, or validation has not improved for long enough."""
        every, most = self.plan.settings.evaluation.every, self.plan.federation.rounds

        def due() -> bool:
            return center.rounds > self.validated and (center.rounds % every == 0 or center.rounds >= most)

        while not self.finished:
            if not due():  # what was interrupted between a round and its validation goes on with the validation
                self._health(f"round {center.rounds + 1}")
                began = time.perf_counter()
                about = self._round(center, center.rounds + 1)
                self._tell({"event": "round", "round": center.rounds} | about
                           | {"seconds": round(time.perf_counter() - began, 4)})  # fmt: skip
                self._checkpoint(2 * center.rounds)
            if due():
                self._health(f"validating after round {center.rounds}")
                self._validate(center)
                self.finished = self.patience.ended or center.rounds >= most
                self._checkpoint(2 * center.rounds + 1)

    # -- before round 1 ------------------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Its folder: a new one, or one that goes on with the same plan."""
        if (self.path / CONFIG).is_file():
            known = read_json(self.path / CONFIG, SCHEMA, {"plan": dict, "run": str})
            if different := self.plan.differences(known["plan"]):
                raise TacitError(f"{self.path} holds a federation of another plan ({'; '.join(different)}): choose "
                                 "another --out")  # fmt: skip
            self.run_id = known["run"]
            if (self.path / PRIVATE / "metrics.json").is_file():
                raise TacitError(f"{self.path} is finished already: there is nothing to go on with.")
            self._live()
            return
        self.run_id = secrets.token_hex(16)
        with new_folder(self.path, CONFIG) as folder:
            (folder / PRIVATE).mkdir(mode=0o700)
            (folder / PRIVATE / "checkpoints").mkdir(mode=0o700)
            (folder / SHAREABLE).mkdir()
            for journal in ("metrics.jsonl", "transcript.jsonl"):
                (folder / PRIVATE / journal).touch()
            (folder / "health.json").touch()
            seal(folder, CONFIG, SCHEMA, {"plan": self.plan.json(), "run": self.run_id, "tacit": __version__})
        self._live()

    def _live(self) -> None:
        """Count how often it was started: letters of an earlier life are not answered any more."""
        where = self.path / PRIVATE / "lives.json"
        lives = read_json(where, "tacit.lives/1", {"lives": int})["lives"] if where.is_file() else 0
        self.exchange.life = lives + 1
        write_json(where, "tacit.lives/1", {"lives": lives + 1})

    @property
    def _kept(self) -> Kept:
        journals = {name: self.path / PRIVATE / f"{name}.jsonl" for name in ("metrics", "transcript")}
        return Kept(self.path, self._origin, journals)

    def _was_ended(self) -> bool:
        """Whether its last checkpoint is of the end."""
        found = sorted((self.path / PRIVATE / "checkpoints").glob("epoch-*.safetensors"))
        return bool(found) and bool(load_tensors(found[-1])[0]["coordinator"][0])

    def _origin(self, schema: str) -> dict[str, str]:
        return {"schema": schema, "run": self.run_id, "plan": json.dumps(self.plan.json(), sort_keys=True)}

    def _meet_parties(self) -> dict[str, Answer]:
        """Wait until all are there; compare what all mean to do, and agree on the noise; what each says of itself."""
        self._health("waiting for parties")
        told = {name: _facts(name, answer) for name, answer in
                self._ask_all(self.plan.parties, "hello", self._hello).items()}  # fmt: skip
        wanted = [one["noise"] for one in told.values()]
        noise = {name: max(each.get(name, 0.0) for each in wanted) for name in {key for one in wanted for key in one}}
        bound = self.plan.federation.bound or max(one["bound"] for one in told.values())
        names = {name: one["names"] for name, one in told.items()}
        where = self.path / PRIVATE / "agreed.json"
        if where.is_file():
            known = read_json(where, "tacit.agreed/1", {"noise": dict, "names": dict, "bound": int})
            if others := [name for name in names if known["names"].get(name) != names[name]]:
                raise Stopped(f"{', '.join(others)}: has other names than when the federation began")
            noise, bound = known["noise"], known["bound"]
        else:
            write_json(where, "tacit.agreed/1", {"noise": noise, "names": names, "bound": bound})
        self._bound, self._noise = bound, noise
        return self._ask_all(self.plan.parties, "begin", {"noise": noise})

    @property
    def _hello(self) -> Says:
        return {"protocol": VERSION, "tacit": __version__, "plan": self.plan.json()}

    def _meet_again(self, lost: Sequence[str]) -> None:
        """Parties that were started again before they had a folder to go on from."""
        self._ask_all(lost, "hello", self._hello)
        self._ask_all(lost, "begin", {"noise": self._noise})

    def _ask_all(self, names: Sequence[str], asked: str, says: Says) -> dict[str, Answer]:
        """Answers of all of them, or it is over; if rounds count with fewer, and some were made, of as many."""
        again = self.least is not None and (self.path / PRIVATE / "places.safetensors").is_file()
        answers = self._ask(
            dict.fromkeys(names, Ask(asked, says)), min(self.wait, self.deadline) if again else self.wait
        )
        missing = [name for name in names if name not in answers]
        if missing and not (again and len(answers) >= (self.least or 0)):
            raise Stopped(f"{', '.join(missing)}: not there after {self.wait:g} s. Start them, and then this again; or "
                          "let this wait for longer (--wait).")  # fmt: skip
        return answers

    def _agree_on_names(self, facts: Mapping[str, Answer]) -> None:
        """Which rows are shared: agreed on once, and remembered."""
        plan, where = self.plan, self.path / PRIVATE / "places.safetensors"
        settings = plan.settings
        if not where.is_file() or not all(answer.says["named"] for answer in facts.values()):
            if gone := [name for name, answer in facts.items() if where.is_file() and answer.says["rounds"]]:
                raise Stopped(f"names were agreed on, and not all remember: {', '.join(gone)} have gone further")
            self._health("agreeing on names")
            found, places = self._converse("names", self._naming)
            both = [both_ways(ids, found, self.part, settings.training.reciprocal) for ids in places]
            kept = {f"places.{party}": ids for party, (ids, _) in enumerate(both)}
            kept["total"] = torch.tensor([both[0][1]])
            save_tensors(where, kept, self._origin("tacit.places/1"))
        self._make_center()
        assert self.center is not None
        known = None if plan.names_are_private else shared_by(self.center.places, self.center.total, 2)
        warn_of(plan.federation, self.part, known)

    def _make_center(self) -> None:
        """The shared rows as they are before round 1, of names that were agreed on."""
        plan, settings = self.plan, self.plan.settings
        tensors, _ = load_tensors(self.path / PRIVATE / "places.safetensors")
        self.center = Center(
            self.part, self.aggregation, [tensors[f"places.{party}"] for party in range(len(plan.parties))],
            int(tensors["total"]), scorer=settings.scorer, dim=settings.dim, seed=settings.seed,
            fraction=plan.federation.fraction, blind=plan.names_are_private,
        )  # fmt: skip

    def _naming(self) -> Talk[tuple[int, list[Any]]]:
        count = len(self.plan.parties)
        if not self.plan.names_are_private:
            return (yield from placed_names(count, self.part))
        assert isinstance(self.aggregation, Secured)
        _, server = self.aggregation.for_one_sum()
        found = yield from joined_names(count, self.part, server, self._bound)
        return found, [torch.zeros(0, dtype=torch.int64)] * count  # which it does not know

    def _counting(self) -> Talk[None]:
        how = self.plan.federation.how(self.plan.parties, "relation", {})
        return added_counts(len(self.plan.parties), how.for_one_sum()[1] if isinstance(how, Secured) else None)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, center: Center, number: int) -> dict[str, Any]:
        """Give, let train, aggregate."""
        before = len(self.transcript.records)
        trained, names = center.sampled(number), self.plan.parties
        answers: dict[str, Answer] = {}

        def start() -> dict[str, Ask]:
            rows = {message.receiver: [message] for message in center.rows_for(trained)}
            return {
                names[i]: Ask("start", {"about": "train", "round": number, "after": self.took[i]}, rows.get(i, []))
                for i in trained
            }

        def heard(found: Mapping[str, Answer]) -> None:
            answers.update(found)
            for i in trained:
                there = names[i] in found and not found[names[i]].lost
                center.seen[i] = number - 1 if there else -1

        result = self._converse("train", lambda: center.collection(number, trained), start, heard)
        assert isinstance(result, Result)
        present = [i for i in trained if i not in result.absent]
        if result.absent and not self.aggregation.tolerates_absence:
            least = self.least or len(trained)
            if len(present) < least:
                missing = ", ".join(names[i] for i in sorted(result.absent))
                raise Stopped(
                    f"{missing}: no rows of round {number} within {self.deadline:g} s, and {least} parties are "
                    "needed. Start them again, and then this: it goes on where it is; or let rounds count with fewer "
                    "(--least)."
                )
        if result.absent:
            LOG.warning("round %d was without %s", number, ", ".join(names[i] for i in sorted(result.absent)))
        center.end_round(number, result)
        for i in present:
            self.took[i] = number
        told = [answers[names[i]].says if names[i] in answers else {} for i in range(len(names))]
        sizes = [(record.receiver == SERVER, record.size) for record in self.transcript.records[before:]]
        return {
            "trained": trained, "absent": sorted(result.absent), "loss": [_loss(says.get("loss")) for says in told],
            "steps": max((_number(says.get("steps")) for says in told), default=0),
            "examples": sum(_number(says.get("examples")) for says in told),
            "given": sum(size for up, size in sizes if not up), "sent": sum(size for up, size in sizes if up),
        }  # fmt: skip

    def _validate(self, center: Center) -> None:
        """Give everyone the rows of the next round; how well they answer the parties' own questions."""
        names, number = self.plan.parties, center.rounds
        found: dict[int, Metrics] = {}
        asked = list(range(len(names)))
        for _ in range(2):  # who lost its rows is given them
            rows = {message.receiver: [message] for message in center.rows_for(asked)}
            answers = self._ask({names[i]: Ask("validate", {"round": number}, rows.get(i, [])) for i in asked},
                                self.deadline)  # fmt: skip
            for i in asked:
                answer = answers.get(names[i])
                center.seen[i] = number if answer is not None and not answer.lost else -1
                if answer is not None and answer.messages:
                    found[i] = _metrics(answer.messages[0], i)
            asked = [i for i in asked if names[i] in answers and answers[names[i]].lost]
            if not asked:
                break
        whole = weighted(list(found.values()))
        self.validated = number
        self.patience.judge(whole, number, self.plan.settings.privacy.sound)
        parties = [found[i].mrr if i in found else float("nan") for i in range(len(names))]
        self._tell({"event": "validation", "round": number, "mrr": listed([whole.mrr])[0],
                    "hits10": listed([whole.hits10])[0], "parties": listed(parties),
                    "best": listed([self.patience.best_mrr])[0], "best_round": self.patience.best_round})  # fmt: skip

    def _end(self) -> Coordinator:
        """Tell everyone that it is over, and what was best; keep what they say."""
        self._health("ending")
        answers = self._ask(dict.fromkeys(self.plan.parties, Ask("end", {})), min(self.deadline, LAST))
        self.exchange.end(self.run_id)
        by_party = {name: _told_metrics(name, answer.says.get("metrics", {})) for name, answer in answers.items()}
        for split in ("valid", "test"):
            if there := [found[split] for found in by_party.values() if split in found]:
                self.metrics[split] = weighted(there)
        private = self.path / PRIVATE
        lines = "".join(f"{line}\n" for line in self.transcript.lines(hashes=False))
        write_whole(self.path / SHAREABLE / "transcript.jsonl", lines.encode(), mode=0o644)
        if self.center is not None:
            save_tensors(private / "rows.safetensors", {self.part: self.center.table}, self._origin("tacit.rows/1"))
        if not self.plan.settings.privacy.sound:
            write_json(self.path / SHAREABLE / "privacy.json", "tacit.privacy/1", no_claim(self.plan.settings))
        whole = {split: metrics.json() for split, metrics in self.metrics.items()}
        write_json(private / "metrics.json", "tacit.metrics/1",
                   {"recipe": self.plan.recipe, "metrics": whole,
                    "parties": {name: {split: one.json() for split, one in found.items()}
                                for name, found in by_party.items()},
                    "best_round": self.patience.best_round, "rounds": self.center.rounds if self.center else 0,
                    "did_not_confirm": [name for name in self.plan.parties if name not in answers]})  # fmt: skip
        self._health("finished")
        return self

    # -- talking -------------------------------------------------------------------------------------------------------

    def _ask(self, asks: Mapping[str, Ask], seconds: float) -> dict[str, Answer]:
        """Ask some parties; the answers that came in time. A party that declines ends it."""
        best = {"best": self.patience.best_round, "run": self.run_id}
        sent = {name: replace(ask, says={**ask.says, **best}) for name, ask in asks.items()}
        for ask in sent.values():
            self._record(ask.messages)
        answers = self.exchange.ask(self.run_id, sent, seconds)
        for name, answer in answers.items():
            if answer.declined is not None:
                raise Stopped(f"{name} declines: {answer.declined}")
            for key, kind in ANSWERED.get(sent[name].asked, {}).items():
                if not answer.lost and not isinstance(answer.says.get(key), kind):
                    raise Stopped(f"{name} answers {sent[name].asked!r} with something else than {key}")
            number = self.plan.parties.index(name)
            if any(message.sender != number or message.receiver != SERVER for message in answer.messages):
                raise Stopped(f"{name} sent messages in another's name")
            self._record(answer.messages)
        self.silent = (self.silent | set(asks)) - answers.keys()
        return answers

    def _record(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.transcript.record(message)

    def _converse(
        self,
        about: str,
        talk: Callable[[], Talk[End]],
        start: Callable[[], Mapping[str, Ask]] | None = None,
        heard: Callable[[Mapping[str, Answer]], None] = lambda answers: None,
    ) -> End:
        """Talk with parties of something to the end; anew, if it fails because someone has gone in the middle."""
        usual = dict.fromkeys(self.plan.parties, Ask("start", {"about": about}))
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._attempt(talk(), start() if start else usual, heard)
            except SumFailed as error:
                LOG.warning("%s: attempt %d failed: %s", about, attempt, error)
                if attempt == ATTEMPTS:
                    raise Stopped(f"{error} ({ATTEMPTS} attempts)") from None
        raise AssertionError

    def _attempt(self, talk: Talk[End], start: Mapping[str, Ask], heard: Callable[[Mapping[str, Answer]], None]) -> End:
        self._talks += 1
        name, numbers = f"{self._talks}", {party: i for i, party in enumerate(self.plan.parties)}
        answers = self._ask(
            {who: replace(ask, says={**ask.says, "id": name}) for who, ask in start.items()}, self.deadline
        )
        heard(answers)
        if lost := [who for who, answer in answers.items() if answer.lost]:
            self._meet_again(lost)
            raise SumFailed(f"{', '.join(lost)}: started again in the middle of a round")
        said, expects, end = going(talk)
        while True:
            asks = {}
            if said:
                asks = {
                    who: Ask("go on", {"id": name}, [m for m in said if m.receiver == numbers[who]])
                    for who in start
                    if any(m.receiver == numbers[who] for m in said)
                }
                answers = self._ask(asks, self.deadline)
            if expects is None:
                # Who did not hear the end of it does not know what was agreed on.
                if gone := [who for who in asks if who not in answers or answers[who].lost]:
                    raise SumFailed(f"{', '.join(gone)}: has not heard the end of it")
                return end  # type: ignore[no-any-return]
            for who, answer in sorted(answers.items()):
                for message in answer.messages:
                    try:
                        expects.take(message)
                    except Refused as error:
                        LOG.warning("a message of %s was refused: %s", who, error)
            try:
                said, expects, end = going(talk, expects)
            except Refused as error:
                raise Stopped(f"what a party sent cannot be used: {error}") from None

    # -- saving --------------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self._journals["metrics"].write(json.dumps(event).encode() + b"\n")
        self.on_event(event)

    def _health(self, doing: str) -> None:
        """What it is doing, for whoever looks after it."""
        state = {"doing": doing, "round": self.center.rounds if self.center else 0, "of": self.plan.federation.rounds,
                 "silent": sorted(self.silent), "time": round(time.time(), 1)}  # fmt: skip
        write_json(self.path / "health.json", "tacit.health/1", state)
        self.on_event({"event": "doing", "what": doing})

    def _checkpoint(self, number: int) -> None:
        for line in self.transcript.lines(self._written):
            self._journals["transcript"].write(line.encode() + b"\n")
        self._written = len(self.transcript.records)
        self._save(number)

    def state(self) -> dict[str, Any]:
        """Everything that it needs to go on."""
        assert self.center is not None
        own = torch.tensor([int(self.finished), self.validated, *self.took])
        return {"coordinator": own} | self.center.state() | self.patience.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        assert self.center is not None
        self.center.load(state)
        self.patience.load(state)
        finished, self.validated, *self.took = (int(value) for value in state["coordinator"])
        self.finished = bool(finished)
        self.center.seen[:] = -1  # who has been started again since does not have what it was given
        self.transcript = Transcript()
        self.transcript.load(self.path / PRIVATE / "transcript.jsonl", self.path / PRIVATE / "payloads")
        self._written = len(self.transcript.records)


def _told_metrics(name: str, told: Any) -> dict[str, Metrics]:
    """What a party tells of its final model; of what cannot be, nothing."""
    found = {}
    try:
        for split in told.keys() & {"valid", "test"}:
            found[split] = Metrics.of(told[split])
            float(sum(float(value) for value in asdict(found[split]).values()))
    except (TypeError, AttributeError, ValueError, OverflowError):
        LOG.warning("%s tells of metrics what cannot be", name)
        return {}
    return found


def _loss(found: Any) -> float | None:
    return None if found is None else _number(found)


def _number(found: Any) -> float:
    """Of what a party tells for people to look at."""
    return found if isinstance(found, int | float) and not isinstance(found, bool) else 0


def _facts(name: str, answer: Answer) -> Says:
    """What a party tells before round 1, if it can be."""
    says = answer.says
    noise, bound, names = says.get("noise"), says.get("bound"), says.get("names")
    if not isinstance(noise, dict) or type(bound) is not int or not 0 < bound <= MOST_HIDDEN:
        raise Stopped(f"{name} tells of itself what cannot be")
    found = {key: value for key, value in noise.items() if value is not None}
    if not found.keys() <= set(NOISES) or not all(type(v) is float and 0 < v < 1e4 for v in found.values()):
        raise Stopped(f"{name} wants noise that cannot be")
    return {"noise": found, "bound": bound, "names": None if names is None else str(names)[:64]}


def _metrics(message: Message, party: int) -> Metrics:
    """What a party tells of its validation."""
    numbers = message.arrays.get("numbers")
    if message.kind != "score" or numbers is None or tuple(numbers.shape) != (1, len(SCORES)):
        raise Stopped(f"party {party} tells something else than its validation")
    values = dict(zip(SCORES, numbers[0].tolist(), strict=True))
    count = values.pop("count")
    whole = all(math.isfinite(value) for value in values.values()) and 0 <= values["mrr"] <= 1
    if not 0 <= count < 1 << 40 or count != int(count) or (count and not whole):
        raise Stopped(f"party {party} tells of a validation that cannot be")
    return Metrics(**values, count=int(count))
