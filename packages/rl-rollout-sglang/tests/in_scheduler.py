"""What SGLang does without a patch of ours, tried in a scheduler: `SchedulerExtension.experiment`.

Each says how it fails; empty if it does not.
"""

import contextlib
import os
import sys
from unittest import mock

import torch


def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it fails with is what is asked for
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def without(variable):
    with mock.patch.dict(os.environ):
        del os.environ[variable]
        yield


def rotary_without_the_stub(scheduler):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    with mock.patch.dict(sys.modules, {"vllm._custom_ops": None}):
        return failure(RotaryEmbedding, 32, 32, 64, 10000, True, torch.float32)


def nccl_without_its_path(scheduler):
    """Each rank by itself: one that fails would leave the other in a collective."""
    from sglang.srt.distributed.device_communicators import pynccl

    group = mock.Mock(spec=pynccl.StatelessProcessGroup, rank=1, world_size=2)
    group.broadcast_obj.side_effect = lambda unique_id, src: unique_id
    with without("SGLANG_NCCL_SO_PATH"):
        return failure(pynccl.PyNcclCommunicator, group, torch.device("cpu"))


def binding_without_its_list(scheduler):
    from sglang.srt.utils.common import get_cpu_ids_by_node
    from sglang.srt.utils.numa_utils import init_threads_binding

    ranks = len(get_cpu_ids_by_node()) + 1
    with without("SGLANG_CPU_OMP_THREADS_BIND"):
        return failure(init_threads_binding, numa_index=0, world_size=ranks)


def home_of_a_decorated_function(scheduler):
    """The file whose code runs: torch's, were it compiled."""
    from sglang.srt.layers.vocab_parallel_embedding import get_masked_input_and_mask

    return get_masked_input_and_mask.__code__.co_filename


def count_attention(scheduler):
    """Begin to count operations of SGLang's attention; the second call tells how many."""
    from sglang.srt.layers.attention import torch_native_backend as backend

    counted = backend.scaled_dot_product_attention
    if isinstance(counted, mock.Mock):
        backend.scaled_dot_product_attention = counted.side_effect
        return counted.call_count
    backend.scaled_dot_product_attention = mock.Mock(side_effect=counted)
    return 0


def session_whose_end_fails(scheduler):
    """A layer fails as SGLang ends an update; whether the session is closed all the same."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from rl_rollout_sglang.load_sessions import BracketedSession, Loader

    session = BracketedSession(scheduler, Loader(scheduler))
    session.begin()
    with mock.patch.object(WeightUpdater, "end_weight_update", side_effect=OSError("a layer")):
        said = failure(session._close)
    session.abandon()
    return [said, scheduler.weight_updater._session is None]
