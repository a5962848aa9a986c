"""Damage to published checkpoints, for the contract."""

from collections.abc import Callable
from pathlib import Path

from rl_ckpt_disk.layout import CheckpointLayout
from rl_ckpt_disk.shards import ShardWriter
from rl_core.interfaces import CheckpointEngine
from rl_core.metadata import TensorMeta


def miscopy(engine: CheckpointEngine, tensor: str) -> None:
    """A byte of the tensor is another one when it is written next."""
    write = ShardWriter.write

    def damaged(writer: ShardWriter, meta: TensorMeta, data: memoryview) -> None:
        if meta.name == tensor:
            ShardWriter.write = write
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        write(writer, meta, data)

    ShardWriter.write = damaged


def corrupt(engine: CheckpointEngine, tensor: str) -> None:
    """A byte of the tensor is flipped in its file."""

    def flip(file: Path, offset: int) -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            byte = stream.read(1)
            stream.seek(offset)
            stream.write(bytes([byte[0] ^ 1]))

    _after_publication(engine, tensor, flip)


def truncate(engine: CheckpointEngine, tensor: str) -> None:
    """The file ends inside the tensor."""
    _after_publication(engine, tensor, lambda file, offset: _cut(file, offset + 1))


def lose(engine: CheckpointEngine, tensor: str) -> None:
    """The tensor's file is gone."""
    _after_publication(engine, tensor, lambda file, offset: file.unlink())


def _cut(file: Path, nbytes: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(nbytes)


def _after_publication(
    engine: CheckpointEngine, tensor: str, damage: Callable[[Path, int], None]
) -> None:
    run = engine._files.run
    stage = run.stage

    def staged(name):
        directory = stage(name)
        publish = directory.publish

        def published(marker):
            path = publish(marker)
            extent = _layout(engine, path).extents[tensor]
            damage(path / extent.file, extent.offset)
            return path

        directory.publish = published
        return directory

    run.stage = staged


def _layout(engine: CheckpointEngine, path: Path) -> CheckpointLayout:
    from rl_ckpt_disk.ready import READY_FILE, Marker

    marker = Marker.decode((path / READY_FILE).read_bytes(), engine._role.key)
    return CheckpointLayout.of(marker.manifest.tensors, marker.max_shard_bytes)
