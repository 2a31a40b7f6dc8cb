"""How messages get from one to another, and how two sides talk.

A side of a protocol is a generator: it says messages, names the inbox for what it expects next, and is given that inbox
filled with what came. So each side is written once, as if it were alone, and does not know whether the other one is in
the same process or in another country.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from tacit.federation.messages import Inbox, Message
from tacit.federation.transcript import Transcript

End = TypeVar("End")
Mine = TypeVar("Mine")
Theirs = TypeVar("Theirs")
Said = tuple[Sequence[Message], Inbox | None]
"""Messages, and what is expected in answer; None: nothing, and the side goes on at once."""
Talk = Generator[Said, Inbox, End]


def going(talk: Talk[End], came: Inbox | None = None) -> tuple[list[Message], Inbox | None, Any]:
    """Let a side go on until it waits for something: what it says, what it expects, and what it ends with, if it does.

    Of a side that ends there is no inbox.
    """
    said: list[Message] = []
    try:
        more, expects = talk.send(came) if came is not None else next(talk)
        said += more
        while expects is None:
            more, expects = next(talk)
            said += more
    except StopIteration as end:
        return said, None, end.value
    return said, expects, None


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

    def meet(self, server: Talk[Mine], parties: Mapping[int, Talk[Theirs]]) -> tuple[Mine, dict[int, Theirs]]:
        """Let a server and some parties talk to the end; what it ends with for each.

        A party to whom nothing is said, where others are spoken to, has dropped out, and ends with nothing.
        """
        expected: dict[int, Inbox] = {}
        ended: dict[int, Theirs] = {}

        def go_on(party: int, came: Inbox | None = None) -> None:
            said, expects, end = going(parties[party], came)
            self.send(said)
            if expects is None:
                ended[party] = end
            else:
                expected[party] = expects

        for party in parties:
            go_on(party)
        said, expects, end = going(server)
        while True:
            self.send(said)
            if said:
                for party in list(expected):
                    inbox = self.receive(expected.pop(party))
                    if inbox.taken:
                        go_on(party, inbox)
                    else:
                        parties[party].close()
            if expects is None:
                break
            said, expects, end = going(server, self.receive(expects))
        for talk in parties.values():
            talk.close()
        return end, ended
