"""Our rows in PyKEEN's models: the same scores, or a refusal."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch

import tacit
from tacit import TacitError
from tacit.clinic import clinic
from tacit.graph import Graph, UnknownName
from tacit.models.model import Model
from tacit.prediction import Embeddings
from tacit.settings import SCORERS
from tacit.tensors import load_tensors

pytest.importorskip("pykeen", reason="the extra pykeen is not installed")
from tacit.pykeen import REFUSED, TAKEN, to_pykeen

GRAPH = Graph.from_triples(
    [(f"e{i % 7}", f"r{i % 3}", f"e{(3 * i + 1) % 11}") for i in range(60)], test=[("e1", "r1", "e2")]
)
BOTH = {"training": {"reciprocal": True}, "negatives": {"sides": "both"}}
BY_NAME = {kind.__name__: name for name, kind in SCORERS.items()}


def trained(name: str, **more: object) -> tacit.Run:
    settings = {"scorer": {"name": name, "dim": 6} | more, "training": {"epochs": 2, "batch": 16, "device": "cpu"}}
    return tacit.train(GRAPH, settings=settings)


def triples() -> torch.Tensor:
    ids = np.stack(np.meshgrid(range(len(GRAPH.entities)), range(3), range(len(GRAPH.entities))), -1).reshape(-1, 3)
    return torch.from_numpy(ids)


@pytest.mark.parametrize(
    ("kind", "more"),
    [*((kind, {}) for kind in TAKEN), ("TransE", {"norm": 2}), ("TransH", {"norm": 1}), ("NTN", {"slices": 2}),
     ("RotatE", {"gamma": 3.0, "init_scale": 0.7})],
)  # fmt: skip
def test_scores_are_the_same_but_for_gamma(kind, more):
    run, asked = trained(BY_NAME[kind], **more), triples()
    with torch.no_grad():
        ours = run.model.score(*asked.unbind(1)) - getattr(run.settings.scorer, "gamma", 0.0)
        model = run.to_pykeen()
        theirs = model.score_hrt(asked)[:, 0]
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
        assert ours.std() > 1e-2  # there is something to agree on
        tails = model.score_t(asked[:5, :2])
        heads = model.score_h(asked[:5, 1:])
    for i, (h, r, t) in enumerate(asked[:5].tolist()):
        everyone = torch.arange(len(GRAPH.entities))
        same = torch.full_like(everyone, r)
        gamma = getattr(run.settings.scorer, "gamma", 0.0)
        with torch.no_grad():
            as_tails = run.model.score(torch.full_like(everyone, h), same, everyone) - gamma
            as_heads = run.model.score(everyone, same, torch.full_like(everyone, t)) - gamma
        torch.testing.assert_close(tails[i], as_tails, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(heads[i], as_heads, rtol=1e-4, atol=1e-4)


def test_every_scorer_is_taken_or_refused_for_a_reason():
    assert {kind.__name__ for kind in SCORERS.values()} == set(TAKEN) | set(REFUSED)
    for kind, why in REFUSED.items():
        with pytest.raises(TacitError, match=f"{kind} does not go to PyKEEN") as error:
            trained(BY_NAME[kind]).to_pykeen()
        assert why in str(error.value)


def test_inverse_relations_and_priors_are_refused():
    run = tacit.train(GRAPH, scorer="distmult", dim=4, epochs=1, settings=BOTH)
    with pytest.raises(TacitError, match="inverse relations"):
        run.to_pykeen()
    with pytest.raises(TacitError, match="noisy counts"):
        to_pykeen(Model.popular(GRAPH))


def test_a_model_there_is_a_copy_that_can_be_kept_and_trained():
    run = trained("rotate")
    draws = torch.random.get_rng_state()
    model, before = run.to_pykeen(), run.model.tables.entity.clone()
    assert torch.equal(torch.random.get_rng_state(), draws)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    asked = triples()
    with torch.no_grad():
        assert torch.equal(again.score_hrt(asked), model.score_hrt(asked))
    model.score_hrt(asked).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with torch.no_grad():
        assert not torch.equal(again.score_hrt(asked), model.score_hrt(asked))
        model.reset_parameters_()  # as its training loops do before they begin
        assert torch.equal(again.score_hrt(asked), model.score_hrt(asked))
    assert torch.equal(run.model.tables.entity, before)


def test_without_pykeen_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pykeen.models", None)
    monkeypatch.delitem(sys.modules, "tacit.pykeen")
    with pytest.raises(TacitError, match=r"pip install \"tacit-kg\[pykeen\]\""):
        trained("distmult").to_pykeen()


# -- as plain arrays ---------------------------------------------------------------------------------------------------


def test_embeddings_are_the_rows_with_their_names(tmp_path):
    run = trained("complex")
    found = run.embeddings()
    assert (found.entities.shape, found.relations.shape, found.more) == ((11, 12), (3, 12), {})
    assert found.entities.dtype == np.float32
    assert list(found.entity_names) == list(GRAPH.entities)
    assert np.array_equal(found.entity("e3"), run.model.tables.entity[GRAPH.entities.id("e3")].numpy())
    assert np.array_equal(found.relation("r2"), run.model.tables.relation[2].numpy())
    assert repr(found) == "Embeddings(11 entities of 12 numbers, 3 relations of 12)"
    for ask in (found.entity, found.relation):
        with pytest.raises(UnknownName):
            ask("nobody")
    found.entities[:] = 0
    assert run.model.tables.entity.any()  # they are a copy
    run.export(tmp_path / "out", format="safetensors")
    assert np.array_equal(load_tensors(tmp_path / "out" / "model.safetensors")[0]["relations"], found.relations)


def test_embeddings_name_inverses_and_hold_what_scores_need_beside_rows():
    settings = BOTH | {"scorer": {"name": "tucker", "dim": 3}}
    found = tacit.train(GRAPH, settings=settings, epochs=1).embeddings()
    assert found.relation_names[-1] == "inverse of r2"
    assert len(found.relations) == len(found.relation_names) == 6
    assert {name: array.shape for name, array in found.more.items()} == {"shared-0": (3, 3, 3)}
    counts = Embeddings.of(Model.popular(GRAPH), GRAPH)
    assert set(counts.more) == {"prior-tails", "prior-heads"}


def test_a_partys_embeddings_are_of_its_own_names():
    parties = clinic("small")
    run = tacit.federate(parties, "fede", dim=4, negatives=2, rounds=1, every=1)
    found = run.of_party(parties.names[1]).embeddings()
    assert list(found.entity_names) == list(parties[1].entities)
