"""RDF in and out, with names people can read.

The name of an RDF term is

    prefix:local     an IRI under a prefix the file declares, or a well-known one
    scheme://...     any other IRI with an authority
    <scheme:...>     any other IRI
    "text"@en        a literal, as N-Triples writes it, its datatype under a prefix where there is one
    _:label          a blank node

`shorten` and `expand` are each other's inverse. A name that is none of these (a graph read from TSV) is written to RDF
as `<urn:tacit:NAME>`, percent-encoded, and read back as itself: any graph survives the way through N-Triples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.parsers import expat

import pyarrow as pa
import pyoxigraph as ox

from tacit.errors import BadInput, excerpt
from tacit.files.encoder import Encoder
from tacit.files.lines import Block, blocks, reading
from tacit.files.records import Faults, FileReading, RawFile
from tacit.graph import FORBIDDEN, Graph, SplitName, name_fault

LINE_FORMATS = {".nt": ox.RdfFormat.N_TRIPLES, ".nq": ox.RdfFormat.N_QUADS}
TREE_FORMATS = {
    ".ttl": ox.RdfFormat.TURTLE,
    ".trig": ox.RdfFormat.TRIG,
    ".rdf": ox.RdfFormat.RDF_XML,
    ".xml": ox.RdfFormat.RDF_XML,
    ".owl": ox.RdfFormat.RDF_XML,
}
WELL_KNOWN = {
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    "owl": "http://www.w3.org/2002/07/owl#",
    "skos": "http://www.w3.org/2004/02/skos/core#",
    "dcterms": "http://purl.org/dc/terms/",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "prov": "http://www.w3.org/ns/prov#",
    "schema": "https://schema.org/",
    "obo": "http://purl.obolibrary.org/obo/",
    "wd": "http://www.wikidata.org/entity/",
    "wdt": "http://www.wikidata.org/prop/direct/",
    "dbr": "http://dbpedia.org/resource/",
    "dbo": "http://dbpedia.org/ontology/",
}
OWN = "urn:tacit:"
AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
ANONYMOUS = re.compile(r"_:[0-9a-f]{20,32}")
"""How the parser labels a blank node that has no label in the file: at random, anew each time."""
LABEL = re.compile(r"_:[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
BASE = "tacit://graph/"
"""What relative IRIs are relative to."""
BATCH, SCOPE = 1 << 16, 1 << 8
Statement = tuple[int | None, Any]
"""The line, where the format has lines, and the pyoxigraph quad."""


class Prefixes:
    """Two-way renaming of RDF terms under a set of prefixes."""

    def __init__(self, prefixes: Mapping[str, str]):
        self.by_prefix = dict(prefixes)
        self._longest_first = sorted(prefixes.items(), key=lambda item: (-len(item[1]), item))
        self.used: set[str] = set()

    def shorten(self, term: str) -> str:
        """The readable name of a term in N-Triples form."""
        if term.startswith("<"):
            iri = term[1:-1]
            if iri.startswith(OWN):
                own = unquote(iri[len(OWN) :], errors="surrogateescape")
                if name_fault(own) is None and quote(own, safe="") == iri[len(OWN) :]:
                    return own
            return self._iri(iri)
        if term.startswith('"'):
            term = FORBIDDEN.sub(lambda match: f"\\u{ord(match.group()):04X}", term)
            if term.endswith(">"):
                text, _, datatype = term.rpartition("^^")
                return f"{text}^^{self._datatype(datatype[1:-1])}"
        return term

    def _iri(self, iri: str) -> str:
        for prefix, base in self._longest_first:
            if iri.startswith(base) and not iri.startswith("//", len(base)):
                self.used.add(prefix)
                return f"{prefix}:{iri[len(base) :]}"
        return iri if AUTHORITY.match(iri) else f"<{iri}>"

    def _datatype(self, iri: str) -> str:
        short = self._iri(iri)
        return f"<{iri}>" if short == iri else short

    def expand(self, name: str) -> ox.NamedNode | ox.Literal | ox.BlankNode | None:
        """The term that `name` is the name of; None if it is no RDF name."""
        try:
            term = self._term(name)
        except (ValueError, SyntaxError):
            return None
        return term if term is not None and self.shorten(str(term)) == name else None

    def _term(self, name: str) -> Any:
        if name.startswith('"'):
            text, mark, datatype = name.rpartition("^^")
            if mark and not datatype.startswith("<") and not datatype.endswith('"'):
                prefix, _, local = datatype.partition(":")
                name = f"{text}^^<{self.by_prefix[prefix]}{local}>" if prefix in self.by_prefix else name
            [quad] = ox.parse(f"<a:a> <a:a> {name} .", format=ox.RdfFormat.N_TRIPLES)
            return quad.object
        if name.startswith("_:"):
            return ox.BlankNode(name[2:]) if LABEL.fullmatch(name) else None
        if name.startswith("<"):
            return ox.NamedNode(name[1:-1])
        if AUTHORITY.match(name):
            return ox.NamedNode(name)
        prefix, colon, local = name.partition(":")
        return ox.NamedNode(self.by_prefix[prefix] + local) if colon and prefix in self.by_prefix else None

    def write(self, name: str, allowed: str) -> str:
        """`name` in N-Triples form if that begins with an `allowed` character, else as an IRI of our own."""
        term = str(self.expand(name) or "")
        return term if term and term[0] in allowed else f"<{OWN}{quote(name, safe='')}>"


def read_rdf(path: Path, split: SplitName, suffix: str) -> RawFile:
    """Read one file; its names stay in N-Triples form until all prefixes of the graph are known."""
    encoder, faults = Encoder(), Faults(path)
    prefixes: dict[str, str] = {}
    in_graphs = 0
    if suffix in LINE_FORMATS:
        batches: Iterable[list[Statement]] = (
            _parse_lines(block, LINE_FORMATS[suffix], faults) for block in blocks(path)
        )
    else:
        batches = _parse_tree(path, TREE_FORMATS[suffix], prefixes)
    for batch in batches:
        fields: list[str] = []
        for line, quad in batch:
            if isinstance(quad.subject, ox.Triple) or isinstance(quad.object, ox.Triple):
                faults.reject(line, "a triple about a triple", "an IRI, a literal or a blank node")
                continue
            in_graphs += not isinstance(quad.graph_name, ox.DefaultGraph)
            fields += (str(quad.subject), str(quad.predicate), str(quad.object))
        encoder.add(fields)
    names, _, ids = encoder.finish(3)
    if suffix in TREE_FORMATS:
        names = _with_labels(names, split)
    notes = (f"{in_graphs:,} statements of named graphs are read as plain triples",) if in_graphs else ()
    rows = len(ids) + faults.rejected
    account = FileReading(str(path), split, rows, faults.rejected, problems=faults.by_line(), notes=notes)
    return RawFile(names, ids, account, rdf=True, prefixes=prefixes)


def _with_labels(names: pa.Array, split: SplitName) -> pa.Array:
    """Nodes without a label get one: the split and a number in order of appearance, which no other node has."""
    values = names.to_pylist()
    taken, numbers = set(values), count(1)
    labels = (label for number in numbers if (label := f"_:anon-{split}-{number}") not in taken)
    return pa.array([next(labels) if ANONYMOUS.fullmatch(value) else value for value in values], pa.string())


def _parse_lines(block: Block, format: ox.RdfFormat, faults: Faults) -> list[Statement]:
    """The statements of a block of N-Triples or N-Quads, each with its line; a bad line is rejected, the rest read."""
    lines = block.lines()
    rows = [n for n, line in enumerate(lines, block.line) if (bare := line.strip()) and not bare.startswith(b"#")]
    try:
        quads = list(ox.parse(bytes(memoryview(block.data)[: block.end]), format=format))
        if len(quads) == len(rows):
            return list(zip(rows, quads, strict=True))
    except SyntaxError:
        quads = []
    found: list[Statement] = []
    for number in rows:
        line = lines[number - block.line]
        try:
            quads = list(ox.parse(line, format=format))
        except SyntaxError as error:
            shown = excerpt(line[:200].decode("utf-8", "backslashreplace"))
            faults.reject(number, f"{shown} ({_reason(error)})", "one statement")
            continue
        if len(quads) != 1:
            faults.reject(number, f"{len(quads)} statements", "one statement in a line")
            continue
        found.append((number, quads[0]))
    return found


def _reason(error: SyntaxError) -> str:
    """What the parser has to say, without its own idea of the place and fit for a terminal."""
    text = re.sub(r"^Parser error (at|between) .*?: ", "", str(error.msg))
    return excerpt(text, 200)[1:-1]


def _parse_tree(path: Path, format: ox.RdfFormat, prefixes: dict[str, str]) -> Iterator[list[Statement]]:
    """The statements of a format that only makes sense as a whole: its first fault ends the reading."""
    if format == ox.RdfFormat.RDF_XML:
        _check_xml(path)
    with reading(path) as file:
        parser = ox.parse(file, format=format, base_iri=BASE)
        batch: list[Statement] = []
        try:
            for number, quad in enumerate(parser):
                if number % SCOPE == 0:  # in RDF/XML a prefix is known only inside the element that declares it
                    prefixes.update(parser.prefixes)
                batch.append((None, quad))
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        except SyntaxError as error:
            place = f"{path}:{error.lineno}" if error.lineno else str(path)
            raise BadInput(f"{place}: not valid {format.name}: {_reason(error)}.") from None
        prefixes.update(parser.prefixes)
        yield batch


def _check_xml(path: Path) -> None:
    """Refuse XML that is cut off: the RDF parser takes what it has got for all there is."""
    try:
        with reading(path) as file:
            parser = expat.ParserCreate()
            while chunk := file.read(1 << 16):
                parser.Parse(chunk)
            parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise BadInput(f"{path}:{error.lineno}: not valid RDF/XML: {expat.errors.messages[error.code]}.") from None


def readable(files: list[RawFile], prefixes: Mapping[str, str] | None = None) -> tuple[list[RawFile], dict[str, str]]:
    """The files with readable names, and the prefixes these use.

    Without given `prefixes`, those that the files declare and the well-known ones are used. A prefix means the first
    thing it was declared to mean; a file that means another by it keeps the full IRIs.
    """
    if not any(file.rdf for file in files):
        return files, dict(prefixes or {})
    known = dict(prefixes or {})
    if prefixes is None:
        for prefix, base in [*(item for file in files for item in file.prefixes.items()), *WELL_KNOWN.items()]:
            if base not in known.values() and prefix != "_":  # _:name is a blank node
                known.setdefault(prefix, base)
    renamer = Prefixes(known)
    files = [
        replace(file, names=pa.array(map(renamer.shorten, file.names.to_pylist()), pa.string())) if file.rdf else file
        for file in files
    ]
    return files, {prefix: known[prefix] for prefix in sorted(renamer.used)} if prefixes is None else known


def n_triples(graph: Graph, split: SplitName) -> Iterator[str]:
    """A split as N-Triples lines. Only a tail can be a literal, only a relation cannot be a blank node."""
    renamer = Prefixes(graph.prefixes)
    heads = [renamer.write(name, "<_") for name in graph.entities]
    relations = [renamer.write(name, "<") for name in graph.relations]
    tails = [renamer.write(name, '<_"') for name in graph.entities]
    for h, r, t in graph.splits[split].triples.tolist():
        yield f"{heads[h]} {relations[r]} {tails[t]} .\n"
