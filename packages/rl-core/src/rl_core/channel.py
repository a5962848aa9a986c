"""A stream of authenticated, numbered messages between two processes.

Frames are `length (4 bytes, big endian) | HMAC-SHA256 (32 bytes) | msgpack`. The HMAC covers the
direction and the number of the message, so a frame can be neither forged, nor replayed, nor
reordered, nor reflected. Both sides hold a key of the run, which travels on another way (through
the controller); each connection derives a key of its own from it and a nonce of either side.
Messages are tagged msgspec structs and validated strictly; nothing is unpickled.

Local sockets live in Linux's abstract namespace: they have no file that could be left behind.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, PeerLostError, TransferError, TransferTimeoutError

KEY_BYTES = 32
MAX_MESSAGE_BYTES = 64 << 20
_NONCE_BYTES = 16
_MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_LOOK_S = 0.02
"""Longest wait for a peer to read, between two looks at whether to go on."""


def _nothing() -> None:
    pass


def new_key() -> bytes:
    """A fresh random key for one run or one connection."""
    return secrets.token_bytes(KEY_BYTES)


class Listener:
    """A bound socket waiting for peers. Address text: `unix:<name>` or `tcp:<host>:<port>`."""

    def __init__(self, host: str | None = None) -> None:
        """Bind a local (Unix) socket, or a free TCP port on the interface of `host`."""
        if host is None:
            name = f"minirl-{os.getpid()}-{secrets.token_hex(8)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(f"\0{name}")
            self.address = f"unix:{name}"
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        self._socket.listen(64)

    def poll(self, seconds: float) -> bool:
        """Whether a peer is waiting to be accepted, after at most `seconds`."""
        return _readable(self._socket, seconds)

    def accept(self, key: bytes, types: Any, deadline: Deadline) -> "Channel":
        """The next peer; one that does not know `key` is dropped with a MessageError."""
        return admit(self.take(deadline), key, types, deadline)

    def take(self, deadline: Deadline) -> socket.socket:
        """The next connection, of a peer that has shown nothing yet; for `admit`."""
        connection: socket.socket
        connection, _ = _within(deadline, self._socket, "a peer to connect", self._socket.accept)
        return connection

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def admit(connection: socket.socket, key: bytes, types: Any, deadline: Deadline) -> "Channel":
    """The channel to a peer that has connected; MessageError, and dropped, without `key`."""
    return _open(connection, key, types, deadline, accepted=True)


def connect(address: str, key: bytes, types: Any, deadline: Deadline) -> "Channel":
    """Reach a `Listener`.

    Args:
        address: as the listener gives it.
        key: the shared key.
        types: union of message structs that may arrive on this side.
        deadline: for connecting and the handshake.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix":
        family, target = socket.AF_UNIX, f"\0{rest}"
    elif kind == "tcp":
        host, _, port = rest.rpartition(":")
        family, target = socket.AF_INET, (host, int(port))  # type: ignore[assignment]
    else:
        raise TransferError(f"not a channel address: {address!r}")
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        _within(deadline, connection, f"{address} to answer", connection.connect, target)
    except TransferError:
        connection.close()
        raise
    return _open(connection, key, types, deadline, accepted=False)


def _open(
    connection: socket.socket, key: bytes, types: Any, deadline: Deadline, *, accepted: bool
) -> "Channel":
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection, key, types, deadline, accepted=accepted)


class Channel:
    """One end of a connection.

    One thread may send while another one receives; no two may do the same. A receive that timed
    out can be repeated. A send that failed, or a message that is not authentic, closes the
    channel: what follows on the wire has no meaning any more.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        types: Any,
        deadline: Deadline,
        *,
        accepted: bool,
    ) -> None:
        self._socket = connection
        # A socket has one timeout: sending and receiving need one each.
        self._reader = connection.dup()
        self._pending = bytearray()
        self._decoder = msgspec.msgpack.Decoder(types)
        self._encoder = msgspec.msgpack.Encoder()
        self._sent = self._received = 0
        self._out, self._in = (b"a", b"c") if accepted else (b"c", b"a")
        self._key = key
        try:
            self._key = self._handshake(accepted, deadline)
        except (TransferError, MessageError):
            self.close()
            raise

    def _handshake(self, accepted: bool, deadline: Deadline) -> bytes:
        mine = secrets.token_bytes(_NONCE_BYTES)
        self._send_all(mine, deadline)
        theirs = self._read(_NONCE_BYTES, deadline)
        nonces = mine + theirs if accepted else theirs + mine
        key = hmac.digest(self._key, b"minirl-channel-1" + nonces, hashlib.sha256)
        self._send_all(hmac.digest(key, b"proof" + self._out, hashlib.sha256), deadline)
        proof = self._read(_MAC_BYTES, deadline)
        if not hmac.compare_digest(proof, hmac.digest(key, b"proof" + self._in, hashlib.sha256)):
            raise MessageError("the peer does not hold this run's key; it was refused")
        return key

    def send(
        self, message: msgspec.Struct, deadline: Deadline, look: Callable[[], None] = _nothing
    ) -> None:
        """Send one message; TransferError if the peer is gone.

        Args:
            message: what to send.
            deadline: for all of it.
            look: called again and again while the peer reads slowly, or not; may end it by raising.
        """
        payload = self._encoder.encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(payload)} bytes exceeds {MAX_MESSAGE_BYTES}")
        mac = self._mac(self._out, self._sent, payload)
        self._sent += 1
        try:
            self._send_all(_LENGTH.pack(len(payload)) + mac + payload, deadline, look)
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: Deadline) -> Any:
        """The next message, an instance of one of `types`.

        Errors: MessageError (forged, out of order, malformed), TransferError (peer gone),
        TransferTimeoutError.
        """
        size = _LENGTH.unpack(self._peek(_LENGTH.size, deadline))[0]
        if size > MAX_MESSAGE_BYTES:
            self.close()
            raise MessageError(f"announced message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
        frame = self._read(_LENGTH.size + _MAC_BYTES + size, deadline)[_LENGTH.size :]
        mac, payload = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, payload)):
            self.close()
            raise MessageError(f"message {self._received} is not authentic or out of order")
        self._received += 1
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise MessageError(f"message {self._received - 1} is malformed: {error}") from error

    def poll(self, seconds: float) -> bool:
        """Whether `receive` would find something (or the peer's end), after at most `seconds`."""
        return _readable(self._socket, seconds)

    def fileno(self) -> int:
        """Descriptor of the socket, for polling several channels together; -1 once closed."""
        return self._socket.fileno()

    def send_fd(self, fd: int, deadline: Deadline) -> None:
        """Hand a file descriptor to the peer; local sockets only."""
        _within(deadline, self._socket, "the peer", socket.send_fds, self._socket, [b"F"], [fd])

    def receive_fd(self, deadline: Deadline) -> int:
        """The descriptor that the peer sent; the caller owns it."""
        result = _within(
            deadline, self._reader, "a descriptor", socket.recv_fds, self._reader, 1, 1
        )
        if result[0] != b"F" or len(result[1]) != 1:
            for fd in result[1]:
                os.close(fd)
            raise MessageError("expected a file descriptor, the peer sent something else")
        return int(result[1][0])

    def close(self) -> None:
        """Close the connection; the peer sees it at once. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mac(self, direction: bytes, number: int, payload: bytes) -> bytes:
        head = direction + number.to_bytes(8, "big")
        return hmac.digest(self._key, head + payload, hashlib.sha256)

    def _send_all(
        self, data: bytes, deadline: Deadline, look: Callable[[], None] = _nothing
    ) -> None:
        left = memoryview(data)
        while left:
            turn = deadline.sooner(_LOOK_S)
            try:
                count = _within(turn, self._socket, "the peer to read", self._socket.send, left)
                left = left[count:]
            except TransferTimeoutError:
                if deadline.expired:
                    raise
            if left:
                look()

    def _read(self, nbytes: int, deadline: Deadline) -> bytes:
        data = self._peek(nbytes, deadline)
        del self._pending[:nbytes]
        return data

    def _peek(self, nbytes: int, deadline: Deadline) -> bytes:
        """The next `nbytes`, which stay pending; no more than that is read off the wire."""
        while len(self._pending) < nbytes:
            want = nbytes - len(self._pending)
            part = _within(deadline, self._reader, "a message", self._reader.recv, want)
            if not part:
                raise PeerLostError("the peer closed the connection")
            self._pending += part
        return bytes(self._pending[:nbytes])


def _readable(on: socket.socket, seconds: float) -> bool:
    # Not select(), which cannot look at descriptors above 1023.
    poll = select.poll()
    poll.register(on, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _within(
    deadline: Deadline, on: socket.socket, what: str, operation: Any, *arguments: Any
) -> Any:
    """Run a socket operation under a deadline, with errors of this package."""
    deadline.check(what)
    try:
        on.settimeout(max(deadline.remaining(), 1e-3))
        return operation(*arguments)
    except TimeoutError as error:
        raise TransferTimeoutError(f"deadline passed while waiting for {what}") from error
    except OSError as error:
        raise PeerLostError(f"connection lost while waiting for {what}: {error}") from error
