"""`tacit keys`: a key for each party, and the roster that says whose key is whose."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import show
from tacit.cli.options import AsJson
from tacit.errors import TacitError

if TYPE_CHECKING:
    from tacit.federation.keys import Identity, Roster

keys = typer.Typer(no_args_is_help=True, help="Make keys, and keep the roster of whose key is whose.")
RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster's file.")]
KeeperKey = Annotated[Path, typer.Option("--keeper", help="The private key of whoever keeps the roster.")]

# The library loads torch: the commands that need it do.


@keys.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Whose key: the party's name in the federation, or the keeper's.")],
    out: Annotated[Path, typer.Option(help="The folder for NAME.key and NAME.pub. Default: here.")] = Path(),
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase, or take it from TACIT_PASSPHRASE.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key: NAME.key, which never leaves this machine, and NAME.pub, which is for the keeper of the roster.

    Example:
      tacit keys new riverside --out keys --passphrase
    """
    from tacit.federation.keys import fingerprint, make

    secret = _passphrase(f"New passphrase for {name}", twice=True) if passphrase else None
    identity, key, pub = make(name, out, secret)
    if as_json:
        told = {"name": name, "fingerprint": fingerprint(identity.public), "public": identity.public.hex()}
        print(json.dumps(told | {"key": str(key), "pub": str(pub)}))
        return
    show.say(f"The fingerprint of {name} is {fingerprint(identity.public)}")
    show.say(f"Keep {key} here, to yourself, and in your backups.")
    show.say(f"Send {pub} to the keeper of the roster, and read the fingerprint out by telephone.")


@keys.command("enrol")
def keys_enrol(
    roster_path: RosterFile,
    pub: Annotated[Path, typer.Argument(metavar="PUBFILE", help="The NAME.pub that the party sent.")],
    keeper_path: KeeperKey,
    heard: Annotated[
        str | None, typer.Option("--fingerprint", help="As the party read it out: the key must have it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="The fingerprint has been compared already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a party on the roster; without a roster, begin one.

    Example:
      tacit keys enrol roster.json riverside.pub --keeper keeper.key
    """
    from tacit.federation.keys import Public, Roster, check_fingerprint, fingerprint

    party = Public.load(pub)
    if heard is not None:
        check_fingerprint(party.public, heard)
    keeper, _ = open_key(keeper_path)
    known = Roster.load(roster_path, keeper.public) if roster_path.exists() else Roster.begin(keeper)
    changed = known.enrol(keeper, party.name, party.public)
    if heard is None and not yes:
        _confirm(party.name, fingerprint(party.public))
    changed.save(roster_path)
    _tell(f"Enrolled {party.name}.", roster_path, changed, as_json)
    if known.version == 1 and not as_json:
        show.say("This roster is new. Read its keeper's fingerprint out to every party:")
        show.say(fingerprint(keeper.public))


@keys.command("rotate")
def keys_rotate(
    roster_path: RosterFile,
    key: Annotated[
        Path, typer.Argument(metavar="KEYFILE", help="The party's private key; or the NAME.pub of a rotation.")
    ],
    keeper_path: Annotated[
        Path | None,
        typer.Option("--keeper", help="The keeper's private key. Without: the roster is left to the keeper."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace a party's key by a new one that the old one signs.

    The party runs it with its own key, and sends its new NAME.pub to the keeper, who runs it with that and --keeper.
    Whoever has both keys does it at once.

    Examples:
      tacit keys rotate roster.json riverside.key
      tacit keys rotate roster.json riverside.pub --keeper keeper.key
    """
    from tacit.federation.keys import Public, Roster, fingerprint, renew

    keeper = None if keeper_path is None else open_key(keeper_path)[0]
    if key.suffix == ".pub":
        party = Public.load(key)
        if keeper is None:
            raise TacitError(f"{key} is for the keeper of the roster: say --keeper, or rotate your own private key.")
        if party.proof is None:
            raise TacitError(
                f"{key}: is not signed by an older key of {party.name}. tacit keys rotate makes one that is."
            )
        changed = Roster.load(roster_path, keeper.public).rotate(keeper, party.name, party.public, party.proof)
        changed.save(roster_path)
        _tell(f"Rotated the key of {party.name}.", roster_path, changed, as_json)
        return
    party, pub, kept = renew(key, roster_path, keeper, open_key(key)[1])
    found = {"key": str(key), "pub": str(pub), "old": str(kept), "new": fingerprint(party.public)}
    if not as_json:
        show.say(f"The fingerprint of {party.name} is now {found['new']}")
        show.say(f"{key} is the new key. The old one is kept as {kept}.")
    if keeper is None and not as_json:
        show.say(f"Send {pub} to the keeper: until the roster has it, what you sign with the new key is refused.")
        return
    _tell(f"Rotated the key of {party.name}.", roster_path, Roster.load(roster_path), as_json, found=found)


@keys.command("revoke")
def keys_revoke(
    roster_path: RosterFile,
    name: Annotated[str, typer.Argument(help="The party whose key was lost or stolen, or that leaves.")],
    keeper_path: KeeperKey,
    as_json: AsJson = False,
) -> None:
    """Refuse a party's key from now on, for ever. The party may be enrolled again with a new one.

    Example:
      tacit keys revoke roster.json riverside --keeper keeper.key
    """
    from tacit.federation.keys import Roster

    keeper, _ = open_key(keeper_path)
    changed = Roster.load(roster_path, keeper.public).revoke(keeper, name)
    changed.save(roster_path)
    _tell(f"Revoked {name}. It holds wherever this version of the roster is.", roster_path, changed, as_json)


@keys.command("list")
def keys_list(
    roster_path: RosterFile,
    heard: Annotated[
        str | None, typer.Option("--fingerprint", help="The keeper's, as the keeper read it out: it must be this one.")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(min=1, help="A version that you have seen: an older one is refused.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a roster, and show the parties with their fingerprints.

    Example:
      tacit keys list roster.json --at-least 3
    """
    from tacit.federation.keys import Roster, check_fingerprint

    roster = Roster.load(roster_path, at_least=at_least)
    if heard is not None:
        check_fingerprint(roster.keeper, heard)
    told = roster.json()
    if as_json:
        print(json.dumps({"roster": str(roster_path)} | told))
        return
    show.say(f"{roster_path}: version {told['version']}, {told['head'][:16]}...")
    show.say(f"Kept by {told['keeper']['name']}, {told['keeper']['fingerprint']}")
    rows = [(each["name"], each["state"], each["since"], each["fingerprint"]) for each in told["parties"]]
    if rows:
        show.table("party", "state", "since", "fingerprint", rows=rows)
    else:
        show.say("No party is enrolled yet: tacit keys enrol")


def _tell(done: str, path: Path, roster: Roster, as_json: bool, found: dict[str, Any] | None = None) -> None:
    if as_json:
        print(json.dumps({"roster": str(path)} | roster.json() | (found or {})))
        return
    show.say(done)
    show.say(f"{path} is at version {roster.version}: send it to every party.")


def open_key(path: Path) -> tuple[Identity, str | None]:
    """A private key, with its passphrase if it has one."""
    from tacit.federation.keys import Identity, Locked

    try:
        return Identity.load(path), None
    except Locked:
        secret = _passphrase(f"Passphrase of {path}")
        return Identity.load(path, secret), secret


def _passphrase(question: str, twice: bool = False) -> str:
    if given := os.environ.get("TACIT_PASSPHRASE"):
        return given
    if not _on_terminal():
        raise TacitError(f"{question}: nobody is there to ask. Set TACIT_PASSPHRASE, or run this on a terminal.")
    return str(typer.prompt(question, hide_input=True, confirmation_prompt=twice, err=True))


def _confirm(name: str, found: str) -> None:
    if not _on_terminal():
        raise TacitError(
            f"The key of {name} has the fingerprint {found}. Compare it with {name} by telephone, and say what you "
            "heard: --fingerprint; or, if that is done, --yes."
        )
    typer.echo(f"The key of {name} has the fingerprint {found}", err=True)
    if not typer.confirm(f"Did {name} read out the same by telephone?", err=True):
        raise TacitError(f"{name} was not enrolled.")


def _on_terminal() -> bool:
    return sys.stdin.isatty()
