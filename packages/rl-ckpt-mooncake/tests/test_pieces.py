"""The cut of buckets into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_mooncake.pieces import PiecePlan
from rl_core.metadata import TensorMeta
from rl_core.transfer.plan import TransferPlan

lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), max_size=30)


@st.composite
def cuts(draw):
    tensors = [
        TensorMeta(f"t{number}", (length,), "uint8") for number, length in enumerate(draw(lengths))
    ]
    plan = TransferPlan.of(tensors, 16 * draw(st.integers(1, 80)), 1)
    size = draw(st.integers(1, 700))
    return plan, size, PiecePlan.of(plan, size)


@given(cuts())
def test_pieces_cover_every_bucket_once_and_in_order(cut):
    plan, size, pieces = cut
    sequence = 0
    for bucket, found in zip(plan.buckets, pieces.pieces, strict=True):
        end = 0
        for piece in found:
            sequence += 1
            assert (piece.sequence, piece.offset) == (sequence, end)
            assert 0 < piece.nbytes <= size
            end = piece.end
        solid = [part for part in bucket.parts if part.slot.nbytes]
        assert end == max((part.slot.offset + part.slot.nbytes for part in solid), default=0)
    assert pieces.last == sequence


@given(cuts())
def test_each_part_ends_in_exactly_one_piece(cut):
    _, _, pieces = cut
    for parts, found in zip(pieces.parts, pieces.pieces, strict=True):
        assert [number for piece in found for number in piece.parts] == list(range(len(parts)))
        for piece in found:
            for number in piece.parts:
                slot = parts[number].slot
                assert piece.offset < slot.offset + slot.nbytes <= piece.end
    assert pieces.most_parts == max(map(len, pieces.parts), default=0)


@given(cuts(), st.data())
def test_complete_counts_the_pieces_below_a_byte(cut, data):
    _, _, pieces = cut
    for bucket, found in enumerate(pieces.pieces):
        end = found[-1].end if found else 0
        filled = data.draw(st.integers(0, end))
        before = pieces.through[bucket - 1] if bucket else 0
        complete = sum(piece.end <= filled for piece in found)
        assert pieces.complete(bucket, filled) == before + complete
        assert pieces.complete(bucket, end) == pieces.through[bucket]
