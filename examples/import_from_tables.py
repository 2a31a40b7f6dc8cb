"""Make a graph out of two CSV tables by a mapping, and see what is confidential.

python examples/import_from_tables.py
"""

import tempfile
from pathlib import Path

import tacit
from tacit.marking import marked_per_relation

MAPPING = """
schema = "tacit.mapping/1"

[[statements]]
query = "SELECT patient, code FROM diagnoses"
head = "patient: {patient}"
relation = "has diagnosis"
tail = "ICD-10: {code}"
confidential = true
group = "patient: {patient}"

[[statements]]
query = "SELECT code, substr(code, 1, 1) AS chapter FROM codes"
head = "ICD-10: {code}"
relation = "is in chapter"
tail = "chapter {chapter}"
"""

with tempfile.TemporaryDirectory() as folder:
    tables = Path(folder)
    (tables / "diagnoses.csv").write_text("patient,code\n0017,I10\n0017,E11\n0018,I10\n0019,\n")
    (tables / "codes.csv").write_text("code\nI10\nE11\nJ45\n")
    (tables / "mapping.toml").write_text(MAPPING)
    made = tacit.import_graph(tacit.read_mapping(tables / "mapping.toml"), folder)

print(made.graph)
print(made.entries[0].nulls, "row skipped for a NULL")
for row in marked_per_relation(made.graph):
    print(f"{row['relation']}: {row['statements']} statements, {row['confidential']} confidential")
