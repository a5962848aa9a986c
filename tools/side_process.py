"""The two processes that `beside_trl.py` lets work in turn, and what the machine did meanwhile."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_S, STEP_S, END_S = 900.0, 3600.0, 120.0


class SideError(Exception):
    """A side did not do what it was told to; the text says where its own words are."""


@dataclass(frozen=True)
class Step:
    """One step of one side.

    Attributes:
        seconds: from the order to the answer.
        cores: busy on average with this side's processes.
        idle_cores: with those of the other side, which is held.
        other_cores: with anything else.
        prompt_tokens: of all samples, a group's prompt as often as it has samples.
        new_tokens: generated.
        phases: seconds of its parts, in the side's own words.
    """

    seconds: float
    cores: float
    idle_cores: float
    other_cores: float
    prompt_tokens: int
    new_tokens: int
    phases: Mapping[str, float]


class Side:
    """A process that does one step when it is told to, with all that it starts.

    Attributes:
        name: for the table.
        log: what it prints.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_until_ready(self) -> None:
        """SideError if it does not start."""
        self._answer(START_S)

    def step(self) -> dict[str, Any]:
        """Let it do a step; what it tells of it. SideError if it fails."""
        try:
            self._orders.write("step\n")
            self._orders.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None
        return self._answer(STEP_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop all of its processes for a while: Ray's, for one, always have something to do."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> dict[psutil.Process, float]:
        """CPU time of each of its processes so far."""
        found = {}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process] = times.user + times.system
        return found

    def memory(self) -> int:
        """Bytes that its processes hold (PSS)."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def finish(self) -> None:
        """Let it end in its own way after the last step. SideError if it ends badly."""
        self._orders.close()
        code = self._process.wait(END_S)
        if code != 0:
            raise self._failed(f"ended with code {code}")

    def close(self) -> None:
        """End whatever of it is left. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()  # `minirl` then ends all that it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def _orders(self) -> Any:
        return self._process.stdin

    def _processes(self) -> Iterator[psutil.Process]:
        """Itself first, then all below it as they are when it is asked for."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            yield root
            yield from root.children(recursive=True)

    def _signal(self, number: int) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"has not answered for {timeout_s:.0f} s") from None
        if line is None:
            raise self._failed("has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> SideError:
        last = self.log.read_text(errors="replace")[-3000:]
        return SideError(f"{self.name} {what}; {self.log} ends with:\n{last}")


def timed_step(working: Side, idle: Side) -> Step:
    """One step of a side while the other one is held."""
    sides = (working, idle)
    with idle.held():
        before, busy = [side.cpu_seconds() for side in sides], busy_seconds()
        begun = time.perf_counter()
        report = working.step()
        seconds = time.perf_counter() - begun
        busy = busy_seconds() - busy
        after = [side.cpu_seconds() for side in sides]
    own, waiting = (_spent(*pair) for pair in zip(before, after, strict=True))
    return Step(
        seconds,
        cores=own / seconds,
        idle_cores=waiting / seconds,
        other_cores=max(0.0, busy - own - waiting) / seconds,
        prompt_tokens=report["prompt_tokens"],
        new_tokens=report["new_tokens"],
        phases=report["phases"],
    )


def _spent(before: Mapping[Any, float], after: Mapping[Any, float]) -> float:
    """By the processes that are still there; those that came since count whole."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
