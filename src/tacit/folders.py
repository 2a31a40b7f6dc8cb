"""What the project writes to disk: JSON that names its schema, folders that appear whole or not at all, logs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from tacit.errors import BadInput, TacitError

LOG = logging.getLogger("tacit")
LOG_BYTES, LOG_FILES = 1 << 20, 5


def write_json(path: Path, schema: str, content: Mapping[str, Any]) -> None:
    """Write `content` under its schema ("tacit.graph/1": kind and version)."""
    path.write_text(
        json.dumps({"schema": schema} | dict(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read what `write_json` wrote; another kind or a newer version is refused by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}.") from None
    found = content.get("schema") if isinstance(content, dict) else None
    kind, _, version = schema.rpartition("/")
    found_kind, _, found_version = str(found).rpartition("/")
    if found_kind != kind or not found_version.isdigit():
        raise BadInput(f"{path}: found the schema {found!r}; expected {schema!r}.")
    if int(found_version) > int(version):
        raise BadInput(
            f"{path}: was written as {found}; this version of tacit reads up to {schema}.",
            hint="A newer tacit reads it: pip install --upgrade tacit-kg",
        )
    return dict(content)


@contextmanager
def new_folder(path: Path, manifest: str, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `path` when the block ends well, and vanishes when it does not.

    An existing folder is only ever replaced when `replace` is asked for and it holds `manifest`, so that nothing but an
    earlier result of ours can be lost.
    """
    path = path.absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        ours = path.is_dir() and (path / manifest).is_file()
        if not (ours and replace):
            way_out = "Choose another --out, or write --force to replace it." if ours else "Choose another --out."
            raise TacitError(f"{path} exists already. {way_out}")
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    draft.chmod(0o777 & ~_umask())
    try:
        yield draft
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.rename(path, old / "was")
            os.rename(draft, path)
            shutil.rmtree(old)
        else:
            os.rename(draft, path)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def log_to(folder: Path) -> Iterator[None]:
    """Write the log to `folder`/private/tacit.log too, in files that rotate and only the owner can read.

    Messages above debug level never hold a name from the data: a log is copied into tickets.
    """
    private = folder / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    handler = RotatingFileHandler(private / "tacit.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        handler.close()
