"""What is particular to this engine: CPU patches, refusals, the stream's far end."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rl_core.channel import Listener, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import ManifestMismatchError, RolloutError, TransferError, TransferTimeoutError
from rl_core.interfaces import PauseMode
from rl_core.rollout.protocol import FromWorker, Offer
from rl_core.testing.rollout_case import GREEDY
from rl_core.testing.weight_set import leases
from rl_core.trajectory import GenerateRequest, SamplingParams

pytestmark = pytest.mark.engine


# -- weights


def test_poison_in_the_engine_is_gone_after_a_sync(dense, weight_sets, ask):
    """Also from the KV cache, into which requests under poison have written."""
    before = ask(dense, GREEDY)
    dense.worker("poison")
    ask(dense, GREEDY)
    dense.sync(weight_sets["dense"][0])
    after = ask(dense, GREEDY)
    assert [item.token_ids for item in after] == [item.token_ids for item in before]
    for new, old in zip(after, before, strict=True):
        assert new.log_probs == pytest.approx(old.log_probs, abs=1e-4)


def test_a_dtype_that_is_not_the_parameters_is_refused(dense, weight_sets):
    """SGLang converts it without a word, and what the trainer meant is lost."""
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = weight_sets["dense"][1].changed(
        {name: weight_sets["dense"][1].tensors[name].bfloat16()}
    )
    manifest = wrong.manifest(dense.next_version())
    with pytest.raises(ManifestMismatchError, match=rf"{name}.*bfloat16.*float32"):
        dense.adapters[0].update_weights(leases(wrong.entries(), 3), manifest, Deadline.after(30))
    assert dense.state()["phase"] == "fenced"
    dense.sync(weight_sets["dense"][0])


def test_the_first_partial_set_names_what_never_came(engines, weight_sets):
    """Before any complete update has shown what a fused parameter is made of."""
    started = engines("dense")
    name = "model.layers.0.self_attn.k_proj.weight"
    short = weight_sets["dense"][0].without(name)
    manifest = short.manifest(started.next_version())
    with pytest.raises(ManifestMismatchError, match=name):
        started.adapters[0].update_weights(leases(short.entries(), 3), manifest, Deadline.after(30))
    started.sync(weight_sets["dense"][0])


def underway(started):
    """A long request, of which some tokens are there; that is told before it ends."""
    sampling = SamplingParams(0.0, max_tokens=900, ignore_eos=True)
    before = started.adapters[0].tokens_made(30)
    running = started.server.submit("generate", [GenerateRequest("long", [5, 6], sampling)])
    end = Deadline.after(30)
    while not 0 < started.adapters[0].tokens_made(30) - before < 900:
        end.check("a token of a long request")
    return running


def test_an_adapter_that_dies_fences_the_replica_at_once(dense, weight_sets):
    """Also requests that were to be kept over the update end then."""
    weights = weight_sets["dense"][1]
    kept = underway(dense)
    with Listener() as listener:
        key = new_key()
        manifest = weights.manifest(dense.next_version())
        offer = Offer(0, listener.address, key, manifest, 60.0, PauseMode.KEEP)
        pending = dense.server.submit("receive_update", offer)
        listener.accept(key, FromWorker, Deadline.after(30)).close()
        with pytest.raises(TransferError, match="closed"):
            pending.result(20)
    assert dense.state()["phase"] == "fenced"
    assert kept.result(20)[0].finish_reason == "abort"
    dense.sync(weight_sets["dense"][0])


def test_a_scheduler_that_hangs_is_waited_for_until_the_deadline_only(dense, weight_sets):
    """The replica is then fenced, and can be repaired as soon as the scheduler goes on."""
    weights = weight_sets["dense"][1]
    manifest = weights.manifest(dense.next_version())
    scheduler = psutil.Process(dense.state()["workers"][0]["pid"])
    scheduler.suspend()
    try:
        with pytest.raises(TransferTimeoutError):
            dense.adapters[0].update_weights(
                leases(weights.entries(), 3), manifest, Deadline.after(1.0)
            )
        assert dense.state()["phase"] == "fenced"
    finally:
        scheduler.resume()
    dense.sync(weight_sets["dense"][0])


def test_a_session_that_could_not_be_ended_is_in_nobodys_way(dense, weight_sets):
    """SGLang takes it for open, and would refuse every update to come."""
    assert dense.experiment("session_whose_end_fails") == [["OSError: a layer", True]]
    dense.sync(weight_sets["dense"][0])


def test_a_broken_directory_is_named(dense, weight_sets, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    manifest = weight_sets["dense"][1].manifest(dense.next_version())
    with pytest.raises(TransferError, match=r"model\.safetensors"):
        dense.adapters[0].update_weights_from_disk(tmp_path, manifest, Deadline.after(30))
    dense.sync(weight_sets["dense"][0])


# -- requests


def test_a_request_that_the_engine_refuses_is_an_error_of_that_request(dense, ask):
    too_long = [5] * 1100
    for prompt, named in [([80], "token ids below 80"), ([], "input_ids"), (too_long, "failed")]:
        with pytest.raises(RolloutError, match=named):
            ask(dense, SamplingParams(max_tokens=4), [prompt])
    assert dense.state()["phase"] == "committed"
    assert ask(dense, GREEDY)


def seeded(ask, started):
    sampling = SamplingParams(1.0, max_tokens=12, seed=11, ignore_eos=True)
    return [item.token_ids for item in ask(started, sampling, [[5, 6, 7]])]


def test_without_its_patch_seeds_do_not_count_and_one_line_says_so(dense, ask):
    """`seeded_sampling` is still needed; the contract shows that it works."""
    seeded(ask, dense)
    assert dense.said("ignores the seeds") == 0
    dense.patches_off("seeded_sampling")
    try:
        ask(dense, SamplingParams(1.0, max_tokens=2))
        assert dense.said("ignores the seeds") == 0
        found = [seeded(ask, dense) for _ in range(3)]
    finally:
        dense.patches_off()
    assert not found[0] == found[1] == found[2], "SGLang seems to honour seeds now"
    assert dense.said("ignores the seeds") == 1
    assert seeded(ask, dense) == seeded(ask, dense)


def test_requests_without_a_seed_differ(dense, ask):
    """`seeded_sampling` gives each of them a seed of its own."""
    found = ask(dense, SamplingParams(1.0, max_tokens=12, ignore_eos=True), [[5, 6]] * 4)
    assert len({tuple(item.token_ids) for item in found}) == 4


def test_files_and_memory_after_many_cycles(dense, weight_sets, ask):
    """Release, resume, sync, 20 times; their speed is for `tools/generation_speed.py`."""
    scheduler = psutil.Process(dense.state()["workers"][0]["pid"])
    server = psutil.Process(dense.state()["pid"])

    def cycle(count):
        for _ in range(count):
            dense.adapters[0].release(["kv_cache", "weights"], 30)
            dense.adapters[0].resume(["weights", "kv_cache"], 30)
            dense.sync(weight_sets["dense"][0])
            ask(dense, GREEDY)

    cycle(4)
    files, memory = (scheduler.num_fds(), server.num_fds()), scheduler.memory_info().rss
    cycle(20)
    assert (scheduler.num_fds(), server.num_fds()) == files
    assert scheduler.memory_info().rss - memory < 8 << 20


def test_a_batch_is_computed_together(dense, ask):
    """`batched_attention`: not one operation for each request, layer and token."""
    before = dense.worker("attention_groups")[0]
    ask(dense, SamplingParams(0.0, max_tokens=9, ignore_eos=True), [[5, 6, 7]] * 64)
    groups = dense.worker("attention_groups")[0] - before
    # Two layers; nine batches, some more if the requests came in several.
    assert 2 * 9 <= groups <= 2 * 9 * 4


def test_answers_without_grouped_attention_are_the_same(dense, ask):
    before = ask(dense, GREEDY)
    dense.patches_off("batched_attention")
    try:
        after = ask(dense, GREEDY)
    finally:
        dense.patches_off()
    for new, old in zip(after, before, strict=True):
        assert new.token_ids == old.token_ids
        assert new.log_probs == pytest.approx(old.log_probs, abs=1e-4)


def test_what_is_paused_in_place_can_be_ended(dense, weight_sets, ask):
    """SGLang's abort waits for a step that it does not take; a release would wait for ever."""
    sampling = SamplingParams(0.0, max_tokens=900, ignore_eos=True)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, dense, sampling, [[5, 6, 7]])
        time.sleep(0.2)
        dense.adapters[0].pause(PauseMode.IN_PLACE, 30)
        assert not running.done()
        dense.adapters[0].release(["kv_cache"], 30)
        [ended] = running.result(30)
    assert ended.finish_reason == "abort"
    dense.adapters[0].resume(["kv_cache"], 30)
    dense.adapters[0].continue_(30)
    dense.sync(weight_sets["dense"][0])
    assert ask(dense, GREEDY)
