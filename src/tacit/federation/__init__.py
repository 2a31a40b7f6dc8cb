"""Parties that learn together without showing each other their triples: messages, aggregations, rounds."""

from tacit.federation.aggregation import AGGREGATIONS, Aggregation, CircularMean, OwnerMean, WeightedMean
from tacit.federation.messages import KINDS, SERVER, Inbox, Message, Refused
from tacit.federation.star import Star
from tacit.federation.transcript import ROLES, Adversary, Record, Transcript, View, rounds

__all__ = [
    "AGGREGATIONS",
    "KINDS",
    "ROLES",
    "SERVER",
    "Adversary",
    "Aggregation",
    "CircularMean",
    "Inbox",
    "Message",
    "OwnerMean",
    "Record",
    "Refused",
    "Star",
    "Transcript",
    "View",
    "WeightedMean",
    "rounds",
]
