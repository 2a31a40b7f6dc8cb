"""Tensors, graphs and parties on disk, with NumPy and torch alone.

The format is safetensors (8 bytes of header length, a JSON header, raw little-endian numbers), written and read here in
a few lines because whatever trains may have no other package. A file appears whole or not at all: it is written under
another name, forced to disk, and renamed.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tacit.errors import BadInput
from tacit.folders import sync_folder
from tacit.graph import SPLITS, Graph, Split, Vocab
from tacit.parties import Link, Parties

Tensor = Any
TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
LONGEST_HEADER, AXES, LONGEST_AXIS = 100_000_000, 8, 1 << 48


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors and text beside them; what stood at `path` is replaced at once, or kept if anything fails."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", opener=_private) as file:
            file.writelines(_pieces(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save_tensors` writes."""
    return b"".join(_pieces(tensors, metadata))


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[Any]:
    arrays = {
        name: np.asarray(t.detach().cpu().numpy() if hasattr(t, "detach") else t, order="C")
        for name, t in sorted(tensors.items())
    }
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        yield array.reshape(-1).view(np.uint8).data


def _private(path: str, flags: int) -> int:
    """Tables and graphs are for their owner's eyes, wherever their file goes."""
    return os.open(path, flags, 0o600)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in a file, and the text beside them; what is not such a file is refused, whatever its bytes."""
    try:
        with open(path, "rb") as file:
            return _read(file, Path(path).stat().st_size)
    except _FAULTS as error:
        raise BadInput(f"{path}: is no whole safetensors file ({error}).") from None


def parse_tensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The same of bytes that are in memory already."""
    try:
        return _read(io.BytesIO(data), len(data))
    except _FAULTS as error:
        raise BadInput(f"is no whole safetensors file ({error}).") from None


_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def _read(file: BinaryIO, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("what stands beside the tensors is not text")
    import torch

    found, expected = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        kind, shape, (begin, end) = np.dtype(TYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > AXES or not all(type(n) is int and 0 <= n <= LONGEST_AXIS for n in shape):
            raise ValueError(f"{name!r} has a shape that no tensor has")  # to multiply it might take for ever
        if begin != expected or end - begin != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{name!r} does not fit its place")
        if end > size - 8 - length:
            raise ValueError(f"{name!r} ends beyond the file")
        if isinstance(file, io.BytesIO):
            array = np.frombuffer(bytearray(file.read(end - begin)), kind) if end > begin else np.empty(0, kind)
        else:
            array = np.fromfile(file, kind, math.prod(shape))
        found[name] = torch.from_numpy(array.reshape(shape))
        expected = end
    if expected != size - 8 - length:
        raise ValueError("bytes that belong to no tensor")
    return found, metadata


GRAPH_SCHEMA, PARTIES_SCHEMA = "tacit.graph-tensors/1", "tacit.parties-tensors/1"


def save_graph(path: Path, graph: Graph) -> None:
    """A graph with its names and marks in one file, that NumPy alone can read again."""
    facts = {"schema": GRAPH_SCHEMA, "fingerprint": graph.fingerprint}
    save_tensors(path, _graph_tensors(graph), facts | {"prefixes": json.dumps(dict(graph.prefixes))})


def load_graph(path: Path) -> Graph:
    """Read what `save_graph` wrote."""
    tensors, metadata = _loaded(path, GRAPH_SCHEMA)
    try:
        graph = _graph_of(tensors, json.loads(metadata["prefixes"]))
    except (LookupError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: holds no whole graph ({type(error).__name__}).") from None
    if graph.fingerprint != metadata.get("fingerprint"):
        raise BadInput(f"{path}: does not hold the graph it says it does: the file is damaged.")
    return graph


def save_parties(path: Path, parties: Parties) -> None:
    """The graphs of several parties, and the links between them, in one file."""
    tensors: dict[str, Any] = {}
    for number, graph in enumerate(parties):
        tensors |= {f"{number}.{name}": array for name, array in _graph_tensors(graph).items()}
    facts: dict[str, Any] = {
        "names": list(parties.names),
        "origin": dict(parties.origin),
        "fingerprints": [graph.fingerprint for graph in parties],
        "prefixes": [dict(graph.prefixes) for graph in parties],
    }
    if parties.links is not None:
        place = {name: number for number, name in enumerate(parties.names)}
        rows = []
        for link in parties.links:
            ends = [(place[link.party], link.name), (place[link.other], link.other_name)]
            vocabs = [parties[i].entities if link.kind == "entity" else parties[i].relations for i, _ in ends]
            ids = [vocab.id(name) for vocab, (_, name) in zip(vocabs, ends, strict=True)]
            rows.append((ends[0][0], ids[0], ends[1][0], ids[1], link.kind == "relation"))
        tensors["links"] = np.array(rows, np.int32).reshape(-1, 5)
    save_tensors(path, tensors, {"schema": PARTIES_SCHEMA, "parties": json.dumps(facts)})


def load_parties(path: Path) -> Parties:
    """Read what `save_parties` wrote."""
    tensors, metadata = _loaded(path, PARTIES_SCHEMA)
    try:
        facts, graphs = json.loads(metadata["parties"]), []
        for number, prefixes in enumerate(facts["prefixes"]):
            begin = f"{number}."
            own = {name.removeprefix(begin): array for name, array in tensors.items() if name.startswith(begin)}
            graphs.append(_graph_of(own, prefixes))
        names, links = tuple(facts["names"]), []
        for one, name, two, other, kind in tensors["links"].tolist() if "links" in tensors else ():
            vocabs = [graphs[i].relations if kind else graphs[i].entities for i in (one, two)]
            ends = (names[one], vocabs[0][name], names[two], vocabs[1][other])
            links.append(Link(*ends, "relation" if kind else "entity"))
        parties = Parties(names, tuple(graphs), tuple(links) if "links" in tensors else None, facts["origin"])
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise BadInput(f"{path}: holds no whole parties ({type(error).__name__}).") from None
    if [graph.fingerprint for graph in graphs] != facts["fingerprints"]:
        raise BadInput(f"{path}: does not hold the graphs it says it does: the file is damaged.")
    return parties


def _loaded(path: Path, schema: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        tensors, metadata = load_tensors(path)
    except FileNotFoundError:
        hint = f"Was it copied without what is in {path.parent.name}/? That belongs to it."
        raise BadInput(f"{path}: no such file, so the folder is not whole.", hint=hint) from None
    if metadata.get("schema") != schema:
        raise BadInput(f"{path}: found the schema {metadata.get('schema')!r}; expected {schema!r}.")
    return tensors, metadata


def _graph_tensors(graph: Graph) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for vocab in ("entities", "relations", "groups"):
        tensors[vocab] = np.frombuffer("\n".join(getattr(graph, vocab).names).encode(), np.uint8)
    for name, split in graph.splits.items():
        for field in ("triples", "confidential", "group"):
            if (array := getattr(split, field)) is not None:
                tensors[f"{name}.{field}"] = array
    return tensors


def _graph_of(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> Graph:
    vocabs = [
        Vocab(tensors[name].numpy().tobytes().decode().split("\n") if len(tensors[name]) else ())
        for name in ("entities", "relations", "groups")
    ]
    splits = []
    for name in SPLITS:
        marks = [tensors.get(f"{name}.{field}") for field in ("confidential", "group")]
        splits.append(Split(tensors[f"{name}.triples"].numpy(), *(m if m is None else m.numpy() for m in marks)))
    train, valid, test = splits
    return Graph(vocabs[0], vocabs[1], train, valid, test, groups=vocabs[2], prefixes=prefixes)
