"""Peers that learn from each other in pairs, without a server (FKGE)."""

from tacit.peers.learner import Learner, Pairing
from tacit.peers.meeting import Meeting, Scores, continued, independent, meet, unified
from tacit.peers.peer import Peer
from tacit.peers.ppat import PPAT

__all__ = ["PPAT", "Learner", "Meeting", "Pairing", "Peer", "Scores", "continued", "independent", "meet", "unified"]
