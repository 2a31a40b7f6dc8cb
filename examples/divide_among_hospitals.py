"""Pool the embedded hospitals into one graph and divide it anew, by entities; write the parts and read them back.

python examples/divide_among_hospitals.py
"""

import tempfile

import tacit
from tacit.datasets import clinic

together = tacit.pool(clinic("small", seed=7))
parties = tacit.partition(together, by="entities", parts=3, share=0.6, seed=7)
for name, graph in zip(parties.names, parties, strict=True):
    print(name, graph)
print(parties.origin["left_out"], "triples have no party that drew both ends")

here, there = parties.shared(0, 1)
print(len(here), "entities in common, such as", parties[0].entities[here[0]])

with tempfile.TemporaryDirectory() as folder:
    tacit.write_parties(parties, f"{folder}/parts")
    assert tacit.read_parties(f"{folder}/parts") == parties
