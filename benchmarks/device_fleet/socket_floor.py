"""The floor under a broadcast: the same bytes over as many bare sockets, and nothing else.

One process stands for the server and has one connection on loopback to each device; the devices
are in as many processes as the benchmark's. Of the model, every device gets all bytes: the sender
copies each piece once out of the model (as a message has to be made of it), the receiver copies it
once into the model's place (as it has to be taken out of its message), and answers with a hundred
bytes when everything is there. No TLS, no HTTP/2, no digest, no Python object per message but the
piece itself; system calls are as few as the pieces.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import resource
import selectors
import socket
import time
from multiprocessing.context import SpawnProcess

PIECE = 256 << 10
_REPLY = 100


def broadcast(
    connections: int, size: int, processes: int, repeats: int
) -> tuple[list[float], float]:
    """Send `size` bytes to each of so many connections, and wait for all replies.

    Returns:
        Seconds of each repeat; CPU seconds of all processes for one.
    """
    _many_files()
    context = multiprocessing.get_context("spawn")
    before = _cpu()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        port: int = listening.getsockname()[1]
        receivers: list[SpawnProcess] = []
        pipes: list[multiprocessing.connection.Connection] = []
        for number in range(processes):
            mine = len(range(number, connections, processes))
            ours, theirs = context.Pipe()
            process = context.Process(target=_receive, args=(port, mine, size, theirs))
            process.start()
            theirs.close()
            receivers.append(process)
            pipes.append(ours)
        peers = [listening.accept()[0] for _ in range(connections)]
        started = sum(pipe.recv() for pipe in pipes) + _cpu() - before
        seconds = [_send(peers, size) for _ in range(repeats)]
        for peer in peers:
            peer.close()
        spent = sum(pipe.recv() for pipe in pipes) + _cpu() - before - started
        for process in receivers:
            process.join()
    return seconds, spent / repeats


def _send(peers: list[socket.socket], size: int) -> float:
    """One broadcast."""
    model = memoryview(bytearray(size))
    begun = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        pieces: dict[socket.socket, tuple[int, memoryview]] = {}
        for peer in peers:
            peer.setblocking(False)
            pieces[peer] = (0, memoryview(b""))
            selector.register(peer, selectors.EVENT_WRITE)
        waiting = len(peers)
        while waiting:
            for key, _ in selector.select():
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                if key.events == selectors.EVENT_READ:
                    peer.recv(_REPLY)
                    selector.unregister(peer)
                    waiting -= 1
                    continue
                offset, piece = pieces[peer]
                if not piece:
                    piece = memoryview(bytes(model[offset : offset + PIECE]))
                    offset += len(piece)
                piece = piece[peer.send(piece) :]
                pieces[peer] = offset, piece
                if not piece and offset == size:
                    selector.modify(peer, selectors.EVENT_READ)
    return time.perf_counter() - begun


def _receive(
    port: int, connections: int, size: int, pipe: multiprocessing.connection.Connection
) -> None:
    """The devices of one process."""
    _many_files()
    model, piece = memoryview(bytearray(size)), memoryview(bytearray(PIECE))
    with selectors.DefaultSelector() as selector:
        have: dict[socket.socket, int] = {}
        for _ in range(connections):
            link = socket.create_connection(("127.0.0.1", port))
            link.setblocking(False)
            have[link] = 0
            selector.register(link, selectors.EVENT_READ)
        pipe.send(_cpu())
        while have:
            for key, _ in selector.select():
                link = key.fileobj
                assert isinstance(link, socket.socket)
                came = link.recv_into(piece)
                if not came:
                    selector.unregister(link)
                    del have[link]
                    link.close()
                    continue
                model[have[link] : have[link] + came] = piece[:came]
                have[link] += came
                if have[link] == size:
                    link.send(bytes(_REPLY))
                    have[link] = 0
    pipe.send(_cpu())


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
