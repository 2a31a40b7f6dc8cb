"""A trained model's rows as NumPy arrays, and as a model of PyKEEN that gives the same scores.

Rows that were trained without privacy are as confidential as the triples they were trained on.

python examples/embeddings_elsewhere.py
"""

import numpy as np
import torch

import tacit
from tacit.datasets import clinic

hospital = clinic("small")[0]
run = tacit.train(hospital, scorer="rotate", dim=16, negatives=16, batch=64, learning_rate=0.01, epochs=10)

rows = run.embeddings()
print(rows)
one = hospital.entities[0]
apart = np.linalg.norm(rows.entities - rows.entity(one), axis=1)
print(f"nearest to {one}:", *(rows.entity_names[i] for i in apart.argsort()[1:4]), sep="\n  ")

model = run.to_pykeen()
asked = torch.from_numpy(hospital.test.triples.astype(np.int64))
with torch.no_grad():
    theirs = model.score_hrt(asked)[:, 0]
    ours = run.model.score(*asked.unbind(1))
print(f"{type(model).__name__}: scores differ by {float((theirs - ours).std()):.0e} beside the margin")
