"""Models that would compute a shared row wrongly are found out, in the dtype that they train in."""

import pytest
import torch
import transformers

from rl_train_fsdp import prefix_sharing
from rl_train_fsdp.policy import Policy

CPU = torch.device("cpu")


class OneRank:
    """A group of one."""

    def max(self, values):
        return values


def policy(config, dtype):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return Policy(model.to(dtype).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "tied", "llama"])
def test_models_with_plain_causal_attention_share(kind, dtype, make_config):
    width, line = prefix_sharing.sharing_width(policy(make_config(kind), dtype), OneRank(), CPU)
    assert width == 32, line


def ignoring(name, decoder):
    """A forward pass that leaves out one argument."""

    def forward(**inputs):
        inputs.pop(name, None)
        return type(decoder).forward(decoder, **inputs)

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("kind", ["dense", "tied", "llama"])
def test_a_model_that_ignores_the_mask_or_the_positions_does_not(kind, ignored, dtype, make_config):
    deaf = policy(make_config(kind), dtype)
    decoder = deaf.model.base_model
    decoder.forward = ignoring(ignored, decoder)
    width, line = prefix_sharing.sharing_width(deaf, OneRank(), CPU)
    assert width is None
    assert "log-probabilities differ" in line


def test_a_model_that_cannot_take_such_a_mask_does_not():
    """Falcon with ALiBi computes its biases from a mask of two dimensions."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    falcon = policy(transformers.FalconConfig(alibi=True, **sizes), torch.float32)
    width, line = prefix_sharing.sharing_width(falcon, OneRank(), CPU)
    assert width is None
    assert "cannot take a mask" in line
