"""A training that is cut off goes on where it was, and ends as one that was not.

python examples/resume_a_run.py
"""

import tempfile
from typing import Any

import tacit
from tacit.datasets import clinic

hospital = clinic("small")[0]
settings = {
    "scorer": {"name": "distmult", "dim": 16},
    "optimizer": {"learning_rate": 0.05},
    "training": {"epochs": 20, "batch": 64, "checkpoint_every": 2},
    "evaluation": {"every": 5},
}


def pull_the_plug(event: dict[str, Any]) -> None:
    if event["event"] == "epoch" and event["epoch"] == 13:
        raise KeyboardInterrupt


with tempfile.TemporaryDirectory() as folder:
    try:
        tacit.train(hospital, settings=settings, out=f"{folder}/run", on_event=pull_the_plug)
    except KeyboardInterrupt:
        print("cut off in epoch 13")
    run = tacit.Run.open(f"{folder}/run")  # in another process, on another day
    print("finished:", run.finished)

    epochs: list[int] = []
    run.train(lambda event: epochs.append(event["epoch"]) if event["event"] == "epoch" else None)
    print(f"went on with epoch {epochs[0]}; test MRR {run.metrics['test'].mrr:.3f}")

    other = tacit.train(hospital, settings=settings)
    assert (run.embeddings().entities == other.embeddings().entities).all()
    print("the same, bit for bit, as a training that was left alone")
