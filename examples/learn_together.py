"""Five hospitals, each alone and then together: what sharing rows is worth, what it costs, and what the server saw.

python examples/learn_together.py
"""

import tacit
from tacit.datasets import clinic
from tacit.federation.transcript import Adversary

hospitals = clinic("demo", seed=0)
runs = {
    recipe: tacit.federate(hospitals, recipe, dim=32, negatives=32, batch=64, learning_rate=0.01, rounds=10)
    for recipe in ("local", "fede", "fedr")
}
for recipe, run in runs.items():
    print(f"{recipe:6} test MRR {run.metrics['test'].mrr:.3f}, {run.communication()['bytes'] / 1e6:.1f} MB sent")
assert runs["fede"].metrics["test"].mrr > runs["local"].metrics["test"].mrr

view = runs["fedr"].view(Adversary("server"))
print(len(view.records), "messages passed before the server's eyes, about", {record.part for record in view.records})
