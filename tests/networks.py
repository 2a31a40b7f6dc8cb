"""What tests of public ledgers share: a chain of their own (anvil), accounts on it, a Helia node."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NPM = ROOT / "build" / "npm"


def installed(name):
    """The folder of a program of npm's, installed by the project's script; skipped if it cannot be."""
    if not (NPM / name / "package.json").is_file() or shutil.which("node") is None:
        done = subprocess.run([ROOT / "scripts" / "install-npm", name], capture_output=True, text=True, check=False,
                              timeout=600)  # fmt: skip
        if not (NPM / name / "package.json").is_file():
            pytest.skip(f"{name} is not installed: {done.stdout.strip() or done.stderr.strip()}")
    return NPM / name


class Anvil:
    """A chain on this machine. Without `every` each transaction is a block at once; else one comes in so many seconds.

    `state`: a file in which it keeps everything, at least every second.
    """

    def __init__(self, every=None, state=None):
        found = list(installed("anvil").glob("node_modules/@foundry-rs/anvil-*/bin/anvil*"))
        if not found:
            pytest.skip("anvil is not there for this kind of machine")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.place = f"evm:http://127.0.0.1:{self.port}"
        self._command = [found[0], "--port", str(self.port), "--silent", "--accounts", "1"]
        self._command += ["--block-time", str(every)] if every else []
        self._command += ["--state", str(state), "--state-interval", "1"] if state else []
        self.start()

    def start(self):
        from tacit.ledger.evm import Node

        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.node = Node(self.place.removeprefix("evm:"), patience=30)
        self.node.head()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.node.close()

    def mine(self, count=1):
        self.node.ask("anvil_mine", hex(count))

    def reorganise(self, depth):
        """The newest blocks are replaced by empty ones."""
        self.node.ask("anvil_reorg", depth, [])

    def account(self, path):
        """A new account with coins."""
        from tacit.ledger.evm import Account

        found = Account.new(path)
        self.node.ask("anvil_setBalance", found.address, hex(10**20))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()


class Helia:
    """A Helia node, which is another program's IPFS."""

    def __init__(self):
        folder = installed("helia")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(["node", Path(__file__).with_name("helia.mjs"), folder], text=True, **pipes)
        line = self.process.stdout.readline()
        if not line:
            told = self.process.stderr.read()[-600:]
            self.__exit__()
            pytest.skip(f"Helia does not run with this Node: {told}")
        self.addresses = json.loads(line)["addresses"]

    def ask(self, **words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        assert "error" not in found, found
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        for each in (self.process.stdin, self.process.stdout, self.process.stderr):
            each.close()


def until(true, seconds=90):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}
