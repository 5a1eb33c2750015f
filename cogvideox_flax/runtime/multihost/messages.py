"""Messages between processes: JSON values and numpy arrays over a TCP connection."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported late: the command line uses this module before it needs arrays
    import numpy as np

_ARRAY = "__array__"
_HEADER = struct.Struct("<QQ")  # bytes of JSON, bytes of the arrays


class Connection:
    """Sends and receives messages; any number of threads may send, one thread receives."""

    def __init__(self, sock: socket.socket):
        self._socket, self._sending = sock, threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a lost host within half a minute
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not on every system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Any) -> None:
        """Send JSON values and numpy arrays, in lists, tuples and dictionaries.

        Raises:
            OSError: the connection is closed.
        """
        import numpy as np

        arrays: list[np.ndarray] = []

        def describe(value: Any) -> Any:
            array = np.ascontiguousarray(value)
            arrays.append(array)
            # the string of a dtype that numpy does not have itself, such as bfloat16, is that of bytes
            dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
            return {_ARRAY: [dtype, np.shape(value)]}

        text = json.dumps(message, default=describe).encode()
        with self._sending:
            self._socket.sendall(_HEADER.pack(len(text), sum(array.nbytes for array in arrays)) + text)
            for array in arrays:
                self._socket.sendall(array.reshape(-1).view(np.uint8).data)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, its tuples as lists; None if the connection is closed, or what came is not a message.

        Args:
            timeout: seconds without a byte after which the connection counts as closed.
        """
        import numpy as np

        start = 0

        def array(value: dict[str, Any]) -> Any:
            nonlocal start
            if _ARRAY not in value:
                return value
            dtype, shape = np.dtype(value[_ARRAY][0]), value[_ARRAY][1]
            nbytes = dtype.itemsize * int(np.prod(shape))
            found = np.frombuffer(body[start : start + nbytes], dtype).reshape(shape)
            start += nbytes
            return found

        try:
            self._socket.settimeout(timeout)
            text_bytes, array_bytes = _HEADER.unpack(self._read(_HEADER.size))
            text, body = self._read(text_bytes), memoryview(self._read(array_bytes))
            self._socket.settimeout(None)
            return json.loads(text, object_hook=array)
        except (OSError, ValueError, MemoryError, OverflowError):  # the last three: bytes of another program
            return None

    def is_idle(self) -> bool:
        """Whether the connection is open and holds no byte to receive."""
        return not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        """Later messages are lost; the other side receives None."""
        self._socket.close()

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            if not (got := self._socket.recv_into(view)):
                raise ConnectionError("closed by the other side")
            view = view[got:]
        return data
