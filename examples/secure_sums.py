"""A federation whose server adds up what parties send and sees nothing of any one of them, nor their names.

python examples/secure_sums.py
"""

from typing import Any

import tacit
from tacit.datasets import clinic
from tacit.federation.transcript import Adversary

hospitals = clinic("small", seed=7)
common: dict[str, Any] = {
    "dim": 16,
    "negatives": 16,
    "batch": 64,
    "learning_rate": 0.02,
    "rounds": 4,
    "every": 2,
    "seed": 7,
}
plain = tacit.federate(hospitals, "fede", **common)
secure = tacit.federate(hospitals, "fede", secure=True, **common)
for run in (plain, secure):
    sent = run.communication()["bytes"] / 1e6
    print(f"test MRR {run.metrics['test'].mrr:.3f}, {sent:.1f} MB, epsilon {run.epsilon}")

for name, run in (("plain", plain), ("secure", secure)):
    print(f"{name}: the server sees", sorted({record.kind for record in run.view(Adversary("server")).records}))

# Sums hide single parties from the server. They are not differential privacy: other parties are given the mean.
print(tacit.attack(secure, "si", targets="canaries", count=100, every=2))
print(tacit.attack(secure, "cip", targets="canaries", count=100, every=2))
