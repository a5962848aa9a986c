"""How SGLang's processes are started, watched and told where to write.

`LaunchedEngine` overrides what SGLang means to be overridden: the functions that its processes run
and the way they are launched. Imported in the server process only, and by the processes that it
spawns.
"""

import contextlib
import ctypes
import faulthandler
import functools
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.scheduler import run_scheduler_process

from rl_core.rollout import process_watch
from rl_core.rollout.process_output import redirect_output
from rl_rollout_sglang.checked_manager import init_checked_manager
from rl_rollout_sglang.scheduler_protocol import SEGMENTS

LAST_LINES = 15


@dataclass(frozen=True)
class ProcessSetup:
    """What a process of the engine needs to know before it begins.

    Attributes:
        server: pid of the server, with which it ends.
        scratch: directory for sockets and last words.
        replica_rank: number of the replica.
        log_dir: directory for its output, or None to leave that where it is.
        threads: compute threads on cpu, or None to leave them.
        address: of the server's `SchedulerLink`.
        key: of the link.
    """

    server: int
    scratch: str
    replica_rank: int
    log_dir: str | None
    threads: int | None
    address: str
    key: bytes

    def enter(self, name: str) -> None:
        """First thing in a process called `name`."""
        process_watch.end_with(self.server, self.scratch, SEGMENTS)
        if self.log_dir is not None:
            redirect_output(self.log_dir, f"sglang-{self.replica_rank}-{name}.log")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        _keep_last_words(Path(self.scratch, f"{name}.words"))


def run_scheduler(setup: ProcessSetup, *args: Any) -> None:
    """A scheduler process: ours to prepare, SGLang's to run. Arguments are SGLang's."""
    from rl_rollout_sglang import scheduler_extension

    setup.enter(f"scheduler-{args[3]}")
    scheduler_extension.install(setup.address, setup.key)
    try:
        run_scheduler_process(*args)
    finally:
        process_watch.unlink_segments(SEGMENTS)  # it may have failed before anybody attached


def run_detokenizer(setup: ProcessSetup, *args: Any) -> None:
    """The detokenizer process."""
    setup.enter("detokenizer")
    run_detokenizer_process(*args)


class LaunchedEngine(Engine):  # type: ignore[misc]
    """SGLang's engine with processes as `configured` says.

    Attributes:
        start_method: `fork` or `spawn`.
        processes: the schedulers and the detokenizer that were started.
    """

    start_method: ClassVar[str] = "spawn"
    processes: ClassVar[list[Any]] = []
    init_tokenizer_manager_func = staticmethod(init_checked_manager)

    @classmethod
    def configured(cls, setup: ProcessSetup, start_method: str) -> type["LaunchedEngine"]:
        """A subclass for one engine; SGLang reads these settings from the class."""
        return type(
            "ConfiguredEngine",
            (cls,),
            {
                "start_method": start_method,
                "processes": [],
                "run_scheduler_process_func": functools.partial(run_scheduler, setup),
                "run_detokenizer_process_func": functools.partial(run_detokenizer, setup),
            },
        )

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        # SGLang has just set `spawn`, which imports everything a second time in each process.
        # Forking is safe here: the server has used no OpenMP threads and no device.
        multiprocessing.set_start_method(cls.start_method, force=True)
        result, processes = super()._launch_scheduler_processes(*args, **kwargs)
        cls.processes.extend(processes or [])
        return result, processes

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
        processes, names = super()._launch_detokenizer_subprocesses(*args, **kwargs)
        cls.processes.extend(processes)
        return processes, names


def ignore_quit_signal() -> None:
    """Survive SIGQUIT, which SGLang's processes send to the server when they fail.

    Its own answer is to kill the whole process tree, the caller included. From any thread: in a
    Ray actor the event loop is not on the main one, where Python could set a handler.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGQUIT, ctypes.c_void_p(1))  # SIG_IGN


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Undo what SGLang does to the root logger while it starts."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def last_words(scratch: str) -> str:
    """The last lines that each process of the engine logged as errors."""
    found = []
    for file in sorted(Path(scratch).glob("*.words")):
        lines = file.read_text(errors="replace").splitlines()
        found += [f"[{file.stem}] {line}" for line in lines[-LAST_LINES:] if line.strip()]
    return "\n".join(found)


_OPEN: list[IO[str]] = []


def _keep_last_words(file: Path) -> None:
    """Write errors and native crashes to a file that outlives this process."""
    log = logging.getLogger("sglang")
    log.handlers.clear()  # a fork inherits the server's
    log.propagate = True
    handler = logging.FileHandler(file)
    handler.setLevel(logging.ERROR)
    log.addHandler(handler)
    _OPEN.append(file.open("a"))
    faulthandler.enable(_OPEN[-1])
