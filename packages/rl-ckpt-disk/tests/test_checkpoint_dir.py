import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_ckpt_disk import checkpoint_dir
from rl_ckpt_disk.checkpoint_dir import RunDirectory, attachments, write_all
from rl_ckpt_disk.leases import DirectoryLease
from rl_ckpt_disk.ready import READY_FILE
from rl_core.errors import TransferError
from rl_core.versions import PolicyVersion


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path, "run-1")
    directory.create()
    return directory


def publish(run, name, content=b"weights"):
    staged = run.stage(name)
    staged.write("model.safetensors", content)
    return staged.publish(b"marker")


def names(run):
    return sorted(path.name for path in run.path.iterdir())


def test_nothing_is_seen_before_it_is_complete(run):
    staged = run.stage("e1.s0")
    staged.write("model.safetensors", b"weights")
    assert not (run.path / "e1.s0").exists()
    assert run.complete() == []
    path = staged.publish(b"marker")
    assert path == run.path / "e1.s0"
    assert run.complete() == [path]
    assert (path / READY_FILE).read_bytes() == b"marker"
    staged.discard()
    assert path.is_dir()


def test_discarded_directory_leaves_nothing(run):
    staged = run.stage("e1.s0")
    staged.write("model.safetensors", b"weights")
    staged.discard()
    staged.discard()
    assert names(run) == []


def test_directories_are_sorted_by_version_not_by_name(run):
    for name in ("e1.s10", "e1.s9", "e2.s0", "e1.s9.2", "e1.s9.10"):
        publish(run, name)
    found = [path.name for path in run.complete()]
    assert found == ["e1.s9", "e1.s9.2", "e1.s9.10", "e1.s10", "e2.s0"]


def test_a_version_that_exists_gets_a_fresh_directory(run):
    version = PolicyVersion(1, 3)
    for expected in ("e1.s3", "e1.s3.2", "e1.s3.3"):
        assert run.free_name(version) == expected
        publish(run, expected)


def test_prune_keeps_the_last(run):
    for step in range(5):
        publish(run, f"e1.s{step}")
    run.prune(2)
    assert names(run) == ["e1.s3", "e1.s4"]


def test_prune_spares_what_is_read(run):
    for step in range(4):
        publish(run, f"e1.s{step}")
    lease = DirectoryLease(run.path / "e1.s0")
    run.prune(1)
    assert names(run) == ["e1.s0", "e1.s3"]
    lease.release()
    run.prune(1)
    assert names(run) == ["e1.s3"]


def test_lease_of_a_process_that_died_holds_nothing(run):
    for step in range(2):
        publish(run, f"e1.s{step}")
    program = (
        "import sys, pathlib; from rl_ckpt_disk.leases import DirectoryLease;"
        "lease = DirectoryLease(pathlib.Path(sys.argv[1])); print('held', flush=True);"
        "sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(run.path / "e1.s0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout.readline() == b"held\n"
        run.prune(1)
        assert names(run) == ["e1.s0", "e1.s1"]
    finally:
        reader.kill()
        reader.wait(30)
        reader.stdin.close()
        reader.stdout.close()
    run.prune(1)
    assert names(run) == ["e1.s1"]


def test_prune_removes_what_a_dead_writer_left_but_not_what_is_being_written(run):
    left = run.stage("e1.s0")
    os.close(left._lock)  # as the kernel does when the writer dies
    writing = run.stage("e1.s1")
    publish(run, "e1.s2")
    run.prune(1)
    assert names(run) == sorted([writing.path.name, "e1.s2"])
    writing.discard()


def test_lease_on_a_directory_that_is_gone(run):
    path = publish(run, "e1.s0")
    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError):
        DirectoryLease(path)


def test_readers_and_pruning_at_once(run):
    """Whoever gets a lease has a whole directory; nobody gets half of one."""
    broken = []
    stop = threading.Event()

    def read():
        while not stop.is_set():
            for path in run.complete():
                try:
                    lease = DirectoryLease(path)
                except FileNotFoundError:
                    continue
                if not (path / "model.safetensors").exists():
                    broken.append(path.name)
                lease.release()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(30):
        publish(run, f"e1.s{step}")
        run.prune(1)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert not broken
    run.prune(1)
    assert names(run) == ["e1.s29"]


def test_attachments_are_everything_small_but_weights(tmp_path):
    kept = ["config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "sp.model"]
    left = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".git"]
    for name in (*kept, *left):
        (tmp_path / name).write_text(name)
    (tmp_path / "onnx").mkdir()
    assert [path.name for path in attachments(tmp_path)] == sorted(kept)


def test_attached_files_are_copied(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    staged = run.stage("e1.s0")
    staged.attach(tmp_path)
    path = staged.publish(b"marker")
    assert (path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "x" * 300, "laufé", "run 1"])
def test_any_run_id_gives_a_directory_of_its_own_inside_the_root(tmp_path, run_id):
    directory = RunDirectory(tmp_path, run_id)
    directory.create()
    assert directory.path.parent == tmp_path
    assert directory.path != RunDirectory(tmp_path, run_id + "x").path


def test_only_the_owner_may_look(run):
    path = publish(run, "e1.s0")
    assert run.path.stat().st_mode & 0o077 == 0
    assert (path / "model.safetensors").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "set a root_dir"),
        (errno.EACCES, "set a root_dir"),
        (errno.ESTALE, "vanished"),
        (errno.EIO, "put"),
    ],
)
def test_what_the_disk_refuses_is_named(run, monkeypatch, number, said):
    good = publish(run, "e1.s0")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_dir.os, "pwrite", refuse)
    staged = run.stage("e1.s1")
    with pytest.raises(TransferError, match=said) as caught:
        staged.write("model.safetensors", b"weights")
    assert "model.safetensors" in str(caught.value)
    staged.discard()
    assert run.complete() == [good]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(checkpoint_dir.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    path = tmp_path / "file"
    with path.open("wb") as file:
        write_all(file.fileno(), memoryview(b"0123456789"), 2)
    assert path.read_bytes() == b"\0\x000123456789"


def test_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TransferError, match="file"):
        RunDirectory(tmp_path / "file" / "root", "run").create()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_root_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(TransferError, match="set a root_dir"):
            RunDirectory(tmp_path, "run").create()
    finally:
        tmp_path.chmod(0o700)


def test_pruning_that_fails_is_logged_and_harmless(run, monkeypatch, caplog):
    for step in range(2):
        publish(run, f"e1.s{step}")

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    run.prune(1)
    assert "could not remove" in caplog.text
    assert len(run.complete()) == 2
