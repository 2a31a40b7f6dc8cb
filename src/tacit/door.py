"""A party's door: a Unix socket at which its own process takes letters, one at a time, and answers them.

For whatever brings letters to a party's machine and cannot hold its graph and model itself, such as a Flower ClientApp,
which is a new process for every message. There and back, a connection each:

    length:u64  letter          length:u64  answer; of length 0: there is none to that letter

Only the user whose process it is can open the door (mode 0600). Who stands there is not asked: letters are signed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import time
from pathlib import Path
from types import TracebackType

from tacit.errors import TacitError

LOG = logging.getLogger(__name__)
LENGTH = struct.Struct(">Q")
LARGEST = 1 << 30
"""Bytes of a letter at most, unless told otherwise."""
HURRY = 60.0
"""Seconds in which a letter, once somebody is at the door, has to be handed in; and an answer to be taken."""
LONGEST_PATH = 107
"""Bytes of a socket's path: what Linux takes."""


class Closed(TacitError):
    """Nobody answers at a party's door. The words may be read by the coordinator."""


class Door:
    """The party's side, as `tacit.correspondence.attend` uses it: what is sent is the answer to what was received last.

    A letter that is not answered before the next is received has no answer.
    """

    def __init__(self, path: Path, largest: int = LARGEST):
        self.path, self.largest = Path(path).absolute(), largest
        self.sent_bytes = self.received_bytes = 0
        self._caller: socket.socket | None = None
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise TacitError(f"{self.path}: is too long for a socket, which has {LONGEST_PATH} bytes at most: choose a "
                             "shorter --socket.")  # fmt: skip
        self._make_way()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._listening.bind(str(self.path))
        except OSError as error:
            self._listening.close()
            raise TacitError(f"{self.path}: there cannot be a socket: {error.strerror}.") from None
        finally:
            os.umask(before)
        self._listening.listen(8)
        self._node = self.path.stat().st_ino

    def _make_way(self) -> None:
        """Remove the socket that a killed process left behind; nothing else."""
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise TacitError(f"{self.path} exists already, and is no socket: choose another --socket.")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            try:
                trial.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise TacitError(f"{self.path}: another process answers there already. Stop it, or choose another --socket.")

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut the door; who still waits for an answer is told that there is none."""
        self._answer(b"")
        self._listening.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._node:
                self.path.unlink()

    def receive(self, timeout: float) -> tuple[str, bytes] | None:
        """The next letter, if one is handed in in time."""
        self._answer(b"")
        self._listening.settimeout(max(timeout, 0.001))
        try:
            caller, _ = self._listening.accept()
        except TimeoutError:
            return None
        try:
            letter = _read(caller, self.largest, time.monotonic() + HURRY)
        except (OSError, EOFError, ValueError) as error:
            LOG.warning("what was handed in at the door is no letter: %s", error)
            caller.close()
            return None
        self._caller = caller
        self.received_bytes += len(letter)
        return "", letter

    def send(self, to: str | None, letter: bytes) -> None:
        """Answer whoever stands at the door. Who has gone meanwhile can be told again: the answer is kept."""
        if self._caller is not None:
            self._answer(letter)

    def _answer(self, letter: bytes) -> None:
        if self._caller is None:
            return
        with self._caller as caller:
            self._caller = None
            try:
                _write(caller, letter)
                self.sent_bytes += len(letter)
            except OSError as error:
                LOG.info("who handed in a letter did not wait for the answer: %s", error)


def hand_over(path: Path, letter: bytes, largest: int = LARGEST) -> bytes:
    """Bring a letter to a party's door; its answer, however long that takes. Empty: it gives none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.connect(str(path))
            _write(door, letter)
            door.settimeout(None)
        except OSError as error:
            raise Closed("the party's own process does not answer at its socket: start tacit join --socket there, with "
                         f"the path that its node-config has ({error.strerror or error})") from None  # fmt: skip
        try:
            return _read(door, largest, None)
        except (OSError, EOFError, ValueError) as error:
            raise Closed(f"the party's own process did not answer to the end ({error})") from None


def _write(connection: socket.socket, content: bytes) -> None:
    connection.settimeout(HURRY)
    connection.sendall(LENGTH.pack(len(content)))
    if content:
        connection.sendall(content)


def _read(connection: socket.socket, largest: int, end: float | None) -> bytes:
    [length] = LENGTH.unpack(_exactly(connection, LENGTH.size, end))
    if length > largest:
        raise ValueError(f"{length} bytes are said to come, and {largest} are taken at most")
    return bytes(_exactly(connection, length, end))


def _exactly(connection: socket.socket, size: int, end: float | None) -> bytearray:
    found = bytearray()
    while len(found) < size:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 0.001))
        piece = connection.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError(f"it ended after {len(found)} bytes of {size}")
        found += piece
    return found
