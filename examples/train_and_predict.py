"""Train a model of one hospital's graph, see what it is worth, and ask it something."""

import tempfile
from pathlib import Path

import tacit
from tacit.datasets import clinic
from tacit.models.model import Model
from tacit.training import evaluated

hospital = clinic("small")[0]

with tempfile.TemporaryDirectory() as folder:
    run = tacit.train(
        hospital,
        scorer="transe",
        dim=32,
        negatives=32,
        batch=64,
        learning_rate=0.01,
        epochs=60,
        out=Path(folder) / "run",
    )
    print(f"test MRR {run.metrics['test'].mrr:.3f}")
    print(f"by popularity alone {evaluated(Model.popular(hospital), hospital, 'test', run.settings).mrr:.3f}")

    # A run is its folder: open it again, today or in a year.
    again = tacit.Run.open(Path(folder) / "run")
    head, relation, _ = next(hospital.named("test"))
    for answer in again.predict(head=head, relation=relation, top=3):
        print(f"{answer.head} {answer.relation} {answer.tail}: {answer.score:.2f}")

    # Rows with their names, for any other program.
    print(again.export(Path(folder) / "vectors", format="npy"))
