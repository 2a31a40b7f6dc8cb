"""Shares of a secret, of which so many tell it and one fewer tells nothing (Shamir, "How to share a secret", 1979).

Secrets are 32 bytes, numbers below 2**256; the field is that of the smallest prime above, so a share is 33 bytes. The
holder of number i has the polynomial's value at i + 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from tacit.errors import TacitError

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33
"""Bytes of a secret and of a share."""


def split(secret: bytes, threshold: int, holders: Sequence[int]) -> list[bytes]:
    """A share for each holder, in their order; any `threshold` of them tell the secret."""
    if len(secret) != SECRET:
        raise TacitError(f"a secret has {SECRET} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(holders) or len(set(holders)) != len(holders) or min(holders) < 0:
        raise TacitError(f"a threshold of {threshold} for {len(holders)} holders, who are to be different ones")
    polynomial = [int.from_bytes(secret, "little"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [value(polynomial, holder + 1).to_bytes(SHARE, "little") for holder in holders]


def value(polynomial: Sequence[int], at: int) -> int:
    """Of a polynomial, lowest coefficient first."""
    found = 0
    for coefficient in reversed(polynomial):
        found = (found * at + coefficient) % PRIME
    return found


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, by holders' shares. If there are more than needed all have to agree: a changed one is noticed."""
    if len(shares) < threshold:
        raise TacitError(f"{len(shares)} shares, and {threshold} are needed: nothing can be told from them")
    numbers = {}
    for holder, share in shares.items():
        numbers[holder] = int.from_bytes(share, "little")
        if len(share) != SHARE or numbers[holder] >= PRIME:
            raise TacitError(f"the share of {holder} is none: it has to be {SHARE} bytes of a number in the field")
    first = tuple(sorted(numbers)[:threshold])
    secret = _combined(numbers, first, 0)
    for holder in numbers.keys() - set(first):
        if _combined(numbers, first, holder + 1) != numbers[holder]:
            raise TacitError("shares that belong to different secrets: one of them was changed")
    if secret >> 8 * SECRET:
        raise TacitError("shares that make no secret: one of them was changed")
    return secret.to_bytes(SECRET, "little")


def _combined(numbers: Mapping[int, int], holders: tuple[int, ...], at: int) -> int:
    return sum(numbers[h] * w for h, w in zip(holders, _weights(holders, at), strict=True)) % PRIME


@lru_cache(maxsize=256)
def _weights(holders: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's weights: the polynomial's value at a place from its values at the holders' places."""
    found = []
    for one in holders:
        above = below = 1
        for other in holders:
            if other != one:
                above = above * (at - other - 1) % PRIME
                below = below * (one - other) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
