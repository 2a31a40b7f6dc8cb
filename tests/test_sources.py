"""Sources: the same graph from every engine, a mapping's mistakes, and what a database can do to you."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import postgresql
from strategies import triples
from tacit import BadInput, read_graph
from tacit.files.lines import reading
from tacit.graph import SPLITS
from tacit.marking import confidential_share, marked_per_relation
from tacit.sources import import_graph, public_coin, read_mapping
from tacit.sources.mapping import SHIPPED
from test_cli import tacit
from test_draws import slow_philox

HEADER = 'schema = "tacit.mapping/1"\n'
PEOPLE = """
[[statements]]
query = "SELECT id, name, city FROM people"
head = "person: {name} ({id})"
relation = "lives in"
tail = "city: {city}"
confidential = true
group = "person: {id}"
"""


def write_mapping(folder, text, name="mapping.toml"):
    path = folder / name
    path.write_text(HEADER + text)
    return path


@pytest.fixture
def people(tmp_path):
    (tmp_path / "people.csv").write_text("id,name,city\n007,Ann,Rome\n8,Bob,\n9,,Oslo\n10,Cem,Rome\n")
    return tmp_path


def named(graph):
    return {split: set(graph.named(split)) for split in SPLITS}


def test_a_query_and_templates_make_statements(people):
    made = import_graph(read_mapping(write_mapping(people, 'source = "."\n' + PEOPLE)))
    assert named(made.graph)["train"] == {
        ("person: Ann (007)", "lives in", "city: Rome"),
        ("person: Cem (10)", "lives in", "city: Rome"),
    }
    assert list(made.graph.groups) == ["person: 007", "person: 10"]
    assert made.graph.train.confidential.all()
    [entry] = made.entries
    assert (entry.rows, entry.nulls, entry.rejected) == (4, 2, 0)
    assert entry.first[0] == ("person: Ann (007)", "lives in", "city: Rome")


def test_columns_named_head_relation_tail_need_no_template(people):
    text = "[[statements]]\nquery = \"SELECT name AS head, 'from' AS relation, city AS tail FROM people\"\n"
    made = import_graph(read_mapping(write_mapping(people, text)), str(people))
    assert ("Ann", "from", "Rome") in named(made.graph)["train"]
    assert made.graph.statements.confidential is None


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "csv.xz", "csv.bz2", "csv.zst", "tsv", "parquet", "sqlite"])
def test_every_kind_of_file_gives_the_same_graph(people, tmp_path, kind):
    import bz2
    import gzip
    import lzma

    from backports import zstd

    expected = import_graph(read_mapping(write_mapping(people, PEOPLE)), str(people)).graph
    data = (people / "people.csv").read_bytes()
    there = tmp_path / "there"
    there.mkdir()
    packers = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd.compress}
    source = there
    if kind == "parquet":
        table = pa.csv.read_csv(
            people / "people.csv", convert_options=pa.csv.ConvertOptions(column_types={"id": pa.string()})
        )
        columns = [pa.array([v or None for v in column.to_pylist()], pa.string()) for column in table.columns]
        pa.parquet.write_table(pa.table(columns, table.column_names), there / "people.parquet")
    elif kind == "sqlite":
        source = there / "people.sqlite"
        with sqlite3.connect(source) as connection:
            connection.execute("CREATE TABLE people (id TEXT, name TEXT, city TEXT)")
            rows = [[v or None for v in line.split(",")] for line in data.decode().splitlines()[1:]]
            connection.executemany("INSERT INTO people VALUES (?, ?, ?)", rows)
        connection.close()
    elif kind == "tsv":
        (there / "people.tsv").write_bytes(data.replace(b",", b"\t"))
    else:
        (there / f"people.{kind}").write_bytes(packers.get(kind[4:], bytes)(data))
    assert import_graph(read_mapping(people / "mapping.toml"), str(source)).graph == expected


def test_types_without_one_spelling_are_refused(people):
    text = "[[statements]]\nquery = \"SELECT 1.5::DOUBLE AS head, 'r' AS relation, 't' AS tail\"\n"
    with pytest.raises(BadInput, match=r"statements 1: found the type double in column 'head'.*CAST it AS VARCHAR"):
        import_graph(read_mapping(write_mapping(people, text)), str(people))
    text = "[[statements]]\nquery = \"SELECT 7 AS head, DATE '2026-01-31' AS relation, true AS tail\"\n"
    made = import_graph(read_mapping(write_mapping(people, text)), str(people))
    assert named(made.graph)["train"] == {("7", "2026-01-31", "true")}


def test_names_that_cannot_be_are_an_error_or_counted(people):
    (people / "people.csv").write_text('id,name,city\n1,"a\nb",Rome\n2,Bob,Rome\n')
    mapping = read_mapping(write_mapping(people, PEOPLE))
    with pytest.raises(BadInput, match=r"1 rows give names that cannot be.") as caught:
        import_graph(mapping, str(people))
    assert "the control character U+000A in a name" in str(caught.value)
    made = import_graph(mapping, str(people), skip_bad=True)
    assert made.entries[0].rejected == 1
    assert len(made.graph.train) == 1


def test_the_same_statement_twice_is_one_and_keeps_the_stricter_mark(people):
    again = PEOPLE.replace("confidential = true\n", "").replace('group = "person: {id}"\n', "")
    both = PEOPLE.replace('group = "person: {id}"\n', "") + again
    made = import_graph(read_mapping(write_mapping(people, both)), str(people))
    assert made.said_by_several == 2
    assert [entry.kept for entry in made.entries] == [2, 2]
    assert made.graph.train.confidential.all()


BAD_MAPPINGS = {
    "no schema": ("", "found the schema None"),
    "not TOML": (HEADER + "x = [", "cannot be read as TOML"),
    "no statements": (HEADER, "found no \\[\\[statements\\]\\]"),
    "a misspelt key": (
        HEADER + PEOPLE + 'confidental = "yes"\n',
        "unknown key 'confidental'.\nDid you mean 'confidential'",
    ),
    "a wrong type": (HEADER + PEOPLE.replace("= true", '= "yes"'), "found \"'yes'\" as confidential; expected a bool"),
    "no query": (HEADER + '[[statements]]\nhead = "x"\n', "statements 1: found no query"),
    "a strange split": (HEADER + "[split]\nvalid = 0.6\ntest = 0.6\n" + PEOPLE, "leave some to train"),
    "a lone brace": (HEADER + PEOPLE.replace("{city}", "{city"), "a brace without its other half in the tail"),
    "an open group": (HEADER + PEOPLE.replace("confidential = true\n", ""), "statements that are not confidential"),
    "a source that is no text": (HEADER + "source = 3\n" + PEOPLE, "found '3' as source; expected a str"),
    "a truth for a share": (HEADER + "[split]\nvalid = true\n" + PEOPLE, "found 'True' as valid; expected a number"),
    "a strange separator": (HEADER + 'separator = "ab"\n' + PEOPLE, "found 'ab' as separator"),
    "a key that is nowhere": (HEADER + 'sorce = "."\n' + PEOPLE, "Did you mean 'source'"),
}


@pytest.mark.parametrize("name", BAD_MAPPINGS)
def test_a_bad_mapping_says_where(tmp_path, name):
    text, message = BAD_MAPPINGS[name]
    (tmp_path / "mapping.toml").write_text(text)
    with pytest.raises(BadInput, match=message):
        read_mapping(tmp_path / "mapping.toml")


def test_a_missing_mapping_names_those_that_are_there():
    with pytest.raises(BadInput, match="clinic, eicu, mimic-iii"):
        read_mapping("mimic-iv")


BAD_QUERIES = {
    "a missing table": ("SELECT * FROM nobody", "Table with name nobody does not exist"),
    "a missing column": ("SELECT id FROM people", "found the columns id in the query's result; expected also 'name'"),
    "no SQL": ("SELECT FROM WHERE", "syntax error"),
    "a command": ("CREATE TABLE x (y INT)", "expected a query"),
    "two queries": ("SELECT 1; SELECT 2", "expected one query"),
    "a column twice": ("SELECT id, name, city, name FROM people", "expected 'name' once"),
    "no rows": ("SELECT id, name, city FROM people WHERE false", "gave no statement"),
}


@pytest.mark.parametrize("name", BAD_QUERIES)
def test_a_bad_query_names_its_entry_and_writes_nothing(people, name):
    query, message = BAD_QUERIES[name]
    write_mapping(people, PEOPLE.replace("SELECT id, name, city FROM people", query))
    before = sorted(path.name for path in people.iterdir())
    done = tacit("data", "import", "mapping.toml", "--source", ".", "--out", "graph", cwd=people, code=2)
    assert message in " ".join(done.stderr.split())
    assert name == "no rows" or "mapping.toml: statements 1 (lives in)" in " ".join(done.stderr.split())
    assert sorted(path.name for path in people.iterdir()) == before


def test_a_table_that_is_none_is_an_error(people):
    (people / "people.csv").unlink()
    (people / "people.parquet").write_bytes(b"not parquet")
    with pytest.raises(BadInput, match=r"people.parquet: cannot be read as a table"):
        import_graph(read_mapping(write_mapping(people, PEOPLE)), str(people))
    with pytest.raises(BadInput, match="no such folder of tables"):
        import_graph(read_mapping(people / "mapping.toml"), str(people / "absent"))


@given(
    st.lists(triples, min_size=1, max_size=20),
    st.text(max_size=5),
    st.sampled_from([(0.1, 0.1), (0.5, 0.5), (0.0, 0.0)]),
)
def test_the_public_coin_equals_a_slow_one(statements, coin, shares):
    names = sorted({name for triple in statements for name in triple})
    ids = np.array([[names.index(name) for name in triple] for triple in statements], np.int32)
    found = public_coin(names, ids, coin, shares).tolist()

    def slow(h, r, t):
        key = hashlib.blake2b(coin.encode(), digest_size=32).digest()
        words = [hashlib.blake2b(name.encode(), digest_size=8, key=key).digest() for name in (h, r, t)]
        (h0, h1), (r0, r1), (t0, t1) = (
            (int.from_bytes(w[:4], "little"), int.from_bytes(w[4:], "little")) for w in words
        )
        first, second, _, _ = slow_philox((h0, h1, t0, t1), (r0, r1))
        u = ((first << 32 | second) >> 11) / 2**53
        return 1 if u < shares[0] else 2 if u < sum(shares) else 0

    assert found == [slow(*triple) for triple in statements]


def test_new_rows_never_move_old_ones(people):
    text = "[split]\nvalid = 0.3\ntest = 0.3\n" + PEOPLE
    (people / "people.csv").write_text("id,name,city\n" + "".join(f"{i},n{i},c{i % 9}\n" for i in range(300)))
    mapping = read_mapping(write_mapping(people, text))
    before = named(import_graph(mapping, str(people)).graph)
    with open(people / "people.csv", "a") as file:
        file.writelines(f"{i},a{i},d{i % 7}\n" for i in range(1000, 1500))
    after = named(import_graph(mapping, str(people)).graph)
    assert all(before[split] <= after[split] for split in SPLITS)
    assert [len(before[split]) / 300 for split in SPLITS] == pytest.approx([0.4, 0.3, 0.3], abs=0.1)


def test_progress_and_dry_run(people):
    calls = []
    import_graph(
        read_mapping(write_mapping(people, PEOPLE + PEOPLE)), str(people), progress=lambda *call: calls.append(call)
    )
    assert calls == [(0, 2, 4), (1, 2, 8)]
    shown = tacit("data", "import", "mapping.toml", "--source", ".", "--dry-run", cwd=people)
    assert "person: Ann (007)" in shown.stdout
    assert "nothing written" in shown.stdout
    assert "4 rows have no value where a name needs one, and are skipped" in shown.stdout
    assert sorted(path.name for path in people.iterdir()) == ["mapping.toml", "people.csv"]
    assert "--out" in tacit("data", "import", "mapping.toml", cwd=people, code=2).stderr


# Tables as eICU names them, with a few made-up stays; what a column is for follows from the mapping.
EICU = {
    "patient": "patientunitstayid,uniquepid,gender,ethnicity,hospitalid,unittype,apacheadmissiondx,hospitaladmitsource,"
    "hospitaldischargelocation,unitdischargestatus\n1,002-1,Female,Hispanic,73,MICU,Sepsis,ED,Home,Alive\n"
    "2,002-1,Female,Hispanic,73,MICU,CHF,ED,,Alive\n3,003-9,Male,,74,SICU,CABG,OR,Home,Expired\n",
    "diagnosis": 'patientunitstayid,diagnosisstring,icd9code\n1,infectious|sepsis,"038.9, A41.9"\n3,CAD,414.00\n',
    "medication": "patientunitstayid,drugname,routeadmin\n1,VANCOMYCIN,IV\n2,FUROSEMIDE,IV\n2,,PO\n",
    "lab": "patientunitstayid,labname\n1,lactate\n2,BNP\n3,potassium\n",
    "treatment": "patientunitstayid,treatmentstring\n1,infectious|antibiotics\n",
    "allergy": "patientunitstayid,allergyname\n2,penicillins\n",
    "pasthistory": "patientunitstayid,pasthistoryvalue\n3,hypertension\n",
    "admissiondx": "patientunitstayid,admitdxname\n1,Sepsis\n",
    "hospital": "hospitalid,numbedscategory,teachingstatus,region\n73,>= 500,t,South\n74,100 - 249,f,\n",
}


def test_the_eicu_mapping(tmp_path):
    for table, text in EICU.items():
        (tmp_path / f"{table}.csv").write_text(text)
    made = import_graph(read_mapping("eicu"), str(tmp_path))
    everything = set().union(*named(made.graph).values())
    assert ("unit stay: 1", "has diagnosis", "diagnosis: infectious|sepsis") in everything
    assert ("hospital: 73", "has beds", "beds: >= 500") in everything
    secret = {row["relation"]: row["confidential"] for row in marked_per_relation(made.graph)}
    assert secret["has beds"] == secret["is in"] == 0
    assert all(row["confidential"] in (0, row["statements"]) for row in marked_per_relation(made.graph))
    assert sum(entry.nulls for entry in made.entries) == 4


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("*.toml")])
def test_shipped_mappings_keep_what_patients_tables_say_confidential(name):
    """Only code systems and dictionaries are unrestricted; everything that comes from a patient's table is marked."""
    open_tables = {
        "caregivers",
        "d_cpt",
        "d_icd_diagnoses",
        "d_icd_procedures",
        "d_items",
        "d_labitems",
        "hospital",
        "knowledge",
    }
    mapping = read_mapping(name)
    for statements in mapping.statements:
        table = statements.query.split(" FROM ")[1].split()[0]
        assert statements.confidential == (table not in open_tables), statements.place


@pytest.fixture(scope="module")
def server():
    try:
        running = postgresql.Server()
    except RuntimeError as error:
        pytest.skip(f"no PostgreSQL here: {error}")
    yield running
    running.close()


WHOLE_NUMBERS = {"subject_id", "hadm_id", "icustay_id", "itemid", "cgid", "row_id"}


@pytest.fixture(scope="module")
def mimic(server, public_data):
    """The tables of the MIMIC-III demo, in the server, with identifiers as numbers."""
    options = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=True)
    with server.connect() as connection, connection.cursor() as cursor:
        for path in sorted((public_data / "mimic-iii-demo").glob("*.csv.xz")):
            with reading(path) as file:
                data = b"".join(iter(lambda f=file: f.read(1 << 20), b""))
            names = data[: data.index(b"\n")].decode().split(",")
            options.column_types = {n: pa.int64() if n in WHOLE_NUMBERS else pa.string() for n in names}
            table = pa.csv.read_csv(
                pa.BufferReader(data),
                convert_options=options,
                parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            )
            cursor.adbc_ingest(path.name.split(".")[0].lower(), table, mode="create")
        connection.commit()
    return public_data / "mimic-iii-demo"


@pytest.mark.data
@pytest.mark.slow
def test_mimic_from_files_and_from_postgresql_is_one_graph(server, mimic, tmp_path):
    files = json.loads(
        tacit("data", "import", "mimic-iii", "--source", mimic, "--out", tmp_path / "files", "--json").stdout
    )
    call = ("data", "import", "mimic-iii", "--source", "postgresql", "--out", tmp_path / "server", "--json")
    served = json.loads(tacit(*call, env=server.environment).stdout)
    assert read_graph(tmp_path / "files") == read_graph(tmp_path / "server")
    assert files["relations"] == served["relations"]
    assert [entry["nulls"] for entry in files["entries"]] == [entry["nulls"] for entry in served["entries"]]
    counts = {row["relation"]: (row["statements"], row["confidential"]) for row in served["relations"]}
    # The demo's own tables: 1,761 coded diagnoses, 129 admissions of 100 patients.
    assert counts["has diagnosis"] == (1761, 1761)
    assert counts["had admission"] == (129, 129)
    assert counts["has gender"] == (100, 100)
    assert counts["is called"][1] == 0
    assert 0.1 < served["confidential_share"] < 0.2
    assert confidential_share(read_graph(tmp_path / "server")) == pytest.approx(served["confidential_share"])
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or server.password not in path.read_text(errors="replace")


def test_a_wrong_password_is_one_clear_error(server, tmp_path):
    write_mapping(tmp_path, PEOPLE)
    call = ("-v", "data", "import", "mapping.toml", "--source", "postgresql", "--out", "graph")
    done = tacit(*call, cwd=tmp_path, code=2, env=server.environment | {"PGPASSWORD": "hunter-two"})
    assert "password authentication failed" in done.stderr
    assert "hunter-two" not in done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mapping.toml"]
    nowhere = tacit(*call, cwd=tmp_path, code=2, env=server.environment | {"PGPORT": "1"})
    assert "PGHOST" in nowhere.stderr


SMUGGLED = [
    "postgresql://ann:secret-word@db/x",
    "postgresql://db/x?password=secret-word",
    "postgresql://db/x?%75ser=ann&%70assword=secret-word",
    "postgresql://db/x?PASSWORD=secret-word",
    "postgresql://db/x?oauth_client_secret=secret-word",
    "postgresql://ann%3Asecret-word%40db:1/x",
    "postgres://db/x?options=-csecret-word",
]
UNKNOWN = [
    "POSTGRESQL://ann:secret-word@db/x",
    " postgresql://ann:secret-word@db/x",
    "mysql://ann:secret-word@db/x",
    "host=db user=ann password=secret-word",
    "postgresql:ann:secret-word@db",
]


@pytest.mark.parametrize("source", UNKNOWN)
def test_an_address_that_is_not_understood_is_not_repeated(tmp_path, source):
    with pytest.raises(BadInput, match="found") as caught:
        import_graph(read_mapping(write_mapping(tmp_path, PEOPLE)), source)
    assert "secret-word" not in str(caught.value)


def test_a_folder_may_be_called_after_a_database(people):
    (people / "postgresql-tables").mkdir()
    (people / "people.csv").rename(people / "postgresql-tables" / "people.csv")
    text = 'source = "postgresql-tables"\n' + PEOPLE
    assert len(import_graph(read_mapping(write_mapping(people, text))).graph.train) == 2


@pytest.mark.parametrize("source", SMUGGLED)
def test_credentials_have_no_place_in_a_mapping_or_a_command(tmp_path, mistaken, source):
    write_mapping(tmp_path, f'source = "{source}"\n' + PEOPLE)
    for call in (["mapping.toml"], ["mapping.toml", "--source", source]):
        told = mistaken("data", "import", *call, "--dry-run", cwd=tmp_path)
        assert "found credentials, or what might hold them" in told
        assert "secret-word" not in told


def test_a_service_file_says_where_and_who(server, tmp_path):
    lines = {key.removeprefix("PG").lower(): value for key, value in server.environment.items()}
    lines["dbname"] = lines.pop("database")
    (tmp_path / "services").write_text("[clinic]\n" + "".join(f"{key}={value}\n" for key, value in lines.items()))
    text = "[[statements]]\nquery = \"SELECT 'a' AS head, 'r' AS relation, 12.50::numeric AS tail\"\n"
    write_mapping(tmp_path, 'source = "postgresql://?service=clinic"\n' + text)
    tacit(
        "data",
        "import",
        "mapping.toml",
        "--out",
        "graph",
        cwd=tmp_path,
        env={"PGSERVICEFILE": str(tmp_path / "services")},
    )
    assert list(read_graph(tmp_path / "graph").named("train")) == [("a", "r", "12.50")]


COMMANDS = [
    "CREATE TABLE x AS SELECT 1 AS head",
    "rollback",
    "copy (select 1) to program 'cat'",
    "/* SELECT */ do $$ begin end $$",
    "set transaction read write",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mapping_holds_queries_and_no_commands(server, tmp_path, monkeypatch, command):
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    text = f'[[statements]]\nquery = "{command}"\n'
    with pytest.raises(BadInput, match="found a command; expected a query"):
        import_graph(read_mapping(write_mapping(tmp_path, text)), "postgresql")


def test_a_query_cannot_write_to_the_server(server, tmp_path, monkeypatch):
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE precious (head TEXT)")
        connection.commit()
    query = "WITH gone AS (INSERT INTO precious VALUES ('x') RETURNING head) SELECT head, head AS tail FROM gone"
    with pytest.raises(BadInput, match="read-only transaction"):
        import_graph(read_mapping(write_mapping(tmp_path, f'[[statements]]\nquery = "{query}"\n')), "postgresql")


@pytest.mark.parametrize(
    "query",
    [
        "attach 'new.db' as n",
        "vacuum into 'copy.db'",
        "with x as (select 1) insert into people select 1, 2, 3 returning id as head",
        "select load_extension('x') as head, 'r' as relation, 't' as tail",
        "-- nothing",
    ],
)
def test_a_query_cannot_write_through_sqlite(tmp_path, monkeypatch, query):
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("people.db") as connection:
        connection.execute("CREATE TABLE people (id, name, city)")
    connection.close()
    mapping = read_mapping(write_mapping(tmp_path, f'[[statements]]\nquery = "{query}"\n'))
    with pytest.raises(BadInput, match="statements 1"):
        import_graph(mapping, "people.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mapping.toml", "people.db"]


def test_a_file_that_is_no_database_is_an_error(people):
    with pytest.raises(BadInput, match=r"people.csv: cannot be read as an SQLite file"):
        import_graph(read_mapping(write_mapping(people, PEOPLE)), str(people / "people.csv"))


PAIRS = '[[statements]]\nquery = "SELECT head, tail FROM a"\nrelation = "r"\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "head,tail\n#note,1\n2,3\n", {("#note", "1"), ("2", "3")}),
        ("a.csv", "head,tail\n'a',b\n", {("'a'", "b")}),
        ("a.tsv", 'head\ttail\n1,5\t"2\n3,6\t4,8\n', {("1,5", '"2'), ("3,6", "4,8")}),
        ("a.csv", "head,tail\n" + "1,2\n" * 30_000 + '"x, y",7\n', {("1", "2"), ("x, y", "7")}),
        ("a*.csv", "head,tail\n1,2\n", {("1", "2")}),
        ("a.csv", "Export of 2020\n\nhead,tail\n1,2\n", None),
        ("a.csv", "head,tail\n1,2\n3\n5,6,7\n", None),
        ("a.csv", "head,tail\n" + "1,2\n" * 100_000 + "5,6,7\n", None),
        ("a.csv", b"head,tail\n" + b"1,2\n" * 100_000 + b"\xff,3\n", None),
    ],
    ids=[
        "hash",
        "apostrophe",
        "commas in tsv",
        "late quote",
        "glob",
        "title line",
        "ragged",
        "late ragged",
        "late bytes",
    ],
)
def test_tables_are_read_as_they_are_or_not_at_all(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if name == "a*.csv":
        (tmp_path / "ab.csv").write_text("head,tail\n8,9\n")
    mapping = read_mapping(write_mapping(tmp_path, PAIRS.replace("FROM a", 'FROM \\"a*\\"') if "*" in name else PAIRS))
    if expected is None:
        with pytest.raises(BadInput, match=r"mapping.toml: statements 1 \(r\): "):
            import_graph(mapping, str(tmp_path))
    else:
        assert {(h, t) for h, _, t in import_graph(mapping, str(tmp_path)).graph.named("train")} == expected


def test_another_separator_is_said(tmp_path):
    (tmp_path / "a.csv").write_text("head;tail\n1,5;2\n")
    made = import_graph(read_mapping(write_mapping(tmp_path, 'separator = ";"\n' + PAIRS)), str(tmp_path))
    assert list(made.graph.named("train")) == [("1,5", "r", "2")]


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2", "zst"])
def test_a_cut_off_table_is_an_error(tmp_path, kind):
    import bz2
    import gzip
    import lzma

    from backports import zstd

    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd.compress}[kind]
    packed = pack(("head,tail\n" + "".join(f"{i},{i * i}\n" for i in range(50_000))).encode())
    (tmp_path / f"a.csv.{kind}").write_bytes(packed[:-1000])
    with pytest.raises(BadInput, match="cannot be read to its end"):
        import_graph(read_mapping(write_mapping(tmp_path, PAIRS)), str(tmp_path))


def test_two_files_for_one_table_are_an_error(people):
    (people / "people.tsv").write_text("id\n")
    with pytest.raises(BadInput, match=r"people.csv and people.tsv for one table"):
        import_graph(read_mapping(write_mapping(people, PEOPLE)), str(people))


def test_every_row_is_accounted_for(people, monkeypatch):
    """Whatever repeats, is missing or cannot be, and however often rows are compacted."""
    rows = [
        f"{i % 7},{'' if i % 5 == 0 else 'n'},{'a' if i % 3 else chr(34) + 'x' + chr(10) + chr(34)}" for i in range(500)
    ]
    (people / "people.csv").write_text("\n".join(["id,name,city", *rows]) + "\n")
    mapping = read_mapping(write_mapping(people, PEOPLE))
    found = []
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr("tacit.sources.COMPACT", size)
        [entry] = import_graph(mapping, str(people), skip_bad=True).entries
        found.append((entry.rows, entry.kept, entry.nulls, entry.duplicates, entry.rejected))
    nulls = sum(i % 5 == 0 for i in range(500))
    bad = sum(i % 5 != 0 and i % 3 == 0 for i in range(500))
    assert found == [(500, 7, nulls, 500 - 7 - nulls - bad, bad)] * 3
    with pytest.raises(BadInput, match=f"{bad} rows give names"):
        import_graph(mapping, str(people))


def test_an_empty_text_is_no_value_in_any_engine(server, tmp_path, monkeypatch):
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    query = "SELECT 'a' AS head, 'r' AS relation, '' AS tail UNION ALL SELECT 'a', 'r', 'b'"
    mapping = read_mapping(write_mapping(tmp_path, f'[[statements]]\nquery = "{query};"\n'))
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    for source in (str(tmp_path), str(tmp_path / "x.db"), "postgresql"):
        made = import_graph(mapping, source)
        assert (made.entries[0].nulls, len(made.graph.train)) == (1, 1)


@pytest.mark.parametrize("value", ["2.5", "x'00ff'"])
def test_sqlite_values_without_one_spelling_are_refused(tmp_path, value):
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    text = f"[[statements]]\nquery = \"SELECT {value} AS head, 'r' AS relation, 't' AS tail\"\n"
    with pytest.raises(BadInput, match="CAST it AS TEXT"):
        import_graph(read_mapping(write_mapping(tmp_path, text)), str(tmp_path / "x.db"))


def test_decimals_dates_and_enums_have_one_spelling(people):
    query = "SELECT 12.50::DECIMAL(6,2) AS head, 'b'::ENUM('a','b') AS relation, DATE '2026-01-31' AS tail"
    made = import_graph(read_mapping(write_mapping(people, f'[[statements]]\nquery = "{query}"\n')), str(people))
    assert list(made.graph.named("train")) == [("12.50", "b", "2026-01-31")]
    query = "SELECT 1 AS head, 'r' AS relation, 'infinity'::DATE AS tail"
    with pytest.raises(BadInput, match="a date beyond all calendars"):
        import_graph(read_mapping(write_mapping(people, f'[[statements]]\nquery = "{query}"\n')), str(people))


@pytest.mark.slow
def test_a_server_that_dies_in_mid_read_is_one_clear_error(tmp_path, monkeypatch):
    try:
        doomed = postgresql.Server()
    except RuntimeError as error:
        pytest.skip(f"no PostgreSQL here: {error}")
    try:
        for key, value in doomed.environment.items():
            monkeypatch.setenv(key, value)
        query = "SELECT i AS head, 'r' AS relation, i AS tail FROM generate_series(1, 50000000) i"
        text = f'[[statements]]\nquery = "{query}"\n'
        mapping = read_mapping(write_mapping(tmp_path, text))
        with pytest.raises(BadInput, match=r"mapping.toml: statements 1: ") as caught:
            import_graph(mapping, "postgresql", progress=lambda entry, entries, rows: doomed.die())
        assert doomed.password not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["mapping.toml"]
    finally:
        doomed.close()


def test_what_an_import_logs_holds_no_names(people, caplog):
    with caplog.at_level(logging.INFO, logger="tacit"):
        import_graph(read_mapping(write_mapping(people, PEOPLE)), str(people))
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "4 rows" in text
    assert not any(name in text for name in ("Ann", "Rome", "lives"))
