"""What loaders copy is counted once, wherever it goes."""

import pytest
import torch

from rl_core.errors import ManifestMismatchError
from rl_core.rollout.copy_ledger import CopyLedger, Shares

SHARES = Shares([], ranks=2, skipped=[])


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_dry_pass_counts_copies_into_meta_tensors():
    batch = [("w", torch.ones(4, 2))]
    with CopyLedger(batch, meta_only=True) as ledger:
        torch.empty(2, 2, device="meta").copy_(batch[0][1][:2])
        torch.empty(4, 2).copy_(batch[0][1])
    assert ledger.copied == {"w": 4}
    SHARES.check(batch, ledger)


def test_what_a_dry_pass_fills_for_good_counts_once():
    """A bias that is written at once, and again when its layer is complete."""
    batch, bias, other = [("bias", torch.ones(4))], torch.zeros(4), torch.zeros(4)
    with CopyLedger(batch, meta_only=True, direct={storage(bias)}) as ledger:
        for _ in range(2):
            bias[:2].copy_(batch[0][1][:2])
        other.copy_(batch[0][1])
        bias.copy_(other)
    assert ledger.copied == {"bias": 2}
    assert ledger.unknown == 0
    SHARES.check(batch, ledger)


def test_what_is_left_out_is_named():
    batch = [("bias", torch.ones(4))]
    with CopyLedger(batch, meta_only=True, direct={0}) as ledger:
        torch.zeros(4).copy_(batch[0][1])
    with pytest.raises(ManifestMismatchError, match="no part of tensor 'bias'"):
        SHARES.check(batch, ledger)
