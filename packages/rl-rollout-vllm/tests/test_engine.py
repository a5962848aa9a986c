"""What is particular to this engine: CPU patches, load paths, HTTP, the stream's far end."""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from rl_core.channel import Listener, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, RolloutError, TransferError
from rl_core.interfaces import PauseMode
from rl_core.rollout.protocol import (
    FromDirectory,
    FromWorker,
    Offer,
    UpdateRequest,
    UpdateResult,
)
from rl_core.testing.rollout_case import GREEDY
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_rollout_vllm.probe import probe

pytestmark = pytest.mark.engine

ROUNDS = 4


@pytest.fixture
def dense(engines, weight_sets):
    """The dense engine, serving A."""
    started = engines("dense")
    started.sync(weight_sets["dense"][0])
    return started


def answers(ask, started):
    return [completion.token_ids for completion in ask(started, GREEDY)]


# -- patches: each is needed, and would be noticed if vLLM no longer needed it


EXPERTS = [
    f"model.layers.{n}.mlp.experts.routed_experts.{w}_weight" for n in (0, 1) for w in ("w13", "w2")
]
STALE = {"moe_repack": EXPERTS, "tied_head_repack": ["lm_head.weight.packed"]}
"""What is wrong in the engine without the patch, and all that is."""


@pytest.mark.parametrize(("kind", "patch"), [("moe", "moe_repack"), ("tied", "tied_head_repack")])
def test_without_its_patch_the_update_is_silently_wrong(
    engines, weight_sets, ask, live_checks, kind, patch
):
    """Silently, but for the live digests, which name what is stale."""
    started = engines(kind)
    first, second = weight_sets[kind]
    started.sync(second)
    right = answers(ask, started)
    started.sync(first)
    started.worker("rl_disable_patches", [patch])
    try:
        started.sync(second)
        wrong = answers(ask, started)
        found = live_checks(kind, second)
    finally:
        started.worker("rl_disable_patches", [])
    for check in found:
        assert sorted(check.mismatched) == STALE[patch]
    assert wrong != right, f"vLLM seems to have fixed what {patch} is for"
    started.sync(second)
    assert answers(ask, started) == right


LINEAR = [
    "lm_head.weight",
    *(
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ),
]
"""Every weight of the dense model that is multiplied with; all others are looked up or scale."""


def test_live_linear_weights_are_what_is_served(dense, weight_sets, ask):
    """Overwriting any one of them changes the answers: none is served from a hidden copy."""
    before = answers(ask, dense)
    for name in LINEAR:
        dense.worker("rl_poison", [name])
        dense.adapters[0].clear_kv_cache(30)
        assert answers(ask, dense) != before, f"{name} is served from a copy"
        dense.sync(weight_sets["dense"][0])
    assert answers(ask, dense) == before


def test_packed_weights_cannot_be_released(engines, weight_sets, ask):
    """One of the reasons for `unpacked_linear`: nobody can reach the packed copies."""
    started = engines("tied")
    started.sync(weight_sets["tied"][0])
    assert started.adapters[0].release(["weights"], 30) == {"weights": 0}
    started.sync(weight_sets["tied"][0])
    assert answers(ask, started)


def test_poison_in_the_engine_is_gone_after_a_sync(dense, weight_sets, ask):
    before = answers(ask, dense)
    dense.worker("rl_poison")
    dense.sync(weight_sets["dense"][0])
    assert answers(ask, dense) == before


def test_released_weights_have_no_digests(dense, weight_sets):
    adapter = dense.adapters[0]
    adapter.release(["weights"], 30)
    with pytest.raises(LifecycleError, match="released"):
        adapter.live_digests(30)
    adapter.resume(["weights"], 30)
    dense.sync(weight_sets["dense"][0])


# -- calls on the ranks


def test_what_one_rank_fails_at_does_not_shift_the_answers_of_the_others(engines, weight_sets):
    """vLLM stops reading at the first rank that raises."""
    started = engines("tied")
    started.sync(weight_sets["tied"][0])
    before = started.worker("rl_live_digests")
    assert len(before) == 2
    for rank in (0, 1):
        with pytest.raises(RolloutError, match=f"'rl_flip' failed on rank {rank}: .*nonsense"):
            started.worker("rl_flip", rank, "nonsense", 0.5)
        assert started.worker("rl_live_digests") == before


# -- load paths


def plain_update(started, weights, path):
    manifest = weights.manifest(started.next_version())
    request = UpdateRequest(FromDirectory(str(path)), manifest, 30.0, "plain")
    encoded = [msgspec.msgpack.encode(request)] * len(started.adapters)
    [result] = started.worker("rl_update", encoded)
    return msgspec.msgpack.decode(result, type=UpdateResult)


def test_the_plain_path_loads_the_same_weights(dense, weight_sets, model_dirs, ask):
    second = weight_sets["dense"][1]
    result = plain_update(dense, second, model_dirs["dense"][1])
    assert result.error is None
    assert result.report.tensors == len(second.tensors)
    dense.adapters[0].clear_kv_cache(30)
    plain = answers(ask, dense)
    dense.sync(second)
    assert answers(ask, dense) == plain


def test_the_plain_path_names_a_parameter_that_got_nothing(dense, weight_sets, tmp_path, save):
    short = weight_sets["dense"][1].without("model.norm.weight")
    save(short, tmp_path)
    result = plain_update(dense, short, tmp_path)
    assert result.error.kind == "ManifestMismatchError"
    assert "model.norm.weight" in result.error.message


def test_the_plain_path_refuses_packed_layers(engines, weight_sets, model_dirs):
    started = engines("moe")
    result = plain_update(started, weight_sets["moe"][1], model_dirs["moe"][1])
    assert result.error.kind == "WeightSyncError"
    assert "load_path=bracketed" in result.error.message


# -- failures that need the far end of the stream


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


def test_a_broken_directory_is_named(dense, weight_sets, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    manifest = weight_sets["dense"][1].manifest(dense.next_version())
    with pytest.raises(TransferError, match=r"model\.safetensors"):
        dense.adapters[0].update_weights_from_disk(tmp_path, manifest, Deadline.after(30))


def test_a_request_that_the_engine_refuses_is_an_error_of_that_request(dense, ask):
    too_long = [5] * 1100
    for prompt, named in [([10**6], "token ids below 80"), ([], "token ids"), (too_long, "failed")]:
        for others in ([], [[5, 6]] * 3):
            with pytest.raises(RolloutError, match=named):
                ask(dense, SamplingParams(max_tokens=4), [*others, prompt, *others])
    assert dense.state()["phase"] == "committed"
    assert ask(dense, GREEDY)


def test_a_pause_in_place_is_refused_with_the_mode_to_use(dense, ask):
    with pytest.raises(RolloutError, match=r"in_place.*use keep"):
        dense.adapters[0].pause(PauseMode.IN_PLACE, 30)
    assert ask(dense, GREEDY)


def test_seeded_requests_that_exceed_a_batch(dense, ask):
    """vLLM 0.32 on cpu dies on a seeded request of which a part is prefilled (`server_args`)."""
    prompts = [[5 + n] * 900 for n in range(8)]
    seeded = SamplingParams(1.0, max_tokens=4, seed=3, ignore_eos=True)
    assert [len(one.token_ids) for one in ask(dense, seeded, prompts)] == [4] * 8
    assert dense.state()["phase"] == "committed"


def test_the_same_batch_gets_the_same_log_probs_bit_for_bit(dense, ask):
    """vLLM would begin with the first request, and make other batches each time."""
    seeded = SamplingParams(1.0, max_tokens=8, seed=3, ignore_eos=True)
    batch = [[5 + n % 70, 6, 7, 8][: 1 + n % 4] for n in range(128)]

    def log_probs():
        dense.adapters[0].clear_kv_cache(30)
        return [one.log_probs for one in ask(dense, seeded, batch)]

    first = log_probs()
    assert [log_probs() for _ in range(ROUNDS)] == [first] * ROUNDS


def test_a_pause_that_waits_leaves_nobody_behind(dense, ask):
    """vLLM (0.32) does not wait for requests that it has put back for lack of KV memory."""
    prompts = [[5 + n % 70, 5 + n // 70] * 245 for n in range(128)]  # 62720 of 65536 tokens
    long = SamplingParams(0.0, max_tokens=60, ignore_eos=True)
    adapter = dense.adapters[0]
    before = adapter.tokens_made(30)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, dense, long, prompts)
        while adapter.tokens_made(30) - before < 40 * 128 and not running.done():
            time.sleep(0.01)
        adapter.pause(PauseMode.WAIT, 60)
        made = adapter.tokens_made(30) - before
        adapter.continue_(30)
        assert [len(one.token_ids) for one in running.result(60)] == [60] * 128
    assert made % 60 == 0, "a request had begun and not ended"


# -- HTTP


def post(started, body, path="/v1/completions"):
    request = urllib.request.Request(
        f"http://{started.replica.address}{path}",
        data=json.dumps({"model": started.config.local_path, **body}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def test_http_answers_as_the_handle_does(dense, prompts, ask):
    body = {"prompt": prompts[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = post(dense, {**body, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == answers(ask, dense)[0]


def test_http_gives_several_samples(dense, prompts, ask):
    """The same that the handle gives for the same seed."""
    body = {"prompt": prompts[0], "max_tokens": 12, "temperature": 1, "ignore_eos": True}
    answer = post(dense, {**body, "n": 3, "seed": 5, "return_token_ids": True})
    sampling = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, n=3)
    expected = [item.token_ids for item in ask(dense, sampling, prompts[:1])]
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_http_tells_what_the_engine_holds_and_how_it_runs(engines, weight_sets, kind):
    """Whatever the gate says."""
    started = engines(kind)
    started.sync(weight_sets[kind][0])
    adapter, address = started.adapters[0], started.replica.address
    found = probe(address, 60)
    assert found.ranks == adapter.live_digests(60)
    assert (found.engine, found.device, found.split) == ("vllm", "cpu", {})
    assert found.settings == {
        "dtype": "float32",
        "tensor_model_parallel_size": started.config.tensor_model_parallel_size,
        "max_model_len": 1024,  # the model's own: the configuration says nothing
        "cpu_packed_weights": started.config.cpu_packed_weights,
    }
    adapter.fence("a test", 30)
    assert probe(address, 60) == found


def test_http_tells_that_weights_are_released(dense, weight_sets):
    adapter, address = dense.adapters[0], dense.replica.address
    adapter.release(["weights"], 30)
    with pytest.raises(RolloutError, match="released"):
        probe(address, 60)
    adapter.resume(["weights"], 30)
    dense.sync(weight_sets["dense"][0])
    assert probe(address, 60).ranks == adapter.live_digests(60)


def test_http_refuses_with_the_reason_while_fenced(dense, prompts):
    dense.adapters[0].fence("a test says so", 30)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(dense, {"prompt": prompts[0], "max_tokens": 2})
    assert caught.value.code == 503
    assert "a test says so" in caught.value.read().decode()
    with urllib.request.urlopen(f"http://{dense.replica.address}/health", timeout=30) as health:
        assert health.status == 200


# -- logs


def test_each_process_has_a_log_of_its_own(dense):
    """What the worker says is not in the server's, with whose handlers it was forked."""
    logs = {file.name: file.read_text() for file in Path(dense.config.log_dir).glob("vllm-0-*")}
    assert {name: "vllm.v1.worker" in text for name, text in logs.items()} == {
        "vllm-0-server.log": False,
        "vllm-0-engine.log": True,
    }


# -- many syncs


def test_many_syncs_leave_memory_and_files_as_they_were(dense, weight_sets):
    worker = psutil.Process(dense.state()["workers"][0]["pid"])
    here = psutil.Process()

    def sync(count):
        for _ in range(count):
            dense.sync(weight_sets["dense"][0])

    def counts():
        return worker.num_fds(), here.num_fds(), psutil.Process(dense.server.pid).num_fds()

    sync(5)
    files, memory = counts(), worker.memory_info().rss
    sync(50)
    assert counts() == files
    assert worker.memory_info().rss - memory < 8 << 20
