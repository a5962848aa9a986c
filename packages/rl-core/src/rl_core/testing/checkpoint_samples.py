"""The sets of weights that the contract of checkpoint engines moves."""

from rl_core.buckets import ALIGNMENT, MEGABYTE
from rl_core.metadata import DTYPE_BYTES
from rl_core.testing.checkpoint_recipe import Layout, TensorRecipe, WeightRecipe

BUCKET_BYTES = 64 * 1024
"""Bucket of the contract's standing group, in bytes: small, so that many are needed."""

BUCKET_MEGABYTES = BUCKET_BYTES / MEGABYTE

SMALL = WeightRecipe(
    (
        TensorRecipe("embed.weight", (64, 48), "bfloat16", aliases=("lm_head.weight",)),
        TensorRecipe("norm.weight", (48,)),
    )
)
"""Fits into one bucket."""

LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided", "shifted")


def every_dtype() -> WeightRecipe:
    """Each dtype in odd lengths, one after the other, so that alignment matters."""
    tensors = [
        TensorRecipe(f"{dtype}.{number}", (length,), dtype)
        for number, length in enumerate((1, 3, 7, 501))
        for dtype in DTYPE_BYTES
    ]
    return WeightRecipe(tuple(tensors))


def every_layout() -> WeightRecipe:
    """Contiguous and non-contiguous tensors of one to four dimensions, tied names among them."""
    shapes = ((5,), (6, 7), (3, 4, 5), (2, 3, 4, 5))
    tensors = [
        TensorRecipe(f"{layout}.{len(shape)}d.{dtype}", shape, dtype, layout)
        for layout in LAYOUTS
        for shape in shapes
        for dtype in ("bfloat16", "float32", "int8")
    ]
    tied = TensorRecipe("tied", (9, 9), "bfloat16", "transposed", ("tied.first", "tied.second"))
    return WeightRecipe((*tensors, tied))


def without_elements() -> WeightRecipe:
    """0-d and empty tensors, first, last and between others."""
    return WeightRecipe(
        (
            TensorRecipe("empty.first", (0,), "bfloat16"),
            TensorRecipe("scalar.odd", (), "int8"),
            TensorRecipe("scalar.wide", (), "float64"),
            TensorRecipe("empty.inner", (3, 0, 2), "float32"),
            TensorRecipe("plain", (17,), "float32"),
            TensorRecipe("scalar.flag", (), "bool"),
            TensorRecipe("empty.last", (0, 4), "float8_e4m3fn"),
        )
    )


def bucket_edges(bucket_bytes: int = BUCKET_BYTES) -> WeightRecipe:
    """Tensors as long as one and two buckets, and a byte or an alignment more and less."""
    offsets = (-ALIGNMENT - 1, -ALIGNMENT, -1, 0, 1, ALIGNMENT, ALIGNMENT + 1)
    lengths = [buckets * bucket_bytes + offset for buckets in (1, 2) for offset in offsets]
    tensors = [
        recipe
        for length in lengths
        for recipe in (
            TensorRecipe(f"edge.{length}", (length,), "uint8"),
            TensorRecipe(f"after.{length}", (3,), "float32"),
        )
    ]
    return WeightRecipe(tuple(tensors))


def larger_than_a_bucket(bucket_bytes: int = BUCKET_BYTES) -> WeightRecipe:
    """Large tensors first, last, adjacent, transposed, and between small ones."""
    rows = 5 * bucket_bytes // 2 // 64
    return WeightRecipe(
        (
            TensorRecipe("large.first", (rows, 32), "bfloat16"),
            TensorRecipe("large.adjacent", (rows, 32), "bfloat16", "transposed"),
            TensorRecipe("small", (5,), "bfloat16"),
            TensorRecipe("large.odd", (bucket_bytes * 3 + 5,), "int8"),
            TensorRecipe("small.last", (5,), "float32"),
            TensorRecipe("large.last", (rows, 16), "float32", "strided"),
        )
    )


def many_buckets(buckets: int = 12, bucket_bytes: int = BUCKET_BYTES) -> WeightRecipe:
    """Tensors of a third of a bucket, filling that many buckets."""
    length = bucket_bytes // 3 // 4
    tensors = [TensorRecipe(f"layer.{number}", (length,)) for number in range(3 * buckets)]
    return WeightRecipe(tuple(tensors))
