"""Whose processes listen at a port."""

import os
import socket
import sys

import pytest

from isthmus.system import listeners
from isthmus.system.listeners import other_users_at

OTHER = os.getuid() + 1


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a port is")
def test_ports_of_this_user_and_of_others_are_told_apart(port, monkeypatch):
    assert other_users_at(port) == []
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    monkeypatch.setattr(listeners, "_ROOT", OTHER)
    (user,) = other_users_at(port)
    assert user == OTHER - 1


def test_connections_and_other_ports_do_not_count(tmp_path, monkeypatch):
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    row = "   0: {}:{:04X} 00000000:0000 {} 00000000:00000000 00:00000000 00000000 {:5} 0 1 1\n"
    table = tmp_path / "tcp"
    table.write_text(
        head
        + row.format("0100007F", 5000, "0A", OTHER)
        + row.format("0100007F", 5001, "01", OTHER)
        + row.format("00000000000000000000000001000000", 5002, "0A", OTHER)
        + row.format("0100007F", 5003, "0A", 0)
    )
    monkeypatch.setattr(listeners, "_TABLES", (tmp_path / "none", table))
    found = {port: other_users_at(port) for port in range(5000, 5005)}
    assert found == {5000: [OTHER], 5001: [], 5002: [OTHER], 5003: [], 5004: []}
