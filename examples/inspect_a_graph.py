"""Read a graph that has faults, see what was wrong with it, and look it over.

python examples/inspect_a_graph.py
"""

import tempfile
from pathlib import Path

import tacit

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "pharmacy.csv"
    path.write_text("drug,does,what\naspirin,treats,headache\nibuprofen,treats\naspirin,treats,headache\n")

    try:
        tacit.read_graph(path, columns=["drug", "does", "what"])
    except tacit.BadInput as error:
        print(error.problems[0].line, error.problems[0].expected)

    graph = tacit.read_graph(path, columns=["drug", "does", "what"], bad_rows="skip")
    reading = graph.reading
    print(f"{reading.rows} rows: {len(graph.train)} kept, {reading.duplicates} repeated, {reading.rejected} rejected")
    print(*tacit.inspect(graph).warnings, sep="\n")
