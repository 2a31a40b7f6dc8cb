"""A holding: the privacy budget of data that its owner names once, and a record of what was spent that nobody can lose.

A budget belongs to the name, not to a file: one changed row must not reset it. What a training may cost is reserved
before it begins and settled, never upwards, when it ends. Entries are only ever added; each holds the hash of the one
before it and is signed. A witness beside the holdings has seen every entry, so a file that was rolled back or deleted
is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tacit.errors import BadInput, BadValue, Problem, TacitError, excerpt
from tacit.folders import sync_folder
from tacit.graph import Graph, name_fault
from tacit.privacy import accountant
from tacit.privacy.events import Gaussian, Sampled, SampledCurve, Segment, Spent, joined

SCHEMA, RESUMED = "tacit.budget/1", "tacit.budget/2"
"""Of entries; the second of those that say that a run was resumed, which the first version did not know."""
ENTRIES, KEY, STATEMENTS, COMING = "entries.jsonl", "key", "statements", "statements.next"
HEADS, SALT, LOCK = "heads.jsonl", "salt", "lock"
NOTHING = "0" * 64
"""What the first entry has before it."""
MOST = 1 << 40
"""Releases of one kind in one reservation: beyond it rounding would show."""
WHOLE_ORDERS = tuple(order for order in accountant.ORDERS if order >= 2 and order == int(order))
"""Of budgets: the divergence of a sample is a finite sum there, and a series that may not converge in between."""
Hashes = npt.NDArray[np.void]


@dataclass(frozen=True)
class Entry:
    """One line of a holding's record."""

    number: int
    kind: str
    time: str
    body: Mapping[str, Any]
    previous: str
    hash: str = ""
    signature: str = ""

    def signed(self, key: Ed25519PrivateKey) -> Entry:
        """With its hash and the signature of that."""
        digest = self.digest()
        return Entry(self.number, self.kind, self.time, self.body, self.previous, digest.hex(), key.sign(digest).hex())

    def digest(self) -> bytes:
        """Over all but the hash and its signature."""
        return hashlib.sha256(
            _canonical({k: v for k, v in self.json().items() if k not in ("hash", "signature")})
        ).digest()

    @property
    def schema(self) -> str:
        return RESUMED if self.kind == "resume" else SCHEMA

    def json(self) -> dict[str, Any]:
        return {"schema": self.schema} | {name: getattr(self, name) for name in self.__dataclass_fields__}

    def line(self) -> bytes:
        return _canonical(self.json()) + b"\n"


@dataclass(frozen=True)
class Charge:
    """What one reservation stands for: in full until it is settled, and then what was used.

    token: what only the folder has that began with it, or resumed it last; before it is resumed, its entry's hash.
    """

    number: int
    time: str
    run: str
    why: str
    party: str | None
    reserved: Spent
    token: str
    settled: Spent | None = None

    @property
    def spent(self) -> Spent:
        return self.reserved if self.settled is None else self.settled


@dataclass(frozen=True)
class Reservation:
    """What a run quotes: its entry's number, and the hash that stands there."""

    number: int
    head: str


@dataclass(frozen=True)
class _Chain:
    """A record as it was read: verified, and what it comes to."""

    entries: tuple[Entry, ...]
    end: int
    charges: tuple[Charge, ...]
    closed: bool
    registered: str
    """SHA-256 of the statements that belong to it."""

    @property
    def about(self) -> Mapping[str, Any]:
        return self.entries[0].body


@dataclass(frozen=True)
class _Witness:
    """What `heads.jsonl` has seen: the hashes of every holding's entries, by name and in order."""

    heads: Mapping[str, Sequence[str]]
    end: int


def check_payable(privatizer: Any) -> None:
    """Refuse what a holding cannot keep account of.

    It counts what each triple costs. One triple more in a group moves a step that clips groups by up to twice the
    clip, so what protects a group at some cost does not protect a triple at that cost.
    """
    if getattr(privatizer, "noise", "system") == "seeded":
        raise TacitError("a simulation costs nothing and protects nothing: leave out the budget, or privacy.noise")
    if getattr(privatizer, "unit", "triple") == "group":
        raise TacitError("a holding counts what a triple costs, and these settings protect groups: leave out the "
                         'budget, or set privacy.unit = "triple"')  # fmt: skip


class Holding:
    """The budget of one owner's data; `begin` it, or `load` it. What it says is as of the last reading or writing.

    The budget is a Renyi divergence of one order, fixed at the opening (`accountant.Filter`), so the settings of a
    later run may follow from what earlier ones released.
    """

    def __init__(self, name: str, home: Path, chain: _Chain):
        self.name, self.home, self._chain = name, home, chain

    @classmethod
    def begin(
        cls, name: str, *, epsilon: float, delta: float, graph: Graph | None = None, home: Path | None = None
    ) -> Holding:
        """Open a holding that may cost (epsilon, delta) in all, for ever.

        `graph`: the data it is for. None of its statements may belong to another holding.
        """
        _check_name(name)
        order, divergence = _room(epsilon, delta)
        home = home_folder(home)
        home.mkdir(parents=True, mode=0o700, exist_ok=True)
        folder = home / name
        with _locked(home):
            witness = _read_witness(home)
            if name in witness.heads and not (folder / ENTRIES).exists():
                raise _deleted(home, name)
            if folder.exists():
                raise TacitError(
                    f"{folder} exists already: a holding is opened once. tacit budget show {name} shows it."
                )
            salt = _salt(home, make=not _names(home, witness))
            statements = _hashes(graph, salt) if graph is not None else np.empty(0, "V16")
            _check_overlap(home, name, witness, statements, salt)
            key = Ed25519PrivateKey.generate()
            body = {
                "name": name,
                "epsilon": float(epsilon),
                "delta": float(delta),
                "unit": "triple",
                "neighbours": "add or remove one triple",
                "order": order,
                "divergence": divergence,
                "public_key": key.public_key().public_bytes_raw().hex(),
                "salt": _commitment(salt),
                "statements": hashlib.sha256(statements.tobytes()).hexdigest(),
            }
            entry = Entry(0, "open", _now(), body, NOTHING).signed(key)
            draft = home / f".{name}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            for file, data in (
                (KEY, key.private_bytes_raw()),
                (STATEMENTS, statements.tobytes()),
                (ENTRIES, entry.line()),
            ):
                _write_at(draft / file, 0, data)
            os.rename(draft, folder)
            sync_folder(home)
            _write_at(home / HEADS, witness.end, _seen(name, [entry]))
            return cls(name, home, _read(home, name, _read_witness(home)))

    @classmethod
    def load(cls, name: str, home: Path | None = None) -> Holding:
        """Read a holding and verify all of it; one that was changed, rolled back or deleted is refused."""
        _check_name(name)
        home = home_folder(home)
        if not home.is_dir():
            raise _unknown(home, name, ())
        with _locked(home, fcntl.LOCK_SH):
            return cls(name, home, _read(home, name, _read_witness(home)))

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        return float(self._chain.about["epsilon"])

    @property
    def delta(self) -> float:
        return float(self._chain.about["delta"])

    @property
    def order(self) -> float:
        return float(self._chain.about["order"])

    @property
    def divergence(self) -> float:
        """All that may be spent, at that order."""
        return float(self._chain.about["divergence"])

    @property
    def closed(self) -> bool:
        return self._chain.closed

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self._chain.entries

    @property
    def number(self) -> int:
        """Of the last entry."""
        return self.entries[-1].number

    @property
    def head(self) -> str:
        """The hash of the last entry: it stands for all before it."""
        return self.entries[-1].hash

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every reservation, in order."""
        return self._chain.charges

    @property
    def spent(self) -> Spent:
        """Everything that was released, and everything that may yet be."""
        return joined(segment for charge in self.charges for segment in charge.spent)

    def left(self) -> float:
        """The divergence that is left."""
        return max(0.0, self.divergence - cost(self.order, self.spent))

    def limits(self) -> tuple[tuple[float, float], ...]:
        """What is left, as `accountant.Target` takes it."""
        return ((self.order, self.left()),)

    def check_quote(self, number: int, hash: str) -> None:
        """Refuse a record that does not have the entry which a run quotes: it is not the one that the run saw."""
        if not 0 <= number <= self.number or self.entries[number].hash != hash:
            raise BadInput(
                f"{self.home / self.name / ENTRIES}: a run quotes entry {number} with the hash {hash[:16]}...: it is "
                "not there.",
                hint="The record was rolled back or is another's: restore the one that the run was trained with.",
            )

    # -- what changes it -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        segments: Iterable[Segment],
        *,
        run: str,
        why: str = "",
        party: str | None = None,
        graph: Graph | None = None,
    ) -> Reservation:
        """Set aside what a run may release, before it does; refused if there is not so much left.

        `graph`: what it trains on. Its statements belong to this holding from now on.
        """
        wanted = joined(segments)
        for what, text in (("run", run), ("why", why or "-"), ("party", "-" if party is None else party)):
            if fault := name_fault(text):
                raise BadValue(f"{what} is text to be shown: found {fault}")
        body: dict[str, Any] = {"run": run, "why": why, "segments": [segment.json() for segment in wanted]}
        if party is not None:
            body["party"] = party

        def check(chain: _Chain, witness: _Witness) -> dict[str, Any]:
            if chain.closed:
                raise TacitError(f"the holding {self.name!r} is closed: nothing can be reserved from it any more.")
            self._check_fits(wanted, run)
            return body if graph is None else body | {"statements": self._register(chain, witness, graph)}

        entry = self._append("reserve", check)
        return Reservation(entry.number, entry.hash)

    def resume(self, number: int, *, tokens: Sequence[str], token: str) -> Reservation:
        """Say that the run of a reservation goes on, in the folder that has one of these tokens, and gets this one.

        A copy of the folder from before has none that still holds: one reservation pays for one training.
        """

        def check(chain: _Chain, witness: _Witness) -> dict[str, Any]:
            return {"reservation": number, "previous": self._held_with(number, tokens).token, "token": token}

        entry = self._append("resume", check)
        return Reservation(entry.number, entry.hash)

    def check_token(self, number: int, tokens: Sequence[str]) -> None:
        """Refuse a folder that a reservation has not been with since another copy of it was resumed, or ended."""
        self._held_with(number, tokens)

    def _held_with(self, number: int, tokens: Sequence[str]) -> Charge:
        charge = self._charge(number)
        another = "To train once more, begin another run: it pays for itself, and this one's folder would not."
        if charge.settled is not None:
            raise TacitError(
                f"reservation {number} of the holding {self.name!r}, for the run {charge.run!r}, is settled: that run "
                f"has ended, and this folder is a copy from before. {another}"
            )
        if charge.token not in tokens:
            raise TacitError(
                f"reservation {number} of the holding {self.name!r}, for the run {charge.run!r}, belongs to another "
                f"copy of this run's folder, which was resumed since: go on with that one. {another}"
            )
        return charge

    def _charge(self, number: int) -> Charge:
        charge = next((charge for charge in self.charges if charge.number == number), None)
        if charge is None:
            raise TacitError(f"entry {number} of the holding {self.name!r} is no reservation.")
        return charge

    def settle(self, number: int, segments: Iterable[Segment]) -> None:
        """Say what of a reservation was used; none of it: void. Nothing can be used that was not reserved.

        The same settlement twice is one, so that a run which was killed may settle again.
        """
        used = joined(segments)

        def check(chain: _Chain, witness: _Witness) -> dict[str, Any] | None:
            charge = self._charge(number)
            if charge.settled is not None:
                if charge.settled == used:
                    return None
                raise TacitError(f"reservation {number} of the holding {self.name!r} is settled already.")
            if fault := _beyond(used, charge.reserved):
                raise TacitError(f"reservation {number} of the holding {self.name!r}: {fault}.")
            return {"reservation": number, "segments": [segment.json() for segment in used], "void": not used}

        self._append("settle", check)

    def close(self) -> None:
        """Nothing can be reserved any more. The statements stay with this holding."""

        def check(chain: _Chain, witness: _Witness) -> dict[str, Any]:
            if chain.closed:
                raise TacitError(f"the holding {self.name!r} is closed already.")
            return {}

        self._append("close", check)

    def _append(self, kind: str, check: Callable[[_Chain, _Witness], dict[str, Any] | None]) -> Entry:
        """Add the entry that `check` gives the body of; None: there is nothing to add.

        Another process may have added some, so all is read again under the lock. The entry is on disk before the
        witness sees it, and both are before anyone hears of it: whoever is killed in between has spent too much on
        paper, never too little.
        """
        folder = self.home / self.name
        with _locked(self.home):
            witness = _read_witness(self.home)
            self._chain = chain = _read(self.home, self.name, witness)
            _promote(folder, chain.registered)
            if (body := check(chain, witness)) is None:
                return chain.entries[-1]
            last = chain.entries[-1]
            entry = Entry(last.number + 1, kind, _now(), body, last.hash).signed(_key(folder, chain))
            missed = _seen(self.name, chain.entries[len(witness.heads.get(self.name, ())) :])
            _write_at(self.home / HEADS, witness.end, missed)
            _write_at(folder / ENTRIES, chain.end, entry.line())
            _write_at(self.home / HEADS, witness.end + len(missed), _seen(self.name, [entry]))
            self._chain = chain = _read(self.home, self.name, _read_witness(self.home))
            _promote(folder, chain.registered)
            return entry

    def _check_fits(self, wanted: Spent, run: str) -> None:
        for segment in wanted:
            if isinstance(segment.event, SampledCurve) and segment.event.delta:
                raise TacitError(
                    f"{run}: a release with a delta of its own has no place in a holding, whose delta is fixed."
                )
            if segment.count > MOST:
                raise BadValue(f"{run}: at most {MOST:,} releases of one kind can be reserved, not {segment.count:,}")
        for order, left in self.limits():
            needed = cost(order, wanted)
            if needed <= left:
                continue
            budget = f"the budget of the holding {self.name!r} (epsilon {self.epsilon:g} at delta {self.delta:g})"
            if not math.isfinite(needed):
                raise TacitError(f"{run}: what it would cost is not known at the order {order:g}, that of {budget}.")
            raise TacitError(
                f"{run}: {_percent(left / self.divergence)} of {budget} is left, and this would take "
                f"{_percent(needed / self.divergence)}. Take more noise or fewer steps: tacit budget plan --budget "
                f"{self.name} says how much."
            )

    def _register(self, chain: _Chain, witness: _Witness, graph: Graph) -> str:
        """Write the statements with those of `graph`, to take the place of the old ones once an entry says so."""
        salt = _salt(self.home)
        _check_salt(self.home, chain, salt)
        found, folder = _hashes(graph, salt), self.home / self.name
        _check_overlap(self.home, self.name, witness, found, salt)
        whole = np.union1d(_statements(folder, chain.registered), found).tobytes()
        registered = hashlib.sha256(whole).hexdigest()
        if registered != chain.registered:
            _write_at(folder / COMING, 0, whole)
            sync_folder(folder)
        return registered

    def __repr__(self) -> str:
        return (
            f"Holding({self.name!r}, epsilon {self.epsilon:g}, delta {self.delta:g}, {len(self.charges)} reservations)"
        )


def cost(order: float, segments: Iterable[Segment]) -> float:
    """The divergence of that order of all these releases. Rounding never makes one that gives budget back."""
    return math.fsum(max(0.0, float(accountant.curve([segment], orders=[order])[0])) for segment in joined(segments))


def home_folder(home: Path | None = None) -> Path:
    """Where holdings are: as said, or in $TACIT_HOME, or in ~/.tacit."""
    if home is not None:
        return Path(home)
    given = os.environ.get("TACIT_HOME")
    return (Path(given) if given else Path.home() / ".tacit") / "holdings"


def names(home: Path | None = None) -> list[str]:
    """All holdings, and those that were deleted although the witness knows them."""
    home = home_folder(home)
    if home.exists() and not home.is_dir():
        raise TacitError(f"{home} is no folder: holdings are in one.")
    if not home.is_dir():
        return []
    with _locked(home, fcntl.LOCK_SH):
        return _names(home, _read_witness(home))


# -- in words ----------------------------------------------------------------------------------------------------------


def account(holding: Holding) -> dict[str, Any]:
    """What was spent and what is left, as plain data.

    Shares of the budget add up. Epsilons do not, and most of a small one is the price of asking at all.
    """
    order, delta, most = holding.order, holding.delta, holding.divergence

    def amount(divergence: float) -> dict[str, float]:
        worth = accountant.converted(order, divergence, delta) if divergence > 0 else 0.0
        return {"divergence": divergence, "share": divergence / most, "epsilon": worth}

    states = [("reserved" if c.settled is None else "settled" if c.settled else "void") for c in holding.charges]
    return {
        "name": holding.name,
        "epsilon": holding.epsilon,
        "delta": delta,
        "unit": holding.entries[0].body["unit"],
        "neighbours": holding.entries[0].body["neighbours"],
        "order": order,
        "divergence": most,
        "closed": holding.closed,
        "used": amount(cost(order, holding.spent)),
        "left": amount(holding.left()),
        "runs": [
            {"number": c.number, "time": c.time, "run": c.run, "why": c.why, "party": c.party, "state": state}
            | amount(cost(order, c.spent))
            for c, state in zip(holding.charges, states, strict=True)
        ],
        "number": holding.number,
        "head": holding.head,
    }


def explain(holding: Holding) -> str:
    """The same in words."""
    told = account(holding)
    used, left = told["used"], told["left"]
    lines = [
        f"{holding.name}: epsilon {holding.epsilon:g} at delta {holding.delta:g}, for one triple more or less; "
        f"kept as a Renyi divergence of order {holding.order:g}.",
        f"Used: {_percent(used['share'])}. All that was reserved or released so far has epsilon {used['epsilon']:.3g}.",
        f"Left: {_percent(left['share'])}. A run that takes all of it has, by itself, epsilon {left['epsilon']:.3g}.",
    ]
    lines += [
        f"  {run['run']} (entry {run['number']}, {run['state']}): {_percent(run['share'])}, by itself epsilon "
        f"{run['epsilon']:.3g}" + (f"; {run['why']}" if run["why"] else "")
        for run in told["runs"]
    ]
    if holding.closed:
        lines.append("It is closed: nothing can be reserved any more.")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.001 else "less than 0.1%"


# -- before anything is spent ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way to train.

    signal: what a step's sum tells of a triple over all steps, against the noise: sqrt(steps) x rate / sigma.
    share: of the holding, or of a whole one with this epsilon; fits: there is as much left.
    """

    batch: int
    rate: float
    steps: int
    sigma: float
    epsilon: float
    share: float | None
    fits: bool | None
    signal: float


@dataclass(frozen=True)
class Plan:
    """What a training would cost, or what noise it needs; first as asked, then with other batches.

    once: the sigma of counts that are released one time, for the same epsilon: what a private training has to beat.
    """

    epsilon: float
    delta: float
    n: int
    epochs: float
    rows: tuple[Row, ...]
    once: float
    holding: str | None = None

    def json(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    *,
    n: int,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    sigma: float | None = None,
    holding: Holding | None = None,
) -> Plan:
    """What an epsilon buys: the noise that it asks for; or, given the noise, the epsilon that is spent.

    The measure is the one that a holding keeps, whose single order takes a little more noise than the tightest account
    of a run that is alone. Other batches are shown for as many epochs, since the batch is the lever: a larger one needs
    more noise in a step and far fewer steps.

    Parameters
    ----------
    n
        How many triples there are, as far as that is public: rounded or guessed, never counted for this.
    epochs, steps
        One of them.
    epsilon, delta
        Of this run; those of the holding where there is one.
    holding
        No more is taken than it has left.
    """
    if n < 1 or batch < 1:
        raise BadValue(f"a graph and a batch have at least 1 triple, not {n} and {batch}")
    if (epochs is None) == (steps is None):
        raise BadValue("say for how long: either epochs or steps")
    long = epochs if epochs is not None else (steps or 0) * min(batch, n) / n
    if not (long > 0 and long * n / batch < 1 << 48):
        shown = epochs if epochs is not None else steps
        raise BadValue(f"epochs or steps are above 0 and of a size that can be, not {shown:g}")
    if sigma is not None and not (sigma > 0 and math.isfinite(sigma)):
        raise BadValue(f"sigma is a number above 0, not {sigma}")
    delta = holding.delta if delta is None and holding is not None else delta
    if delta is None or not 0 < delta < 1:
        raise BadValue(f"delta is above 0 and below 1, not {delta}")
    if holding is not None and delta != holding.delta:
        raise BadValue(f"the delta of the holding {holding.name!r} is {holding.delta:g}, not {delta:g}")
    limits = holding.limits() if holding is not None else ()
    whole = holding.divergence if holding is not None else None
    if epsilon is not None:
        order, most = _room(epsilon, delta)
        limits, whole = (*limits, (order, most)), most if whole is None else whole
    elif holding is not None:
        epsilon = holding.epsilon
    target = None if epsilon is None else _Within(epsilon, delta, limits=limits)

    def way(size: int, count: int) -> Row:
        rate = size / n

        def release(noise: float) -> Spent:
            return (Segment(Sampled(rate, (noise,)), count),)

        if sigma is not None:
            noise = sigma
        elif target is not None:
            noise = accountant.noise_for(target, release)
        else:
            raise BadValue("say what it may cost (epsilon, or a holding), or how much noise there is (sigma)")
        made = release(noise)
        if sigma is None:
            worth = min(accountant.converted(order, cost(order, made), delta) for order, _ in limits)
        else:
            curve = accountant.curve(made, orders=WHOLE_ORDERS)
            worth = min(accountant.converted(o, r, delta) for o, r in zip(WHOLE_ORDERS, curve, strict=True))
        if not math.isfinite(worth):
            raise accountant.CannotAccount(f"no finite epsilon is known for sigma {noise:g}: there is too little noise")
        share = cost(limits[0][0], made) / whole if whole else None
        fits = all(cost(order, made) <= left for order, left in limits) if limits else None
        return Row(size, rate, count, noise, worth, share, fits, math.sqrt(count) * rate / noise)

    asked = way(size := min(batch, n), steps or max(1, math.ceil(long * n / size)))
    larger = sorted({min(n, batch * k) for k in (4, 16, 64)} | {n})
    rows = (asked, *(way(size, max(1, math.ceil(long * n / size))) for size in larger if size > asked.batch))
    goal = asked.epsilon if sigma is not None or epsilon is None else epsilon
    room = _Within(goal, delta, limits=limits if sigma is None else (_room(goal, delta),))
    once = accountant.noise_for(room, lambda s: [Segment(Gaussian(s))])
    return Plan(goal, delta, n, long, rows, once, None if holding is None else holding.name)


class _Within(accountant.Target):
    """What a holding asks: its limits, and nothing else, since they imply the epsilon."""

    def holds(self, more: Sequence[Segment]) -> bool:
        return all(cost(order, more) <= left for order, left in self.limits)


def _room(epsilon: float, delta: float) -> tuple[float, float]:
    """The order of a budget, at which normal noise has the most room, and the divergence that it allows."""
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise BadValue(f"epsilon is a number above 0, not {epsilon}")
    if not 0 < delta < 1:
        raise BadValue(f"delta is above 0 and below 1, not {delta}")
    order = max(WHOLE_ORDERS, key=lambda order: accountant.allowed(order, epsilon, delta) / order)
    if (divergence := accountant.allowed(order, epsilon, delta)) <= 0:
        raise BadValue(f"nothing can be released for epsilon {epsilon:g} at delta {delta:g}: one of them is too small")
    return order, divergence


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(home: Path, name: str, witness: _Witness) -> _Chain:
    """A holding's record, verified: every entry, and against what the witness has seen."""
    path, seen = home / name / ENTRIES, witness.heads.get(name, ())
    if not path.exists():
        raise _deleted(home, name) if seen else _unknown(home, name, _names(home, witness))
    lines, end = _lines(path)
    entries: list[Entry] = []
    for place, line in enumerate(lines, 1):
        entries.append(_entry(line, path, place, entries))
    if len(seen) > len(entries):
        raise _rolled_back(path, f"it ends with entry {len(entries) - 1}, and {HEADS} has seen entry {len(seen) - 1}")
    if not entries:
        raise BadInput(f"{path}: is empty.", hint=RESTORE)
    for entry, head in zip(entries, seen, strict=False):
        if entry.hash != head:
            raise _rolled_back(path, f"entry {entry.number} is another than {HEADS} has seen")
    if len(entries) > len(seen) + 1:
        raise BadInput(
            f"{home / HEADS}: has seen {len(seen)} of the {len(entries)} entries of {name!r}: it was rolled back.",
            hint=RESTORE,
        )
    chain = _replayed(entries, end, path)
    about = chain.about
    if about["name"] != name:
        raise BadInput(f"{path}: is the record of {excerpt(str(about['name']))}, not of {name!r}.", hint=RESTORE)
    _statements(home / name, chain.registered)
    return chain


RESTORE = "Restore the file from a copy that is as new as the last run; without it nothing more can be spent."


def _entry(line: bytes, path: Path, place: int, before: Sequence[Entry]) -> Entry:
    def damaged(found: str, expected: str) -> BadInput:
        problem = Problem(str(path), place, found, expected)
        return BadInput("The record of a holding was changed or damaged.", [problem], hint=RESTORE)

    content = _parsed(line)
    if content is None:
        raise damaged("a line that is no entry", "an entry as it was written")
    schema = content.get("schema")
    if schema not in (SCHEMA, RESUMED):
        if (match := re.fullmatch(r"tacit\.budget/([0-9]{1,6})", str(schema))) and int(match[1]) > 2:
            raise BadInput(
                f"{path}:{place}: was written as {schema}; this version of tacit reads up to {RESUMED}.",
                hint="A newer tacit reads it: pip install --upgrade tacit-kg",
            )
        raise damaged(f"the schema {excerpt(str(schema))}", SCHEMA)
    try:
        entry = Entry(**{key: value for key, value in content.items() if key != "schema"})
    except TypeError:
        raise damaged("an entry with other fields", "those of " + SCHEMA) from None
    if schema != entry.schema:
        raise damaged(f"the schema {excerpt(str(schema))}", entry.schema)
    if type(entry.number) is not int or entry.number != len(before):
        raise damaged(f"entry {excerpt(str(entry.number))}", f"entry {len(before)}")
    if entry.previous != (before[-1].hash if before else NOTHING):
        raise damaged("a link to another entry than the one before", "the hash of the one before")
    digest = entry.digest()
    if entry.hash != digest.hex():
        raise damaged("a hash of something else", "the hash of this entry")
    try:
        public = bytes.fromhex((before[0] if before else entry).body["public_key"])
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(entry.signature), digest)
    except (InvalidSignature, LookupError, TypeError, ValueError):
        raise damaged("a signature by another key", "one by the key that the holding was opened with") from None
    return entry


def _replayed(entries: Sequence[Entry], end: int, path: Path) -> _Chain:
    """What the entries come to. They are signed; one that makes no sense is refused all the same."""
    charges: dict[int, Charge] = {}
    closed, registered = False, ""
    for entry in entries:
        body = entry.body
        try:
            if (entry.kind == "open") != (entry.number == 0):
                raise ValueError("a holding is opened once, by its first entry")
            if entry.kind == "open":
                order, divergence = float(body["order"]), float(body["divergence"])
                if not 0 < divergence <= accountant.allowed(order, body["epsilon"], body["delta"]) * (1 + 1e-9):
                    raise ValueError("its divergence is not what its epsilon allows")
            elif entry.kind == "reserve":
                if closed:
                    raise ValueError("a reservation after the end")
                segments = joined(map(Segment.of, body["segments"]))
                party = body.get("party")
                charges[entry.number] = Charge(
                    entry.number, entry.time, body["run"], body["why"], party, segments, entry.hash
                )
            elif entry.kind == "resume":
                charge = charges[body["reservation"]]
                if charge.settled is not None or charge.token != body["previous"]:
                    raise ValueError("a run that goes on from where it is not")
                charges[charge.number] = replace(charge, token=str(body["token"]))
            elif entry.kind == "settle":
                charge, used = charges[body["reservation"]], joined(map(Segment.of, body["segments"]))
                if charge.settled is not None or _beyond(used, charge.reserved):
                    raise ValueError(_beyond(used, charge.reserved) or "a settlement of what is settled already")
                charges[charge.number] = replace(charge, settled=used)
            elif entry.kind == "close":
                closed = True
            else:
                raise ValueError(f"an entry of the kind {excerpt(str(entry.kind))}")
            registered = str(body.get("statements", registered))
        except (BadInput, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = Problem(
                str(path), entry.number + 1, f"{entry.kind}: {error}", "an entry that follows from the others"
            )
            raise BadInput("The record of a holding makes no sense.", [problem], hint=RESTORE) from None
    return _Chain(tuple(entries), end, tuple(charges.values()), closed, registered)


def _beyond(used: Spent, reserved: Spent) -> str | None:
    """What was used and not reserved; None: nothing."""
    had = {segment.event: segment.count for segment in reserved}
    for segment in used:
        if segment.count > had.get(segment.event, 0):
            return f"{segment.count:,} releases of {segment.event} were used, {had.get(segment.event, 0):,} reserved"
    return None


def _read_witness(home: Path) -> _Witness:
    path, heads = home / HEADS, dict[str, list[str]]()
    lines, end = _lines(path) if path.exists() else ([], 0)
    for place, line in enumerate(lines, 1):
        content = _parsed(line) or {}
        name, number, head = (content.get(key) for key in ("name", "number", "hash"))
        known = heads.setdefault(str(name), [])
        if set(content) != {"name", "number", "hash"} or number != len(known):
            problem = Problem(str(path), place, "another line", f"the next entry of {excerpt(str(name))}")
            raise BadInput("The record of all holdings was changed or damaged.", [problem], hint=RESTORE)
        known.append(str(head))
    return _Witness(heads, end)


def _seen(name: str, entries: Iterable[Entry]) -> bytes:
    """The witness's lines."""
    return b"".join(_canonical({"name": name, "number": e.number, "hash": e.hash}) + b"\n" for e in entries)


def _names(home: Path, witness: _Witness) -> list[str]:
    there = (item.parent.name for item in home.glob(f"*/{ENTRIES}") if not item.parent.name.startswith("."))
    return sorted({*there, *witness.heads})


def _lines(path: Path) -> tuple[list[bytes], int]:
    """The whole lines, and where they end: what comes after was being written when the writer was killed."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], end


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line that is exactly as `_canonical` writes it."""
    try:
        content = json.loads(line)
        return content if isinstance(content, dict) and _canonical(content) == line else None
    except (ValueError, RecursionError):
        return None


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name in (HEADS, SALT, LOCK):
        raise BadValue(
            f"a holding's name has up to 64 letters, digits, dots, dashes and underscores, and is none of {HEADS}, "
            f"{SALT} and {LOCK}; not {excerpt(name)}"
        )


def _unknown(home: Path, name: str, others: Sequence[str]) -> TacitError:
    there = f"There are: {', '.join(others)}." if others else "There is none yet."
    return TacitError(
        f"there is no holding {name!r} in {home}. {there} Open it with: tacit budget open {name} --epsilon 8 "
        "--delta 1e-6"
    )


def _deleted(home: Path, name: str) -> BadInput:
    return BadInput(f"{home / name}: was deleted, and {HEADS} has seen the holding {name!r}.", hint=RESTORE)


def _rolled_back(path: Path, how: str) -> BadInput:
    return BadInput(f"{path}: was rolled back: {how}.", hint=RESTORE)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- statements --------------------------------------------------------------------------------------------------------


def _hashes(graph: Graph, salt: bytes) -> Hashes:
    """Each statement once, sorted: keyed hashes of its names, of which the lengths are part."""
    entities, relations = (
        [len(name).to_bytes(4, "little") + name for name in map(str.encode, vocab.names)]
        for vocab in (graph.entities, graph.relations)
    )
    rows = graph.statements.triples.tolist()
    digests = (
        hashlib.blake2b(entities[h] + relations[r] + entities[t], digest_size=16, key=salt).digest() for h, r, t in rows
    )
    return np.unique(_of_bytes(b"".join(digests)))


def _of_bytes(data: bytes) -> Hashes:
    return np.frombuffer(data, "V16") if data else np.empty(0, "V16")


def _statements(folder: Path, registered: str) -> Hashes:
    """The statements that the last entry speaks of; they may not have come to their place yet."""
    for path in (folder / STATEMENTS, folder / COMING):
        if path.exists() and hashlib.sha256(data := path.read_bytes()).hexdigest() == registered:
            return _of_bytes(data)
    raise BadInput(f"{folder / STATEMENTS}: holds other statements than were registered.", hint=RESTORE)


def _promote(folder: Path, registered: str) -> None:
    """Put the statements that an entry speaks of in their place."""
    coming = folder / COMING
    if coming.exists() and hashlib.sha256(coming.read_bytes()).hexdigest() == registered:
        os.replace(coming, folder / STATEMENTS)
        sync_folder(folder)


def _check_overlap(home: Path, name: str, witness: _Witness, statements: Hashes, salt: bytes) -> None:
    """Refuse statements that belong to another holding, whose budget would be passed by; each of them is verified."""
    for other in _names(home, witness) if len(statements) else ():
        if other == name:
            continue
        chain = _read(home, other, witness)
        _check_salt(home, chain, salt)
        if common := int(np.isin(statements, _statements(home / other, chain.registered)).sum()):
            raise TacitError(
                f"{common:,} of these {len(statements):,} statements belong to the holding {other!r}: spend from that "
                "one. A statement has one budget."
            )


def _check_salt(home: Path, chain: _Chain, salt: bytes) -> None:
    if chain.about["salt"] != _commitment(salt):
        name = chain.about["name"]
        raise BadInput(f"{home / SALT}: is another than when the holding {name!r} was opened.", hint=RESTORE)


def _salt(home: Path, *, make: bool = False) -> bytes:
    """What the hashes are keyed with, the same for all holdings of a home; made with the first."""
    path = home / SALT
    if not path.exists() and make:
        draft = home / f".{SALT}.draft"
        _write_at(draft, 0, os.urandom(32))
        os.link(draft, path)  # whole, and never in place of another
        os.unlink(draft)
        sync_folder(home)
    salt = path.read_bytes() if path.exists() else b""
    if len(salt) != 32:
        raise BadInput(f"{path}: is missing or damaged, and statements cannot be compared without it.", hint=RESTORE)
    return salt


def _commitment(salt: bytes) -> str:
    return hashlib.sha256(b"tacit.budget salt" + salt).hexdigest()


def _key(folder: Path, chain: _Chain) -> Ed25519PrivateKey:
    try:
        key = Ed25519PrivateKey.from_private_bytes((folder / KEY).read_bytes())
    except (OSError, ValueError):
        raise BadInput(f"{folder / KEY}: cannot be read as a key.", hint=RESTORE) from None
    if key.public_key().public_bytes_raw().hex() != chain.about["public_key"]:
        raise BadInput(f"{folder / KEY}: is not the key that the holding was opened with.", hint=RESTORE)
    return key


# -- writing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(home: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Wait for the lock of all holdings of a home: they share a witness, and no two may take the same statements."""
    path = home / LOCK
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, how)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                yield
                return
        finally:
            os.close(lock)


def _write_at(path: Path, end: int, data: bytes) -> None:
    """Write to a file from `end` on, whatever stood there, and wait until it is on disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, end)
        os.lseek(file, end, os.SEEK_SET)
        while data:
            data = data[os.write(file, data) :]
        os.fsync(file)
    finally:
        os.close(file)
    if not end:
        sync_folder(path.parent)
