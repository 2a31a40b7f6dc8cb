"""A mapping: SQL queries, and templates that make statements out of their rows; read from TOML and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from tacit.errors import BadInput, excerpt

SCHEMA = "tacit.mapping/1"
SHIPPED = Path(__file__).parent / "mappings"
POSTGRESQL = ("postgresql", "postgres:")
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
    valid: float = 0.0
    test: float = 0.0
    coin: str = "tacit"


def read_mapping(path: str | PathLike[str]) -> GraphMapping:
    """Read a mapping from a file, or one of those that come with tacit by its name."""
    file = Path(path)
    if not file.exists() and (SHIPPED / f"{path}.toml").is_file():
        file = SHIPPED / f"{path}.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in SHIPPED.glob("*.toml")))
        raise BadInput(f"{file}: no such file.", hint=f"Mappings that come with tacit: {known}.") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as TOML: {error}.") from None
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise BadInput(f"{file}: found the schema {schema!r}; expected {SCHEMA!r}.")
    split, source = content.pop("split", {}), content.pop("source", "")
    entries = content.pop("statements", [])
    _known_keys(file, "the mapping", content, ())
    if not isinstance(split, dict) or not isinstance(entries, list) or not entries:
        raise BadInput(f"{file}: found no [[statements]]; expected at least one, and [split] as a table.")
    _known_keys(file, "[split]", split, ("valid", "test", "coin"))
    shares = [split.get(name, 0.0) for name in ("valid", "test")]
    if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares) or sum(shares) >= 1:
        raise BadInput(
            f"{file}: [split]: found valid {shares[0]} and test {shares[1]}; expected shares that leave some to train."
        )
    return GraphMapping(
        file,
        without_secrets(file, str(source)),
        tuple(_statements(file, number, entry) for number, entry in enumerate(entries, 1)),
        valid=float(shares[0]),
        test=float(shares[1]),
        coin=str(split.get("coin", "tacit")),
    )


def _statements(file: Path, number: int, entry: Any) -> Statements:
    place = f"{file}: statements {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("query"), str):
        raise BadInput(f"{place}: found no query.")
    types = {"query": str, "head": str, "relation": str, "tail": str, "group": str, "confidential": bool}
    _known_keys(file, f"statements {number}", entry, tuple(types))
    for key, value in entry.items():
        if not isinstance(value, types[key]):
            raise BadInput(f"{place}: found {excerpt(repr(value))} as {key}; expected a {types[key].__name__}.")
    if "{" not in (constant := entry.get("relation", "{")):
        place += f" ({constant})"
    return Statements(**entry, place=place)


def _known_keys(file: Path, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in table if key not in known]:
        near = get_close_matches(unknown[0], [*known, "schema", "source", "split", "statements"], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"{file}: {where}: found the unknown key {unknown[0]!r}.", hint=hint)


def without_secrets(place: object, source: str) -> str:
    """A source that says where, never who: user and password have no place in a file, a log or a command line."""
    if source.startswith(POSTGRESQL) and (re.search(r"//[^/]*@|password|user=", source)):
        raise BadInput(
            f"{place}: found credentials in the source; expected none.",
            hint="Set PGUSER and PGPASSWORD, use ~/.pgpass, or a service file and PGSERVICE.",
        )
    return source
