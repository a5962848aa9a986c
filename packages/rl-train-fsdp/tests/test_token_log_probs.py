import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rl_train_fsdp import token_log_probs as module
from rl_train_fsdp.token_log_probs import Head, token_log_probs


def reference(hidden, weight, targets, temperature, head, bias):
    logits = torch.nn.functional.linear(hidden, weight, bias) * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    log_p = torch.log_softmax(logits / temperature[:, None], -1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 5),
    head=st.sampled_from([Head(), Head(0.25), Head(1.0, 3.0), Head(2.0, 5.0)]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_the_full_logits(rows, chunk, head, biased, seed):
    torch.manual_seed(seed)
    vocab, width = 13, 7
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width)
    bias = torch.randn(vocab) if biased else None
    targets, temperature = torch.randint(vocab, (rows,)), torch.rand(rows) + 0.5
    outer = torch.randn(2, rows)

    def gradients(function):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
        outputs = function(leaves[0], leaves[1], targets, temperature, head, *leaves[2:] or [None])
        (outputs[0] * outer[0] + outputs[1] * outer[1]).sum().backward()
        return [*outputs, *(leaf.grad for leaf in leaves)]

    old = module.CHUNK_BYTES
    module.CHUNK_BYTES = 4 * vocab * chunk
    try:
        ours = gradients(token_log_probs)
    finally:
        module.CHUNK_BYTES = old
    for mine, theirs in zip(ours, gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)


def test_log_probs_alone_need_no_entropy_gradient():
    hidden = torch.randn(4, 3, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, torch.randn(5, 3), torch.arange(4), torch.ones(4))
    log_probs.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_a_uniform_head_by_hand():
    log_probs, entropy = token_log_probs(
        torch.ones(1, 2), torch.zeros(8, 2), torch.tensor([3]), torch.ones(1)
    )
    assert log_probs.item() == pytest.approx(-2.0794415)  # log(1/8)
    assert entropy.item() == pytest.approx(2.0794415)


class Peak(TorchDispatchMode):
    """Most bytes at a time of what operations made, in pieces of some size."""

    def __init__(self, least):
        super().__init__()
        self._least, self._made, self.bytes = least, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= self._least:
            storage = result.untyped_storage()
            self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        alive = [size for reference, size in self._made.values() if not reference.expired()]
        self.bytes = max(self.bytes, sum(alive))
        return result


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_beside_one_chunk_there_is_one_more_of_its_size(monkeypatch, outputs):
    rows, vocab, width = 64, 997, 4
    chunk = 4 * 8 * vocab
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    hidden = torch.randn(rows, width, requires_grad=True)
    with Peak(chunk) as peak:
        found = token_log_probs(
            hidden, torch.randn(vocab, width), torch.zeros(rows, dtype=int), torch.ones(rows)
        )
        assert peak.bytes == 2 * chunk
        sum(found[output].sum() for output in outputs).backward()
    assert peak.bytes == 2 * chunk


def test_no_more_than_one_chunk_of_logits_exists(monkeypatch):
    seen = []
    original = module._logits

    def spy(hidden, *rest):
        seen.append(hidden.shape[0])
        return original(hidden, *rest)

    monkeypatch.setattr(module, "_logits", spy)
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 11 * 3)
    hidden = torch.randn(10, 4, requires_grad=True)
    weight = torch.randn(11, 4)
    token_log_probs(hidden, weight, torch.zeros(10, dtype=int), torch.ones(10))[0].sum().backward()
    assert seen == [3, 3, 3, 1] * 2
