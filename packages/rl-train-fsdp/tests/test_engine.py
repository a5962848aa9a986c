"""The engine on one and two real ranks: gloo on loopback, tiny models, float32 unless said."""

import json
import math
import re

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rl_core.errors import ConfigError, LifecycleError, NonFiniteError, TrainError, TransferError
from rl_core.interfaces import RankPlace
from rl_train_fsdp.config import EngineConfig, FsdpConfig, ModelConfig
from rl_train_fsdp.engine import FsdpTrainEngine
from rl_train_fsdp.rows import plan_rows
from rl_train_fsdp.wrapping import check_experts

pytestmark = pytest.mark.engine

KINDS = ["dense", "tied", "moe"]


def split(samples, world):
    """The calls' samples of each rank; the ranks get unequal shares."""
    cut = len(samples) * 2 // 3
    return [samples] if world == 1 else [samples[:cut], samples[cut:]]


def reference_log_probs(path, sample):
    """By transformers alone: one unpadded sample, the full logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits[0].float() / sample.temperature, -1)
    rows = log_p[len(sample.prompt_ids) - 1 : -1]
    return rows.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0], -(
        rows.exp() * rows
    ).sum(-1)


@pytest.mark.parametrize("kind", [*KINDS, "llama", "gemma2", "mamba"])
@pytest.mark.parametrize("world", [1, 2])
def test_log_probs_are_those_of_transformers(kind, world, ranks, models, settings, make_samples):
    path = models(kind)
    samples = make_samples(7, temperature=0.7)
    shares = split(samples, world)
    config = settings(path, world, engine={"ppo_max_token_len_per_gpu": 40})
    results = ranks.run(
        world, config, lambda rank: [("initialize",), ("compute_log_prob", shares[rank])]
    )
    scores = [score for result in results for score in result[1]]
    for sample, score in zip(samples, scores, strict=True):
        log_probs, entropy = reference_log_probs(path, sample)
        torch.testing.assert_close(torch.tensor(score.log_probs), log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(score.entropy), entropy, rtol=1e-5, atol=1e-5)


LOSSES = [
    {"kl_coef": 0.1, "entropy_coef": 0.01, "critic": True, "vf_coef": 0.5},
    {"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "gspo", "clip_ratio_high": 5.0},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4.0, "kl_coef": 0.3},
]


@pytest.mark.parametrize(
    ("kind", "loss"), [("tied", LOSSES[0]), ("moe", LOSSES[1]), ("dense", LOSSES[2])]
)
def test_the_gradient_depends_on_neither_ranks_nor_batches(
    kind, loss, ranks, models, settings, make_samples
):
    samples = make_samples.for_critic(7, old=True, ref=True)
    variants = [
        (1, {}),
        (1, {"ppo_max_token_len_per_gpu": 20}),
        (1, {"gradient_checkpointing": True}),
        (2, {}),
        (2, {"ppo_max_token_len_per_gpu": 1}),
        (2, {"ppo_max_token_len_per_gpu": 30, "reshard_after_forward": True}),
        (2, {"fsdp_size": 1}),
        (2, {"gradient_checkpointing": True, "reshard_after_forward": True}),
    ]
    outcomes = []
    for world, engine in variants:
        config = settings(models(kind), world, engine=engine, loss=loss, optimizer={"lr": 0.01})
        config["optimizer"]["max_grad_norm"] = 1e9
        shares = split(samples, world)
        results = ranks.run(
            world,
            config,
            lambda rank, shares=shares: [
                ("initialize",),
                ("watch_layers",),
                ("update_policy", shares[rank]),
                ("gradients",),
                ("layer_passes",),
            ],
        )
        assert all(result[2] == results[0][2] for result in results)
        outcomes.append(results[0][2:])
    metrics, gradients, passes = outcomes[0]
    assert metrics["grad_norm"] > 0.01
    # Recomputed in the backward pass, and only then.
    assert outcomes[2][2] == 2 * passes > 0
    assert outcomes[7][2] == 2 * outcomes[3][2]
    for other_metrics, other, _ in outcomes[1:]:
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shared", "steps"), [(False, 1), (True, 1), (True, 2)])
def test_an_update_of_one_step_tells_the_log_probs_before_it(
    shared, steps, ranks, models, settings, make_samples
):
    """Those that a pass of its own computes, of the tokens in the loss."""
    samples = ended_in_every_way(make_samples(7, old=True, ref=True, temperature=0.7))
    samples = [msgspec.structs.replace(item, old_log_probs=None) for item in samples]
    shares = split(in_groups(samples, [4, 3]), 2)
    engine = {"share_prefixes": shared, "ppo_max_token_len_per_gpu": 60}
    loss = {"ppo_mini_batch_size": -(-len(samples) // steps)}
    config = settings(models("dense"), 2, engine=engine, loss=loss, optimizer={"lr": 0.01})
    results = ranks.run(
        2,
        config,
        lambda rank: [
            ("initialize",),
            ("update_scores",),
            ("compute_log_prob", shares[rank]),
            ("update_policy", shares[rank]),
            ("update_scores",),
            ("compute_log_prob", shares[rank]),
        ],
    )
    for share, (_, nothing, before, _, told, after) in zip(shares, results, strict=True):
        assert nothing is None
        if steps > 1:
            assert told is None
            continue
        for sample, old, new, scores in zip(share, before, after, told, strict=True):
            where = [offset for offset, mask in enumerate(sample.loss_mask) if mask]
            assert scores.log_probs == pytest.approx([old.log_probs[n] for n in where], abs=1e-5)
            assert scores.entropy == pytest.approx([old.entropy[n] for n in where], abs=1e-5)
            if where:
                assert scores.log_probs != pytest.approx([new.log_probs[n] for n in where], 1e-3)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_no_element_is_published_as_it_was_once_it_is_perturbed(wire, ranks, models, settings):
    """Norms around 1 would lose a small delta in bfloat16."""
    config = settings(models("dense"), 2, engine={"wire_dtype": wire})
    calls = ["initialize", "shards", "tensors", "perturb", "tensors", "restore", "tensors"]
    script = [(call, 1e-3) if call == "perturb" else (call,) for call in [*calls, "shards"]]
    for outcome in ranks.run(2, config, script):
        _, shards, before, _, changed, _, after, restored = outcome
        for (meta, mine), (_, theirs), (_, again) in zip(before, changed, after, strict=True):
            assert (mine != theirs).all(), meta.name
            assert torch.equal(mine, again), meta.name
            assert (theirs - mine).abs().max() < 0.05 * max(1.0, float(mine.abs().max()))
        for name, shard in shards.items():
            assert torch.equal(shard.view(torch.int32), restored[name].view(torch.int32)), name


def in_groups(samples, sizes):
    """The samples with a common prompt in each group of the given sizes."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return [
        msgspec.structs.replace(sample, prompt_ids=[7 + group, 3, 5, 2, 11][: 5 - group])
        for sample, group in zip(samples, groups, strict=True)
    ]


def ended_in_every_way(samples, longest=9):
    """The samples, two of them cut at the longest length, one of those aborted, one of one token.

    A cut response has no end, so that its last token is one of the loss like all others.
    """

    def changed(sample, length, mask):
        def fit(column):
            return (column * length)[:length]

        return msgspec.structs.replace(
            sample,
            response_ids=fit(sample.response_ids),
            loss_mask=[mask] * length,
            advantages=fit(sample.advantages),
            old_log_probs=fit(sample.old_log_probs),
            ref_log_probs=fit(sample.ref_log_probs),
            rollout_is_weights=[1.0 + 0.1 * place for place in range(length)],
        )

    samples = [
        msgspec.structs.replace(sample, rollout_is_weights=[0.9] * len(sample.response_ids))
        for sample in samples
    ]
    samples[0] = changed(samples[0], longest, 1)
    samples[1] = changed(samples[1], longest, 0)
    samples[2] = changed(samples[2], 1, 1)
    samples[6] = changed(samples[6], longest, 1)
    return samples


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_change_neither_log_probs_nor_gradients(
    kind, ranks, models, settings, make_samples
):
    """Groups of unequal size, padding, masked ends, truncation; one group lies on both ranks."""
    samples = in_groups(make_samples(11, old=True, ref=True), [5, 1, 3, 2])
    samples = ended_in_every_way(samples)
    for limit, expected in ((16384, [1, 2, 3, 5]), (14, [1, 1, 2, 2, 2, 3])):
        rows = plan_rows(samples, loss_only=True, max_tokens=limit, width=32)
        assert sorted(len(row.samples) for row in rows) == expected
    variants = [
        (1, {"share_prefixes": False}),
        (1, {}),
        (1, {"ppo_max_token_len_per_gpu": 14}),
        (2, {}),
        (2, {"gradient_checkpointing": True, "reshard_after_forward": True}),
    ]
    outcomes = []
    for world, engine in variants:
        config = settings(models(kind), world, engine=engine, loss={"kl_coef": 0.1})
        config["optimizer"] = {"lr": 0.0, "max_grad_norm": 1e9}
        shares = split(samples, world)
        results = ranks.run(
            world,
            config,
            lambda rank, shares=shares: [
                ("initialize",),
                ("compute_log_prob", shares[rank]),
                ("update_policy", shares[rank]),
                ("gradients",),
            ],
        )
        scores = [score for result in results for score in result[1]]
        outcomes.append((scores, *results[0][2:]))
    scores, metrics, gradients = outcomes[0]
    assert metrics["grad_norm"] > 0.01
    for other_scores, other_metrics, other in outcomes[1:]:
        for mine, theirs in zip(scores, other_scores, strict=True):
            assert theirs.log_probs == pytest.approx(mine.log_probs, abs=1e-5)
            assert theirs.entropy == pytest.approx(mine.entropy, abs=1e-5)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "shared"), [("llama", True), ("gemma2", False)])
def test_prompts_are_shared_only_under_full_attention(kind, shared, ranks, models, settings):
    (result,) = ranks.run(1, settings(models(kind)), [("initialize",), ("lines",)])
    line = next(line for line in reversed(result[1]) if line.startswith("Prompts are"))
    assert line.startswith("Prompts are shared") is shared
    assert shared or "sliding_attention" in line


def test_the_gradient_is_that_of_autograd_on_the_full_model(ranks, models, settings, make_samples):
    """Plain REINFORCE of one on-policy step: d/dw of -sum_t A_t log p_t / T."""
    path, samples = models("dense"), make_samples(5)
    results = ranks.run(
        2,
        settings(path, 2, optimizer={"max_grad_norm": 1e9}),
        lambda rank: [
            ("initialize",),
            ("update_policy", split(samples, 2)[rank]),
            ("gradients",),
        ],
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loss = 0
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        log_p = torch.log_softmax(model(ids).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
        chosen = log_p.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        loss -= (torch.tensor(sample.advantages) * torch.tensor(sample.loss_mask) * chosen).sum()
    (loss / sum(sum(sample.loss_mask) for sample in samples)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][2][name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_equals_the_checkpoint_on_every_rank(kind, ranks, models, settings):
    path = models(kind)
    saved = load_file(path / "model.safetensors")
    calls = [("initialize",), ("manifest",), ("tensors",), ("compute_log_prob", []), ("tensors",)]
    for world in (1, 2):
        for _, manifest, tensors, _, again in ranks.run(world, settings(path, world), calls):
            assert tuple(meta for meta, _ in tensors) == manifest.tensors
            assert {meta.name for meta, _ in tensors} == set(saved)
            for (meta, tensor), (_, repeated) in zip(tensors, again, strict=True):
                assert torch.equal(tensor, saved[meta.name])
                assert torch.equal(repeated, tensor)
            aliases = {name for meta in manifest.tensors for name in meta.aliases}
            assert aliases == ({"lm_head.weight"} if kind == "tied" else set())


def test_an_update_follows_adamw(ranks, models, settings, make_samples):
    """Two updates, two mini-batches each, against torch's AdamW fed with the same gradients."""
    samples = make_samples(6, old=True)
    optimizer = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2}
    config = settings(models("dense"), 2, optimizer=optimizer, loss={"ppo_mini_batch_size": 6})
    step = [("update_policy", samples[:3]), ("gradients",), ("tensors",)]
    result = ranks.run(2, config, [("initialize",), ("tensors",), *step, *step])[0]
    names = [meta.name for meta, _ in result[1]]
    weights = {meta.name: tensor.clone().requires_grad_() for meta, tensor in result[1]}
    adamw = torch.optim.AdamW([weights[name] for name in names], weight_decay=0.1)
    for number, (metrics, gradients, after) in enumerate([result[2:5], result[5:8]]):
        adamw.param_groups[0]["lr"] = metrics["lr"]
        assert metrics["lr"] == pytest.approx(0.01 * (number + 1) / 2)
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in gradients.values()))
        assert norm == pytest.approx(min(0.5, metrics["grad_norm"]), rel=1e-4)
        for name in names:
            weights[name].grad = gradients[name]
        adamw.step()
        for meta, tensor in after:
            torch.testing.assert_close(tensor, weights[meta.name].detach())


def test_mini_batches_and_epochs_are_optimizer_steps(ranks, models, settings, make_samples):
    samples = make_samples(9)
    loss = {"ppo_mini_batch_size": 4, "ppo_epochs": 2}
    config = settings(models("dense"), 2, loss=loss, optimizer={"lr": 1e-3})
    calls = [("initialize",), ("update_policy", samples)]
    given = ranks.run(
        2, config, lambda rank: [calls[0], ("update_policy", split(samples, 2)[rank])]
    )
    assert given[0][1]["optimizer_steps"] == 6  # ceil(9 / 4) mini-batches, two epochs
    assert given[0][1]["ppo_kl"] != 0


def test_learning_rate_zero_leaves_the_weights_bit_equal(ranks, models, settings, make_samples):
    path = models("tied")
    saved = load_file(path / "model.safetensors")
    config = settings(path, 2, optimizer={"lr": 0.0, "weight_decay": 0.1})
    calls = [("initialize",), ("update_policy", make_samples(4)), ("tensors",)]
    for _, metrics, tensors in ranks.run(2, config, calls):
        assert metrics["grad_norm"] > 0
        assert all(torch.equal(tensor, saved[meta.name]) for meta, tensor in tensors)


def test_nothing_to_learn_changes_nothing(ranks, models, settings, make_samples):
    path = models("dense")
    saved = load_file(path / "model.safetensors")
    masked = [
        msgspec.structs.replace(sample, loss_mask=[0] * len(sample.loss_mask))
        for sample in make_samples(3)
    ]
    config = settings(path, 2, optimizer={"lr": 0.1, "weight_decay": 0.1})
    results = ranks.run(
        2,
        config,
        lambda rank: [("initialize",), ("update_policy", masked if rank else []), ("tensors",)],
    )
    for _, metrics, tensors in results:
        assert metrics["optimizer_steps"] == 0
        assert all(torch.equal(tensor, saved[meta.name]) for meta, tensor in tensors)


def test_a_rank_without_samples_keeps_in_step(ranks, models, settings, make_samples):
    samples = make_samples(4, old=True)
    config = settings(models("moe"), 2, optimizer={"lr": 1e-3})
    alone, shared = (
        ranks.run(2, config, lambda rank, s=s: [("initialize",), ("update_policy", s[rank])])
        for s in ((samples, []), (samples[:2], samples[2:]))
    )
    assert alone[0][1] == pytest.approx(shared[0][1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_every_rank(
    value, ranks, models, settings, make_samples
):
    good = make_samples(4)
    bad = [msgspec.structs.replace(good[0], advantages=[value] * len(good[0].advantages))]
    results = ranks.outcomes(
        2,
        settings(models("dense"), 2),
        lambda rank: [("initialize",), ("update_policy", good if rank else bad)],
    )
    for result in results:
        assert isinstance(result["error"], NonFiniteError)
        assert "gradient norm" in str(result["error"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1]}, "sample 0 has 1 loss_mask for 2 response tokens"),
        ({"response_ids": [3, 61]}, "sample 0 has a token id outside"),
        ({"prompt_ids": []}, "sample 0 has no prompt"),
        ({"temperature": 0.0}, "sample 0 has temperature 0.0"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(
    change, message, ranks, models, settings, make_samples
):
    sample = msgspec.structs.replace(
        make_samples(1)[0], response_ids=[3, 4], loss_mask=[1, 1], advantages=[1.0, 1.0]
    )
    sample = msgspec.structs.replace(sample, **change)
    calls = [("initialize",), ("update_policy", [sample])]
    outcome = ranks.outcomes(1, settings(models("dense")), calls)[0]
    assert isinstance(outcome["error"], TrainError)
    assert message in str(outcome["error"])


def test_a_kl_term_needs_a_reference(ranks, models, settings, make_samples):
    calls = [("initialize",), ("update_policy", make_samples(1))]
    config = settings(models("dense"), loss={"kl_coef": 0.1})
    assert "ref_log_probs" in str(ranks.outcomes(1, config, calls)[0]["error"])


def test_a_second_engine_holds_the_reference(ranks, models, settings, make_samples):
    samples = make_samples(3)
    calls = [
        ("initialize",),
        ("compute_log_prob", samples),
        ("update_policy", samples),
        ("reference", samples),
        ("compute_log_prob", samples),
    ]
    config = settings(models("tied"), 2, optimizer={"lr": 0.01})
    for _, before, _, (reference, still_joined), after in ranks.run(2, config, calls):
        assert reference == before
        assert still_joined
        assert after != before


@pytest.mark.parametrize(
    ("kind", "first", "second"), [("dense", 2, 1), ("tied", 1, 2), ("moe", 2, 1), ("moe", 1, 2)]
)
def test_training_resumes_on_another_number_of_ranks(  # noqa: PLR0913
    kind, first, second, ranks, models, settings, make_samples, tmp_path
):
    path = tmp_path / "checkpoint"
    samples = make_samples.for_critic(6, old=True)
    optimizer = {"lr": 0.01, "lr_scheduler_type": "cosine", "total_training_steps": 5}

    def run(world, calls):
        critic = {"critic": kind == "tied"}
        config = settings(models(kind), world, optimizer=optimizer, loss=critic)
        shares = split(samples, world)
        return ranks.run(
            world,
            config,
            lambda rank: [("update_policy", shares[rank]) if c == "update" else c for c in calls],
        )[0]

    end = ["update", ("tensors",), ("compute_log_prob", samples)]
    start = run(first, [("initialize",), "update", ("save_checkpoint", path), *end])
    resumed = run(second, [("initialize",), ("load_checkpoint", path), *end])
    assert resumed[2] == pytest.approx(start[3], rel=1e-3, abs=1e-6)
    assert resumed[2]["lr"] < 0.01
    for (meta, tensor), (_, expected) in zip(resumed[3], start[4], strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4, msg=meta.name)
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]
    for mine, theirs in zip(resumed[4], start[5], strict=True):
        assert (mine.values is not None) == (kind == "tied")
        if mine.values is not None:
            assert any(mine.values)
            assert mine.values == pytest.approx(theirs.values, rel=1e-3, abs=1e-4)


def test_random_generators_go_on_where_they_were_on_every_rank(ranks, models, settings, tmp_path):
    path = tmp_path / "checkpoint"
    config = settings(models("dense"), 2)
    first = [("initialize",), *[("draw",)] * 2, ("save_checkpoint", path), ("draw",)]
    drawn = ranks.run(2, config, lambda rank: first if rank else [*first[:2], *first[3:]])
    again = [("initialize",), ("draw",), ("load_checkpoint", path), ("draw",)]
    resumed = ranks.run(2, config, again)
    assert [result[-1] for result in resumed] == [result[-1] for result in drawn]
    assert drawn[0][-1] != drawn[1][-1]
    one = ranks.run(1, settings(models("dense")), again)
    assert one[0][-1] == drawn[0][-1]


def test_a_checkpoint_that_cannot_be_written_behind_stops_every_rank(
    ranks, models, settings, tmp_path
):
    """Its staging directory is gone when the thread comes to it, or its name is taken by a file."""
    path = tmp_path / "checkpoint"
    (tmp_path / ".checkpoint.old").write_text("in the way")
    path.mkdir()
    calls = [("initialize",), ("begin_checkpoint", path), ("finish_checkpoint", 20.0)]
    for outcome in ranks.outcomes(2, settings(models("dense"), 2), calls):
        assert isinstance(outcome["error"], TrainError)
    assert list(path.iterdir()) == []


def test_what_is_no_checkpoint_is_refused(ranks, models, settings, tmp_path):
    calls = [("initialize",), ("load_checkpoint", tmp_path)]
    error = ranks.outcomes(1, settings(models("dense")), calls)[0]["error"]
    assert isinstance(error, ConfigError)
    assert str(tmp_path) in str(error)
    saved = tmp_path / "dense"
    ranks.run(1, settings(models("dense")), [("initialize",), ("save_checkpoint", saved)])
    calls = [("initialize",), ("load_checkpoint", saved)]
    error = ranks.outcomes(1, settings(models("moe")), calls)[0]["error"]
    assert "not of Qwen3MoeForCausalLM" in str(error)
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:10])
    error = ranks.outcomes(1, settings(models("dense")), calls)[0]["error"]
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("kind", "wire"), [("dense", None), ("tied", None), ("moe", None), ("moe", "bfloat16")]
)
def test_a_saved_model_loads_in_transformers(  # noqa: PLR0913
    kind, wire, ranks, models, settings, make_samples, tmp_path
):
    path = models(kind)
    (path / "tokenizer_config.json").write_text('{"x": 1}')
    out = tmp_path / "out"
    samples = make_samples(4)
    config = settings(path, 2, engine={"wire_dtype": wire}, optimizer={"lr": 0.01})
    calls = [
        ("initialize",),
        ("update_policy", samples),
        ("save_pretrained", out),
        ("save_pretrained", out),
        ("tensors",),
        ("compute_log_prob", samples),
    ]
    result = ranks.run(2, config, calls)[0]
    saved = load_file(out / "model.safetensors")
    assert {meta.name for meta, _ in result[4]} == set(saved)
    assert all(torch.equal(tensor, saved[meta.name]) for meta, tensor in result[4])
    assert json.loads((out / "config.json").read_text())["dtype"] == (wire or "float32")
    assert (out / "tokenizer_config.json").exists()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    if wire is None:
        for sample, score in zip(samples, result[5], strict=True):
            torch.testing.assert_close(
                torch.tensor(score.log_probs),
                reference_log_probs(out, sample)[0],
                atol=1e-5,
                rtol=0,
            )


def test_a_path_that_cannot_be_written_stops_every_rank(ranks, models, settings, tmp_path):
    (tmp_path / "file").write_text("")
    config = settings(models("dense"), 2)
    for method in ("save_pretrained", "save_checkpoint"):
        calls = [("initialize",), (method, tmp_path / "file" / "out")]
        for outcome in ranks.outcomes(2, config, calls):
            assert isinstance(outcome["error"], TrainError)


def test_bfloat16_computes_close_to_float32_and_keeps_float32_masters(
    ranks, models, settings, make_samples
):
    samples = make_samples(6, old=True)
    calls = [
        ("initialize",),
        ("compute_log_prob", samples),
        ("update_policy", samples),
        ("gradients",),
        ("shards",),
    ]
    runs = {}
    for dtype in ("float32", "bfloat16"):
        config = settings(models("tied"), 2, engine={"dtype": dtype}, optimizer={"lr": 1e-3})
        runs[dtype] = ranks.run(2, config, calls)[0]
    for exact, rough in zip(runs["float32"][1], runs["bfloat16"][1], strict=True):
        assert rough.log_probs == pytest.approx(exact.log_probs, abs=0.2)
        assert rough.log_probs != exact.log_probs
    for name, shard in runs["bfloat16"][4].items():
        assert shard.dtype is torch.float32
        gradient, exact = runs["bfloat16"][3][name], runs["float32"][3][name]
        assert gradient.dtype is torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), exact.flatten(), 0) > 0.9


def test_each_rank_holds_its_share_only(ranks, models, settings):
    results = ranks.run(2, settings(models("moe"), 2), [("initialize",), ("shards",), ("tensors",)])
    total = sum(tensor.numel() for _, tensor in results[0][2])
    sizes = [sum(shard.numel() for shard in result[1].values()) for result in results]
    assert sum(sizes) == total
    assert max(sizes) < 0.6 * total


def test_each_group_has_one_gloo_thread(ranks, models, settings):
    """Two of them corrupt memory (`gloo_backend`); copies of the model have groups of their own."""
    config = settings(models("tied"), 2, engine={"fsdp_size": 1})
    for result in ranks.run(2, config, [("initialize",), ("tensors",), ("gloo_threads",)]):
        threads, groups = result[2]
        assert threads == groups > 1


def test_the_log_says_what_was_loaded(ranks, models, settings):
    config = settings(models("moe"), 2, engine={"param_offload": True})
    calls = [("initialize",), ("offload",), ("offload",), ("onload",), ("threads",), ("lines",)]
    first, second = ranks.run(2, config, calls)
    number = r"\d+\.\d\d"
    memory = (
        rf"memory allocated \(GB\): {number}, memory reserved \(GB\): {number}, "
        rf"device memory used/total \(GB\): {number}/{number}"
    )
    patterns = [
        r"Qwen3MoeForCausalLM contains \d+\.\d\dK parameters",
        rf"Before FSDP, {memory}",
        r"Applied FSDP wrapping\. mesh=\(2,\), dtype=float32, layers=Qwen3MoeDecoderLayer, .*",
        rf"After FSDP, {memory}",
        r"Prompts are shared in training: common tokens of a group are computed once",
        r"Offload not applicable: device=cpu, .*",
    ]
    assert len(first[5]) == len(patterns)
    for line, pattern in zip(first[5], patterns, strict=True):
        assert re.fullmatch(pattern, line), line
    assert second[5] == []
    assert first[4] >= 1


def test_a_rank_that_leaves_ends_the_others(ranks, models, settings, make_samples):
    config = settings(models("dense"), 2, engine={"timeout_s": 5.0})
    outcomes = ranks.outcomes(
        2,
        config,
        lambda rank: [("initialize",), *([("update_policy", make_samples(2))] if rank else [])],
    )
    assert outcomes[0]["error"] is None
    assert isinstance(outcomes[1]["error"], TransferError)


def test_calls_in_the_wrong_state_are_refused(models):
    engine = FsdpTrainEngine(FsdpConfig(ModelConfig(str(models("dense")))), RankPlace())
    with pytest.raises(LifecycleError, match="not initialized"):
        engine.compute_log_prob([])
    engine.shutdown()
    engine.shutdown()


def test_a_world_that_fsdp_size_does_not_divide_is_refused():
    config = FsdpConfig(ModelConfig("/x"), EngineConfig(fsdp_size=2))
    with pytest.raises(ConfigError, match="does not divide"):
        FsdpTrainEngine(config, RankPlace(world_size=3))


def test_experts_as_separate_modules_are_refused_on_several_ranks():
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList()})})
    check_experts(model, 1)
    with pytest.raises(ConfigError, match=r"mlp\.experts"):
        check_experts(model, 2)


def test_a_device_that_is_not_there_is_named(models):
    engine = FsdpTrainEngine(FsdpConfig(ModelConfig(str(models("dense")))), RankPlace(device="tpu"))
    with pytest.raises(ConfigError, match="'tpu'"):
        engine.initialize()


@pytest.mark.parametrize("world", [1, 2])
def test_the_reference_stays_where_the_policy_was_loaded(
    world, ranks, models, settings, make_samples
):
    samples = make_samples(6)
    shares = split(samples, world)
    config = settings(models("tied"), world, loss={"kl_coef": 0.1})

    def script(rank):
        carrying = [
            msgspec.structs.replace(sample, ref_log_probs=[-1.0] * len(sample.response_ids))
            for sample in shares[rank]
        ]
        return [
            ("initialize",),
            ("compute_log_prob", shares[rank]),
            ("update_policy", carrying),
            ("compute_log_prob", shares[rank]),
            ("compute_ref_log_prob", shares[rank]),
            ("compute_log_prob", shares[rank]),
        ]

    for result in ranks.run(world, config, script):
        loaded, trained, reference, again = result[1], result[3], result[4], result[5]
        assert reference == [score.log_probs for score in loaded]
        assert trained != loaded
        assert again == trained


def test_without_a_kl_term_there_is_no_reference(models, free_port):
    config = FsdpConfig(ModelConfig(str(models("tied"))), EngineConfig(dtype="float32"))
    engine = FsdpTrainEngine(config, RankPlace(master_port=free_port()))
    engine.initialize()
    try:
        with pytest.raises(LifecycleError, match="kl_coef"):
            engine.compute_ref_log_prob([])
    finally:
        engine.shutdown()
