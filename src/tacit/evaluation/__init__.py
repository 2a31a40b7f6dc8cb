"""What a model is worth: link prediction, triple classification, clusters, a linear probe."""

from tacit.evaluation.classification import ProbeScores, TripleClassification, classify_entities, classify_triples
from tacit.evaluation.clustering import cluster_agreement, clusters, mutual_information
from tacit.evaluation.ranking import Metrics, Ranks, rank, typed_candidates, weighted

__all__ = [
    "Metrics",
    "ProbeScores",
    "Ranks",
    "TripleClassification",
    "classify_entities",
    "classify_triples",
    "cluster_agreement",
    "clusters",
    "mutual_information",
    "rank",
    "typed_candidates",
    "weighted",
]
