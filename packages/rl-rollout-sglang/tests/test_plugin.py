"""Without its patch SGLang fails, or is slow: each is still needed (`cpu_plugin`).

What `seeded_sampling` is needed for is in test_engine.
"""

from pathlib import Path

import pytest
import torch

from rl_core.trajectory import SamplingParams

pytestmark = pytest.mark.engine


def test_without_its_patch_attention_goes_one_by_one(engines, weight_sets, ask):
    """`batched_attention` is still needed."""
    dense = engines("dense")
    dense.sync(weight_sets["dense"][0])
    sampling = SamplingParams(0.0, max_tokens=9, ignore_eos=True)
    dense.patches_off("batched_attention")
    try:
        dense.experiment("count_attention")
        ask(dense, sampling, [[5, 6, 7]] * 64)
        [operations] = dense.experiment("count_attention")
    finally:
        dense.patches_off()
    assert operations >= 2 * 9 * 64, "SGLang seems to compute sequences together now"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rotary_without_the_stub", "vllm._custom_ops"),
        ("nccl_without_its_path", "cuda"),
        ("binding_without_its_list", "SGLANG_CPU_OMP_THREADS_BIND is not set"),
    ],
)
def test_without_its_patch_sglang_fails(engines, name, words):
    """`rotary_import`, `nccl_path` and `thread_binding` are still needed."""
    if name == "nccl_without_its_path" and torch.version.cuda is None:
        pytest.skip("this torch brings no NCCL")
    found = engines("tied").experiment(name)
    assert len(found) == 2
    assert all(words in said for said in found), f"SGLang seems to do without now: {found}"


def test_nothing_is_compiled_in_a_scheduler(engines):
    """`TORCHDYNAMO_DISABLE` reaches it before SGLang decorates its functions, as it still does."""
    [home] = engines("dense").experiment("home_of_a_decorated_function")
    assert home.endswith("vocab_parallel_embedding.py")
    code = Path(home).read_text().partition("def get_masked_input_and_mask")[0]
    assert "@torch.compile" in code.splitlines()[-1], "SGLang does not compile it any more"
