"""A mapping: SQL queries, and templates that make statements out of their rows; read from TOML and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tacit.errors import BadInput, excerpt

SCHEMA = "tacit.mapping/1"
SHIPPED = Path(__file__).parent / "mappings"
COLUMN = re.compile(r"\{([^{}]+)\}")
HARMLESS = {"connect_timeout", "dbname", "host", "hostaddr", "port", "service", "sslmode", "sslrootcert"}
"""What the query part of a server's address may hold."""
PARTS = ("head", "relation", "tail", "group")


@dataclass(frozen=True)
class Statements:
    """One entry of a mapping: a query, and what its rows say."""

    query: str
    head: str = "{head}"
    relation: str = "{relation}"
    tail: str = "{tail}"
    confidential: bool = False
    group: str | None = None
    place: str = "statements"
    """Where the entry stands, for messages."""

    def templates(self) -> dict[str, str]:
        return {part: template for part in PARTS if (template := getattr(self, part)) is not None}


@dataclass(frozen=True)
class GraphMapping:
    """A whole mapping; `read_mapping` makes it from a file."""

    file: Path
    source: str
    statements: tuple[Statements, ...]
    separator: str = ","
    valid: float = 0.0
    test: float = 0.0
    coin: str = "tacit"


def read_mapping(path: str | PathLike[str]) -> GraphMapping:
    """Read a mapping: SQL queries, and what their rows say.

    Parameters
    ----------
    path
        A TOML file; or the name of a mapping that comes with tacit: mimic-iii, eicu, clinic.
    """
    file = SHIPPED / f"{path}.toml" if str(path) in shipped() else Path(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"Mappings that come with tacit: {', '.join(shipped())}."
        raise BadInput(f"{file}: no such file.", hint=hint) from None
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: cannot be read as TOML: {error}.") from None
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise BadInput(f"{file}: found the schema {schema!r}; expected {SCHEMA!r}.")
    _check(file, "the mapping", content, {"source": str, "separator": str, "split": dict, "statements": list})
    split = content.get("split", {})
    _check(file, "[split]", split, {"valid": float | int, "test": float | int, "coin": str})
    shares = float(split.get("valid", 0)), float(split.get("test", 0))
    if not (min(shares) >= 0 and sum(shares) < 1):
        raise BadInput(
            f"{file}: [split]: found valid {shares[0]} and test {shares[1]}; expected to leave some to train."
        )
    if not (entries := content.get("statements", [])):
        raise BadInput(f"{file}: found no [[statements]]; expected at least one.")
    separator = content.get("separator", ",")
    if len(separator) != 1 or not separator.isascii() or separator in "\n\r\"'":
        raise BadInput(f"{file}: found {excerpt(separator)} as separator; expected a single character.")
    postgres_uri(content.get("source", ""), file)
    return GraphMapping(
        file,
        content.get("source", ""),
        tuple(_statements(file, number, entry) for number, entry in enumerate(entries, 1)),
        separator,
        *shares,
        split.get("coin", "tacit"),
    )


def shipped() -> list[str]:
    """The names of the mappings that come with tacit."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def _statements(file: Path, number: int, entry: Any) -> Statements:
    place = f"{file}: statements {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("query"), str):
        raise BadInput(f"{place}: found no query.")
    texts = dict.fromkeys(("query", "head", "relation", "tail", "group"), str)
    _check(file, f"statements {number}", entry, texts | {"confidential": bool})
    if "{" not in (constant := entry.get("relation", "{")):
        place += f" ({constant})"
    made = Statements(**entry, place=place)
    for part, template in made.templates().items():
        if "{" in (rest := COLUMN.sub("", template)) or "}" in rest:
            raise BadInput(f"{place}: found a brace without its other half in the {part}, {excerpt(template)}.")
    if made.group is not None and not made.confidential:
        raise BadInput(f"{place}: found a group for statements that are not confidential; expected none.")
    return made


def _check(file: Path, where: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse keys that mean nothing, and values of another type."""
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key, [*known, "schema"], n=1)
            hint = f"Did you mean {near[0]!r}?" if near else ""
            raise BadInput(f"{file}: {where}: found the unknown key {excerpt(key)}.", hint=hint)
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            expected = getattr(known[key], "__name__", "number")
            raise BadInput(f"{file}: {where}: found {excerpt(repr(value))} as {key}; expected a {expected}.")


def postgres_uri(source: str, place: object = "--source") -> str | None:
    """The address of a PostgreSQL server if `source` is one, None if it is a path.

    An address says where, never who: user and password have no place in a file, a log or a command line, and a source
    that might hold them is not even quoted.
    """
    text = source.strip()
    if text.lower() in ("postgresql", "postgres"):
        return "postgresql://"
    if "://" not in text and not re.search(r"@|\b(password|user)\s*=", text, re.IGNORECASE):
        return None
    parts = urlsplit(text)
    if parts.scheme.lower() not in ("postgresql", "postgres") or not text.startswith(f"{parts.scheme}://"):
        raise BadInput(
            f"{place}: found a source that tacit does not know; expected a path, or postgresql://HOST/DATABASE."
        )
    keys = {key.lower() for key, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if "@" in unquote(text) or ":" in unquote(parts.hostname or "") or not keys <= HARMLESS:
        raise BadInput(
            f"{place}: found credentials, or what might hold them, in the source; expected none.",
            hint="Set PGUSER and PGPASSWORD, use ~/.pgpass, or a service file and PGSERVICE. "
            f"An address may set {', '.join(sorted(HARMLESS))}.",
        )
    return text
