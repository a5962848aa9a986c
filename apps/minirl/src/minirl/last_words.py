"""What a process said when native code ended it, found in the log that it left.

Ray knows only that a connection broke. The C library, a C++ run-time, Go's or Python's fatal error
handler write their reason to stderr, which is the process's log file, and then end it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 64 << 10
"""A fatal message is at the end, before the stack and the list of modules that Python adds."""

_MOST_LINES = 3
_MOST_CHARACTERS = 160
"""Lines that are told, and of each."""

_FATAL = re.compile(
    r"(?:free|malloc|calloc|realloc|munmap_chunk|mremap_chunk|malloc_consolidate)\(\): "
    r"|double free or corruption|corrupted (?:size|double-linked list)"
    r"|\*\*\* (?:stack smashing|buffer overflow) detected|\*\*\* SIG[A-Z]+ received"
    r"|terminate called |  what\(\):  "
    r"|Fatal Python error: "
    r"|fatal error: |panic: |SIG[A-Z]+: "  # Go
    r"|F\d{4} \d\d:\d\d:\d\d"  # glog
)


@dataclass(frozen=True)
class ProcessLog:
    """The log file of one process.

    Attributes:
        path: the file, on the process's own node.
        begin: where the process begins to write: an earlier run may have left its own words.
    """

    path: Path
    begin: int = 0

    @classmethod
    def from_now(cls, path: Path) -> "ProcessLog":
        """That of a process which has not started yet."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def last_words(self) -> str | None:
        """The fatal messages at its end, in one line; None if there are none, or no such file.

        A process that was killed from outside says nothing; one on another node says it there.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(self.begin, self.path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return None
        fatal = [line.strip()[:_MOST_CHARACTERS] for line in lines if _FATAL.match(line)]
        return "; ".join(fatal[:_MOST_LINES]) or None
