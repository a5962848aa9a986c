import subprocess
import sys

import pytest
from ray.exceptions import RayActorError

from minirl.last_words import ProcessLog
from minirl.ray_launcher import MemberDiedError, translated

NATIVE = "import ctypes, faulthandler; faulthandler.enable(); ctypes.CDLL(None)"
FREES_WHAT_IT_DOES_NOT_OWN = (
    f"{NATIVE}.free(ctypes.c_void_p(ctypes.addressof(ctypes.create_string_buffer(64)) + 24))"
)


def test_a_process_that_the_c_library_aborts_is_quoted(tmp_path):
    path = tmp_path / "actor_1.log"
    path.write_text("free(): invalid size\n")  # of an earlier run
    log = ProcessLog.from_now(path)
    with path.open("ab") as output:
        command = [sys.executable, "-c", FREES_WHAT_IT_DOES_NOT_OWN]
        done = subprocess.run(command, stderr=output, check=False, timeout=60)
    assert done.returncode == -6
    told = translated(RayActorError(), "actor rank 1", log)
    assert isinstance(told, MemberDiedError)
    said = f"actor rank 1 died: free(): invalid pointer; Fatal Python error: Aborted (in {path})"
    assert str(told) == said


def test_what_is_not_fatal_is_no_last_word(tmp_path):
    path = tmp_path / "actor_0.log"
    path.write_text("W1130 12:44:20 a warning\nE1130 12:44:28 an error\nabout malloc(): nothing\n")
    assert ProcessLog(path).last_words() is None
    assert ProcessLog(tmp_path / "elsewhere.log").last_words() is None
    told = str(translated(RayActorError(), "actor rank 0", ProcessLog(path)))
    assert told == str(translated(RayActorError(), "actor rank 0"))
    assert told.startswith("actor rank 0 died: ")


@pytest.mark.parametrize(
    "line",
    [
        "double free or corruption (!prev)",
        "corrupted double-linked list",
        "malloc(): unaligned tcache chunk detected",
        "*** SIGSEGV received at time=1796042723 on cpu 1 ***",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "fatal error: unexpected signal during runtime execution",
        "panic: runtime error: invalid memory address or nil pointer dereference",
        "F1130 12:44:28.517025 31522 tcp_transport.cpp:98] Check failed: x",
    ],
)
def test_native_libraries_have_many_ways_to_end_a_process(tmp_path, line):
    path = tmp_path / "actor_0.log"
    path.write_text("x" * 100_000 + f"\nnoise\n{line}\n" + "  module, " * 1000)
    assert ProcessLog(path).last_words() == line
