"""Train privately, paid for by a holding: what it costs, what is left, and a run that is refused.

python examples/train_with_a_budget.py
"""

import os
import tempfile

import tacit
from tacit.datasets import clinic
from tacit.privacy.budget import Holding

hospital = clinic("demo", seed=7)[0]

with tempfile.TemporaryDirectory() as folder:
    os.environ["TACIT_HOME"] = folder  # default: ~/.tacit, which belongs into your backups
    Holding.begin("study", epsilon=4, delta=1e-5, graph=hospital)

    # Noisy counts, the default: released once, and cheap in time.
    first = tacit.train(hospital, epsilon=2, delta=1e-5, budget="study", out=f"{folder}/first")
    print(f"test MRR {first.metrics['test'].mrr:.3f}, epsilon {first.epsilon:.2f} at delta {first.claim['delta']:g}")
    print("not covered:", *first.claim["not_covered"], sep="\n  ")

    holding = Holding.load("study")
    print(f"{holding.left() / holding.divergence:.0%} of the budget is left")
    try:
        tacit.train(hospital, epsilon=4, delta=1e-5, budget="study", out=f"{folder}/second")
    except tacit.TacitError as refused:
        print(refused)
