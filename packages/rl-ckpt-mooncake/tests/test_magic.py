"""Counters and seals: only those of members count, and counters never go back."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_mooncake.magic import (
    FILLED,
    RECORD_BYTES,
    SEAL_BYTES,
    TAKEN,
    MagicBuffer,
    Signet,
    seals_at,
)

KEY = b"k" * 32
RANK = 2
WRITERS = {FILLED: RANK - 1, TAKEN: RANK + 1}
counts = st.integers(0, 2**64 - 1)
places = st.sampled_from([FILLED, TAKEN])


def written(magic, place, record):
    """As a peer writes into registered memory."""
    magic._view[place : place + len(record)] = record


@given(st.lists(counts, max_size=6), places, st.integers(1, 2**63))
def test_counter_is_the_highest_written(sequences, place, epoch):
    signet = Signet(KEY, "group", epoch)
    magic, highest = MagicBuffer(signet, RANK, 1), 0
    assert magic.count(place) == 0
    for sequence in sequences:
        written(magic, place, signet.record(place, WRITERS[place], sequence))
        highest = max(highest, sequence)
        assert magic.count(place) == highest
        assert magic.count(FILLED + TAKEN - place) == 0


@given(counts.filter(bool), places, st.integers(0, RECORD_BYTES - 1), st.integers(1, 255))
def test_damaged_record_is_none(sequence, place, at, flip):
    signet = Signet(KEY, "group", 1)
    magic = MagicBuffer(signet, RANK, 1)
    record = bytearray(signet.record(place, WRITERS[place], sequence))
    record[at] ^= flip
    written(magic, place, record)
    assert magic.count(place) == 0


@given(counts.filter(bool), counts, places, st.integers(0, RECORD_BYTES))
def test_torn_record_is_the_new_one_or_none(old, new, place, torn):
    signet = Signet(KEY, "group", 1)
    magic = MagicBuffer(signet, RANK, 1)
    first, second = (signet.record(place, WRITERS[place], number) for number in (old, new))
    written(magic, place, second[:torn] + first[torn:])
    assert magic.count(place) in {0, old, new}


@given(counts.filter(bool), places)
def test_records_of_others_are_none(sequence, place):
    mine = Signet(KEY, "group", 5)
    magic = MagicBuffer(mine, RANK, 1)
    foreign = [
        Signet(b"other" * 8, "group", 5).record(place, WRITERS[place], sequence),
        Signet(KEY, "other group", 5).record(place, WRITERS[place], sequence),
        Signet(KEY, "group", 4).record(place, WRITERS[place], sequence),
        mine.record(place, RANK, sequence),
        mine.record(FILLED + TAKEN - place, WRITERS[place], sequence),
    ]
    for record in foreign:
        written(magic, place, record)
        assert magic.count(place) == 0


@given(st.binary(max_size=128))
def test_any_bytes_are_none(data):
    magic = MagicBuffer(Signet(KEY, "group", 1), RANK, 1)
    written(magic, 0, data)
    assert (magic.count(FILLED), magic.count(TAKEN)) == (0, 0)


@given(st.integers(0, 9), st.integers(0, 6), st.binary(min_size=16, max_size=16), st.data())
def test_seal_is_bound_to_its_part_and_version(bucket, number, digest, data):
    theirs = MagicBuffer(Signet(KEY, "group", 3), 1, 7)
    theirs.set_seal(bucket, number, digest)
    at = seals_at(bucket, 7) + SEAL_BYTES * number
    sealed = bytes(theirs._view[at : at + SEAL_BYTES])
    mine = MagicBuffer(Signet(KEY, "group", 3), RANK, 7)
    written(mine, at, sealed)
    assert mine.vouches(bucket, number, digest)
    assert not mine.vouches(bucket, number, bytes(16) if any(digest) else b"x" * 16)
    older = MagicBuffer(Signet(KEY, "group", 2), RANK, 7)
    written(older, at, sealed)
    assert not older.vouches(bucket, number, digest)
    other = data.draw(st.integers(0, 6).filter(lambda n: n != number))
    place = seals_at(bucket, 7) + SEAL_BYTES * other
    written(mine, place, sealed)
    assert not mine.vouches(bucket, other, digest)


def test_layout_has_no_overlaps():
    magic = MagicBuffer(Signet(KEY, "group", 1), RANK, 5)
    staged = [magic.stage(place, 1) - magic.address for place in (FILLED, TAKEN)]
    spans = [(at, at + RECORD_BYTES) for at in (FILLED, TAKEN, *staged)]
    spans += [(seals_at(n, 5), seals_at(n, 5) + 5 * SEAL_BYTES) for n in (0, 1)]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] == magic.nbytes
    assert seals_at(2, 5) == seals_at(0, 5)
