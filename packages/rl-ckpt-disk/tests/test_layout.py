import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rl_ckpt_disk.layout import INDEX_FILE, CheckpointLayout
from rl_core.metadata import DTYPE_BYTES, TensorMeta
from rl_core.testing.checkpoint_recipe import TensorRecipe, WeightRecipe
from rl_core.torch import as_bytes, dtype_of

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
METAS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), max_size=20)


def metas_of(drawn):
    return [TensorMeta(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(drawn)]


def head_of(shard):
    (length,) = struct.unpack("<Q", shard.head[:8])
    assert length == len(shard.head) - 8
    return json.loads(shard.head[8:])


@given(METAS, st.integers(1, 500))
def test_tensors_lie_aligned_one_after_the_other(drawn, limit):
    metas = metas_of(drawn)
    layout = CheckpointLayout.of(metas, limit)
    assert set(layout.extents) == {meta.name for meta in metas}
    for shard in layout.shards:
        mine = {meta.name: meta for meta in metas if meta.name in shard.extents}
        runs = sorted(
            (extent.offset, mine[name].nbytes, name) for name, extent in shard.extents.items()
        )
        end = len(shard.head)
        assert end % 8 == 0
        for offset, nbytes, name in runs:
            assert offset == end, f"{name} overlaps, or leaves a hole"
            assert offset % DTYPE_BYTES[mine[name].dtype] == 0
            end += nbytes
        assert end == shard.nbytes


@given(METAS, st.integers(1, 500))
def test_files_are_no_larger_than_asked_for(drawn, limit):
    metas = metas_of(drawn)
    for shard in CheckpointLayout.of(metas, limit).shards:
        payload = shard.nbytes - len(shard.head)
        assert payload <= limit or len(shard.extents) == 1


@given(METAS, st.integers(1, 500))
def test_index_names_the_file_of_every_tensor(drawn, limit):
    metas = metas_of(drawn)
    layout = CheckpointLayout.of(metas, limit)
    index = json.loads(layout.indexes[INDEX_FILE])
    assert index["weight_map"] == {name: extent.file for name, extent in layout.extents.items()}
    assert index["metadata"]["total_size"] == sum(meta.nbytes for meta in metas)


@settings(max_examples=30)
@given(METAS)
def test_the_safetensors_library_reads_what_the_layout_says(tmp_path_factory, drawn):
    recipes = [TensorRecipe(meta.name, meta.shape, meta.dtype) for meta in metas_of(drawn)]
    layout = CheckpointLayout.of([recipe.meta for recipe in recipes], 1 << 30)
    (shard,) = layout.shards
    content = bytearray(shard.nbytes)
    content[: len(shard.head)] = shard.head
    weights = WeightRecipe(tuple(recipes))
    expected = {}
    for meta, tensor in weights.stream(weights.scratch()):
        data = bytes(as_bytes(tensor).numpy())
        expected[meta.name] = data
        offset = shard.extents[meta.name].offset
        content[offset : offset + len(data)] = data
    path = tmp_path_factory.mktemp("shard") / "model.safetensors"
    path.write_bytes(content)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(expected)
        assert file.metadata() == {"format": "pt"}
        for recipe in recipes:
            tensor = file.get_tensor(recipe.name)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype_of(recipe.dtype), recipe.shape)
            assert bytes(as_bytes(tensor).numpy()) == expected[recipe.name]


def test_tied_names_are_left_out_and_other_targets_kept_apart():
    metas = [
        TensorMeta("embed", (4, 2), "bfloat16", aliases=("head",)),
        TensorMeta("draft.fc", (2, 2), "float32", target="draft"),
    ]
    layout = CheckpointLayout.of(metas, 1 << 20)
    assert set(head_of(layout.shards[0])) == {"__metadata__", "embed"}
    assert layout.extents["draft.fc"].file == "draft/model-00001-of-00001.safetensors"
    index = json.loads(layout.indexes[f"draft/{INDEX_FILE}"])
    assert index["weight_map"] == {"draft.fc": "model-00001-of-00001.safetensors"}


def test_no_tensors_make_an_empty_file(tmp_path):
    layout = CheckpointLayout.of([], 1 << 20)
    path = tmp_path / "model.safetensors"
    path.write_bytes(layout.shards[0].head)
    with safe_open(path, "pt") as file:
        assert not list(file.keys())


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_has_a_name_in_the_format(dtype):
    assert CheckpointLayout.of([TensorMeta("t", (2,), dtype)], 100).extents
