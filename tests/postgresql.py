"""A PostgreSQL server of the tests' own: a free port on loopback, its own data folder and password, ended by its id."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def binaries() -> Path | None:
    """The folder of initdb and postgres, where Debian and others put it."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


class Server:
    """A running server; `environment` is all a client needs to reach it."""

    def __init__(self) -> None:
        folder = binaries()
        if folder is None:
            raise RuntimeError("PostgreSQL is not installed")
        # PostgreSQL refuses to run as root; as root, its own user runs it.
        self._user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
        self.data = Path(tempfile.mkdtemp(prefix="tacit-postgresql-"))
        if self._user:
            shutil.chown(self.data, "postgres", "postgres")
        self.password = secrets.token_hex(12)
        word = self.data / "password"
        word.write_text(self.password)
        if self._user:
            shutil.chown(word, "postgres", "postgres")
        command = [folder / "initdb", "-D", self.data / "db", "-U", "tacit", "-A", "scram-sha-256", "--pwfile", word]
        command += ["-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]
        self._process = subprocess.Popen(
            [folder / "postgres", "-D", self.data / "db", "-p", str(self.port), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            **self._user,
        )
        self._wait()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": "tacit",
            "PGPASSWORD": self.password,
            "PGDATABASE": "postgres",
        }

    def connect(self):
        from adbc_driver_postgresql import dbapi

        return dbapi.connect(f"postgresql://tacit:{self.password}@127.0.0.1:{self.port}/postgres")

    def _wait(self) -> None:
        from adbc_driver_manager import Error

        for _ in range(200):
            try:
                self.connect().close()
                return
            except Error:
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError("PostgreSQL did not start")

    def die(self) -> None:
        """End at once, as in a crash."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
        shutil.rmtree(self.data, ignore_errors=True)
