"""Bytes: those of the formulas, and those that sockets count."""

import socket
import sys

import pytest

from headnotes.parallel import traffic
from headnotes.parallel.traffic import Collective


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (1, 2, 3, 7):
        whole = traffic.bytes_to_send([Collective("all-reduce", 700)], ranks)
        parts = [Collective("reduce-scatter", 700), Collective("all-gather", 700)]
        assert traffic.bytes_to_send(parts, ranks) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts bytes")
def test_all_that_is_written_to_a_socket_is_counted_once() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    connection, _ = server.accept()
    with server, client, connection:
        before = traffic.bytes_sent()
        client.sendall(bytes(12345))
        received = 0
        while received < 12345:
            received += len(connection.recv(65536))
        assert traffic.bytes_sent() - before == 12345
        # The count has closed no socket.
        client.sendall(b"more")
