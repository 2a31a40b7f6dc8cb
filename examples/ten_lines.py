"""The whole of it: a graph, three parties that learn privately, what an attacker finds, and what the model says.

python examples/ten_lines.py
"""

import tempfile
from pathlib import Path

import tacit
from tacit.datasets import clinic

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "hospital.tsv"
    file.write_text("".join("\t".join(triple) + "\n" for triple in tacit.pool(clinic("small", seed=7)).named("train")))
    graph = tacit.read_graph(file)

parties = tacit.partition(graph, by="entities", parts=3, split=(0.8, 0.1, 0.1), seed=7)
run = tacit.federate(parties, recipe="private_fede", scorer="transe", dim=64, epsilon=8, delta=1e-5, seed=7)
print(run.metrics["test"].mrr, run.epsilon)
found = tacit.attack(run, attack=["counts", "cip"], targets="canaries", count=300)
print(found)
audited = tacit.audit(run, canaries=300, guesses=100)
print(audited.claimed, audited.lower_bound, audited.status)
print(run.predict(parties.names[0], relation=graph.relations[0], tail=parties[0].entities[0], top=3))
