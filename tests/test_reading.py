"""Readers against slow ones that take a file line by line, on any bytes at all."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import stat
from contextlib import contextmanager

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from strategies import graphs, names, plain_triples, triples
from tacit import BadInput, Graph, read_graph, write_graph
from tacit.files import lines as lines_module
from tacit.graph import SPLITS, name_fault


@contextmanager
def block_size(size):
    """Tiny blocks put a block's border everywhere in a small file."""
    before, lines_module.BLOCK = lines_module.BLOCK, size
    try:
        yield
    finally:
        lines_module.BLOCK = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


def slow_rows(data, separator=b"\t"):
    """(line, fields or None, fault) of every row of a delimited file without quotes, header or BOM."""
    for number, line in enumerate(data.replace(b"\r\n", b"\n").split(b"\n"), 1):
        if not line.strip() and separator not in line:
            continue
        fields = [field.decode("utf-8", "surrogateescape") for field in line.split(separator)]
        yield number, fields, len(fields) == 3 and not any(map(name_fault, fields))


def check_against_slow(path, data, separator=b"\t"):
    rows = list(slow_rows(data, separator))
    good = {tuple(fields) for _, fields, fine in rows if fine}
    bad = [number for number, _, fine in rows if not fine]
    if not rows:
        with pytest.raises(BadInput, match="no statement"):
            read_graph(path, bad_rows="skip")
        return
    if not good:
        with pytest.raises(BadInput, match="none of its rows can be read"):
            read_graph(path, bad_rows="skip")
        return
    graph = read_graph(path, bad_rows="skip")
    [file] = graph.reading.files
    assert set(graph.named("train")) == good
    assert (file.rows, file.rejected, file.kept) == (len(rows), len(bad), len(good))
    assert [problem.line for problem in file.problems] == bad
    if bad:
        with pytest.raises(BadInput) as caught:
            read_graph(path)
        assert f"{path}:{bad[0]}: found" in str(caught.value)
    else:
        assert read_graph(path) == graph


lines = (
    triples.map("\t".join).map(str.encode)
    | st.sampled_from(
        [
            b"",
            b"  ",
            b"a\tb",
            b"a\tb\tc\td",
            b"a\t\tc",
            b"a\t \tc",
            b"\xff\tr\tb",
            b"a\tr\tb\x00",
            b"a\rb\tr\tc",
            b"\t\t",
        ]
    )
    | st.binary(max_size=12)
)
BOMS = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")


@given(st.lists(lines, max_size=20), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.integers(1, 64))
def test_tsv_equals_the_slow_reader(folder, content, ending, closed, size):
    data = ending.join(content) + (ending if closed else b"")
    if data.startswith(BOMS):
        return
    path = folder / "any.tsv"
    path.write_bytes(data)
    with block_size(size):
        check_against_slow(path, data)


@given(st.lists(st.binary(max_size=8).filter(lambda line: b'"' not in line), max_size=12), st.integers(1, 64))
def test_csv_without_quotes_equals_the_slow_reader(folder, content, size):
    data = b"\n".join(content)
    if data.startswith(BOMS):
        return
    path = folder / "any.csv"
    path.write_bytes(data)
    with block_size(size):
        check_against_slow(path, data, b",")


@given(
    st.lists(triples, min_size=1, max_size=20), st.lists(st.booleans(), min_size=20, max_size=20), st.integers(8, 64)
)
def test_quoted_csv_equals_pythons_reader(folder, rows, quote, size):
    text = io.StringIO()
    for row, all_quoted in zip(rows, quote, strict=False):
        style = csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL
        csv.writer(text, quoting=style, lineterminator="\n").writerow(row)
    if text.getvalue().startswith("\ufeff"):
        return
    path = folder / "quoted.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    with block_size(size):
        graph = read_graph(path, columns=[1, 2, 3])
    assert set(graph.named("train")) == set(rows)
    assert graph.reading.rows == len(rows)


SUFFIXES = ("tsv", "csv", "txt", "nt", "nq", "ttl", "trig", "rdf", "tsv.gz", "tsv.xz", "csv.zst", "nt.bz2")


@given(st.binary(max_size=200), st.sampled_from(SUFFIXES), st.sampled_from(["refuse", "skip"]))
def test_any_bytes_give_a_graph_or_one_clear_error(folder, data, suffix, bad_rows):
    path = folder / f"fuzz.{suffix}"
    path.write_bytes(data)
    message = None
    try:
        graph = read_graph(path, bad_rows=bad_rows)
    except BadInput as error:
        message = str(error)
    if message is not None:
        assert str(path) in message
        assert len(message.splitlines()) <= 12
        return
    [file] = graph.reading.files
    assert file.rows == file.kept + file.duplicates + file.rejected
    assert file.kept == len(graph.train)
    assert bad_rows == "skip" or not file.rejected


BAD_FILES = {
    "wrong column count": (b"a\tr\tb\na\tr\n", 2, "2 columns", "3 columns separated by tabs"),
    "spaces for tabs": (b"a r b\n", 1, "1 column", "3 columns separated by tabs"),
    "empty field": (b"a\tr\tb\n\n\t\na\t\tb\n", 4, "an empty field as relation", "the name of a relation"),
    "blank field": (b" \tr\tb\n", 1, "only blanks as head", "the name of a head"),
    "bad UTF-8": (b"a\tr\tb\n" * 3 + b"a\tr\t\xc3\n", 4, "bytes that are not UTF-8 as tail", "the name of a tail"),
    "control character": (b"a\tr\tb\x1b[31m\n", 1, "the control character U+001B as tail", "the name of a tail"),
    "carriage return alone": (b"a\tr\tb\ra\tr\tc\n", 1, "5 columns", "3 columns separated by tabs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("size", [4, 1 << 20])
def test_every_problem_names_file_line_found_and_expected(tmp_path, name, size):
    data, line, found, expected = BAD_FILES[name]
    path = tmp_path / "graph.tsv"
    path.write_bytes(data)
    with block_size(size), pytest.raises(BadInput) as caught:
        read_graph(path)
    problem = caught.value.problems[-1]
    assert (problem.file, problem.line) == (str(path), line)
    assert problem.found.startswith(found)
    assert problem.expected == expected


def test_line_numbers_are_exact_far_into_a_file(tmp_path):
    path = tmp_path / "long.tsv"
    rows = [f"e{i}\tr\te{i + 1}" for i in range(300_000)]
    rows[123_456], rows[200_000], rows[299_999] = "broken", "", "a\t\tb"
    path.write_text("\n".join(rows))
    graph = read_graph(path, bad_rows="skip")
    assert [problem.line for problem in graph.reading.files[0].problems] == [123_457, 300_000]
    assert graph.reading.rows == 299_999


def test_a_long_list_of_problems_stays_on_one_screen(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("a\tr\tb\n" + "x\n" * 5000)
    with pytest.raises(BadInput) as caught:
        read_graph(path)
    assert "5,000 of 5,001 rows" in str(caught.value)
    assert "... and 4,992 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 12


@pytest.mark.parametrize(
    "content", [b"", b"\n\n  \n", b"head\trelation\ttail\n"], ids=["empty", "blank", "only a header"]
)
def test_a_file_without_statements_is_an_error(tmp_path, content):
    path = tmp_path / "graph.tsv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="found no statement in it"):
        read_graph(path)


def test_missing_and_unknown_files_are_errors(tmp_path):
    with pytest.raises(BadInput, match="no such file or folder"):
        read_graph(tmp_path / "absent.tsv")
    (tmp_path / "graph.docx").write_bytes(b"a\tr\tb\n")
    with pytest.raises(BadInput, match="unknown format"):
        read_graph(tmp_path / "graph.docx")


def test_a_folder_with_nothing_to_read_says_what_is_there(tmp_path):
    with pytest.raises(BadInput, match="the folder holds nothing"):
        read_graph(tmp_path)
    (tmp_path / "notes.md").touch()
    with pytest.raises(BadInput, match=r"holds notes\.md"):
        read_graph(tmp_path)
    (tmp_path / "train.tsv").write_text("a\tr\tb\n")
    (tmp_path / "train.csv").write_text("a,r,b\n")
    with pytest.raises(BadInput, match="two files for train"):
        read_graph(tmp_path)


COMPRESSORS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd.compress}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compression_changes_nothing_and_a_cut_file_is_an_error(tmp_path, suffix):
    data = "".join(f"e{i}\tr{i % 7}\te{i * i % 1000}\n" for i in range(5000)).encode()
    (tmp_path / "plain.tsv").write_bytes(data)
    packed = tmp_path / f"packed.tsv{suffix}"
    packed.write_bytes(COMPRESSORS[suffix](data))
    assert read_graph(packed) == read_graph(tmp_path / "plain.tsv")
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(BadInput, match="cannot be read to its end"):
        read_graph(packed)
    two = COMPRESSORS[suffix](data[:400]), COMPRESSORS[suffix](data[400:])
    packed.write_bytes(b"".join(two))
    assert read_graph(packed) == read_graph(tmp_path / "plain.tsv")
    packed.write_bytes(two[0] + b"X" + two[1][1:])
    with pytest.raises(BadInput, match="cannot be read to its end"):
        read_graph(packed)
    packed.write_bytes(b"not compressed at all")
    with pytest.raises(BadInput, match="cannot be read to its end"):
        read_graph(packed)


def test_byte_order_marks(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_bytes(b"\xef\xbb\xbfa\tr\tb\n")
    assert list(read_graph(path).named("train")) == [("a", "r", "b")]
    path.write_bytes("a\tr\tb\n".encode("utf-16"))
    with pytest.raises(BadInput, match="found UTF-16 text; expected UTF-8"):
        read_graph(path)


def test_a_line_without_end_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 1000)
    path = tmp_path / "graph.tsv"
    path.write_bytes(b"a\tr\tb\n" + b"x" * 5000)
    with block_size(500), pytest.raises(BadInput, match=r"graph.tsv:2: found a line of more than"):
        read_graph(path)


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("subject,predicate,object,score", None),
        ("x,target,relation,source", None),
        ("a,b,c,d", ["a", "b", "c"]),
        ("a,b,c,d", ["d", "b", "a"]),
        (None, [1, 2, 3]),
        (None, [4, 2, 1]),
    ],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_columns_by_name_or_position(tmp_path, header, columns, quoted):
    rows = [("v0", "v1", "v2", "v3"), ("w0", "w1", "w2", "w3")]
    style = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    with open(tmp_path / "graph.csv", "w", newline="") as file:
        csv.writer(file, quoting=style).writerows([*([header.split(",")] if header else []), *rows])
    graph = read_graph(tmp_path / "graph.csv", columns=columns)
    where = {
        ("subject,predicate,object,score", None): (0, 1, 2),
        ("x,target,relation,source", None): (3, 2, 1),
    }.get((header, columns if columns is None else 0)) or [
        int(str(c).translate(str.maketrans("abcd1234", "01230123"))) for c in columns
    ]
    assert set(graph.named("train")) == {tuple(row[i] for i in where) for row in rows}
    assert graph.reading.files[0].header == (header is not None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["head", "relation"], "2 columns were asked for"),
        (["h", "r", "tail"], "expected also h, r"),
        ([1, 2, 9], "found 3 columns; expected columns 1, 2, 9"),
        ([1, 1, 2], "different ones"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, message):
    (tmp_path / "graph.tsv").write_text("head\trelation\ttail\na\tr\tb\n")
    with pytest.raises(BadInput, match=message):
        read_graph(tmp_path / "graph.tsv", columns=columns)


def test_confidential_and_group_columns(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("tail\thead\trelation\tgroup\tconfidential\nb\ta\tr\tg1\tyes\nc\ta\tr\t\tfalse\n")
    graph = read_graph(path)
    assert list(graph.named("train")) == [("a", "r", "b"), ("a", "r", "c")]
    assert graph.train.confidential.tolist() == [True, False]
    assert [graph.groups[i] if i >= 0 else None for i in graph.train.group] == ["g1", None]
    path.write_text("head\trelation\ttail\tconfidential\na\tr\tb\tmaybe\n")
    with pytest.raises(BadInput, match="found 'maybe' as confidential; expected true or false"):
        read_graph(path)


def test_a_quote_nobody_closes_costs_its_own_line_only(tmp_path):
    path = tmp_path / "graph.csv"
    good = [f"e{i},r,e{i + 1}" for i in range(1000)]
    path.write_text("\n".join(['"a",r,"b"', 'x,r,"open', *good[:500], 'y,r,"open too', *good[500:]]))
    for size in (64, 1 << 20):
        with block_size(size):
            graph = read_graph(path, bad_rows="skip")
        assert [problem.line for problem in graph.reading.files[0].problems] == [2, 503]
        assert (graph.reading.rows, len(graph.train)) == (1003, 1001)


def test_a_record_may_go_over_lines_in_a_column_that_is_not_read(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text('head,note,relation,tail\na,"first\nsecond, third",r,b\nbroken\nc,,r,d\n')
    graph = read_graph(path, bad_rows="skip")
    assert list(graph.named("train")) == [("a", "r", "b"), ("c", "r", "d")]
    assert [problem.line for problem in graph.reading.files[0].problems] == [4]


def test_the_role_a_column_is_named_after_wins(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("head\trelation\ttail\tsource\na\tr\tb\tpubmed\n")
    assert list(read_graph(path).named("train")) == [("a", "r", "b")]
    path.write_text("subject\tpredicate\tobject\tsource\na\tr\tb\tpubmed\n")
    with pytest.raises(BadInput, match=r"graph.tsv:1: found 2 columns for the head"):
        read_graph(path)


def test_a_row_that_only_looks_like_a_header_is_data(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("tail\tr\ttail\nhead\ttail\ttail\n")
    assert set(read_graph(path).named("train")) == {("tail", "r", "tail"), ("head", "tail", "tail")}


def test_a_header_can_be_announced_or_denied(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("head\trelation\ttail\n")
    assert list(read_graph(path, header=False).named("train")) == [("head", "relation", "tail")]
    path.write_text("h\tr\tt\na\tr\tb\n")
    assert list(read_graph(path, header=True).named("train")) == [("a", "r", "b")]
    assert list(read_graph(path, header=True, columns=[3, 2, 1]).named("train")) == [("b", "r", "a")]


def test_other_separators_may_quote_too(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text('"a;b";r;"c ""d"""\n')
    assert list(read_graph(path, separator=";").named("train")) == [("a;b", "r", 'c "d"')]


@pytest.mark.parametrize("separator", ["ab", "\n", '"', "ü", "\udcff"])
def test_a_separator_is_one_plain_character(tmp_path, separator):
    (tmp_path / "graph.tsv").write_text("a\tr\tb\n")
    with pytest.raises(BadInput, match="single character"):
        read_graph(tmp_path / "graph.tsv", separator=separator)


def test_a_split_that_is_no_file_is_an_error(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tr\tb\n")
    (tmp_path / "test.tsv").symlink_to(tmp_path / "gone.tsv")
    with pytest.raises(BadInput, match="link to nothing; expected the test triples"):
        read_graph(tmp_path)


@pytest.mark.parametrize("path", ["/dev/null", "x" * 5000])
def test_paths_that_are_no_files(path):
    with pytest.raises(BadInput):
        read_graph(path)


def test_duplicates_are_counted_and_unseen_entities_kept(tmp_path):
    (tmp_path / "train.txt").write_text("a\tr\tb\na\tr\tb\na\tr\tc\n")
    (tmp_path / "dev.csv").write_text("a,r,new\n")
    graph = read_graph(tmp_path)
    assert [file.duplicates for file in graph.reading.files] == [1, 0]
    assert "new" in graph.entities
    assert list(graph.named("valid")) == [("a", "r", "new")]


def write_openke(folder, entities="2\na 0\nb\t1\n", relations="1\nr 0\n", train="1\n0 1 0\n", **more):
    content = {"entity2id": entities, "relation2id": relations, "train2id": train} | more
    for name, text in content.items():
        (folder / f"{name}.txt").write_text(text)


def test_openke_files_have_the_tail_before_the_relation(tmp_path):
    write_openke(tmp_path, entities="3\na 0\nb\t1\nlone name\t2\n", relations="2\nr 0\ns 1\n", test2id="1\n1 0 1\n")
    graph = read_graph(tmp_path)
    assert list(graph.named("train")) == [("a", "r", "b")]
    assert list(graph.named("test")) == [("b", "s", "a")]
    assert "lone name" in graph.entities


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"entities": "x\n"}, r"entity2id.txt:1: found 'x'; expected the number of rows"),
        ({"entities": "2\na 0\nb 2\n"}, r"entity2id.txt:3: found 'b 2'"),
        ({"entities": "2\na 0\nb 0\n"}, r"entity2id.txt:3"),
        ({"entities": "3\na 0\nb 1\n"}, "found 2 ids of 2 names; expected 3"),
        ({"train": "1\n0 2 0\n"}, r"train2id.txt:2: found '0 2 0'"),
        ({"train": "1\n0 1\n"}, r"train2id.txt:2: found '0 1'"),
        ({"train": ""}, r"train2id.txt:1: found ''"),
        ({"train": "2\n0 1 0\n"}, "found 2 as the number of rows; expected 1"),
        ({"train": "1\n0 1 " + "9" * 5000}, r"train2id.txt:2: found"),
    ],
)
def test_openke_faults(tmp_path, files, message):
    write_openke(tmp_path, **files)
    with pytest.raises(BadInput, match=message):
        read_graph(tmp_path)


@given(graphs(), st.sampled_from(["tsv", "nt"]))
def test_a_written_graph_is_read_back_as_it_was(folder, graph, format):
    write_graph(graph, folder / format, format=format, force=True)
    again = read_graph(folder / format)
    assert again == graph
    assert all(list(again.named(split)) == list(graph.named(split)) for split in SPLITS)


@given(st.lists(st.tuples(plain_triples, st.booleans(), names), min_size=1, max_size=20, unique_by=lambda row: row[0]))
def test_marks_and_groups_are_read_back(folder, rows):
    path = folder / "marked.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        marked = [(*triple, str(mark).lower(), group) for triple, mark, group in rows]
        csv.writer(file).writerows([("head", "relation", "tail", "confidential", "group"), *marked])
    graph = read_graph(path)
    write_graph(graph, folder / "marked", force=True)
    assert read_graph(folder / "marked") == graph
    marks = graph.train.confidential
    assert (0 if marks is None else int(marks.sum())) == sum(mark for _, mark, _ in rows)


def test_marks_are_not_dropped_for_a_format_without_them(tmp_path):
    (tmp_path / "graph.csv").write_text("head,relation,tail,confidential\na,r,b,true\n")
    with pytest.raises(BadInput, match="N-Triples cannot hold"):
        write_graph(read_graph(tmp_path / "graph.csv"), tmp_path / "out", format="nt")
    assert not (tmp_path / "out").exists()


def test_names_in_no_triple_survive(tmp_path):
    write_openke(tmp_path, entities="3\na 0\nb 1\nlone 2\n", relations="2\nr 0\nidle 1\n")
    graph = read_graph(tmp_path)
    for kind in ("tsv", "nt"):
        write_graph(graph, tmp_path / kind, format=kind)
        assert read_graph(tmp_path / kind) == graph


def test_what_was_written_is_guarded(tmp_path):
    graph = Graph.from_triples([("a", "r", "b")])
    write_graph(graph, tmp_path / "g")
    manifest = tmp_path / "g" / "graph.json"
    manifest.write_text(manifest.read_text().replace("tacit.graph/1", "tacit.graph/2"))
    with pytest.raises(
        BadInput, match=r"was written as tacit.graph/2; this version of tacit reads up to tacit.graph/1"
    ):
        read_graph(tmp_path / "g")
    manifest.write_text(manifest.read_text().replace("tacit.graph/2", "tacit.graph/1"))
    (tmp_path / "g" / "train.tsv").write_text("head\trelation\ttail\na\tr\tc\n")
    with pytest.raises(BadInput, match="no longer hold the graph"):
        read_graph(tmp_path / "g")
    manifest.unlink()
    assert list(read_graph(tmp_path / "g").named("train")) == [("a", "r", "c")]


DAMAGE = [
    ("schema", "tacit.graph/²"),
    ("schema", 5),
    ("format", "csv"),
    ("format", None),
    ("prefixes", []),
    ("prefixes", {"a": 5}),
    ("fingerprint", None),
    ("unused_entities", ["\n"]),
    ("unused_relations", [7]),
]


@pytest.mark.parametrize("change", DAMAGE, ids=str)
def test_a_damaged_manifest_is_refused(tmp_path, change):
    write_graph(Graph.from_triples([("a", "r", "b")]), tmp_path / "g")
    manifest = tmp_path / "g" / "graph.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | dict([change])))
    with pytest.raises(BadInput, match=r"graph.json: found"):
        read_graph(tmp_path / "g")
    manifest.write_text("[" * 100_000)
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        read_graph(tmp_path / "g")


def test_an_existing_folder_is_not_overwritten(tmp_path):
    graph = Graph.from_triples([("a", "r", "b")])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(Exception, match="exists already"):
            write_graph(graph, tmp_path / "mine", force=force)
    write_graph(graph, tmp_path / "g")
    with pytest.raises(Exception, match="--force"):
        write_graph(graph, tmp_path / "g")
    write_graph(graph, tmp_path / "g", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "mine"]
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) & 0o700 == 0o700
