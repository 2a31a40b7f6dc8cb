"""Keys and rosters: whoever is unknown, revoked, rotated away or forged is refused, whatever is done to the files."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tacit.cli import app
from tacit.errors import BadValue, Refused, TacitError
from tacit.federation import keys
from tacit.federation.keys import (
    Identity,
    Locked,
    Member,
    Public,
    Roster,
    Version,
    check_fingerprint,
    fingerprint,
    make,
    renew,
    verify,
)

KEEPER, NORTH, SOUTH, OTHER = (Identity.new(name) for name in ("keeper", "north", "south", "other"))
SMALL = Roster.begin(KEEPER).enrol(KEEPER, "north", NORTH.public).enrol(KEEPER, "south", SOUTH.public)
NEWER = Identity.new("north")
ALL = SMALL.rotate(KEEPER, "north", NEWER.public, NORTH.sign("rotate", NEWER.public)).revoke(KEEPER, "south")
"""North has its second key, south none any more."""


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
)
def test_signatures_are_those_of_rfc_8032(secret, public, message, signature):
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    assert Identity("north", key).public.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert Identity("north", key).sign("x", b"y") == key.sign(b"tacit/x\0y")
    Roster.begin(KEEPER).enrol(KEEPER, "north", bytes.fromhex(public))  # and is taken for a key


@given(st.binary(max_size=50), st.text(min_size=1, max_size=9).filter(lambda word: "\0" not in word), st.data())
def test_a_signature_holds_for_its_key_purpose_and_content_alone(content, purpose, data):
    try:
        purpose.encode()
    except UnicodeEncodeError:
        return
    signature = NORTH.sign(purpose, content)
    assert len(signature) == 64
    verify(NORTH.public, purpose, content, signature)
    place = data.draw(st.integers(0, 511))
    flipped = bytearray(signature)
    flipped[place // 8] ^= 1 << place % 8
    for wrong in (
        (SOUTH.public, purpose, content, signature),
        (NORTH.public, purpose + "x", content, signature),
        (NORTH.public, purpose, content + b"x", signature),
        (NORTH.public, purpose, content, bytes(flipped)),
        (NORTH.public, purpose, content, signature[:-1]),
        (NORTH.public, purpose, content, signature + b"x"),
        (NORTH.public[:-1], purpose, content, signature),
        (NORTH.public, purpose, content, signature.hex()),
    ):
        with pytest.raises(Refused):
            verify(*wrong)


def test_where_a_purpose_ends_is_part_of_what_is_signed():
    with pytest.raises(Refused):
        verify(NORTH.public, "round", b"s\0x", NORTH.sign("rounds", b"x"))
    for purpose in ("", "a\0b"):
        with pytest.raises(BadValue, match="a purpose"):
            NORTH.sign(purpose, b"x")


def test_a_fingerprint_can_be_read_aloud():
    found = fingerprint(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))
    assert found == "bc77 c8e9 062b c8d2 5d41 cd85 c8e6 e6ae"  # sha256(b"tacit/fingerprint\0" + key), first 16 bytes
    check_fingerprint(NORTH.public, fingerprint(NORTH.public))
    check_fingerprint(NORTH.public, fingerprint(NORTH.public).upper().replace(" ", ":") + "\n")
    with pytest.raises(Refused, match="not the one that was given"):
        check_fingerprint(NORTH.public, fingerprint(SOUTH.public))
    for short in ("", fingerprint(NORTH.public)[:-5], fingerprint(NORTH.public) + " 0000", "x" * 32):
        with pytest.raises(BadValue, match="8 groups"):
            check_fingerprint(NORTH.public, short)


@pytest.mark.parametrize("passphrase", [None, "correct horse", "pässwörd"])
def test_a_key_is_saved_for_its_owner_alone(tmp_path, passphrase):
    path = tmp_path / "north.key"
    before = os.umask(0)
    try:
        NORTH.save(path, passphrase)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Identity.load(path, passphrase)
    assert (again.name, again.public) == ("north", NORTH.public)
    assert again.sign("x", b"y") == NORTH.sign("x", b"y")
    assert (b"ENCRYPTED" in path.read_bytes()) == (passphrase is not None)
    kept = path.read_bytes()
    with pytest.raises(TacitError, match="never replaced"):
        SOUTH.save(path)
    assert path.read_bytes() == kept
    assert os.listdir(tmp_path) == ["north.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "north.key"
    NORTH.save(path)
    path.chmod(mode)
    with pytest.raises(TacitError, match=f"chmod 600 {path}"):
        Identity.load(path)
    path.chmod(0o400)
    Identity.load(path)


def test_passphrases(tmp_path):
    NORTH.save(tmp_path / "locked", "right")
    NORTH.save(tmp_path / "open")
    with pytest.raises(TacitError, match="the passphrase is wrong"):
        Identity.load(tmp_path / "locked", "wrong")
    with pytest.raises(Locked, match="none was given"):
        Identity.load(tmp_path / "locked")
    with pytest.raises(TacitError, match="has no passphrase, but one was given"):
        Identity.load(tmp_path / "open", "right")
    for act in (NORTH.save, Identity.load):
        with pytest.raises(BadValue, match="not empty"):
            act(tmp_path / ("new" if act == NORTH.save else "locked"), "")
    assert sorted(os.listdir(tmp_path)) == ["locked", "open"]


def test_files_that_are_no_keys(tmp_path):
    path = tmp_path / "x.key"
    NORTH.save(path)
    good = path.read_bytes()
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data, message in (
        (b"", "no private key"),
        (good.split(b"\n", 1)[1], "no private key"),
        (good[:60], "damaged"),
        (good.split(b"\n", 1)[0] + b"\n" + other, "another kind"),
        (good.replace(b"private north", b"private ../north"), "cannot be the name"),
        (good.replace(b"private north", b"private \xff"), "cannot be the name"),
    ):
        path.write_bytes(data)
        with pytest.raises(TacitError, match=message):
            Identity.load(path)


def test_nothing_shows_a_private_key(tmp_path):
    secret = NORTH._key.private_bytes_raw()
    for shown in (repr(NORTH), str(NORTH), f"{[NORTH]}", repr(ALL)):
        assert secret.hex() not in shown
        assert "object at" not in shown
    assert fingerprint(NORTH.public) in repr(NORTH)
    for identity in (KEEPER, NORTH, SOUTH, NEWER):
        raw = identity._key.private_bytes_raw()
        assert raw.hex().encode() not in ALL.encode()
        assert base64.b64encode(raw) not in ALL.encode()
    NORTH.save(tmp_path / "k", "right")
    assert base64.b64encode(secret)[:40] not in (tmp_path / "k").read_bytes()


ODD = ["", ".", "..", "../x", "a/b", ".a", "-a", "a b", "a\n", "a\0", "ä", "a" * 101, "private", "north\u200b", 7, None]


@pytest.mark.parametrize("name", ODD)
def test_names_with_odd_characters_are_refused(tmp_path, name):
    with pytest.raises(BadValue, match="cannot be the name"):
        Identity.new(name)
    with pytest.raises(BadValue, match="cannot be the name"):
        SMALL.enrol(KEEPER, name, OTHER.public)
    if isinstance(name, str):
        line = f"tacit-ed25519 {name} {base64.b64encode(OTHER.public).decode()}\n"
        (tmp_path / "x.pub").write_text(line, encoding="utf-8")
        with pytest.raises(Refused):
            Public.load(tmp_path / "x.pub")


def test_a_public_key_is_one_line(tmp_path):
    path = tmp_path / "north.pub"
    for public in (Public("north", NORTH.public), Public("north", NEWER.public, NORTH.sign("rotate", NEWER.public))):
        public.save(path)
        [line] = path.read_text().splitlines()
        assert line.split()[:3] == ["tacit-ed25519", "north", base64.b64encode(public.public).decode()]
        assert Public.load(path) == public
        path.write_bytes(line.encode() + b"\r\n")  # as mail has it
        assert Public.load(path) == public
    Public("north", NORTH.public).save(path)
    line = path.read_text().strip()
    twin = line[:-2] + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".index(line[-2]) + 1
    ] + "="  # fmt: skip
    assert base64.b64decode(twin.split()[2]) == NORTH.public
    for wrong in (
        "",
        line + " x",
        line + "\n\n",
        " " + line,
        line[:-1],
        line.replace("ed25519", "rsa"),
        line * 2,
        twin,
    ):
        path.write_text(wrong)
        with pytest.raises(Refused):
            Public.load(path)
    path.unlink()
    NORTH.save(path)
    with pytest.raises(Refused, match="stays where it is"):
        Public.load(path)


P = 2**255 - 19


@pytest.mark.parametrize(
    "y",
    [
        0,
        1,
        P - 1,
        P,
        P + 1,
        P + 3,  # 3 is on the curve, but not written so
        2,  # not on the curve
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,  # of order 8
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
    ],
)
@pytest.mark.parametrize("sign", [0, 1 << 255])
def test_keys_that_anybody_could_sign_for_are_refused(tmp_path, y, sign):
    public = (y + sign).to_bytes(32, "little")
    with pytest.raises(Refused, match="not a public key"):
        SMALL.enrol(KEEPER, "east", public)
    Public("east", public).save(tmp_path / "east.pub")
    with pytest.raises(Refused, match="not a public key"):
        Public.load(tmp_path / "east.pub")


@settings(max_examples=200)
@given(st.binary(min_size=32, max_size=32))
def test_every_key_that_is_made_is_taken(seed):
    keys._check_public(Identity("x", Ed25519PrivateKey.from_private_bytes(seed)).public)


# -- the roster --------------------------------------------------------------------------------------------------------


def test_a_roster_says_whose_key_is_whose(tmp_path):
    assert (SMALL.version, SMALL.names, SMALL.keeper) == (3, ("north", "south"), KEEPER.public)
    assert SMALL.public("south") == SOUTH.public
    SMALL.check("north", "round", b"content", NORTH.sign("round", b"content"))
    ALL.check("north", "round", b"content", NEWER.sign("round", b"content"))
    assert ALL.names == ("north",)
    assert ALL.members["north"] == Member("north", NEWER.public, "active", 4, (NORTH.public,))
    assert ALL.members["south"] == Member("south", SOUTH.public, "revoked", 5)
    path = tmp_path / "roster.json"
    SMALL.save(path)
    ALL.save(path)
    ALL.save(path)
    again = Roster.load(path, keeper_public=KEEPER.public, at_least=5)
    assert again == ALL
    assert again.head == ALL.head != SMALL.head
    assert os.listdir(tmp_path) == ["roster.json"]
    told = json.loads(json.dumps(again.json()))
    assert [each["state"] for each in told["parties"]] == ["active", "revoked"]
    assert told["parties"][0]["before"] == [fingerprint(NORTH.public)]
    assert told["keeper"]["fingerprint"] == fingerprint(KEEPER.public)


def test_unknown_revoked_and_rotated_keys_are_refused():
    def refused(message, roster, name, signer, purpose="round", content=b"x"):
        with pytest.raises(Refused, match=message):
            roster.check(name, "round", b"x", signer.sign(purpose, content))

    refused("not in the roster", SMALL, "other", OTHER)
    refused("not in the roster", SMALL, "keeper", KEEPER)
    refused("not in the roster", SMALL, None, NORTH)
    refused("revoked in version 5", ALL, "south", SOUTH)
    refused("a key that it has no longer", ALL, "north", NORTH)
    refused("is not of the key", SMALL, "north", SOUTH)
    refused("is not of the key", ALL, "north", SOUTH)
    refused("is not of the key", SMALL, "north", NORTH, purpose="rotate")
    refused("is not of the key", SMALL, "north", NORTH, content=b"y")
    for signature in (b"", None, "0" * 64):
        with pytest.raises(Refused, match="64"):
            SMALL.check("north", "round", b"x", signature)


def test_what_was_revoked_comes_back_with_another_key_only():
    for act in (lambda r: r.revoke(KEEPER, "south"), lambda r: r.rotate(KEEPER, "south", OTHER.public, bytes(64))):
        with pytest.raises(Refused, match="south was revoked"):
            act(ALL)
    for name in ("south", "east"):
        with pytest.raises(Refused, match="south had the key"):
            ALL.enrol(KEEPER, name, SOUTH.public)
        with pytest.raises(Refused, match="north had the key"):
            ALL.enrol(KEEPER, name, NORTH.public)
    back = ALL.enrol(KEEPER, "east", OTHER.public).enrol(KEEPER, "south", Identity.new("south").public)
    assert back.names == ("north", "east", "south")  # south is the newest
    with pytest.raises(Refused, match="south had the key"):
        back.enrol(KEEPER, "west", SOUTH.public)
    with pytest.raises(Refused, match="a key that it has no longer"):
        back.check("south", "x", b"", SOUTH.sign("x", b""))


def test_acts_that_are_refused():
    proof = NORTH.sign("rotate", NEWER.public)
    for message, act in (
        ("enrolled already", lambda: SMALL.enrol(KEEPER, "north", OTHER.public)),
        ("north has the key", lambda: SMALL.enrol(KEEPER, "east", NORTH.public)),
        ("keeper's key signs the roster", lambda: SMALL.enrol(KEEPER, "keeper", KEEPER.public)),
        ("keeper's key signs the roster", lambda: SMALL.rotate(KEEPER, "north", KEEPER.public, proof)),
        ("32 bytes", lambda: SMALL.enrol(KEEPER, "east", b"")),
        ("32 bytes", lambda: SMALL.enrol(KEEPER, "east", OTHER.public.hex())),
        ("not in the roster", lambda: SMALL.revoke(KEEPER, "east")),
        ("not in the roster", lambda: SMALL.rotate(KEEPER, "east", NEWER.public, proof)),
        ("north has the key", lambda: SMALL.rotate(KEEPER, "north", NORTH.public, NORTH.sign("rotate", NORTH.public))),
        ("south has the key", lambda: SMALL.rotate(KEEPER, "north", SOUTH.public, NORTH.sign("rotate", SOUTH.public))),
        ("not the keeper", lambda: SMALL.enrol(OTHER, "east", OTHER.public)),
        ("not the keeper", lambda: SMALL.revoke(NORTH, "south")),
        ("not the keeper", lambda: SMALL.rotate(NORTH, "north", NEWER.public, proof)),
    ):
        with pytest.raises(Refused, match=message):
            act()


def test_a_rotation_is_signed_by_the_old_key():
    for proof in (
        bytes(64),
        KEEPER.sign("rotate", NEWER.public),
        NEWER.sign("rotate", NEWER.public),
        NORTH.sign("rotate", OTHER.public),
        NORTH.sign("round", NEWER.public),
    ):
        with pytest.raises(Refused, match="not signed by its old one"):
            SMALL.rotate(KEEPER, "north", NEWER.public, proof)
    for proof in (b"", None):
        with pytest.raises(Refused, match="64 bytes"):
            SMALL.rotate(KEEPER, "north", NEWER.public, proof)


# -- rosters that were tampered with -----------------------------------------------------------------------------------


def test_every_single_byte_matters():
    data = SMALL.rotate(KEEPER, "north", NEWER.public, NORTH.sign("rotate", NEWER.public)).encode()
    for place in range(len(data)):
        for change in (1, 32, 128):  # 32: the other case
            wrong = bytearray(data)
            wrong[place] ^= change
            with pytest.raises(Refused):
                Roster.decode(bytes(wrong))
        with pytest.raises(Refused):
            Roster.decode(data[:place] + data[place + 1 :])
        with pytest.raises(Refused):
            Roster.decode(data[:place])
    assert Roster.decode(data).version == 4


def test_older_rosters_and_those_of_others_are_refused(tmp_path):
    path = tmp_path / "roster.json"
    SMALL.save(path)
    assert Roster.load(path, at_least=3).version == 3
    with pytest.raises(Refused, match=r"roster\.json: is at version 3, but version 4 was seen.*rolled back"):
        Roster.load(path, at_least=4)
    assert Roster.load(path, keeper_public=KEEPER.public) == SMALL
    with pytest.raises(Refused, match="is kept by keeper"):
        Roster.load(path, keeper_public=OTHER.public)
    with pytest.raises(Refused, match="is kept by other"):
        Roster.decode(Roster.begin(OTHER).encode(), KEEPER.public)


def test_a_file_is_replaced_only_by_what_continues_it(tmp_path):
    path = tmp_path / "roster.json"
    ALL.save(path)
    fork = SMALL.enrol(KEEPER, "east", OTHER.public)
    for other in (SMALL, fork, fork.revoke(KEEPER, "south").revoke(KEEPER, "north"), Roster.begin(OTHER)):
        with pytest.raises(Refused, match="does not continue"):
            other.save(path)
    assert Roster.load(path) == ALL
    path.write_text("my thesis")
    with pytest.raises(Refused, match="no roster"):
        ALL.save(path)
    assert path.read_text() == "my thesis"
    assert os.listdir(tmp_path) == ["roster.json"]


def test_of_two_changes_at_once_one_is_told_to_look_again(tmp_path, monkeypatch):
    path = tmp_path / "roster.json"
    SMALL.save(path)
    forks = [SMALL.enrol(KEEPER, f"p{i}", Identity.new("x").public) for i in range(6)]
    write = keys.write_whole

    def slowly(*args, **how):
        time.sleep(0.05)
        write(*args, **how)

    monkeypatch.setattr(keys, "write_whole", slowly)

    def saved(roster):
        try:
            roster.save(path)
        except Refused:
            return False
        return True

    with ThreadPoolExecutor(len(forks)) as pool:
        won = list(pool.map(saved, forks))
    assert won.count(True) == 1
    assert Roster.load(path) == forks[won.index(True)]
    assert os.listdir(tmp_path) == ["roster.json"]


def written(*versions):
    return Roster(tuple(versions)).encode()


def signed(version, keeper=KEEPER):
    return replace(version, signature=keeper.sign("roster", version.content()).hex())


def test_versions_follow_on_each_other():
    """What a keeper's own key could sign, and nobody should take."""
    first, second, third = SMALL.versions
    proof = NORTH.sign("rotate", NEWER.public).hex()
    rotation = Version(4, SMALL.head, "rotate", "north", NEWER.public.hex(), proof)
    assert Roster.decode(written(*SMALL.versions, signed(rotation))).public("north") == NEWER.public
    for versions, message in (
        ((first, third), "does not follow"),
        ((first, third, second), "does not follow"),
        ((second, third), "does not follow"),
        ((first, first), "does not follow"),
        ((first, second, signed(replace(third, number=4))), "does not follow"),
        ((first, second, signed(replace(third, number=3.0))), "number is an integer"),
        ((signed(replace(first, number=True)),), "number is an integer"),
        ((first, second, signed(replace(third, previous="0" * 64))), "does not follow"),
        ((first, second, signed(third, NORTH)), "is not of the key"),
        ((first, second, replace(third, signature="0" * 128)), "is not of the key"),
        ((first, second, signed(replace(third, act="begin"))), "begins once"),
        ((signed(replace(first, act="enrol")),), "begins once"),
        ((first, second, signed(replace(third, name="north"))), "enrolled already"),
        ((first, second, signed(replace(third, public=NORTH.public.hex()))), "north has the key"),
        ((first, second, signed(replace(third, public=KEEPER.public.hex()))), "the keeper's key"),
        ((first, second, signed(replace(third, public="01" + "0" * 62))), "anybody could sign"),
        ((first, second, signed(replace(third, name="../south"))), "cannot be the name"),
        ((first, second, signed(replace(third, act="revoke", name="north"))), "another key of north"),
        ((*SMALL.versions, signed(replace(rotation, proof=OTHER.sign("rotate", NEWER.public).hex()))), "old one"),
        ((*ALL.versions, signed(replace(rotation, number=6, previous=ALL.head, name="south"))), "north has the key"),
        ((*SMALL.versions, signed(replace(rotation, proof=""))), "'proof' of a version has 128"),
        ((first, second, signed(replace(third, proof=proof))), "'proof' of a version has 0"),
    ):
        with pytest.raises(Refused, match=message):
            Roster.decode(written(*versions))


def test_only_the_exact_form_is_read():
    good = json.loads(SMALL.encode())

    def form(content):
        return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"

    def with_second(**changes):
        first, second, *rest = good["versions"]
        return form(good | {"versions": [first, second | changes, *rest]})

    assert form(good) == SMALL.encode()
    text = SMALL.encode()
    for data in (
        json.dumps(good).encode(),
        text.strip(),
        text + b"\n",
        b"\xef\xbb\xbf" + text,
        text.decode().encode("utf-16"),
        text.replace(b"\n", b"\r\n"),
        text.replace(b'"schema"', b'"schema": "tacit.roster/1",\n "schema"'),
        text.replace(b"north", b"nort\\u0068"),
        form(good | {"schema": "tacit.roster/2"}),
        form(good | {"note": ""}),
        form({"schema": good["schema"]}),
        form(good | {"versions": []}),
        form(good | {"versions": {}}),
        form(good | {"versions": [None]}),
        form([]),
        b"[" * 100_000,
        b"9" * 10_000,
        b"",
        with_second(extra=1),
        with_second(number=2.0),
        with_second(number=True),
        with_second(number="2"),
        with_second(act=[]),
        with_second(act="promote"),
        with_second(name=None),
        with_second(name=["north"]),
        with_second(public=None),
        with_second(public=NORTH.public.hex().upper()),
        with_second(public=NORTH.public.hex() + "\n"),
        with_second(signature=7),
        with_second(previous="0" * 63),
    ):
        with pytest.raises(Refused):
            Roster.decode(data)
    with pytest.raises(Refused, match=r"expected JSON with the schema .tacit\.roster/1."):
        Roster.decode(form(good | {"schema": "tacit.roster/2"}))


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_whatever_bytes_arrive_are_refused_with_a_reason(tmp_path_factory, data):
    with pytest.raises(Refused, match="is no roster"):
        Roster.decode(data)
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(TacitError, match="no private key"):
        Identity.load(path)
    with pytest.raises(Refused, match="no public key"):
        Public.load(path)


# -- against a model ---------------------------------------------------------------------------------------------------

POOL = [Identity("x", Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32)) for i in range(6)]
acts = st.lists(
    st.tuples(st.sampled_from(["enrol", "rotate", "revoke"]), st.sampled_from("abc"), st.integers(0, 5)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(acts)
def test_any_order_of_acts(sequence):
    roster = Roster.begin(KEEPER)
    active: dict[str, int] = {}
    used: set[int] = set()
    for act, name, key in sequence:
        public = POOL[key].public
        fine = (name in active) == (act != "enrol") and (act == "revoke" or key not in used)
        try:
            if act == "enrol":
                roster = roster.enrol(KEEPER, name, public)
            elif act == "revoke":
                roster = roster.revoke(KEEPER, name)
            else:
                roster = roster.rotate(KEEPER, name, public, POOL[active.get(name, 0)].sign("rotate", public))
            assert fine
        except Refused:
            assert not fine
            continue
        if act == "revoke":
            del active[name]
        else:
            active[name] = key
            used.add(key)
    assert roster.names == tuple(active)
    assert Roster.decode(roster.encode()) == roster
    for name in "abc":
        for number, identity in enumerate(POOL):
            if active.get(name) == number:
                roster.check(name, "p", b"c", identity.sign("p", b"c"))
            else:
                with pytest.raises(Refused):
                    roster.check(name, "p", b"c", identity.sign("p", b"c"))


# -- files that are made together --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A keeper's key, a party's, and a roster that has it."""
    keeper, _, _ = make("keeper", tmp_path)
    north, _, _ = make("north", tmp_path)
    Roster.begin(keeper).enrol(keeper, "north", north.public).save(tmp_path / "roster.json")
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("broken", ["os.fsync", "os.link", "os.replace"])
def test_what_fails_leaves_nothing_behind(folder, monkeypatch, broken, error):
    before = contents(folder)
    keeper = Identity.load(folder / "keeper.key")
    roster = Roster.load(folder / "roster.json")

    def fail(*_):
        raise error

    monkeypatch.setattr(broken, fail)
    with pytest.raises(error):
        make("south", folder)
    if broken != "os.link":
        with pytest.raises(error):
            roster.revoke(keeper, "north").save(folder / "roster.json")
    for who in (keeper, None):
        with pytest.raises(error):
            renew(folder / "north.key", folder / "roster.json", who)
    assert contents(folder) == before


def test_a_key_that_the_roster_has_got_is_not_lost(folder, monkeypatch):
    keeper, old = (Identity.load(folder / f"{name}.key") for name in ("keeper", "north"))
    save = Roster.save

    def then_fail(self, path):
        save(self, path)
        raise OSError

    monkeypatch.setattr(Roster, "save", then_fail)
    with pytest.raises(OSError):
        renew(folder / "north.key", folder / "roster.json", keeper)
    has = Roster.load(folder / "roster.json").public("north")
    assert Identity.load(folder / "north.key").public == old.public != has
    assert Identity.load(folder / "north.key.next").public == has
    with pytest.raises(Refused, match=r"north\.key\.next may be the one"):
        renew(folder / "north.key", folder / "roster.json", keeper)


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, also where these tests were started by what ignores it, as a job in the background does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_waits_until_all_files_are_written(folder, monkeypatch, interruptible):
    keeper = Identity.load(folder / "keeper.key")
    save = Roster.save

    def interrupted(self, path):
        save(self, path)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Roster, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        renew(folder / "north.key", folder / "roster.json", keeper)
    assert sorted(contents(folder)) == [
        "keeper.key", "keeper.pub", "north.key", "north.key.1", "north.pub", "roster.json",
    ]  # fmt: skip
    new = Identity.load(folder / "north.key").public
    assert new == Roster.load(folder / "roster.json").public("north") == Public.load(folder / "north.pub").public
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rotation_that_was_cut_short_is_noticed(folder):
    OTHER.save(folder / "north.key.next")
    before = contents(folder)
    with pytest.raises(TacitError, match="cut short before the roster had it"):
        renew(folder / "north.key", folder / "roster.json")
    assert contents(folder) == before


# -- the command line --------------------------------------------------------------------------------------------------


def tacit(*arguments, code=0, env=None, input=None):
    """The command, without the seconds that a process takes to start."""
    done = CliRunner().invoke(
        app, ["keys", *map(str, arguments)], env={"TACIT_PASSPHRASE": None, "COLUMNS": "200"} | (env or {}), input=input
    )
    if isinstance(done.exception, TacitError):
        assert code == 2, done.exception
        return SimpleNamespace(stdout=done.stdout, stderr=str(done.exception))
    assert done.exit_code == code, done.exception
    return done


def test_the_life_of_a_key(tmp_path):
    roster, keeper = tmp_path / "roster.json", tmp_path / "keeper.key"
    made = {
        name: json.loads(tacit("new", name, "--out", tmp_path, "--json").stdout)["fingerprint"]
        for name in ("keeper", "north", "south")
    }
    by = ("--keeper", keeper)
    shown = tacit("enrol", roster, tmp_path / "north.pub", *by, "--fingerprint", made["north"]).stdout
    assert "Enrolled north" in shown
    assert made["keeper"] in shown
    assert "roster is new" in shown
    assert "roster is new" not in tacit("enrol", roster, tmp_path / "south.pub", *by, "--yes").stdout
    listed = json.loads(tacit("list", roster, "--fingerprint", made["keeper"], "--at-least", 3, "--json").stdout)
    assert {each["name"]: each["fingerprint"] for each in listed["parties"]} | {"keeper": made["keeper"]} == made
    old = (tmp_path / "north.key").read_bytes()
    turned = json.loads(tacit("rotate", roster, tmp_path / "north.key", *by, "--json").stdout)
    assert (tmp_path / "north.key.1").read_bytes() == old
    assert stat.S_IMODE((tmp_path / "north.key").stat().st_mode) == 0o600
    new = Identity.load(tmp_path / "north.key")
    assert turned["new"] == turned["parties"][0]["fingerprint"] == fingerprint(new.public) != made["north"]
    assert Public.load(tmp_path / "north.pub").public == new.public
    assert "kept as" in tacit("rotate", roster, tmp_path / "north.key", *by).stdout
    assert (tmp_path / "north.key.2").exists()
    assert "Revoked south" in tacit("revoke", roster, "south", *by).stdout
    shown = tacit("list", roster).stdout
    assert "version 6" in shown
    assert "revoked" in shown
    assert made["south"] in shown
    with pytest.raises(Refused, match="revoked"):
        Roster.load(roster).check("south", "x", b"", bytes(64))


def test_a_rotation_by_two_people(folder):
    roster, key = folder / "roster.json", folder / "north.key"
    before = roster.read_bytes()
    assert "for the keeper" in tacit("rotate", roster, folder / "north.pub", code=2).stderr
    refused = tacit("rotate", roster, folder / "north.pub", "--keeper", folder / "keeper.key", code=2)
    assert "not signed by an older key" in refused.stderr
    assert "to the keeper" in tacit("rotate", roster, key).stdout.replace("\n", " ")
    assert roster.read_bytes() == before
    new = Identity.load(key)
    with pytest.raises(Refused):
        Roster.load(roster).check("north", "x", b"", new.sign("x", b""))
    tacit("rotate", roster, folder / "north.pub", "--keeper", folder / "keeper.key")
    Roster.load(roster).check("north", "x", b"", new.sign("x", b""))


def test_passphrases_on_the_command_line(tmp_path, monkeypatch):
    env = {"TACIT_PASSPHRASE": "right"}
    assert "nobody is there to ask" in tacit("new", "keeper", "--out", tmp_path, "--passphrase", code=2).stderr
    assert contents(tmp_path) == {}
    tacit("new", "keeper", "--out", tmp_path, "--passphrase", env=env)
    tacit("new", "north", "--out", tmp_path, env=env)  # not asked for, so not locked
    Identity.load(tmp_path / "north.key")
    enrol = ("enrol", tmp_path / "r", tmp_path / "north.pub", "--keeper", tmp_path / "keeper.key", "--yes")
    assert "nobody is there to ask" in tacit(*enrol, code=2).stderr
    assert "passphrase is wrong" in tacit(*enrol, code=2, env={"TACIT_PASSPHRASE": "wrong"}).stderr
    assert not (tmp_path / "r").exists()
    tacit(*enrol, env=env)
    monkeypatch.setattr(sys.modules["tacit.cli.keys"], "_on_terminal", lambda: True)
    tacit("new", "south", "--out", tmp_path, "--passphrase", input="mine\nmine\n")
    Identity.load(tmp_path / "south.key", "mine")
    tacit("enrol", tmp_path / "r", tmp_path / "south.pub", "--keeper", tmp_path / "keeper.key", input="right\ny\n")
    rotate = ("rotate", tmp_path / "r", tmp_path / "south.key")
    tacit(*rotate, input="mine\n")
    Identity.load(tmp_path / "south.key", "mine")  # the new one has the old one's


def test_a_fingerprint_has_to_be_compared(folder, monkeypatch):
    make("south", folder)
    before = contents(folder)
    enrol = ("enrol", folder / "roster.json", folder / "south.pub", "--keeper", folder / "keeper.key")
    south = fingerprint(Public.load(folder / "south.pub").public)
    refused = tacit(*enrol, code=2).stderr
    assert south in refused
    assert "--fingerprint" in refused
    wrong = fingerprint(OTHER.public)
    assert "not the one that was given" in tacit(*enrol, "--fingerprint", wrong, "--yes", code=2).stderr
    assert "8 groups" in tacit(*enrol, "--fingerprint", south[:9], code=2).stderr
    monkeypatch.setattr(sys.modules["tacit.cli.keys"], "_on_terminal", lambda: True)
    assert "was not enrolled" in tacit(*enrol, code=2, input="n\n").stderr
    tacit(*enrol, code=1, input="")  # nobody answers
    assert contents(folder) == before
    asked = tacit(*enrol, "--json", input="y\n")
    assert south in asked.stderr
    assert json.loads(asked.stdout)["version"] == 3


def test_wrong_input_leaves_nothing_behind(folder):
    make("other", folder)
    (folder / "open.key").write_bytes((folder / "keeper.key").read_bytes())
    (folder / "open.key").chmod(0o644)
    before = contents(folder)
    roster, by = folder / "roster.json", ("--keeper", folder / "keeper.key")
    for arguments, message in (
        (("new", "north", "--out", folder), "exists already"),
        (("new", "a/b", "--out", folder), "cannot be the name"),
        (("new", "private", "--out", folder), "cannot be the name"),
        (("enrol", roster, folder / "north.pub", *by, "--yes"), "north has the key"),
        (("enrol", roster, folder / "keeper.pub", *by, "--yes"), "keeper's key"),
        (("enrol", roster, folder / "north.key", *by, "--yes"), "stays where it is"),
        (("enrol", folder / "new.json", folder / "north.pub", "--keeper", folder / "open.key", "--yes"), "chmod 600"),
        (("enrol", folder / "new.json", folder / "keeper.pub", *by, "--yes"), "keeper's key"),
        (("enrol", roster, folder / "other.pub", "--keeper", folder / "north.key", "--yes"), "is kept by keeper"),
        (("enrol", folder / "north.pub", folder / "other.pub", *by, "--yes"), "no roster"),
        (("enrol", folder / "no" / "r.json", folder / "other.pub", *by, "--yes"), "is no folder"),
        (("rotate", roster, folder / "other.key", *by), "not in the roster"),
        (("rotate", roster, folder / "north.key", "--keeper", folder / "other.key"), "is kept by keeper"),
        (("revoke", roster, "other", *by), "not in the roster"),
        (("revoke", roster, "north", "--keeper", folder / "north.key"), "is kept by keeper"),
        (("list", folder / "north.pub"), "no roster"),
        (("list", roster, "--at-least", 3), "rolled back"),
        (("list", roster, "--fingerprint", fingerprint(OTHER.public)), "not the one that was given"),
    ):
        assert message in tacit(*arguments, code=2).stderr, arguments
        assert contents(folder) == before, arguments
    missing = CliRunner().invoke(app, ["keys", "list", str(folder / "none.json")])
    assert isinstance(missing.exception, FileNotFoundError)  # which `main` tells in one line


# -- the documentation -------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "keys.md").read_text()


def test_the_commands_of_the_documentation_work_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["tacit.cli.keys"], "_on_terminal", lambda: True)
    for name in ("keeper", "south"):
        make(name, tmp_path)
    commands = [shlex.split(line)[2:] for line in re.findall(r"^tacit keys .*$", PAGE, re.MULTILINE)]
    assert [command[0] for command in commands] == ["new", "enrol", "enrol", "list", "rotate", "rotate", "revoke"]
    for command in commands:
        if "--fingerprint" in command:
            whose = Public.load(tmp_path / ("keeper.pub" if command[0] == "list" else command[2]))
            command[command.index("--fingerprint") + 1] = fingerprint(whose.public)
        tacit(*command, env={"TACIT_PASSPHRASE": "right"}, input="y\n")
    assert [each.state for each in Roster.load(tmp_path / "roster.json").members.values()] == ["revoked", "active"]
    assert (tmp_path / "north.key.1").exists()


def test_the_python_of_the_documentation_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Roster.load(folder / "roster.json").enrol(Identity.load(folder / "keeper.key"), "south", SOUTH.public).save(
        folder / "roster.json"
    )
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})  # noqa: S102
