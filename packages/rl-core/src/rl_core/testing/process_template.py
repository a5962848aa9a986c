"""A process that has imported what others need, and becomes them by forking.

Importing torch takes a core for more than a second, and a contract ends and replaces many
processes. Forks of one that has imported it, and has started no thread, come up at once.

Started as `python -m rl_core.testing.process_template PARENT_PID SOCKET_FD MODULE...` by
`ProcessLauncher`. Each message on the socket asks for one fork; the answer is its pid. It ends, and
with it every fork, when the socket closes or the launching process dies.
"""

import gc
import importlib
import os
import signal
import socket
import sys

import msgspec

from rl_core.testing.process_host import serve
from rl_core.testing.process_tree import die_with_parent
from rl_core.testing.process_wire import HostSpec

REQUEST_BYTES = 1 << 20


class ForkOrder(msgspec.Struct, frozen=True):
    """One process to be.

    Two descriptors come along: where it announces its address, and where its output goes.

    Attributes:
        spec: the object in it.
        environment: all of its environment variables.
        directory: its working directory.
    """

    spec: HostSpec
    environment: dict[str, str]
    directory: str


def main() -> None:
    """Import, then fork as ordered."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent, signal.SIGKILL)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    # A collection in a fork would go through all that was imported, and copy its pages.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is reaped by the kernel
    with socket.socket(fileno=descriptor) as orders:
        while True:
            data, descriptors, _, _ = socket.recv_fds(orders, REQUEST_BYTES, 2)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                orders.close()
                become(msgspec.msgpack.decode(data, type=ForkOrder), *descriptors)
            for received in descriptors:
                os.close(received)
            orders.send(str(pid).encode())


def become(order: ForkOrder, announce: int, output: int) -> None:
    """Be the process that `order` describes; never returns."""
    template = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    serve(order.spec, template, announce)
    os._exit(0)


if __name__ == "__main__":
    main()
