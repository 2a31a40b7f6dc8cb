"""What the project writes to disk: JSON that names its schema, folders that appear whole or not at all, logs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from tacit.errors import BadInput, TacitError, excerpt

LOG = logging.getLogger("tacit")
LOG_BYTES, LOG_FILES = 1 << 20, 5
PRIVATE = "private"
"""The folder, inside a result, of what its owner keeps."""


WRITERS = {
    "tacit.run": "tacit train",
    "tacit.federation": "tacit federate",
    "tacit.tuning": "tacit tune",
    "tacit.peer": "tacit peer start",
}
"""Which command writes folders of a kind, and goes on with them."""


def write_json(path: Path, schema: str, content: Mapping[str, Any], mode: int | None = None) -> None:
    """Write `content` under its schema ("tacit.graph/1": kind and version); whole, or not at all.

    `mode` None: as the umask has it.
    """
    text = json.dumps({"schema": schema} | dict(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, text.encode(), mode)


def write_whole(path: Path, data: bytes, mode: int | None = 0o600) -> None:
    """Write a file whole, or not at all; `mode` None: as the umask has it."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a journal, on the disk before this returns. A last line that was cut off was none yet, and goes."""
    new = not path.exists()
    with open(path, "ab") as file:
        whole = path.read_bytes()
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make sure that a new file's name is on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, schema: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Read what `write_json` wrote; another kind, a newer version or a missing field is refused by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}.") from None
    found = content.get("schema") if isinstance(content, dict) else None
    kind, version = schema.split("/")
    match = re.fullmatch(r"(?P<kind>[a-z.-]+)/(?P<version>[0-9]{1,6})", str(found))
    if match is None or match["kind"] != kind:
        other = WRITERS.get(match["kind"]) if match is not None else None
        hint = (
            f"This folder was written by {other}, and is for that: {other} --resume goes on with it." if other else ""
        )
        raise BadInput(f"{path}: found the schema {found!r}; expected {schema!r}.", hint=hint)
    if int(match["version"]) > int(version):
        raise BadInput(
            f"{path}: was written as {found}; this version of tacit reads up to {schema}.",
            hint="A newer tacit reads it: pip install --upgrade tacit-kg",
        )
    for name, type_ in fields.items():
        if not isinstance(content.get(name), type_):
            raise BadInput(
                f"{path}: found {excerpt(repr(content.get(name)))} as {name!r}; expected a {type_.__name__}."
            )
    return dict(content)


@contextmanager
def new_folder(path: Path, manifest: str, *, force: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `path` when the block ends well, and vanishes when it does not.

    The block has to `seal` it. What exists at `path` is replaced only if `force` asks for it and every file there is
    one that an earlier seal lists, so that nothing but a result of ours can be lost.
    """
    path = path.resolve()
    check_free(path, manifest, force=force)
    nearest = next(up for up in path.parents if up.exists())
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=nearest))
    except OSError as error:
        raise TacitError(f"{path} cannot be made in {nearest}: {error.strerror}. Choose another --out.") from None
    draft.chmod(0o777 & ~_umask())
    try:
        yield draft
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and any(path.iterdir()):
            old = draft.with_name(draft.name + ".old")
            os.rename(path, old)
            try:
                os.rename(draft, path)
            except OSError:
                os.rename(old, path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            try:
                os.rename(draft, path)
            except OSError:  # an empty mount point cannot be replaced, only filled
                for item in sorted(draft.iterdir(), key=lambda item: item.name == manifest):
                    shutil.move(item, path)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def check_free(path: Path, manifest: str, *, force: bool = False) -> None:
    """Refuse a place where `new_folder` could not put a folder because of what is there."""
    path = path.resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        _check_replaceable(path, manifest, force)


def seal(
    folder: Path,
    manifest: str,
    schema: str,
    content: Mapping[str, Any],
    *,
    later: Iterable[str] = (),
    mode: int | None = None,
) -> None:
    """Write the manifest of a folder that is complete, with a list of what belongs to it, now or `later`."""
    belongs = sorted({*(item.name for item in folder.iterdir()), manifest, PRIVATE, *later})
    write_json(folder / manifest, schema, dict(content) | {"contents": belongs}, mode)


def _check_replaceable(path: Path, manifest: str, force: bool) -> None:
    try:
        kind = json.loads((path / manifest).read_text(encoding="utf-8"))
        ours = str(kind["schema"]).startswith("tacit.") and isinstance(kind["contents"], list)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        ours = False
    if not ours or not force:
        way_out = "Choose another place, or write --force to replace it." if ours else "Choose another place."
        raise TacitError(f"{path} exists already. {way_out}")
    if foreign := [item.name for item in path.iterdir() if item.name not in kind["contents"]]:
        raise TacitError(f"{path} holds {excerpt(foreign[0])}, which is none of ours, and is not replaced.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def log_to(folder: Path) -> Iterator[None]:
    """Write the log to `folder`/private/tacit.log too, in files that rotate and only the owner can read.

    Messages above debug level never hold a name from the data: a log is copied into tickets.
    """
    private = folder / PRIVATE
    private.mkdir(mode=0o700, exist_ok=True)
    handler = _PrivateFile(private / "tacit.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        handler.close()


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding=self.encoding)
