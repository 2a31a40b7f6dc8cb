"""Secure sums: plain sums, whoever drops out, told to nobody who should not know; with a server that lies."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from tacit.draws import chacha
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation import shamir
from tacit.federation.keys import Identity, Roster
from tacit.federation.messages import SERVER, Inbox, Message
from tacit.federation.secure import (
    Agreement,
    FixedPoint,
    Member,
    SumFailed,
    Summing,
    Terms,
    _derived,
    _pair_mask,
    least_threshold,
    mask,
    usual_threshold,
)

MOST = 12
NAMES = tuple(f"party-{i:02d}" for i in range(MOST))
KEEPER = Identity.new("keeper")
IDENTITIES = [Identity.new(name) for name in NAMES]
ROSTER = Roster.begin(KEEPER)
for identity in IDENTITIES:
    ROSTER = ROSTER.enrol(KEEPER, identity.name, identity.public)
PHASES = ("keys", "shares", "masked", "signed", "opened")


class Table:
    """Members and a server who talk in encoded bytes; at each phase some members' messages are lost."""

    def __init__(self, members, *, sums=2, threshold=None):
        self.terms = Terms(NAMES, len(members), threshold, sums)
        self.members = {i: Member(i, IDENTITIES[i], ROSTER, self.terms) for i in members}
        self.server, self.sent, self.here = Summing(self.terms), [], set(members)

    def inbox(self, kind, phase, senders, messages):
        box = Inbox(kind, "relation", 1, phase, SERVER, dict.fromkeys(senders, 0))
        for message in messages:
            self.sent.append(message)
            if message.sender in self.here:
                box.take(message.encode())
        return box

    def tell(self, messages):
        """What each member hears, who has not dropped out."""
        self.sent += messages
        return {m.receiver: Message.decode(m.encode()) for m in messages if m.receiver in self.here}

    def agree(self, lost=frozenset(), late=frozenset()):
        everyone = sorted(self.members)
        self.here -= lost
        heard = self.tell(
            self.server.keys(self.inbox("keys", 1, everyone, [m.keys(1, 1) for m in self.members.values()]))
        )
        sent = [self.members[i].shares(told, 2) for i, told in heard.items()]
        self.here -= late
        for i, told in self.tell(self.server.shares(self.inbox("shares", 2, heard, sent))).items():
            self.members[i].keep(told)

    def sum(self, vectors, lost=frozenset(), late=frozenset(), last=frozenset()):
        count = len(next(iter(vectors.values())))
        alive = [i for i in self.server.members if i in self.here]
        sent = [self.members[i].masked(vectors[i], 3, 1) for i in alive]
        self.here -= lost
        heard = self.tell(self.server.masked(self.inbox("masked", 3, self.server.members, sent), count))
        sent = [self.members[i].signed(told, 4) for i, told in heard.items()]
        self.here -= late
        heard = self.tell(self.server.signed(self.inbox("signed", 4, self.server.heard, sent)))
        sent = [self.members[i].opened(told, 5) for i, told in heard.items()]
        self.here -= last
        return self.server.opened(self.inbox("opened", 5, heard, sent))


def vectors(rng, members, count):
    return {i: rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32) for i in members}


def plain(all_vectors, who):
    return np.sum([all_vectors[i].astype(np.uint64) for i in who], axis=0).astype(np.uint32)


# -- the sum -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_the_sum_is_that_of_all_who_were_heard_or_it_fails(data):
    size = data.draw(st.integers(2, MOST), label="parties")
    members = sorted(data.draw(st.sets(st.integers(0, MOST - 1), min_size=size, max_size=size)))
    needed = data.draw(st.sampled_from([least_threshold(size), usual_threshold(size)]), label="threshold")
    drops = [data.draw(st.sets(st.sampled_from(members), max_size=max(1, size // 3)), label=phase) for phase in PHASES]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    given_vectors = vectors(rng, members, int(rng.integers(0, 9)))
    table = Table(members, threshold=needed)
    gone: set[int] = set()
    left = []
    for lost in drops:
        gone |= lost
        left.append(size - len(gone))
    heard = [i for i in members if not any(i in lost for lost in drops[:3])]
    fails = min(left) < needed
    try:
        table.agree(drops[0], drops[1])
        found = table.sum(given_vectors, *drops[2:])
    except SumFailed:
        assert fails
        return
    assert not fails
    assert np.array_equal(found, plain(given_vectors, heard))


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_numbers_come_within_half_a_step_of_each(parties, seed):
    rng = np.random.default_rng(seed)
    fixed = FixedPoint(8.0, parties)
    numbers = rng.uniform(-9, 9, (parties, 20))
    encoded = [fixed.encode(row) for row in numbers]
    total = fixed.decode(np.sum([words.astype(np.uint64) for words, _ in encoded], axis=0).astype(np.uint32))
    assert np.abs(total - np.clip(numbers, -8, 8).sum(0)).max() <= parties * fixed.step / 2
    assert [beyond for _, beyond in encoded] == [(np.abs(row) > 8).sum() for row in numbers]
    assert parties * 8.0 / fixed.step < 2**31


def test_all_parties_at_the_limit_fit():
    for parties in (1, 2, 3, 7, 100, 1000):
        fixed = FixedPoint(64.0, parties)
        for sign in (-1, 1):
            words, _ = fixed.encode(np.array([sign * 64.0]))
            total = fixed.decode((words.astype(np.uint64) * parties).astype(np.uint32))
            assert total == sign * 64.0 * parties


def test_what_cannot_be_added_up_is_said():
    with pytest.raises(TacitError, match="not finite"):
        FixedPoint(1.0, 2).encode(np.array([np.nan]))
    with pytest.raises(BadValue, match=r"smaller federation\.range"):
        FixedPoint(1e9, 5)
    with pytest.raises(BadValue, match="above 0"):
        FixedPoint(0.0, 5)


def test_several_sums_of_one_agreement_and_members_that_leave_between():
    rng = np.random.default_rng(3)
    table = Table(range(6), sums=4, threshold=4)
    table.agree()
    one, two, three = (vectors(rng, range(6), 5) for _ in range(3))
    assert np.array_equal(table.sum(one), plain(one, range(6)))
    assert np.array_equal(table.sum(two, lost={2}), plain(two, [0, 1, 3, 4, 5]))
    assert not table.members[0].ready(1), "someone is gone: a new agreement is due"
    assert not table.server.ready(1, range(6))
    assert np.array_equal(table.sum(three, lost={5}), plain(three, [0, 1, 3, 4]))
    with pytest.raises(SumFailed, match="3 of 6"):
        table.sum(vectors(rng, range(6), 5), lost={1})


# -- known answers -----------------------------------------------------------------------------------------------------


def test_x25519_is_that_of_rfc_7748():
    """Section 6.1."""
    alice, bob = (
        X25519PrivateKey.from_private_bytes(bytes.fromhex(text))
        for text in (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        )
    )
    theirs = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    assert bob.public_key().public_bytes_raw() == theirs
    shared = alice.exchange(X25519PublicKey.from_public_bytes(theirs))
    assert shared.hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def test_hkdf_is_that_of_rfc_5869():
    """Test case 1, and the definition."""
    secret, salt, info = bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA))
    found = HKDF(hashes.SHA256(), 42, salt, info).derive(secret)
    assert found.hex() == ("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")
    whole, block = b"", b""
    middle = hmac.digest(salt, secret, hashlib.sha256)
    for number in (1, 2):
        block = hmac.digest(middle, block + info + bytes([number]), hashlib.sha256)
        whole += block
    assert whole[:42] == found


def test_masks_are_chacha20():
    """RFC 8439, appendix A.1, vector 1; and our own ChaCha20 under any key."""
    assert mask(bytes(32), 16).tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    key = np.random.default_rng(1).bytes(32)
    zero = np.zeros(3, np.int64)
    expected = np.stack(chacha((np.arange(3), zero, zero, zero), tuple(np.frombuffer(key, "<u4").tolist())), 1)
    assert mask(key, 41).tolist() == expected.reshape(-1)[:41].tolist()


def test_shares_are_values_of_a_polynomial():
    assert shamir.value([42, 7, 3], 5) == 42 + 7 * 5 + 3 * 25
    assert shamir.value([1, shamir.PRIME - 1], 2) == shamir.PRIME - 1
    # 42 + 7x + 3x^2 at 1, 2 and 4.
    shares = {holder: number.to_bytes(33, "little") for holder, number in ((0, 52), (1, 68), (3, 118))}
    assert shamir.join(shares, 3) == (42).to_bytes(32, "little")


@given(st.binary(min_size=32, max_size=32), st.data())
def test_enough_shares_tell_and_fewer_do_not(secret, data):
    holders = sorted(data.draw(st.sets(st.integers(0, 200), min_size=1, max_size=9)))
    threshold = data.draw(st.integers(1, len(holders)))
    shares = dict(zip(holders, shamir.split(secret, threshold, holders), strict=True))
    chosen = data.draw(st.lists(st.sampled_from(holders), unique=True, min_size=1))
    some = {holder: shares[holder] for holder in chosen}
    if len(some) < threshold:
        with pytest.raises(TacitError, match="are needed"):
            shamir.join(some, threshold)
        return
    assert shamir.join(some, threshold) == secret
    if len(some) > threshold:
        changed = dict(some)
        who = data.draw(st.sampled_from(chosen))
        changed[who] = ((int.from_bytes(some[who], "little") + 1) % shamir.PRIME).to_bytes(33, "little")
        with pytest.raises(TacitError, match="changed"):
            shamir.join(changed, threshold)


def test_one_share_fewer_fits_every_secret():
    """Whatever the secret was, some last share would make it: so the others tell nothing."""
    shares = dict(zip(range(3), shamir.split(bytes(range(32)), 3, range(3)), strict=True))
    for other in (bytes(32), bytes([255] * 32)):
        weights = shamir._weights((0, 1, 2), 0)
        known = sum(int.from_bytes(shares[i], "little") * weights[i] for i in (0, 1))
        last = (int.from_bytes(other, "little") - known) * pow(weights[2], -1, shamir.PRIME) % shamir.PRIME
        assert shamir.join({**shares, 2: last.to_bytes(33, "little")}, 3) == other


# -- masks -------------------------------------------------------------------------------------------------------------


def test_no_mask_is_used_twice():
    """Zeros under masks, of all members, in sums of one agreement and of the next."""
    table, seen = Table(range(4), sums=3), set()
    for _ in range(2):
        table.agree()
        for _ in range(3):
            before = len(table.sent)
            assert not table.sum({i: np.zeros(4, np.uint32) for i in range(4)}).any()
            seen |= {m.arrays["words"].numpy().tobytes() for m in table.sent[before:] if m.kind == "masked"}
    assert len(seen) == 2 * 3 * 4
    # Nor do two of them differ by a mask that stands elsewhere.
    words = [np.frombuffer(x, np.uint32) for x in seen]
    apart = {(a - b).tobytes() for i, a in enumerate(words) for b in words[:i]}
    assert len(apart) == len(words) * (len(words) - 1) // 2


def test_what_the_server_sees_is_the_same_for_inputs_with_the_same_sum():
    """Two members' masked words, in 8 x 8 cells, for two inputs of one sum: each as even as chance has it."""
    sums = 640
    for numbers in ((5, 0, 2**31), (2**31, 5, 0)):
        table = Table(range(3), sums=sums, threshold=3)
        table.agree()
        cells = np.zeros((8, 8))
        for _ in range(sums):
            sent = {i: table.members[i].masked(np.array([numbers[i]], np.uint32), 3, 1) for i in range(3)}
            for member in table.members.values():
                member.heard = ()  # the next sum
            one, two = (int(sent[i].arrays["words"].numpy()[0]) >> 29 for i in (0, 1))
            cells[one, two] += 1
        even = sums / 64
        assert ((cells - even) ** 2 / even).sum() < 140, "chi squared, 63 degrees: one in 10 million is above"


# -- a server that lies ------------------------------------------------------------------------------------------------


def at_signing(parties=5, threshold=4):
    """A table whose members have all sent masked numbers, and what the server would tell them."""
    table = Table(range(parties), threshold=threshold)
    table.agree()
    numbers = vectors(np.random.default_rng(0), range(parties), 3)
    sent = [table.members[i].masked(numbers[i], 3, 1) for i in range(parties)]
    honest = table.server.masked(table.inbox("masked", 3, range(parties), sent), 3)
    return table, numbers, honest


def heard_as(message, members):
    arrays = {"members": torch.tensor(members, dtype=torch.int64)}
    return Message("heard", message.round, message.phase, SERVER, message.receiver, message.says, arrays)


def test_different_lists_to_different_members_open_nothing():
    """The server wants both secrets of member 4: some are told that it was heard, others that it was not."""
    table, _, honest = at_signing()
    told = [heard_as(m, [0, 1, 2, 3]) if m.receiver < 2 else m for m in honest]
    signatures = [table.members[m.receiver].signed(m, 4) for m in told]
    answers = table.server.signed(table.inbox("signed", 4, range(5), signatures))
    for answer in answers:
        with pytest.raises(Refused, match="signature"):
            table.members[answer.receiver].opened(answer, 5)


def test_a_member_that_was_heard_and_is_said_to_have_dropped_out_stays_hidden():
    """All others open its key for masks; its own mask stays on, and nobody opens that as well."""
    table, numbers, honest = at_signing()
    others = [0, 1, 2, 3]
    with pytest.raises(Refused, match="without this member"):
        table.members[4].signed(heard_as(honest[4], others), 4)
    signatures = [table.members[i].signed(heard_as(honest[i], others), 4) for i in others]
    agreed = table.server.signed(table.inbox("signed", 4, others, signatures))
    opened = [table.members[m.receiver].opened(m, 5) for m in agreed]
    masked = next(m for m in table.sent if m.kind == "masked" and m.sender == 4).arrays["words"].numpy()
    found, seeds = {}, {}
    for message in opened:
        for member, share in zip(message.arrays["members"].tolist(), message.arrays["shares"].numpy(), strict=True):
            (found if member == 4 else seeds).setdefault(member, {})[message.sender] = share.tobytes()
    key = shamir.join(found[4], 4)
    assert key == table.members[4]._masking[0].private_bytes_raw(), "the server has its key for masks"
    # What is left of its numbers is under its own mask: without pair masks it is not the numbers.
    bare, private = masked.copy(), X25519PrivateKey.from_private_bytes(key)
    for other in others:
        theirs = table.server.agreement.public[other, 1].tobytes()
        bare = bare + mask(_pair_mask(private, theirs, table.server.agreement.session, 0, (4, other)), 3)
    assert not np.array_equal(bare, numbers[4])
    own = mask(_derived(table.members[4]._seeds[0], table.server.agreement.session, b"secure-own", 0, 4), 3)
    assert np.array_equal(bare - own, numbers[4]), "the test took off the right masks"
    for member in others:  # and no second list of this sum is signed, no second share opened
        with pytest.raises(Refused, match="second list"):
            table.members[member].signed(honest[member], 4)
        with pytest.raises((Refused, SumFailed)):
            table.members[member].opened(agreed[member], 5)


def test_replayed_phases_are_refused():
    table, _, honest = at_signing()
    table.members[0].signed(honest[0], 4)
    with pytest.raises(Refused, match="second list"):
        table.members[0].signed(honest[0], 4)
    old = Table(range(5), threshold=4)
    stale = [m.keys(1, 1) for m in old.members.values()]
    fresh = Table(range(5), threshold=4)
    for member in fresh.members.values():
        member.keys(2, 1)
    box = Inbox("keys", "relation", 1, 1, SERVER, dict.fromkeys(range(5), 0))
    for message in stale:
        box.take(message)
    for told in fresh.server.keys(box):
        with pytest.raises(Refused):
            fresh.members[told.receiver].shares(told, 2)


def test_keys_that_the_server_puts_in_place_are_refused():
    table = Table(range(3))
    sent = [m.keys(1, 1) for m in table.members.values()]
    own = X25519PrivateKey.generate().public_key().public_bytes_raw()
    public = sent[2].arrays["public"].clone()
    public[1] = torch.tensor(list(own), dtype=torch.uint8)
    sent[2] = Message("keys", 1, 1, 2, SERVER, sent[2].says, {**sent[2].arrays, "public": public})
    for told in table.server.keys(table.inbox("keys", 1, range(3), sent)):
        with pytest.raises(Refused, match="signature"):
            table.members[told.receiver].shares(told, 2)


def test_different_members_to_different_members_seal_nothing_that_opens():
    """A server that shows members different sets of members gives them different agreements."""
    table = Table(range(5), threshold=3)
    told = table.server.keys(table.inbox("keys", 1, range(5), [m.keys(1, 1) for m in table.members.values()]))
    arrays = told[0].arrays
    each = 1 + table.terms.sums
    fewer = {
        "members": arrays["members"][:4],
        "public": arrays["public"][: 4 * each],
        "signatures": arrays["signatures"][:4],
    }
    sent = []
    for message in told:
        shown = (
            message
            if message.receiver >= 2
            else Message("members", 1, 1, SERVER, message.receiver, message.says, fewer)
        )
        sent.append(table.members[message.receiver].shares(shown, 2))
    wide = [m if m.sender >= 2 else _widened(m) for m in sent]
    for answer in table.server.shares(table.inbox("shares", 2, range(5), wide)):
        with pytest.raises((Refused, SumFailed)):
            table.members[answer.receiver].keep(answer)


def _widened(message):
    """Sealed shares for four members, as if they were for five."""
    sealed = torch.cat([message.arrays["sealed"], message.arrays["sealed"][:1]])
    arrays = {"members": torch.arange(5), "sealed": sealed}
    return Message("shares", message.round, message.phase, message.sender, SERVER, message.says, arrays)


def test_sealed_shares_for_another_member_do_not_open():
    table = Table(range(3))
    told = table.server.keys(table.inbox("keys", 1, range(3), [m.keys(1, 1) for m in table.members.values()]))
    sent = [table.members[m.receiver].shares(m, 2) for m in told]
    answers = table.server.shares(table.inbox("shares", 2, range(3), sent))
    swapped = Message("shares", 1, 2, SERVER, 1, answers[0].says, answers[0].arrays)
    with pytest.raises(Refused, match="not sealed for this member"):
        table.members[1].keep(swapped)


def test_a_revoked_member_is_refused():
    roster = ROSTER.revoke(KEEPER, NAMES[1])
    table = Table(range(3))
    for member in table.members.values():
        member.roster = roster
    for told in table.server.keys(table.inbox("keys", 1, range(3), [m.keys(1, 1) for m in table.members.values()])):
        with pytest.raises(Refused, match="revoked"):
            table.members[told.receiver].shares(told, 2)


@pytest.mark.parametrize(("members", "threshold"), [(5, 2), (4, 2), (3, 4)])
def test_a_threshold_that_does_not_protect_is_refused(members, threshold):
    with pytest.raises(BadValue, match="threshold"):
        Table(range(members), threshold=threshold)


def test_a_sum_of_one_is_refused():
    with pytest.raises(BadValue, match="sum of one"):
        Table(range(1))


def test_a_server_that_names_few_members_gets_no_sum():
    """With one of five that works with it, two members would tell it the other's numbers."""
    table = Table(range(5))
    sent = [m.keys(1, 1) for m in table.members.values()]
    told = table.server.keys(table.inbox("keys", 1, range(5), sent))
    each, arrays = 1 + table.terms.sums, told[0].arrays
    few = {
        "members": arrays["members"][[0, 4]],
        "public": torch.cat([arrays["public"][:each], arrays["public"][4 * each :]]),
        "signatures": arrays["signatures"][[0, 4]],
    }
    with pytest.raises(SumFailed, match="2 members are named, and 4 are needed"):
        table.members[0].shares(Message("members", 1, 1, SERVER, 0, told[0].says, few), 2)


def test_members_that_were_told_different_things_open_nothing():
    table, _, honest = at_signing()
    table.members[3].told = bytes([1] * 32)
    signatures = [table.members[m.receiver].signed(m, 4) for m in honest]
    for answer in table.server.signed(table.inbox("signed", 4, range(5), signatures)):
        with pytest.raises(Refused, match="signature"):
            table.members[answer.receiver].opened(answer, 5)


def test_no_list_is_signed_before_there_are_numbers():
    table = Table(range(3))
    table.agree()
    arrays = {"members": torch.arange(3)}
    with pytest.raises(Refused, match="not begun"):
        table.members[0].signed(Message("heard", 1, 3, SERVER, 0, {"part": "relation"}, arrays), 4)


def test_an_agreement_is_named_by_its_members_and_keys():
    public = np.zeros((3, 2, 32), np.uint8)
    names = {
        Agreement((0, 1, 2), public).session,
        Agreement((0, 1, 3), public).session,
        Agreement((0, 1, 2), public + 1).session,
    }
    assert len(names) == 3
