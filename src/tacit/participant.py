"""A party of a federation in a process of its own: it answers what the coordinator asks, from its own graph and folder.

What it has to say goes out as messages; its triples, and whatever rows are not shared, never do. Its folder is a run's
(`tacit.run`): its own settings, graph, model and metrics, and beside them

    private/transcript.jsonl     every message that it sent and received, with hashes
    private/places.safetensors   which shared rows its names have
    private/opened.json          which secure sums it has helped to open, and of whom

It saves what it has become before it answers. So a question that is asked again, after it or the coordinator was
killed, has the same answer, and nothing is trained twice; but for private steps between two savings, which are charged
twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tacit import __version__
from tacit.draws import Secret
from tacit.errors import BadInput, TacitError, excerpt
from tacit.evaluation.ranking import Metrics
from tacit.federated import Plan
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import SERVER, VERSION, Inbox, Message
from tacit.federation.secured import Secured
from tacit.federation.star import Seat, both_ways, checked, row_counts, warn_beyond
from tacit.federation.transcript import Record
from tacit.federation.transport import Talk, going
from tacit.federation.vocabulary import hidden_names, names_of, told_names, usual_bound
from tacit.folders import PRIVATE, read_json, write_json
from tacit.graph import Graph
from tacit.kept import Kept
from tacit.models import Prior, Tables
from tacit.privacy.marginals import Marginals
from tacit.privacy.plan import solved
from tacit.privacy.privatizers import Sound
from tacit.privacy.shared import stacked, told_counts
from tacit.recipes import SHARED
from tacit.run import CONFIG, Run, check_enough, create, note
from tacit.settings import Settings
from tacit.tensors import load_tensors, save_tensors
from tacit.training import Event, Fit, listed

LOG = logging.getLogger(__name__)
Says = dict[str, Any]
NOISES = ("sigma", "prior_sigma", "degree_sigma")
"""The noise that parties agree on: the most that any of them needs."""
SCORES = ("mrr", "mr", "hits1", "hits3", "hits10", "amri", "count")
"""What a party tells of its ranks, in this order."""


class Declined(TacitError):
    """What this party does not agree to, in words that the coordinator may read."""


class Finished(TacitError):
    """This party has its model already."""


class Lost(Exception):
    """The coordinator goes on with something that this process knows nothing of: it was started again since."""


class Participant:
    """One party.

    Parameters
    ----------
    plan
        What this party agrees to: recipe, settings and parties, in their order. A coordinator that has another is
        refused.
    path
        The folder of its run; one that exists goes on.
    budget
        The holding that pays, if training is private.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        identity: Identity,
        roster: Roster,
        path: Path,
        *,
        budget: str | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ):
        if identity.name not in plan.parties:
            raise TacitError(f"{identity.name} is none of the parties: {', '.join(plan.parties)}")
        if roster.public(identity.name) != identity.public:
            raise TacitError(f"the roster has another key for {identity.name} than the one that was given")
        plan.check(graph, identity.name)
        self.plan, self.graph, self.identity, self.roster, self.path = plan, graph, identity, roster, path
        self.budget, self.on_event = budget, on_event
        self.number, self.part = plan.parties.index(identity.name), SHARED[plan.recipe]
        self.rounds = self.validated = self.ready_for = self.best_round = 0
        self.given_hash = ""
        """The last round that it trained, validated, has rows for, has kept; what it was given for the last."""
        self.run: Run | None = None
        self.fit: Fit | None = None
        self.seat: Seat | None = None
        self._talk: tuple[str, Talk[Any], Inbox] | None = None
        self._open = contextlib.ExitStack()
        self._journals: dict[str, Any] = {}
        self._save: Callable[[int], None] = lambda number: None
        self._recorded, self._begun = -1, False
        self._pending: list[Record] = []
        self._needed = self._own_noise()
        wanted = plan.federation
        self.aggregation = checked(
            wanted.how(plan.parties, self.part, {self.number: identity}, roster),
            plan.settings.scorer, plan.settings.dim, self.part, plan.names_are_private,
        )  # fmt: skip
        self.run_id = ""
        if (path / CONFIG).is_file():
            self._reopen()

    def _reopen(self) -> None:
        """Go on with a folder that was begun before, if it is of the same graph and plan."""
        where = self.path / PRIVATE / "federation.json"
        if not where.is_file():
            raise TacitError(
                f"{self.path} holds something else than a party's run of a federation: choose another --out"
            )
        known = read_json(where, "tacit.participant/1", {"run": str, "plan": dict})
        if different := self.plan.differences(known["plan"]):
            raise TacitError(f"{self.path} was begun with another plan ({'; '.join(different)}): choose another --out")
        self.run, self.run_id = Run.open(self.path), known["run"]
        if self.run.graph.fingerprint != self.graph.fingerprint:
            raise TacitError(f"{self.path} was begun with another graph: its triples, names or marks differ")
        if self.run.finished:
            raise Finished(f"{self.path} is finished already: there is nothing to go on with.")
        if self._places_file.is_file():
            self._take_seat()

    def close(self) -> None:
        """Let go of the folder."""
        self._open.close()
        self._journals, self._save = {}, lambda number: None

    @property
    def last_letter(self) -> tuple[int, int]:
        """The last question that it was asked, before it was started again."""
        where = self.path / PRIVATE / "letters.json"
        if not self.run_id or not where.is_file():
            return (0, 0)
        known = read_json(where, "tacit.letters/1", {"life": int, "number": int})
        return (known["life"], known["number"])

    def remember(self, life: int, number: int) -> None:
        """What is asked now: nothing older is answered any more."""
        if self.run is not None:
            write_json(self.path / PRIVATE / "letters.json", "tacit.letters/1", {"life": life, "number": number})

    # -- what is asked -------------------------------------------------------------------------------------------------

    def answer(self, asked: str, says: Says, messages: Sequence[Message]) -> tuple[Says, list[Message]]:
        """Do what the coordinator asks, and say what came of it."""
        ways = {"hello": self._hello, "begin": self._begin, "start": self._start, "go on": self._go_on,
                "validate": self._validate, "end": self._end}  # fmt: skip
        if asked not in ways:
            raise Declined(f"the coordinator asks for {asked!r}, which this version does not know")
        for message in messages:
            self._record(message)
        if self.fit is not None and (best := says.get("best", 0)) != self.best_round and best == self.validated:
            self._keep_best()
        try:
            answer, said = ways[asked](says, list(messages))
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            if isinstance(error, TacitError):
                raise
            LOG.exception("a question could not be answered")
            raise Declined(f"the question {asked!r} makes no sense to this party, as it is asked now") from error
        for message in said:
            self._record(message)
        for journal in self._journals.values():
            journal.flush()
        return answer, said

    def _hello(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        """Compare what both mean to do; tell what the coordinator has to know before it begins."""
        if says.get("protocol") != VERSION:
            raise Declined(f"the coordinator speaks version {says.get('protocol')} of the protocol, and this party "
                             f"version {VERSION}: run the same tacit on both sides ({__version__} here, "
                             f"{says.get('tacit')} there)")  # fmt: skip
        if different := self.plan.differences(says["plan"]):
            raise Declined("the coordinator means to do something else than this party: " + "; ".join(different))
        names = names_of(self.graph, self.part)
        return {
            "tacit": __version__, "noise": self._needed,
            "bound": usual_bound([names]) if self.plan.names_are_private and not self.plan.federation.bound else 1,
            "names": None if self.plan.names_are_private else hashlib.sha256("\n".join(names).encode()).hexdigest(),
            "rounds": self._saved_rounds(),
        }, []  # fmt: skip

    def _saved_rounds(self) -> int:
        """How far its folder has got."""
        if self.fit is not None:
            return self.rounds
        found = sorted((self.path / PRIVATE / "checkpoints").glob("epoch-*.safetensors"))
        return int(found[-1].stem.split("-")[1]) // 2 if found else 0

    def _own_noise(self) -> dict[str, float | None]:
        """The noise that this party needs, by its own triples and holding."""
        privacy = self.plan.settings.privacy
        if not isinstance(privacy, Sound):
            return {}
        limits: Sequence[Sequence[float]] = ()
        begins = not (self.path / CONFIG).is_file()
        if self.budget is not None and begins:
            from tacit.privacy.budget import Holding

            limits = Holding.load(self.budget).limits()
        wanted = self.plan.federation
        epochs = wanted.rounds * wanted.local_epochs
        found = solved(self.plan.settings, [self.graph], epochs=epochs, limits=limits, holders=wanted.holders)
        if self.budget is not None and begins and found.privacy != privacy:
            check_enough(found, self.graph, self.budget, epochs=epochs, holders=wanted.holders)
        return {name: getattr(found.privacy, name) for name in NOISES}

    def _begin(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        """The federation begins, or goes on: a folder for it, with the noise that all have agreed on."""
        settings = self._settings(says["noise"])
        if self.run is None:
            about = {"run": says["run"], "plan": self.plan.json(), "party": self.identity.name}
            self.run = create(self.graph, settings, self.path, budget=self.budget,
                              holders=self.plan.federation.holders, federation=about)  # fmt: skip
            self.run_id = says["run"]
        if self.run_id != says["run"]:
            raise Declined("this party's folder belongs to another federation than the coordinator's: choose another "
                           "--out")  # fmt: skip
        if self.run.settings != settings:
            raise Declined("this party's folder was begun with other settings than the coordinator has now")
        return {"rounds": self.rounds, "named": self.seat is not None, "counted": self._counts_file.is_file()}, []

    def _settings(self, noise: Mapping[str, float | None]) -> Settings:
        """Of its run: as many epochs as all rounds have, saved after each; and noise that is enough for every party."""
        settings, wanted = self.plan.settings, self.plan.federation
        training = replace(
            settings.training, epochs=wanted.rounds * wanted.local_epochs, checkpoint_every=wanted.local_epochs
        )
        settings = replace(settings, training=training)
        if not isinstance(settings.privacy, Sound):
            return settings
        chosen = {}
        for name, least in self._needed.items():
            if least is not None:
                told = noise[name]
                chosen[name] = told if isinstance(told, float) else 0.0
                if not least <= chosen[name] < math.inf:
                    raise Declined(f"the coordinator wants a {name} of {noise[name]}, and this party needs {least}")
        return replace(settings, privacy=replace(settings.privacy, **chosen))  # type: ignore[arg-type]

    # -- talks ---------------------------------------------------------------------------------------------------------

    def _start(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        """Begin to talk of something, or begin anew."""
        about, more, privacy = says["about"], {}, self.plan.settings.privacy
        # What was agreed on, and nothing else: exact counts, above all, only where the plan has them told.
        counted = isinstance(privacy, Sound) and (not privacy.trains or bool(privacy.prior_share))
        allowed = {"names": True, "train": True, "marginals": counted,
                   "counts": self.aggregation.needs_counts and not privacy.sound}  # fmt: skip
        if not allowed.get(about):
            raise Declined(f"the plan has nothing to tell about {excerpt(str(about))}")
        if about == "names":
            talk = self._name()
        elif about == "marginals":
            talk = self._count()
        elif about == "counts":
            if self.seat is None:
                raise Lost
            talk = self.seat.told_counts(row_counts(self.graph, self.part, self.plan.settings.training.reciprocal))
        else:
            more = self._train(says, messages)
            assert self.seat is not None
            talk = self._contribute(self.seat.contribution(says["round"]), says["round"])
        self._talk = None
        return more, self._going(says["id"], talk)

    def _go_on(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        if self._talk is None or self._talk[0] != says["id"]:
            raise Lost
        name, talk, inbox = self._talk
        for message in messages:
            inbox.take(message)
        self._talk = None
        return {}, self._going(name, talk, inbox)

    def _going(self, name: str, talk: Talk[Any], came: Inbox | None = None) -> list[Message]:
        said, expects, _ = going(talk, came)
        self._talk = None if expects is None else (name, talk, expects)
        return said

    def _name(self) -> Talk[None]:
        """Agree on names, and remember the places of its own."""
        if self._saved_rounds():
            raise Declined("the coordinator asks for names again, after rounds: it was put back to an older state")
        names, told = names_of(self.graph, self.part), b""
        if self.plan.names_are_private:
            assert isinstance(self.aggregation, Secured)
            members, _ = self.aggregation.for_one_sum()
            places, told = yield from hidden_names(names, self.part, members[self.number])
            found = len(told) // 16
        else:
            found, places = yield from told_names(names, self.part, self.number)
        twice = self.plan.settings.training.reciprocal
        places, total = both_ways(places, found, self.part, twice)
        kept = {"places": places, "total": torch.tensor([total]), "told": torch.tensor(list(told), dtype=torch.uint8)}
        save_tensors(self._places_file, kept, {"schema": "tacit.places/1"})
        self._take_seat()

    def _count(self) -> Talk[None]:
        """Release noisy counts, once, and remember what all parties' add up to."""
        assert self.run is not None
        privacy = self.run.settings.privacy
        assert isinstance(privacy, Sound)
        own_file = self.path / PRIVATE / "own-counts.safetensors"
        if not own_file.is_file():  # what is asked for again, because it was lost, is not drawn again
            self._charge(0)
            sigma = privacy.prior_sigma if privacy.trains else privacy.sigma
            assert sigma is not None
            secret = Secret.simulation(self.run.settings.seed) if privacy.noise == "seeded" else Secret.fresh()
            own = Marginals.release(self.graph, sigma, secret, self.number)
            deviation = torch.tensor([own.deviation], dtype=torch.float64)
            save_tensors(own_file, {"tails": own.tails, "heads": own.heads, "deviation": deviation},
                         {"schema": "tacit.counts/1"})  # fmt: skip
        tensors, _ = load_tensors(own_file)
        own = Marginals(tensors["tails"], tensors["heads"], float(tensors["deviation"]))
        how = self.plan.federation.how(self.plan.parties, "relation", {self.number: self.identity}, self.roster)
        member = how.for_one_sum()[0][self.number] if isinstance(how, Secured) else None
        found = yield from told_counts(self.graph, own, self.number, member)
        made = stacked([found], self.run.settings.training.reciprocal)
        save_tensors(self._counts_file, {"tails": made.tails, "heads": made.heads}, {"schema": "tacit.counts/1"})

    def _contribute(self, talk: Talk[None], number: int) -> Talk[None]:
        """Its contribution; which secure sum it helps to open is on disk before its shares go out.

        The rows of a round are the same when it is made again. Two sums of them, over different parties, could be
        subtracted: so a list of others than before is refused.
        """
        where, came, before = self.path / PRIVATE / "opened.json", None, self.aggregation.beyond
        opened = dict(read_json(where, "tacit.opened/1", {"rounds": dict})["rounds"]) if where.is_file() else {}
        while True:
            said, expects, _ = going(talk, came)
            for message in said:
                if message.kind == "opened":
                    assert isinstance(self.aggregation, Secured)
                    side = self.aggregation.sides[self.number]
                    key, heard = f"{number} {side.of}", list(side.member.members)
                    if opened.setdefault(key, heard) != heard:
                        raise Declined(f"the sum of round {number} was opened before, of other parties than now")
                    write_json(where, "tacit.opened/1", {"rounds": {**opened, key: heard}})
            if expects is None:
                warn_beyond(self.aggregation.beyond - before, number)
                yield said, None
                return
            came = yield said, expects

    # -- training ------------------------------------------------------------------------------------------------------

    def _take_seat(self) -> None:
        """Become a party that trains, from its last checkpoint if there is one."""
        assert self.run is not None
        tensors, _ = load_tensors(self._places_file)
        settings, prior = self.run.settings, None
        if self._counts_file.is_file():
            counts, _ = load_tensors(self._counts_file)
            prior = Prior(counts["tails"], counts["heads"])
        if isinstance(settings.privacy, Sound) and not settings.privacy.trains:
            return
        if self._journals:  # names are agreed on once more
            self.close()
        self.fit = Fit(settings, [self.graph], numbers=[self.number], prior=prior)
        fit, told = self.fit, tensors["told"].numpy().tobytes()
        if isinstance(self.aggregation, Secured):
            self.aggregation.sides[self.number].bind(told)
        table = fit.cohort.tables.entity if self.part == "entity" else fit.cohort.tables.relation
        self.seat = Seat(self.number, self.part, self.aggregation, lambda: table, tensors["places"].to(fit.device),
                         int(tensors["total"]), self.plan.names_are_private)  # fmt: skip
        kept = Kept(self.path, self.run._origin, {"metrics": self.path / PRIVATE / "metrics.jsonl"})
        self._journals, self._save = self._open.enter_context(kept.training(self))
        self._charge(int(fit.cohort.epochs.max()))

    def _charge(self, epochs: int) -> None:
        """Before anything private is released in this process: pay for it, and for what may be released once more."""
        assert self.run is not None
        if isinstance(self.run.settings.privacy, Sound) and not self._begun:
            self.run._begin(epochs)
            self._begun = True

    def _train(self, says: Says, messages: list[Message]) -> Says:
        """Take the rows of a round and train, unless that is done already."""
        number, fit, seat = says["round"], self.fit, self.seat
        if fit is None or seat is None:
            raise Lost
        if type(number) is not int or not 1 <= number <= self.plan.federation.rounds:
            raise Declined(f"there are {self.plan.federation.rounds} rounds, and the coordinator wants another")
        if self.rounds < says["after"]:
            raise Declined(
                f"this party's folder is after round {self.rounds}, and the federation has its rows up to round "
                f"{says['after']}: it was put back to an older state. Put the newer one back; or leave the federation."
            )
        if self.rounds > number or (self.rounds < number <= self.validated):
            raise Declined(f"the coordinator is at round {number}, and this party has trained round {self.rounds}: "
                             "the coordinator was put back to an older state")  # fmt: skip
        if self.rounds == number:
            if messages and _digest(self._read(number, messages)) != self.given_hash:
                raise Declined(f"the coordinator gives other rows for round {number} than it did before")
            return {"loss": None, "steps": 0, "examples": 0}
        self._take(number, messages)
        if self.plan.federation.optimizer_state == "reset":
            fit.cohort.between_rounds("reset")
        reports = [fit.epoch() for _ in range(self.plan.federation.local_epochs)]
        fit.check_rows()
        self.rounds = number
        loss = float(np.mean([report.loss for report in reports]))
        steps, examples = (int(sum(getattr(report, name) for report in reports)) for name in ("steps", "examples"))
        self._tell({"event": "round", "round": number, "loss": listed([loss]), "steps": steps, "examples": examples})
        self._checkpoint(2 * number)
        if fit.private is not None:
            return {"loss": None, "steps": 0, "examples": 0}  # they are computed from the triples, without noise
        return {"loss": listed([loss])[0], "steps": steps, "examples": examples}

    def _read(self, number: int, messages: list[Message]) -> Any:
        """The rows that are given for a round."""
        assert self.seat is not None
        inbox = self.seat.expected(number)
        for message in messages:
            inbox.take(message)
        [message] = inbox.messages()
        return self.seat.read(message)

    def _take(self, number: int, messages: list[Message]) -> None:
        """Take the rows for a round, if it does not have them already."""
        assert self.seat is not None
        if self.ready_for == number:
            return
        if not messages:
            raise Lost
        rows = self._read(number, messages)
        self.seat.take(rows)
        self.ready_for, self.given_hash = number, _digest(rows)

    def _validate(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        """Take the rows after a round, and tell how well they answer its own questions; of private training nothing."""
        fit, number = self.fit, says["round"]
        if fit is None:
            raise Lost
        first, last = max(self.rounds, self.validated, 1), self.plan.federation.rounds
        if type(number) is not int or not first <= number <= last:
            raise Declined(f"round {excerpt(str(number))} cannot be validated: it is {first} to {last}")
        self._take(number + 1, messages)
        self.validated = number
        [metrics] = fit.evaluate("valid", best=False)
        self._tell({"event": "validation", "round": number, "mrr": listed([metrics.mrr])})
        self._checkpoint(2 * number + 1)
        return {}, [] if fit.private is not None else [self._score([metrics], number)]

    def _score(self, found: Sequence[Metrics], number: int) -> Message:
        rows = [[float(getattr(metrics, name)) for name in SCORES] for metrics in found]
        numbers = torch.tensor(rows, dtype=torch.float64)
        return Message("score", number, 0, self.number, SERVER, {"part": self.part}, {"numbers": numbers})

    def _keep_best(self) -> None:
        """What was validated last is the best so far."""
        assert self.fit is not None
        for name, tensor in self.fit.best.tensors().items():
            tensor.copy_(self.fit.cohort.tables.tensors()[name])
        self.best_round = self.validated

    def _end(self, says: Says, messages: list[Message]) -> tuple[Says, list[Message]]:
        """The federation has ended: keep the best model, and rank by it. Metrics of a private one stay here."""
        run, fit = self.run, self.fit
        assert run is not None
        if not run.finished:
            privacy = run.settings.privacy
            if isinstance(privacy, Sound) and not privacy.trains:
                counts, _ = load_tensors(self._counts_file)
                twice = 2 if run.settings.training.reciprocal else 1
                nothing = Tables.empty(run.settings.scorer, len(self.graph.entities), twice * len(self.graph.relations))
                run._end(run._made(nothing, Prior(counts["tails"], counts["heads"])), 0)
            else:
                if fit is None:
                    raise Lost
                if fit.private is not None:  # the last is the best
                    self._keep_best()
                elif says["best"] != self.best_round:
                    LOG.warning("the best round was %d, in which this party was absent: it keeps what it has of round "
                                "%d", says["best"], self.best_round)  # fmt: skip
                run._end(fit.model(), self.best_round * self.plan.federation.local_epochs)
        if run.settings.privacy.sound:
            return {}, []
        found = {split: metrics.json() for split, metrics in run.metrics.items()}
        return {"metrics": found}, []

    # -- saving --------------------------------------------------------------------------------------------------------

    @property
    def _places_file(self) -> Path:
        return self.path / PRIVATE / "places.safetensors"

    @property
    def _counts_file(self) -> Path:
        return self.path / PRIVATE / "counts.safetensors"

    def _tell(self, event: Event) -> None:
        self._journals["metrics"].write(json.dumps(event).encode() + b"\n")
        self.on_event(event)

    def _record(self, message: Message) -> None:
        """Note what was sent or received, for ever: also what is sent again. Until there is a folder, remember to."""
        self._pending.append(replace(Record.of(0, message), sha256=hashlib.sha256(message.encode()).hexdigest()))
        if self.run is None:
            return
        where = self.path / PRIVATE / "transcript.jsonl"
        if self._recorded < 0:
            self._recorded = where.read_bytes().count(b"\n") if where.is_file() else 0
        with open(where, "ab") as journal:
            for record in self._pending:
                line = json.dumps(replace(record, number=self._recorded).json(), sort_keys=True)
                journal.write(line.encode() + b"\n")
                self._recorded += 1
        self._pending.clear()

    def _checkpoint(self, number: int) -> None:
        self._save(number)
        if self.run is not None and self.fit is not None and self.run.settings.privacy.sound:
            note(self.path, "saved", int(self.fit.cohort.epochs.max()))

    def state(self) -> dict[str, Any]:
        """Everything that it needs to go on."""
        assert self.fit is not None
        assert self.seat is not None
        own = [self.rounds, self.validated, self.ready_for, self.best_round]
        found = {"participant": torch.tensor(own), "participant.given": _hash_tensor(self.given_hash)}
        if self.seat.given is not None:
            found["participant.rows"] = self.seat.given
        return self.fit.state() | found | self.aggregation.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        assert self.fit is not None
        assert self.seat is not None
        self.fit.load(state)
        try:
            own = [int(value) for value in state["participant"]]
            self.given_hash = state["participant.given"].numpy().tobytes().hex()
        except KeyError:
            raise BadInput("the state is not of a party in a federation.") from None
        self.rounds, self.validated, self.ready_for, self.best_round = own
        given = state.get("participant.rows")
        self.seat.given = None if given is None else given.to(self.fit.device)
        self.aggregation.load(state)


def _digest(rows: Any) -> str:
    return hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()


def _hash_tensor(digest: str) -> Any:
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
