"""SGLang's tokenizer manager, through which every request goes, with our checks and cache keys.

Whoever asks, by HTTP or by the handle, native or OpenAI-compatible: what goes to the schedulers is
made by `_create_tokenized_object`. Imported in the server process only.
"""

import os
import re
from typing import Any

import msgspec
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.io_struct import (
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from rl_rollout_sglang import cpu_plugin
from rl_rollout_sglang.cache_keys import keyed
from rl_rollout_sglang.pause_condition import REQUESTS
from rl_rollout_sglang.request_checks import RefusedRequestError, check_request, check_samples
from rl_rollout_sglang.seed_notice import SeedNotice


class QuietSignals(SignalHandler):  # type: ignore[misc]
    """Leaves the server alone when a child fails or somebody asks it to end."""

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        """End this process only."""
        os._exit(143)

    def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
        """The death of a child is found by watching it."""


class CheckedTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """Refuses what the schedulers would die of; see `request_checks`.

    Attributes:
        cache_epoch: of requests from here on; see `cache_keys`.
        seeds: looks at the seed of every request.
    """

    cache_epoch = 0
    seeds = SeedNotice(lambda: True)

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        """SGLang's answers to one request; RefusedRequestError."""
        check_samples(obj.sampling_params)
        return super().generate_request(obj, request)

    async def busy(self) -> bool:
        """Whether a scheduler has a request that has not ended, or is about to get one.

        SGLang's lock tells too much: a stream holds it until its client has read the last word.
        """
        locked = await self.model_update_lock.is_locked()
        return bool(locked and not self.is_pause_cond.holds(self.rid_to_state.keys()))

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        super()._init_req_state(obj, request)
        REQUESTS.set([obj.rid] if isinstance(obj.rid, str) else obj.rid)

    def _create_tokenized_object(self, *args: Any, **kwargs: Any) -> Any:
        request = super()._create_tokenized_object(*args, **kwargs)
        if isinstance(request, TokenizedGenerateReqInput):
            _check_types(request)
            seeded = cpu_plugin.active("seeded_sampling")
            check_request(request, self.model_config.vocab_size, seeded=seeded)
            self.seeds.see(request.sampling_params.sampling_seed)
            request.extra_key = keyed(self.cache_epoch, request.extra_key)
        return request


def init_checked_manager(server_args: Any, port_args: Any) -> Any:
    """SGLang's function of that kind, with our class."""
    return init_tokenizer_manager(server_args, port_args, CheckedTokenizerManager)


def _check_types(request: TokenizedGenerateReqInput) -> None:
    """RefusedRequestError if a scheduler could not read the request, which would end it.

    SGLang checks the types of a list of prompts, not of what is given for each of them.
    """
    plain = msgspec.structs.replace(request, time_stats=None)  # wrapped on the way only
    try:
        msgpack_decode(msgpack_encode(plain))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise RefusedRequestError(_named(str(error))) from error


def _named(problem: str) -> str:
    """A complaint of msgspec's with the field's name in place of its number."""
    found = re.search(r" - at `\$\[(\d+)\](?:\[(\d+)\])?.*`", problem)
    if found is None:
        return problem
    name = TokenizedGenerateReqInput.__struct_fields__[int(found[1]) - 1]  # the first is a tag
    if name == "sampling_params" and found[2] is not None:
        name = SamplingParams.__struct_fields__[int(found[2])]
    return f"{name}: {problem[: found.start()]}"
