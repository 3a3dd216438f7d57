"""A listener that records the changes of a link's participants."""

import asyncio

from isthmus_server.transport.peer import ParticipantListener


class RecordingListener(ParticipantListener):
    """Records what it receives, in order; `event` is set by each notification."""

    def __init__(self):
        self.joined_instances = []
        self.left_reasons = []
        self.progress = []
        self.event = asyncio.Event()

    def joined(self, peer):
        self.joined_instances.append(peer.instance)
        self.event.set()

    def left(self, peer, reason):
        self.left_reasons.append((peer.name, reason))
        self.event.set()

    def progressed(self, name, progress):
        self.progress.append((name, progress))
        self.event.set()


def attached(link):
    """Attach a new recording listener to a link."""
    listener = RecordingListener()
    link.listeners.attach(listener)
    return listener
