"""The lower bound for a broadcast: the same bytes over as many plain sockets.

One process acts as the server, with one loopback connection to each device; the devices are in as
many processes as in the benchmark. Every device receives the whole model. The sender copies each
piece once out of the model, as it must to build a message; the receiver copies it once into its
buffer, as it must to unpack a message, and replies with 100 bytes at the end. There is no TLS, no
HTTP/2, no digest, no Python object per message except the piece, and one system call per piece.
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
    """Send `size` bytes over each connection, and wait for all replies.

    Returns:
        Seconds of each repeat, and the mean CPU seconds of all processes per repeat.
    """
    _raise_file_limit()
    context = multiprocessing.get_context("spawn")
    before = _cpu()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        port: int = listening.getsockname()[1]
        receivers: list[SpawnProcess] = []
        pipes: list[multiprocessing.connection.Connection] = []
        for number in range(processes):
            assigned = len(range(number, connections, processes))
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=_receive, args=(port, assigned, size, child_pipe))
            process.start()
            child_pipe.close()
            receivers.append(process)
            pipes.append(pipe)
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
    """Broadcast once; returns the seconds it took."""
    model = memoryview(bytearray(size))
    start = time.perf_counter()
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
    return time.perf_counter() - start


def _receive(
    port: int, connections: int, size: int, pipe: multiprocessing.connection.Connection
) -> None:
    """Receive as the devices of one process."""
    _raise_file_limit()
    model, piece = memoryview(bytearray(size)), memoryview(bytearray(PIECE))
    with selectors.DefaultSelector() as selector:
        received: dict[socket.socket, int] = {}
        for _ in range(connections):
            link = socket.create_connection(("127.0.0.1", port))
            link.setblocking(False)
            received[link] = 0
            selector.register(link, selectors.EVENT_READ)
        pipe.send(_cpu())
        while received:
            for key, _ in selector.select():
                link = key.fileobj
                assert isinstance(link, socket.socket)
                count = link.recv_into(piece)
                if not count:
                    selector.unregister(link)
                    del received[link]
                    link.close()
                    continue
                model[received[link] : received[link] + count] = piece[:count]
                received[link] += count
                if received[link] == size:
                    link.send(bytes(_REPLY))
                    received[link] = 0
    pipe.send(_cpu())


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
