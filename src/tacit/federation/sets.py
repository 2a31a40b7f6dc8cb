"""Which names parties have between them, without showing a name: the mathematics of private set union and intersection.

A name becomes a point of ristretto255 (RFC 9496), a group of prime order in which the decisional Diffie-Hellman problem
is held to be hard: a list of points, all multiplied by one secret scalar, looks like a list of random points. Scalars
commute, and so parties that multiply each other's points meet at the same point exactly where they began from the same
name, and no single one of them can go that way alone.

- `Pseudonyms`: any number of parties turn their names into pseudonyms that are equal where the names are.
- `Sketch`: pseudonyms as numbers that can be summed up. The sum tells the union, and how many hold each; not who.
- `Intersection`: two parties, each of which may learn which of its names the other has.

Nothing here is sent anywhere. What goes out and comes in are bytes and arrays whose size follows from public bounds
alone. Everything from outside is looked at before it is used, and `Refused` if it is not what it should be.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import rbcl
from numpy.typing import NDArray

from tacit.draws import below, philox
from tacit.errors import BadValue, Refused, TacitError

# rbcl unpacks libsodium into a temporary file, loads it, and leaves it lying there. Once loaded it is not needed.
with suppress(AttributeError, OSError):
    if Path(rbcl._sodium._name).parent == Path(tempfile.gettempdir()):
        Path(rbcl._sodium._name).unlink()

POINT = 32
"""Bytes of a point, and of a scalar."""
PSEUDONYM = 16
AT_ONCE = 500 * POINT

# -- points ------------------------------------------------------------------------------------------------------------


def _hash(algorithm: str, use: bytes, domain: bytes) -> hashlib._Hash:
    """A hash that begins with what it is for, so that no two uses or domains ever hash the same bytes."""
    return hashlib.new(algorithm, b"tacit %d %b %d %b:" % (len(use), use, len(domain), domain))


def points_of(names: Sequence[str], domain: bytes) -> bytes:
    """The point of each name, one after the other: SHA-512, then the map of RFC 9496, section 4.3.4.

    A random oracle into the group: nobody knows how the points of two names, or of one name in two domains, relate.
    """
    begun = _hash("sha512", b"point", domain)
    points = bytearray()
    for name in names:
        hashed = begun.copy()
        hashed.update(name.encode("utf-8", "surrogatepass"))  # every string that Python can hold has bytes of its own
        points += rbcl.crypto_core_ristretto255_from_hash(hashed.digest())
    return bytes(points)


def random_points(count: int) -> bytes:
    """Points that nobody has a name for."""
    return b"".join(rbcl.crypto_core_ristretto255_random() for _ in range(count))


def random_scalar() -> bytes:
    """A secret scalar from the operating system, never zero."""
    return bytes(rbcl.crypto_core_ristretto255_scalar_random())


def inverse(scalar: bytes) -> bytes:
    """The scalar that undoes a multiplication by this one."""
    return bytes(rbcl.crypto_core_ristretto255_scalar_invert(scalar))


def multiplied(points: bytes, scalar: bytes) -> bytes:
    """Each point times the scalar, in constant time; bytes that are no point, and the identity, are refused.

    The identity is the one point that stays what it is under every scalar, and so would pass for anybody's.
    """
    if len(points) % POINT:
        raise Refused(f"points have {POINT} bytes each, and {len(points):,} bytes are no whole number of them")
    points = bytes(points)

    def some(begin: int) -> bytes:
        every = range(begin, min(begin + AT_ONCE, len(points)), POINT)
        return b"".join(rbcl.crypto_scalarmult_ristretto255(scalar, points[at : at + POINT]) for at in every)

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # the library lets others run meanwhile
            return b"".join(threads.map(some, range(0, len(points), AT_ONCE)))
    except RuntimeError:  # libsodium does not tell which
        raise Refused("32 bytes that are no point of ristretto255, or are its identity") from None


def _listed(names: Sequence[str], bound: int, domain: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """The points of the names and as many random ones as the bound leaves room for, shuffled; where each name's is.

    The same work is done for a dummy as for a name, so that the time it takes tells no more than the length does.
    """
    if len(names) > bound:
        raise TacitError(f"there are {len(names):,} names, and the bound that was agreed on is {bound:,}")
    if len(set(names)) < len(names):
        raise BadValue("a name is there twice, which its points would show")
    order = np.array(secrets.SystemRandom().sample(range(bound), bound), np.int64)
    points = np.empty((bound, POINT), np.uint8)
    points[order] = _rows(points_of(names, domain) + random_points(bound - len(names)))
    return points.tobytes(), order[: len(names)]


def _rows(points: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(points, np.uint8).reshape(-1, POINT)


def _times(points: bytes, bound: int, scalar: bytes) -> bytes:
    """Another's list times a scalar, if it has as many points as it should and no two the same, as honest ones do."""
    if len(points) != POINT * bound:
        raise Refused(f"a list of {len(points):,} bytes where the bound of {bound:,} points makes {POINT * bound:,}")
    results = multiplied(points, scalar)
    if len(np.unique(_rows(results).view(f"S{POINT}"))) < bound:
        raise Refused("a list that has a point twice")
    return results


# -- union -------------------------------------------------------------------------------------------------------------


class Pseudonyms:
    """One party's side of an oblivious pseudo-random function whose key is the product of all parties' keys.

    A party blinds the points of its names with a scalar of its own, fills up with random points to a public bound, and
    shuffles. The list visits every other party, in any order, each of which multiplies it by its key; back home, the
    party takes its blinding off and multiplies by its own key. What is left, H(name) times the product of all keys, is
    the same for all that have the name. Its hash is the pseudonym. Keys live as long as the object: another run has
    other pseudonyms.

    Model: semi-honest parties, of which all but one may collude; DDH in ristretto255; SHA-512 and SHA-256 as random
    oracles. A coalition that misses one key sees lists of points that look random, and cannot compute the pseudonym of
    a name that it did not send. Who sees pseudonyms learns which are equal, and nothing of the names.

    Cost: with n parties, n passes of 32 bytes x bound for each list, and (n + 1) x bound multiplications a party.

    A malicious party can put names on its list that it does not have, and then look for their pseudonyms among those
    of others: a dictionary attack of at most `bound` guesses, which is why the bound is public and should be small, and
    why `passed` is for one list of each other party and run. It can also make results wrong, by a wrong key on the list
    of another. That tells it no name; but where only sums over parties are shown, such a spoilt list is missing from
    them, which tells whether that party had what is on the malicious one's own list.

    Freedman, Ishai, Pinkas and Reingold: "Keyword search and oblivious pseudorandom functions", TCC 2005. The commuting
    keys are those of Meadows, "A more efficient cryptographic matchmaking protocol for use in the absence of a
    continuously available third party", IEEE S&P 1986, and of Huberman, Franklin and Hogg, "Enhancing privacy and trust
    in electronic communities", EC 1999.

    Parameters
    ----------
    names
        What this party has, each name once.
    bound
        How many names it may have at most, which all parties know.
    domain
        What the pseudonyms are for, the same at all parties: those of different domains have nothing in common.
    """

    def __init__(self, names: Sequence[str], bound: int, domain: bytes):
        self._points, self._where = _listed(names, bound, domain)
        self._bound, self._domain = bound, domain
        self._key, self._blinding = random_scalar(), random_scalar()

    def blinded(self) -> bytes:
        """The list that goes to the other parties, one after the other."""
        return multiplied(self._points, self._blinding)

    def passed(self, points: bytes, bound: int) -> bytes:
        """Another party's list with this party's key on it, in the same order; `bound` is the other's."""
        return _times(points, bound, self._key)

    def finished(self, points: bytes) -> NDArray[np.uint8]:
        """(names, 16) the pseudonyms, in the order of the names, from the own list when all others had it."""
        scalar = rbcl.crypto_core_ristretto255_scalar_mul(self._key, inverse(self._blinding))
        begun = _hash("sha256", b"pseudonym", self._domain)
        pseudonyms = np.empty((len(self._where), PSEUDONYM), np.uint8)
        for row, point in enumerate(_rows(_times(points, self._bound, scalar))[self._where]):
            hashed = begun.copy()
            hashed.update(point)
            pseudonyms[row] = np.frombuffer(hashed.digest()[:PSEUDONYM], np.uint8)
        return pseudonyms


class Sketch:
    """Sets of 16-byte keys as tables of numbers whose sum, modulo 2**32, tells the union and how many sets have each.

    An invertible Bloom lookup table (Goodrich and Mitzenmacher: "Invertible Bloom lookup tables", Allerton 2011). A key
    is added to four cells, one in each quarter of the table, found by a salted hash. A cell is 11 numbers: how often
    something was added to it, the key's 8 words of 16 bits, and 2 such words that check the key. A cell that has one
    key alone, however often, shows it: all its numbers are multiples of the count. That key is taken out of its other
    cells, which makes more cells show theirs, until nothing is left.

    The sum depends on nothing but how many parties have each key, and so whoever sees only the sum, as in secure
    aggregation, does not learn who has what. Words of 16 bits times up to 65,535 parties stay below 2**32; a cell of
    several keys may wrap, which does no harm, since taking keys out wraps back.

    A wrong key would have to pass a check of 32 bits, stand where its hash says, and leave all cells empty in the end:
    it is not to be expected. A party that does not follow the rules can make the sum unreadable.

    Salts are public integers below 2**63, the same at all parties.
    """

    HASHES = 4
    """Two keys that share all their cells cannot be told apart, which with 3 would be seen once in 10,000 times even
    with 50,000 keys."""
    WIDTH = 11
    MOST = 65_535
    """Parties."""

    @staticmethod
    def cells(bound: int) -> int:
        """How many cells make it rare, below once in 10,000 times, that up to `bound` distinct keys cannot be read.

        Two things go wrong. Two keys may share all four cells: of n keys some two do with probability below
        n (n - 1) / 2 / quarter**4, and the first term keeps that at 1 in 20,000; it decides up to some 680 keys. And
        large tables jam when there are more than 0.772 keys for a cell (Molloy: "Cores in random hypergraphs and
        Boolean formulas", 2005), give or take some square root of their number. In simulations of 1,000 to 50,000 keys
        half of the root that the second term has was enough; with 2 to 50 keys 37 to 57 of a million tables failed.
        """
        if bound < 0:
            raise BadValue(f"a bound is a number of keys, not {bound}")
        apart = 10 * math.sqrt(math.sqrt(bound * max(bound - 1, 0)))
        unjammed = 0.324 * bound + 1.5 * math.sqrt(bound)
        return Sketch.HASHES * max(1, math.ceil(apart), math.ceil(unjammed))

    @staticmethod
    def of(keys: NDArray[np.uint8], cells: int, salt: int) -> NDArray[np.uint32]:
        """(cells, 11) the table of one party's keys, (n, 16), each of which is there once."""
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != PSEUDONYM:
            raise BadValue(f"keys are rows of {PSEUDONYM} bytes")
        keys = np.ascontiguousarray(keys)
        if len(_distinct(keys)) < len(keys):
            raise BadValue("a key is there twice, which would count as two parties'")
        places, content = Sketch._added(keys, cells, salt)
        table = np.zeros((cells, Sketch.WIDTH), np.uint32)
        Sketch._apply(np.add, table, places, content)
        return table

    @staticmethod
    def read(total: NDArray[np.uint32], salt: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The keys, (n, 16) in order of their bytes, and how many parties have each, (n,), from a sum of tables."""
        if total.ndim != 2 or total.shape[1] != Sketch.WIDTH or len(total) == 0:
            raise BadValue(f"a sketch is a table of rows of {Sketch.WIDTH} numbers")
        table = np.array(total, np.uint32)
        keys, counts = [np.zeros((0, PSEUDONYM), np.uint8)], [np.zeros(0, np.int64)]
        look = np.arange(len(table))
        while len(look):  # this ends: each key that is found empties a cell, and counts only go down
            key, count = Sketch._alone(table, look, salt)
            places, content = Sketch._added(key, len(table), salt)
            Sketch._apply(np.subtract, table, places, content * count[:, None])
            keys.append(key)
            counts.append(count.astype(np.int64))
            look = np.unique(places)
        found = np.concatenate(keys)
        if table.any():
            raise TacitError(
                f"the sketch cannot be read: {len(found):,} keys came out, and something is left over. There are more "
                "distinct keys than its bound, or it is bad luck: try again with another salt"
            )
        order = _distinct(found)
        return found[order], np.concatenate(counts)[order]

    @staticmethod
    def _alone(
        table: NDArray[np.uint32], look: NDArray[np.int64], salt: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """The keys that are alone in one of the cells to look at, each once, and their counts."""
        look = look[(table[look, 0] >= 1) & (table[look, 0] <= Sketch.MOST)]
        words, rest = np.divmod(table[look, 1:], table[look, :1])
        whole = ~rest.any(1) & (words <= 0xFFFF).all(1)
        look, words = look[whole], words[whole]
        keys = words[:, :8].astype("<u2").view(np.uint8).reshape(-1, PSEUDONYM)
        places, content = Sketch._added(keys, len(table), salt)
        alone = (content[:, 9:] == words[:, 8:]).all(1) & (places == look).any(0)
        keys, look = keys[alone], look[alone]
        once = _distinct(keys)
        return keys[once], table[look[once], 0]

    @staticmethod
    def _added(keys: NDArray[np.uint8], cells: int, salt: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """(4, n) the cells of each key, and (n, 11) what one party adds to each of them.

        The hash is Philox, keyed by the salt, with the 16 bytes as its counter: a different one for the check.
        """
        if cells < Sketch.HASHES or cells % Sketch.HASHES:
            raise BadValue(f"a sketch has a multiple of {Sketch.HASHES} cells, not {cells}")
        if not 0 <= salt < 1 << 63:
            raise BadValue(f"a salt is an integer from 0 to 2**63 - 1, not {salt}")
        quarter, words = cells // Sketch.HASHES, keys.view("<u4").astype(np.int64)
        counter = (words[:, 0], words[:, 1], words[:, 2], words[:, 3])
        places, check = (philox(counter, (seed & 0xFFFFFFFF, seed >> 32)) for seed in (2 * salt, 2 * salt + 1))
        content = np.empty((len(keys), Sketch.WIDTH), np.uint32)
        content[:, 0] = 1
        content[:, 1:9] = keys.view("<u2")
        content[:, 9], content[:, 10] = check[0] & 0xFFFF, check[0] >> 16
        return np.stack([below(place, quarter) + at * quarter for at, place in enumerate(places)]), content

    @staticmethod
    def _apply(change: np.ufunc, table: NDArray[np.uint32], places: NDArray[np.int64], by: NDArray[np.uint32]) -> None:
        """Add, or subtract, each row of `by` at each of its cells; cells may be met more than once."""
        numbers = np.arange(Sketch.WIDTH)
        for place in places:
            change.at(table.reshape(-1), (place[:, None] * Sketch.WIDTH + numbers).ravel(), by.ravel())


def _distinct(keys: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where each different key stands first, in the order of their bytes."""
    return np.unique(keys.view(f"S{PSEUDONYM}")[:, 0], return_index=True)[1]


# -- intersection ------------------------------------------------------------------------------------------------------


class Intersection:
    """One side of a private set intersection of two parties, by Diffie and Hellman's trick.

    Each party multiplies the points of its names by a secret key, fills up with random points to its public bound,
    shuffles, and sends them (`blinded`). Each puts its key on what it got (`passed`). A point with both keys on it is
    the same for both exactly where the name is. Who gets its own list back, with both keys on it and in its own order,
    finds out which of its names the other has too (`finished`): a party that keeps the other's list to itself learns
    this alone.

    Model: semi-honest parties; DDH in ristretto255; SHA-512 as a random oracle. Beside the bounds, who finishes learns
    which of its names the other has, and who does not learns nothing.

    Cost: for the first to finish two passes, of 32 bytes x its own bound, and of 32 bytes x both bounds back; for both
    to finish one more, of 32 bytes x the other's bound. Each multiplies as many points as both bounds together.

    A malicious party can put names on its list that it does not have, at most as many as its bound, and can make the
    other's result wrong.

    Meadows: "A more efficient cryptographic matchmaking protocol for use in the absence of a continuously available
    third party", IEEE S&P 1986; Huberman, Franklin and Hogg: "Enhancing privacy and trust in electronic communities",
    EC 1999.

    Parameters
    ----------
    names
        What this party has, each name once.
    bound, others_bound
        How many names each party may have at most, which both know.
    domain
        What the intersection is for, the same at both parties.
    """

    def __init__(self, names: Sequence[str], bound: int, others_bound: int, domain: bytes):
        self._points, self._where = _listed(names, bound, domain)
        self._bound, self._others_bound = bound, others_bound
        self._key = random_scalar()

    def blinded(self) -> bytes:
        """The list that goes to the other."""
        return multiplied(self._points, self._key)

    def passed(self, points: bytes) -> bytes:
        """The other's list with both keys on it, in the same order: to compare with, and for the other to finish."""
        return _times(points, self._others_bound, self._key)

    def finished(self, own: bytes, others: bytes) -> NDArray[np.bool_]:
        """(names,) which of the names the other has too.

        `own`: this party's list, as the other `passed` it. `others`: the other's, as this one did.
        """
        for points, bound in ((own, self._bound), (others, self._others_bound)):
            if len(points) != POINT * bound:
                raise Refused(f"a list of {len(points):,} bytes where the bound makes {POINT * bound:,}")
        theirs = {point.tobytes() for point in _rows(others)}
        return np.array([point.tobytes() in theirs for point in _rows(own)[self._where]], bool)
