"""Who is told what, and how far ranks may run ahead of each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_mooncake.chain import PREDECESSOR, SUCCESSOR, Neighbour, Relay, introductions
from rl_ckpt_mooncake.terms import VersionTerms
from rl_core.errors import MessageError
from rl_core.torch import as_bytes

addresses = st.integers(1, 2**64 - 1)


@given(addresses, st.lists(addresses, max_size=2).map(tuple), st.integers(0, 65535))
def test_neighbour_travels(magic, buffers, port):
    neighbour = Neighbour(f"host-1.example:{port}", magic, buffers)
    assert Neighbour.parse(neighbour.text()) == neighbour


numbers = st.sampled_from(["-1", "0", "1", "18446744073709551616", "1e3", "", "٣", "0x10"])


@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(st.sampled_from(["h:1", ":1", "h:", "h"]) | numbers, max_size=5).map(" ".join),
    )
)
def test_whatever_a_member_says_is_a_neighbour_or_refused(text):
    try:
        neighbour = Neighbour.parse(text)
    except MessageError:
        return
    assert neighbour.magic > 0
    assert len(neighbour.buffers) <= 2


@given(
    st.dictionaries(
        st.sampled_from(["epoch", "piece_bytes", "parts"]),
        st.sampled_from(["xxh3-128", "wsum64", "md5", "4096", "4095", str(2**63)]) | numbers,
    )
)
def test_whatever_a_sender_says_are_terms_or_refused(properties):
    try:
        terms = VersionTerms.parse(properties)
    except MessageError:
        return
    assert terms.epoch >= 1
    assert terms.piece_bytes >= 4096
    assert VersionTerms.parse(terms.properties()) == terms


def test_missing_buffer_is_named():
    with pytest.raises(MessageError, match="no buffer for bucket 3"):
        Neighbour("h:1", 5, (7,)).buffer(3)


@given(st.integers(1, 20))
def test_everybody_reads_from_the_rank_before(receivers):
    told = introductions({rank: f"rank {rank}" for rank in range(receivers + 1)})
    assert list(told) == list(range(1, receivers + 1))
    for rank, neighbours in told.items():
        assert neighbours[PREDECESSOR] == f"rank {rank - 1}"
        assert neighbours.get(SUCCESSOR) == (f"rank {rank + 1}" if rank < receivers else None)


@pytest.mark.engine
def test_chain_is_pipelined(chain, weights, monkeypatch):
    """Rank k + 1 reads a bucket while rank k reads later ones, and no rank is over two ahead."""
    reads, read = [], Relay._read

    def noted(relay, bucket, piece):
        read(relay, bucket, piece)
        reads.append((relay._station, bucket, piece.sequence))

    monkeypatch.setattr(Relay, "_read", noted)
    ends = chain.sync(weights)
    for got in ends[1:]:
        for name, tensor in weights.tensors.items():
            assert bytes(as_bytes(got[name]).numpy()) == bytes(as_bytes(tensor).numpy())
    stations = chain.stations()[1:]
    at = {
        (stations.index(station), bucket, sequence): when
        for when, (station, bucket, sequence) in enumerate(reads)
    }
    buckets = 1 + max(bucket for _, bucket, _ in at)
    assert buckets > 8
    for rank in range(2):
        for (who, bucket, sequence), when in at.items():
            if who == rank:
                assert when < at[rank + 1, bucket, sequence], "read before it was there"
            if who == rank and bucket >= 2:
                taken = [
                    place
                    for (other, b, _), place in at.items()
                    if (other, b) == (rank + 1, bucket - 2)
                ]
                assert max(taken) < when, "a buffer was filled before the successor had read it"
        first_of_next = min(when for (who, _, _), when in at.items() if who == rank + 1)
        last_of_this = max(when for (who, _, _), when in at.items() if who == rank)
        assert first_of_next < last_of_this, "the next rank waited for everything"
