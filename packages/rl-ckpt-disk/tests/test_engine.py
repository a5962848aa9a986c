"""What only the disk engine does, with its ranks as threads of this process."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rl_ckpt_disk import checkpoint, checkpoint_dir, publication
from rl_ckpt_disk.checkpoint_dir import RunDirectory
from rl_ckpt_disk.engine import DiskCheckpointEngine
from rl_ckpt_disk.ready import READY_FILE, Marker
from rl_core.deadlines import CancelToken, Deadline
from rl_core.digests import XXH3_128
from rl_core.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    MessageError,
    MiniRLError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.interfaces import SupportsCheckpointPath, SupportsKeptVersions
from rl_core.testing.checkpoint_assertions import assert_arrived, assert_ended
from rl_core.testing.checkpoint_case import CheckpointCase, Deadlines
from rl_core.testing.checkpoint_group import Terms, TransferGroup
from rl_core.testing.checkpoint_orders import ReceiveOrder
from rl_core.testing.checkpoint_recipe import RUN_ID, TensorRecipe, WeightRecipe
from rl_core.testing.checkpoint_samples import SMALL, every_dtype, many_buckets
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.torch import content_digest
from rl_core.transfer.watch import Watch
from rl_core.versions import PolicyVersion

PLENTY = many_buckets(4)
BOTH = ("sender 0", "receiver 0")


@pytest.fixture
def options(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("old weights")
    root = tmp_path / "root"
    return {"root_dir": str(root), "model_dir": str(model), "max_shard_megabytes": 0.25}


@pytest.fixture
def case(options):
    case = CheckpointCase("disk", options, ThreadLauncher(), {}, Deadlines(20.0, 3.0))
    yield case
    for member in case._members.values():
        member.handle.call("shutdown", timeout=20)
    case.close()


@pytest.fixture
def run_path(options):
    return Path(options["root_dir"]) / RUN_ID


def directories(run_path):
    return sorted(path.name for path in run_path.iterdir())


def take_path(case, group, weights, manifest):
    """A sync in which the receivers ask for the directory; what each of them got."""
    assert not group.connect()
    senders = TransferGroup(group.senders, case)
    pending = senders.begin(weights, manifest)
    order = ReceiveOrder(manifest, case.deadline_s)
    asked = [member.handle.submit("checkpoint_path", order) for member in group.receivers]
    errors = [future.exception(25) for future in asked]
    outcome = senders.end(pending, manifest)
    ok = outcome.ok and not any(errors)
    group.finalize(ok)
    return [error or future.result() for error, future in zip(errors, asked, strict=True)], outcome


def test_a_version_is_a_hugging_face_directory(case, run_path):
    weights = every_dtype()
    manifest = weights.manifest(case.version())
    assert_arrived(case.group().sync(weights, manifest), weights, XXH3_128)
    path = run_path / str(manifest.version)
    assert (path / "config.json").read_text() == '{"model_type": "qwen3"}'
    assert (path / "tokenizer.json").exists()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(path / file, "pt") as shard:
            found[name] = content_digest(manifest.by_name[name], shard.get_tensor(name))
    assert found == weights.content_digests()


def test_weights_are_sharded(case, run_path):
    assert case.group().sync(many_buckets(12)).ok
    shards = list((run_path / "e1.s1").glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < (1 << 18) + 4096 for shard in shards)


def test_a_tensor_that_must_be_copied_has_its_digest_before(case, monkeypatch):
    """What the copy is damaged by is found, and the two copies are not there at the same time."""
    copies, as_bytes = [], publication.as_bytes

    def damaged(tensor):
        copies.append(as_bytes(tensor).clone())
        copies[-1][-1] ^= 1
        return copies[-1]

    weights = WeightRecipe((TensorRecipe("transposed", (6, 7), layout="transposed"),))
    digests, group = publication.content_digest, case.group()
    monkeypatch.setattr(publication, "as_bytes", damaged)
    monkeypatch.setattr(
        publication, "content_digest", lambda *given: (copies.append("digest"), digests(*given))[1]
    )
    assert_ended(group.sync(weights, deadline_s=5.0), {"receiver 0": DigestMismatchError})
    assert copies[0] == "digest"


def undigested(case):
    """A group without digests: its receivers may ask for the directory."""
    return case.group(terms=Terms(options=case.options, digest_kind=None))


def test_the_directory_itself_can_be_asked_for(case, run_path):
    group = undigested(case)
    manifest = PLENTY.manifest(case.version())
    paths, outcome = take_path(case, group, PLENTY, manifest)
    assert outcome.ok
    assert paths == [str(run_path / "e1.s1")] * 2


def test_a_directory_asked_for_stays_until_the_next_version(case, run_path):
    terms_keep_one(case)
    group = undigested(case)
    take_path(case, group, SMALL, SMALL.manifest(case.version()))
    assert group.sync(SMALL).ok
    # The sender pruned before the receivers had let the old one go.
    assert "e1.s2" in directories(run_path)
    assert group.sync(SMALL).ok
    assert group.sync(SMALL).ok
    assert "e1.s1" not in directories(run_path)
    assert len(directories(run_path)) <= 2


def terms_keep_one(case):
    case.options = {**case.options, "keep_last": 1}


def test_keep_last_versions_stay(case, run_path):
    group = case.group()
    for _ in range(5):
        assert group.sync(SMALL).ok
    kept = directories(run_path)
    assert kept[-2:] == ["e1.s4", "e1.s5"]
    assert len(kept) <= 3


def test_a_version_published_again_takes_the_place_of_none(case, run_path):
    """As for a late receiver."""
    group = case.group(1, 1, Terms(options=case.options | {"keep_last": 2}))
    manifests = [SMALL.manifest(case.version()) for _ in range(2)]
    for manifest in manifests:
        assert group.sync(SMALL, manifest).ok
    late = TransferGroup([group.member("sender 0"), case.group(1, 2).member("receiver 1")], case)
    assert late.sync(SMALL, manifests[1]).ok
    kept = RunDirectory(run_path.parent, RUN_ID).complete()
    assert [path.name for path in kept if path.name != "e1.s2"] == ["e1.s1", "e1.s2.2"]


def test_a_version_that_is_kept_can_be_read_again(case):
    group = case.group()
    manifest = SMALL.manifest(case.version())
    assert group.sync(SMALL, manifest).ok
    assert group.sync(PLENTY).ok
    engine = group.receivers[0].handle._object.engine
    assert isinstance(engine, SupportsKeptVersions)
    found = {}
    for lease in engine.read_again(manifest, Deadline.after(20)):
        with lease as entries:
            for entry in entries:
                found[entry.meta.name] = content_digest(entry.meta, entry.tensor)
                assert entry.digest == found[entry.meta.name]
    assert found == SMALL.content_digests()
    never = SMALL.manifest(PolicyVersion(1, 99))
    with pytest.raises(TransferError, match=r"no directory of version e1\.s99 is kept"):
        next(engine.read_again(never, Deadline.after(20)))
    assert group.sync(SMALL).ok


def test_the_same_version_for_a_late_receiver_gets_a_fresh_directory(case, run_path):
    group = case.group()
    manifest = SMALL.manifest(case.version())
    assert group.without("receiver 1").sync(SMALL, manifest).ok
    assert group.without("receiver 0").sync(SMALL, manifest).ok
    assert directories(run_path) == ["e1.s1", "e1.s1.2"]


def test_a_failed_version_leaves_nothing_and_the_last_good_one(case, run_path):
    group = case.group()
    assert group.sync(SMALL).ok
    outcome = group.sync(PLENTY, None, {"receiver 0": {"flip": PLENTY.tensors[3].name}}, 3.0)
    assert_ended(outcome, {"receiver 0": DigestMismatchError})
    # A receiver may still read it: it counts for nothing now, and is gone after the next version.
    assert [path.name for path in RunDirectory(run_path.parent, RUN_ID).complete()] == ["e1.s1"]
    assert group.sync(SMALL).ok
    assert directories(run_path) == ["e1.s1", "e1.s3"]


def test_versions_that_nobody_could_use_do_not_push_out_the_last_good_one(case, run_path):
    """They were moved whole, and then somebody's load or verification failed."""
    terms_keep_one(case)
    group, kept = case.group(), RunDirectory(run_path.parent, RUN_ID)
    good = SMALL.manifest(case.version())
    assert group.sync(SMALL, good).ok
    for _ in range(2):
        assert not group.connect()
        assert group.transfer(PLENTY, PLENTY.manifest(case.version())).ok
        group.finalize(success=False)
        assert [path.name for path in kept.complete()] == ["e1.s1"]
    engine = group.receivers[0].handle._object.engine
    found = []
    for lease in engine.read_again(good, Deadline.after(20)):
        with lease as entries:
            found += [entry.meta for entry in entries]
    assert found == list(good.tensors)
    assert group.sync(SMALL).ok
    assert [path.name for path in kept.complete()] == ["e1.s4"]
    assert "e1.s2" not in directories(run_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_is_named_on_both_sides(case, run_path, monkeypatch, number):
    group = case.group()
    assert group.sync(SMALL).ok
    with monkeypatch.context() as patch:
        patch.setattr("rl_ckpt_disk.checkpoint_dir.os.pwrite", refusing(number))
        outcome = group.sync(PLENTY, deadline_s=5.0)
    expected = dict.fromkeys(BOTH, TransferError)
    assert_ended(outcome, expected, os.strerror(number), "root_dir")
    assert directories(run_path) == ["e1.s1"]
    assert_arrived(group.sync(PLENTY), PLENTY, XXH3_128)


def refusing(number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


def test_too_little_space_is_noticed_before_anything_is_written(case, run_path, monkeypatch):
    group = case.group()
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(run_path.parent.parent)._replace(free=1000)
        patch.setattr(publication.shutil, "disk_usage", lambda _: usage)
        outcome = group.sync(PLENTY, deadline_s=5.0)
    assert_ended(outcome, dict.fromkeys(BOTH, TransferError), "has 1000 left")
    assert directories(run_path) == []
    assert group.sync(PLENTY).ok


def test_a_full_disk(case, options, tmp_path, monkeypatch):
    """A real one: a tmpfs of a megabyte, where this may be mounted, that fills while written."""
    with small_disk(tmp_path / "small") as root:
        case.options = {**options, "root_dir": str(root)}
        group = case.group()
        assert group.sync(SMALL).ok
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage("/")._replace(free=1 << 40)
            patch.setattr(publication.shutil, "disk_usage", lambda _: usage)
            outcome = group.sync(many_buckets(30), deadline_s=5.0)
        said = os.strerror(errno.ENOSPC)
        assert_ended(outcome, dict.fromkeys(BOTH, TransferError), said)
        assert (root / RUN_ID / "e1.s1" / READY_FILE).exists()
        assert group.sync(SMALL).ok
        for member in group.members:
            member.handle.call("shutdown", timeout=20)


@contextmanager
def small_disk(path):
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_root_that_vanished_is_named_and_comes_back(case, run_path):
    group = case.group()
    assert group.sync(SMALL).ok
    endpoints = group.prepare()
    shutil.rmtree(run_path.parent)
    assert not group.build(group.places(endpoints), 5.0)
    manifest = SMALL.manifest(case.version())
    outcome = group.transfer(SMALL, manifest, deadline_s=5.0)
    assert_ended(outcome, dict.fromkeys(BOTH, TransferError), "vanished")
    group.finalize(success=False)
    assert_arrived(group.sync(SMALL), SMALL, XXH3_128)


def test_a_directory_that_vanishes_while_it_is_read_is_read_to_its_end(case, run_path):
    """The files are open: their names are no longer needed."""
    group = case.group(1, 1)
    manifest = PLENTY.manifest(case.version())
    assert not group.connect()
    pending = group.begin(PLENTY, manifest, {"receiver 0": {"hold_s": 0.3}})
    path = run_path / str(manifest.version)
    wait_for((path / READY_FILE).exists)
    time.sleep(0.3)
    shutil.rmtree(path)
    outcome = group.end(pending, manifest)
    group.finalize(outcome.ok)
    assert_arrived(outcome, PLENTY, XXH3_128)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture
def published(case, run_path):
    """A complete version on disk, its manifest, and the key it was made with."""
    manifest = PLENTY.manifest(case.version())
    assert case.group(1, 1).sync(PLENTY, manifest).ok
    return run_path / str(manifest.version), manifest, case.key


def opened(path, manifest, key, seconds=2.0):
    found = checkpoint.Checkpoint.await_ready(path, key, Watch(Deadline.after(seconds)))
    try:
        found.check(manifest)
    finally:
        found.release()


def test_a_reader_without_a_group(published):
    opened(*published)


def test_a_reader_waits_no_longer_than_its_deadline(published):
    path, manifest, key = published
    (path / READY_FILE).unlink()
    with pytest.raises(TransferTimeoutError, match="READY"):
        opened(path, manifest, key, 0.2)


def test_a_cancelled_reader(published):
    path, _, key = published
    token = CancelToken()
    token.cancel("enough")
    watch = Watch(Deadline.after(60), (token,))
    with pytest.raises(Exception, match="enough"):
        checkpoint.Checkpoint.await_ready(path / "nowhere", key, watch)


def test_a_directory_of_another_run_s_key_is_refused(published):
    path, manifest, _ = published
    with pytest.raises(MessageError, match="key"):
        opened(path, manifest, b"x" * 32)


def test_another_version_is_refused(published):
    path, manifest, key = published
    other = PLENTY.manifest(manifest.version.next_step())
    with pytest.raises(ManifestMismatchError, match=str(other.version)):
        opened(path, other, key)


def test_a_missing_file_is_refused(published):
    path, manifest, key = published
    (path / "tokenizer.json").unlink()
    with pytest.raises(ManifestMismatchError, match=r"tokenizer\.json"):
        opened(path, manifest, key)


def test_a_file_of_another_length_is_refused(published):
    path, manifest, key = published
    shard = min(path.glob("*.safetensors"))
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ManifestMismatchError, match=shard.name):
        opened(path, manifest, key)


def test_a_file_with_another_header_is_refused(published):
    path, manifest, key = published
    shard = min(path.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"layer.0", b"layer.x", 1))
    with pytest.raises(ManifestMismatchError, match="laid out"):
        opened(path, manifest, key)


def signed_by_another(path, key, content):
    return Marker.decode(content, key).encode(b"another key of a run" * 2)


def of_the_version_before(path, key, content):
    return (path.parent / "e1.s1" / READY_FILE).read_bytes()


@pytest.mark.parametrize(
    ("forge", "kind", "said"),
    [
        (signed_by_another, MessageError, "not written with the key"),
        (of_the_version_before, ManifestMismatchError, "of version e1.s1"),
    ],
)
def test_a_forged_marker_ends_the_sync_by_name(case, monkeypatch, forge, kind, said):
    """A directory that somebody else has put there, or an old one put there again."""
    group = case.group()
    assert group.sync(SMALL).ok
    publish = checkpoint_dir.StagedDirectory.publish
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint_dir.StagedDirectory,
            "publish",
            lambda staged, content: publish(staged, forge(staged.final, case.key, content)),
        )
        outcome = group.sync(SMALL, deadline_s=5.0)
    assert_ended(outcome, {"sender 0": kind}, said)
    # The first receiver that complains ends the sync, and the directory with it.
    readers = [outcome.errors[f"receiver {rank}"] for rank in (0, 1)]
    assert any(isinstance(error, kind) and said in str(error) for error in readers)
    assert all(isinstance(error, MiniRLError) for error in readers)
    assert_arrived(group.sync(SMALL), SMALL, XXH3_128)


def test_a_marker_copied_from_another_version_is_refused(published):
    path, manifest, key = published
    marker = Marker.decode((path / READY_FILE).read_bytes(), key)
    assert marker.trailer.weights_digest == PLENTY.weights_digest()
    other = SMALL.manifest(manifest.version)
    with pytest.raises(ManifestMismatchError):
        opened(path, other, key)


def test_a_read_that_comes_too_late_goes_into_no_later_version(case, monkeypatch):
    """A read of a failed sync hangs, and ends while a lease of the next sync is open."""
    stall, group = StallingRead(at=3), case.group(1, 1)
    assert group.sync(PLENTY).ok
    monkeypatch.setattr(checkpoint.os, "preadv", stall)
    stall.armed.set()
    assert_ended(group.sync(PLENTY, deadline_s=1.0), {"receiver 0": TransferTimeoutError})
    assert stall.hanging.is_set()
    try:
        assert_arrived(group.sync(PLENTY.reseeded(1)), PLENTY.reseeded(1), XXH3_128)
    finally:
        stall.let_go.set()


class StallingRead:
    """`os.preadv`, but one read hangs until its memory is read into again, or for ever."""

    def __init__(self, at):
        self.armed, self.hanging, self.let_go, self.over = (threading.Event() for _ in range(4))
        self._preadv, self._numbers, self._at, self._memory = os.preadv, itertools.count(), at, 0

    def __call__(self, fd, buffers, offset):
        memory = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
        if self.armed.is_set() and next(self._numbers) == self._at:
            self.armed.clear()
            self._memory = memory
            self.hanging.set()
            self.let_go.wait(60)
            count = self._preadv(fd, buffers, offset)
            self.over.set()
            return count
        count = self._preadv(fd, buffers, offset)
        if memory == self._memory:
            self.let_go.set()
            self.over.wait(60)
        return count


@pytest.mark.parametrize("number", [0, 7, len(PLENTY.tensors) - 1])
def test_a_byte_flipped_after_the_check_is_found_before_loading(case, monkeypatch, number):
    """The file is complete and checked when it changes, and not yet read."""
    harmed, group, checks = PLENTY.tensors[number].name, case.group(1, 2), itertools.count()
    check = checkpoint.Checkpoint.check

    def flip_then(found, *arguments):
        check(found, *arguments)
        extent = found._layout.extents[harmed]
        if next(checks) == 0:  # of two threads only one: a byte flipped twice is as it was
            flip_byte(found.path / extent.file, extent.offset)

    monkeypatch.setattr(checkpoint.Checkpoint, "check", flip_then)
    outcome = group.sync(PLENTY, deadline_s=3.0)
    ended = dict.fromkeys(["sender 0", "receiver 0"], DigestMismatchError)
    assert_ended(outcome, ended, f"tensor {harmed!r}")
    assert outcome.errors["receiver 0"].tensors == (harmed,)
    monkeypatch.undo()
    assert_arrived(group.sync(PLENTY), PLENTY, XXH3_128)


def flip_byte(file, offset):
    with file.open("r+b") as stream:
        byte = stream.read(offset + 1)[-1]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))
    return file


def test_where_digests_travel_no_path_is_given_out(case):
    """Whoever loads a directory does not know the digests; the check would be worth nothing."""
    with_digests, without = case.group(1, 1), None
    assert not with_digests.receivers[0].handle.call("gives_path", timeout=20)
    assert not issubclass(DiskCheckpointEngine, SupportsCheckpointPath)
    without = undigested(case)
    assert without.receivers[0].handle.call("gives_path", timeout=20)


def test_two_runs_share_a_root(case, options, run_path):
    other = CheckpointCase("disk", options, ThreadLauncher(), {}, Deadlines(20.0, 3.0))
    terms = replace(Terms(options=options), run_id="other")
    try:
        theirs = other.group(1, 1, terms)
        mine = case.group(1, 1)
        manifest = SMALL.manifest(other.version(), "other")
        assert theirs.sync(SMALL, manifest).ok
        assert mine.sync(SMALL).ok
        assert sorted(path.name for path in run_path.parent.iterdir()) == [RUN_ID, "other"]
        for member in theirs.members:
            member.handle.call("shutdown", timeout=20)
    finally:
        other.close()
