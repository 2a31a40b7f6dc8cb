"""How messages get from one to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tacit.federation.messages import Inbox, Message
from tacit.federation.transcript import Transcript


class InProcess:
    """Messages within one process: recorded, and handed over as they are; but for those that are lost, by a test."""

    def __init__(self, transcript: Transcript, lost: Callable[[Message], bool] = lambda message: False):
        self.transcript, self.lost = transcript, lost
        self.waiting: dict[int, list[Message]] = {}

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.transcript.record(message)
            if self.lost(message):
                continue
            self.waiting.setdefault(message.receiver, []).append(message)

    def receive(self, inbox: Inbox) -> Inbox:
        """Take what waits for the inbox's owner."""
        for message in self.waiting.pop(inbox.receiver, []):
            inbox.take(message)
        return inbox
