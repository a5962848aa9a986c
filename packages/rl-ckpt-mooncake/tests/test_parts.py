"""Copying and digesting parts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_mooncake import parts
from rl_ckpt_mooncake.parts import copy_part, digest_part
from rl_core.digests import WSUM64, XXH3_128


@settings(deadline=None)
@given(st.binary(max_size=3000), st.sampled_from([XXH3_128, WSUM64]), st.integers(1, 500))
def test_copies_and_digests_what_was_copied(data, kind, chunk):
    source = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    target, seen = torch.full_like(source, 7), []
    before, parts.CHUNK_BYTES = parts.CHUNK_BYTES, chunk

    def progress(done):
        assert torch.equal(target[:done], source[:done])
        seen.append(done)

    try:
        digest = copy_part(target, source, kind, progress)
    finally:
        parts.CHUNK_BYTES = before
    assert torch.equal(target, source)
    assert digest == digest_part(target, kind)
    assert seen == sorted(set(seen))
    target[len(target) // 2] ^= 1
    assert digest != digest_part(target, kind)
