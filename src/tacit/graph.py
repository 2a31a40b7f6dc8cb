"""A knowledge graph: an immutable set of named triples in three splits.

A graph is kept in one canonical form whatever the order of its source: names are sorted by code point and numbered in
that order, triples are sorted by (head, relation, tail), and no triple stands twice in a split. So two files with the
same triples are the same graph, byte for byte, and nothing downstream (partition, batches, fingerprints) can depend on
the order of lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from operator import lt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from tacit.errors import BadInput, TacitError, excerpt

if TYPE_CHECKING:
    import pandas as pd

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
NO_GROUP = -1

FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates: a name free of them can stand in any file, and on any terminal, as it is."""


EMPTY = "an empty field"


def name_fault(name: str) -> str | None:
    """What keeps `name` from being the name of an entity, relation or group; None if nothing does."""
    if not name or name.isspace():
        return EMPTY if not name else "only blanks"
    if (match := FORBIDDEN.search(name)) is None:
        return None
    code = ord(match.group())
    return "bytes that are not UTF-8" if code >= 0xD800 else f"the control character U+{code:04X}"


class UnknownName(TacitError, KeyError):
    """A name that the vocabulary does not hold; the message offers the nearest that it does."""

    def __init__(self, name: str, known: Sequence[str]):
        near = (
            get_close_matches(name, known[:200_000], n=3)
            or [other for other in known[:200_000] if name.casefold() in other.casefold()][:3]
        )
        self.message = f"no such name: {excerpt(name)}." + (
            f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        )
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class Vocab(Sequence[str]):
    """Names in sorted order; the id of a name is its position.

    >>> vocab = Vocab(["drug", "disease"])
    >>> list(vocab), vocab.id("drug")
    (['disease', 'drug'], 1)
    """

    __slots__ = ("_ids", "names")

    def __init__(self, names: Iterable[str] = ()):
        self.names: tuple[str, ...] = tuple(names)
        if not all(map(lt, self.names, self.names[1:])):
            self.names = tuple(sorted(set(self.names)))
        self._ids: dict[str, int] | None = None
        if not all(self.names) or any(map(str.isspace, self.names)) or FORBIDDEN.search("".join(self.names)):
            name = next(filter(name_fault, self.names))
            raise BadInput(f"{excerpt(name)} cannot be a name: found {name_fault(name)}.")

    @classmethod
    def trusted(cls, names: Sequence[str]) -> Vocab:
        """Names known to be good, distinct and sorted, taken over without a look."""
        vocab = cls()
        vocab.names = tuple(names)
        return vocab

    def id(self, name: str) -> int:
        """The id of `name`; `UnknownName` with suggestions if there is none."""
        try:
            return self._index()[name]
        except KeyError:
            raise UnknownName(name, self.names) from None

    def _index(self) -> dict[str, int]:
        if self._ids is None:
            self._ids = {name: i for i, name in enumerate(self.names)}
        return self._ids

    def positions(self, other: Vocab) -> Ids:
        """For each of our names its id in `other`, or -1: how rows of two parties meet."""
        index = other._index()
        return np.fromiter((index.get(name, -1) for name in self.names), np.int32, len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[str]: ...
    def __getitem__(self, item: int | slice) -> str | Sequence[str]:
        return self.names[item]

    def __contains__(self, name: object) -> bool:
        return name in self._index()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocab) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Vocab({len(self)} names)"


@dataclass(frozen=True, eq=False)
class Split:
    """The statements of one split, row by row.

    Attributes
    ----------
    triples
        (n, 3) int32: head, relation, tail; sorted, without repeats.
    confidential
        (n,) bool: which statements the owner marked confidential. None: nothing is marked.
    group
        (n,) int32: the id of the group a statement belongs to (an address, an admission), or `NO_GROUP`.
        None: there are no groups.
    """

    triples: Ids
    confidential: Mask | None = None
    group: Ids | None = None

    def __post_init__(self) -> None:
        for array in (self.triples, self.confidential, self.group):
            if array is not None:
                array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.triples)

    def at(self, rows: npt.NDArray[Any]) -> Split:
        """Some of the statements, with their marks and groups: by positions in rising order, or by a mask."""
        marks, group = (None if array is None else array[rows] for array in (self.confidential, self.group))
        return Split(self.triples[rows], marks, group)

    def plus(self, more: npt.NDArray[Any]) -> Split:
        """With more statements, that were not there: confidential if anything is marked at all, and in no group."""
        triples = np.concatenate([self.triples, more]).astype(np.int32)
        order, marks, group = np.lexsort(triples.T[::-1]), self.confidential, self.group
        if marks is not None:
            marks = np.concatenate([marks, np.ones(len(more), bool)])[order]
        if group is not None:
            group = np.concatenate([group, np.full(len(more), NO_GROUP, np.int32)])[order]
        return Split(triples[order], marks, group)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and all(
            (a is None) == (b is None) and (a is None or np.array_equal(a, b))
            for a, b in zip(self._arrays(), other._arrays(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[Any, ...]:
        return self.triples, self.confidential, self.group


@dataclass(frozen=True, eq=False)
class Graph:
    """Triples with names, in three splits.

    Make one with `tacit.read_graph`, `Graph.from_triples` or `assemble`; these put it into canonical form.

    >>> graph = Graph.from_triples([("aspirin", "treats", "headache"), ("ibuprofen", "treats", "headache")])
    >>> len(graph.entities), len(graph.relations), len(graph.train)
    (3, 1, 2)
    >>> next(graph.named("train"))
    ('aspirin', 'treats', 'headache')
    """

    entities: Vocab
    relations: Vocab
    train: Split
    valid: Split
    test: Split
    groups: Vocab = field(default_factory=Vocab)
    prefixes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """RDF prefixes that names use, prefix -> IRI."""
    reading: Any = None
    """What reading the files found (`tacit.files.Reading`), or None; no part of the graph's identity."""

    @staticmethod
    def from_triples(
        train: Iterable[tuple[str, str, str]],
        valid: Iterable[tuple[str, str, str]] = (),
        test: Iterable[tuple[str, str, str]] = (),
    ) -> Graph:
        """A graph from triples of names; repeats within a split are kept once."""
        train, valid, test = list(train), list(valid), list(test)
        for triple in (*train, *valid, *test):
            if isinstance(triple, str) or len(triple) != 3 or not all(isinstance(name, str) for name in triple):
                raise BadInput(f"found {excerpt(repr(triple))}; expected three names: head, relation, tail.")
        seen: dict[str, int] = {}
        rows = {
            name: np.array([[seen.setdefault(x, len(seen)) for x in triple] for triple in split], np.int32).reshape(
                -1, 3
            )
            for name, split in zip(SPLITS, (train, valid, test), strict=True)
        }
        return assemble(list(seen), {name: Split(ids) for name, ids in rows.items()})[0]

    @staticmethod
    def from_pandas(
        frame: pd.DataFrame,
        *,
        head: str = "head",
        relation: str = "relation",
        tail: str = "tail",
        confidential: str | None = None,
        group: str | None = None,
        split: str | None = None,
    ) -> Graph:
        """A graph from a frame of pandas, a row for a statement; repeats within a split are kept once.

        Parameters
        ----------
        frame
            With names as text. Anything else (NaN, None, numbers) is refused, with its row: `frame.astype(str)` makes
            names of numbers, where that is meant.
        head, relation, tail
            The columns that have them.
        confidential
            The column that says what is confidential, by True and False; default: nothing is.
        group
            The column that names the group a statement belongs to, NaN or None for no group; default: there are none.
        split
            The column that says train, valid or test; default: all is train.

        >>> import pandas
        >>> Graph.from_pandas(pandas.DataFrame({"head": ["a", "b"], "relation": ["r", "r"], "tail": ["b", "c"]}))
        Graph(3 entities, 1 relations; train 2, valid 0, test 0)
        """
        from tacit.frames import read_frame

        return read_frame(
            frame, head=head, relation=relation, tail=tail, confidential=confidential, group=group, split=split
        )

    def to_pandas(self) -> pd.DataFrame:
        """A frame of pandas with a row for every statement: head, relation, tail, split.

        Where there are marks or groups also confidential and group. `from_pandas` makes the same graph of it again, but
        for names that no statement has, and RDF prefixes.
        """
        from tacit.frames import make_frame

        return make_frame(self)

    @property
    def splits(self) -> dict[SplitName, Split]:
        """train, valid and test, in this order."""
        return {"train": self.train, "valid": self.valid, "test": self.test}

    @cached_property
    def statements(self) -> Split:
        """All splits in one, in the order train, valid, test."""
        return concatenate(list(self.splits.values()))

    def named(self, split: SplitName) -> Iterator[tuple[str, str, str]]:
        """The triples of a split by name."""
        for h, r, t in self.splits[split].triples.tolist():
            yield self.entities[h], self.relations[r], self.entities[t]

    def keys(self, triples: Ids) -> npt.NDArray[Any]:
        """One integer per triple, in the order of the triples: equal keys, equal triples."""
        return triple_keys(triples, len(self.entities), len(self.relations))

    def carve(self, rows: Mapping[SplitName, npt.NDArray[np.integer[Any]]]) -> Graph:
        """The graph of some of our statements: for each split the rows of `statements` it gets.

        Its vocabulary is what occurs in those rows, so a party does not learn names it has no triple with.
        """
        pool, names = self.statements, [*self.entities, *self.relations, *self.groups]
        shift = np.array([0, len(self.entities), 0], np.int32)
        first_group = len(self.entities) + len(self.relations)
        splits = {}
        for split, index in rows.items():
            group = None
            if pool.group is not None:
                group = pool.group[index]
                group = np.where(group == NO_GROUP, NO_GROUP, group + first_group).astype(np.int32)
            mask = None if pool.confidential is None else pool.confidential[index]
            splits[split] = Split(pool.triples[index] + shift, mask, group)
        return assemble(names, splits, prefixes=self.prefixes, checked=True)[0]

    def marked(self, splits: Iterable[SplitName]) -> Graph:
        """Over the same names, and of some splits only the statements that are marked confidential."""
        kept = {}
        for name in splits:
            split = self.splits[name]
            marks = np.zeros(len(split), bool) if split.confidential is None else split.confidential
            kept[name] = Split(split.triples[marks], marks[marks], None if split.group is None else split.group[marks])
        return replace(self, **kept)  # type: ignore[arg-type]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of names, triples, marks and groups: the same for every file that holds the same graph."""
        digest = hashlib.sha256(b"tacit.graph/1")
        for vocab in (self.entities, self.relations, self.groups):
            digest.update(len(vocab).to_bytes(8, "little"))
            digest.update("\n".join(vocab.names).encode())
        for split in self.splits.values():
            digest.update(len(split).to_bytes(8, "little"))
            digest.update(split.triples.astype("<i4").tobytes())
            digest.update(b"-" if split.confidential is None else split.confidential.tobytes())
            digest.update(b"-" if split.group is None else split.group.astype("<i4").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        return f"Graph({len(self.entities):,} entities, {len(self.relations):,} relations; {sizes})"


def triple_keys(triples: npt.NDArray[Any], entities: int, relations: int) -> npt.NDArray[Any]:
    """One comparable value per triple: (head * relations + relation) * entities + tail where that fits into 62 bits.

    Where it does not, the bytes of the triple, most significant first: slower, but as good for `unique` and `isin`.
    """
    if _keys_fit(entities, relations):
        keys = triples[:, 0].astype(np.int64)
        keys *= relations
        keys += triples[:, 1]
        keys *= entities
        keys += triples[:, 2]
        return keys
    return np.ascontiguousarray(triples.astype(">i4")).view("V12").reshape(-1)


def _keys_fit(entities: int, relations: int) -> bool:
    return entities * entities * relations < 1 << 62


def concatenate(splits: Sequence[Split]) -> Split:
    """Several splits in one; a split without marks or groups counts as unmarked and ungrouped."""
    triples = np.concatenate([split.triples for split in splits])
    confidential, group = None, None
    if any(split.confidential is not None for split in splits):
        confidential = np.concatenate(
            [np.zeros(len(s), bool) if s.confidential is None else s.confidential for s in splits]
        )
    if any(split.group is not None for split in splits):
        group = np.concatenate([np.full(len(s), NO_GROUP, np.int32) if s.group is None else s.group for s in splits])
    return Split(triples, confidential, group)


def assemble(
    names: Sequence[str],
    splits: Mapping[SplitName, Split],
    *,
    rank: Ids | None = None,
    entities: Ids | None = None,
    relations: Ids | None = None,
    prefixes: Mapping[str, str] | None = None,
    checked: bool = False,
) -> tuple[Graph, dict[SplitName, int]]:
    """Put raw rows into canonical form; also say how many repeats each split had.

    Parameters
    ----------
    names
        Distinct names in any order; the ids in `splits` (of heads, relations, tails and groups) point here.
    splits
        Raw rows; a split left out is empty.
    rank
        Each name's position in sorted order, if the caller knows it already.
    entities, relations
        Positions in `names` of entities and relations to keep even if no triple has them.
    checked
        The names come from a graph or a reader that has looked at them.
    """
    if rank is None:
        rank = np.empty(len(names), np.int32)
        rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names), dtype=np.int32)
    occurring = np.zeros((3, len(names)), bool)
    for raw in splits.values():
        occurring[0][raw.triples[:, 0]] = occurring[0][raw.triples[:, 2]] = occurring[1][raw.triples[:, 1]] = True
        if raw.group is not None:
            occurring[2][raw.group[raw.group != NO_GROUP]] = True
    for kind, extra in enumerate((entities, relations)):
        if extra is not None:
            occurring[kind][extra] = True
    order = np.empty_like(rank)
    order[rank] = np.arange(len(rank), dtype=np.int32)
    make = Vocab.trusted if checked else Vocab
    vocabs = [make([names[i] for i in order[mask[order]].tolist()]) for mask in occurring]
    final = [(np.cumsum(mask[order], dtype=np.int32) - 1)[rank] for mask in occurring]  # raw id -> id in its vocabulary

    def canonical(raw: Split) -> Split:
        if raw.group is None and _keys_fit(len(vocabs[0]), len(vocabs[1])):
            return _canonical(raw, final[0], final[1], len(vocabs[0]), len(vocabs[1]))
        return _canonical_by_index(raw, final, vocabs)

    empty = Split(np.empty((0, 3), np.int32))
    done = {split: canonical(splits.get(split, empty)) for split in SPLITS}
    if any(split.confidential is not None for split in done.values()):
        done = _marked_alike(done, len(vocabs[0]), len(vocabs[1]))
    repeats = {split: len(splits.get(split, empty)) - len(done[split]) for split in SPLITS}
    graph = Graph(
        entities=vocabs[0],
        relations=vocabs[1],
        train=done["train"],
        valid=done["valid"],
        test=done["test"],
        groups=vocabs[2],
        prefixes=MappingProxyType(dict(prefixes or {})),
    )
    return graph, repeats


def _marked_alike(splits: Mapping[SplitName, Split], entities: int, relations: int) -> dict[SplitName, Split]:
    """A mark belongs to the statement, not to the row: what is confidential in one split is so in all of them."""
    whole = concatenate(list(splits.values()))
    keys = triple_keys(whole.triples, entities, relations)
    marks = np.isin(keys, keys[whole.confidential])
    cuts = np.cumsum([len(split) for split in splits.values()])[:-1]
    return {
        name: replace(split, confidential=mask if marks.any() else None)
        for (name, split), mask in zip(splits.items(), np.split(marks, cuts), strict=True)
    }


def _canonical(raw: Split, entity: Ids, relation: Ids, entities: int, relations: int) -> Split:
    """Sorted rows, each triple once: the keys are sorted, and the triples read back off them.

    Three times as fast as sorting rows by index, for a million triples, and in half the memory. A mark travels as the
    lowest bit of the key, confidential first, so that the first of equal triples has the stricter one.
    """
    keys = (entity.astype(np.int64) * (relations * entities))[raw.triples[:, 0]]
    keys += (relation.astype(np.int64) * entities)[raw.triples[:, 1]]
    keys += entity[raw.triples[:, 2]]
    marks = None
    if raw.confidential is not None:
        keys <<= 1
        keys |= ~raw.confidential
    keys = _sorted(keys)
    if raw.confidential is not None:
        marks = (keys & 1) == 0
        keys >>= 1
    if not (first := _first_of_run(keys)).all():
        keys, marks = keys[first], None if marks is None else marks[first]
    out = np.empty((len(keys), 3), np.int32)
    rest = keys // max(entities, 1)
    out[:, 2] = keys - rest * entities
    out[:, 0] = rest // max(relations, 1)
    out[:, 1] = rest - out[:, 0] * np.int64(relations)
    return Split(out, marks)


def _sorted(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sort in place; large arrays in two halves by two threads, then merged: nearly twice as fast."""
    if len(keys) > 1 << 16:
        half = len(keys) // 2
        with ThreadPoolExecutor(2) as executor:
            list(executor.map(np.ndarray.sort, (keys[:half], keys[half:])))
    keys.sort(kind="stable")
    return keys


def _canonical_by_index(raw: Split, final: Sequence[Ids], vocabs: Sequence[Vocab]) -> Split:
    """The same by sorting an index: for rows with groups, and where keys do not fit."""
    entities, relations, groups = vocabs
    triples = np.stack([final[kind][raw.triples[:, column]] for column, kind in enumerate((0, 1, 0))], 1)
    keys = triple_keys(triples, len(entities), len(relations))
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(_first_of_run(keys[order]))
    triples = triples[order[first]]
    confidential = None if raw.confidential is None else np.logical_or.reduceat(raw.confidential[order], first)
    group = None
    if raw.group is not None and len(groups):
        ids = np.where(raw.group == NO_GROUP, NO_GROUP, final[2][raw.group])[order]
        group, other = np.minimum.reduceat(ids, first), np.maximum.reduceat(ids, first)
        if (clash := np.flatnonzero(group != other)).size:
            h, r, t = triples[clash[0]].tolist()
            one, two = (groups[i] if i != NO_GROUP else "no group" for i in (group[clash[0]], other[clash[0]]))
            raise BadInput(
                f"{clash.size:,} statements are listed more than once, in different groups.",
                hint=f"({entities[h]}, {relations[r]}, {entities[t]}) is in {one!r} and in {two!r}: list it once.",
            )
    return Split(triples, confidential, group)


def _first_of_run(keys: npt.NDArray[Any]) -> Mask:
    """Which of the sorted keys differ from the one before."""
    return np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]
