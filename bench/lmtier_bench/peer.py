"""The other end of a bare socket: takes and gives bytes as it is told. What any server could do at best.

    python -m lmtier_bench.peer SOCKET | PORT
    G n    gives n bytes            S n    takes n bytes, gives one            (n: u64, little endian)

Both rotate over memory that no cache holds, as a server does.
"""

from __future__ import annotations

import socket
import struct
import sys

from lmtier_bench.copies import faulted_memory

MEMORY = 1 << 30
ORDER = struct.Struct("<cQ")


def take(sock: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count


def serve(listener: socket.socket, memory: memoryview) -> None:
    order = memoryview(bytearray(ORDER.size))
    sock, _ = listener.accept()
    at = 0
    with sock:
        while True:
            take(sock, order)
            word, nbytes = ORDER.unpack(order)
            at = 0 if at + nbytes > len(memory) else at
            view = memory[at : at + nbytes]
            at += nbytes
            if word == b"G":
                sock.sendall(view)
            else:
                take(sock, view)
                sock.sendall(b".")


def main(place: str) -> None:
    address: str | tuple[str, int] = ("127.0.0.1", int(place)) if place.isdigit() else place
    memory = faulted_memory(MEMORY).data
    with socket.socket(socket.AF_INET if place.isdigit() else socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(1)
        try:
            serve(listener, memory)
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main(sys.argv[1])
