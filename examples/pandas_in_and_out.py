"""A graph from a frame of pandas, with what is confidential and whom it is about; and back into a frame.

python examples/pandas_in_and_out.py
"""

import pandas as pd

import tacit

visits = pd.DataFrame(
    {
        "patient": ["0017", "0017", "0018", None],
        "code": ["I10", "E11", "I10", "J45"],
        "year": [2023, 2024, 2024, 2024],
    }
).assign(relation="has diagnosis", confidential=True)

try:
    tacit.Graph.from_pandas(visits, head="patient", tail="code")
except tacit.BadInput as error:
    print(error)

visits = visits.dropna()
graph = tacit.Graph.from_pandas(visits, head="patient", tail="code", confidential="confidential", group="patient")
print(graph)

frame = graph.to_pandas()
print(frame)
again = tacit.Graph.from_pandas(frame, confidential="confidential", group="group", split="split")
assert again == graph
