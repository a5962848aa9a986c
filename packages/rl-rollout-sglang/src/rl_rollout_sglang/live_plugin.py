"""Lets an SGLang server that was started by anybody tell what its engine holds.

SGLang calls `install` in each of its processes (entry point `sglang.srt.plugins`). SGLang's own
path `/weights_checker` then knows one action more, `ACTION`, which only reads: it takes no
parameters and answers digests, names of tensors and a few settings. Who may ask is up to SGLang, as
for its other actions (`--admin-api-key`). Nothing else changes.
"""

from typing import Any

import msgspec

ACTION = "rl_live_weights"
TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.check_weights"
)


def install() -> None:
    """Register the action; before the engine is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, check_weights, HookType.AROUND)


def check_weights(original: Any, manager: Any, request: Any) -> Any:
    """In place of SGLang's method, in every scheduler: answer `ACTION`, leave it the others.

    Args:
        original: SGLang's method.
        manager: its `self`.
        request: a `CheckWeightsReqInput`.

    Returns:
        A `CheckWeightsReqOutput`. Its message is the list of all ranks' `RankWeights` as JSON:
        SGLang carries no other data of ours.
    """
    if request.action != ACTION:
        return original(manager, request)
    import torch
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    group = manager.tp_cpu_group
    answers: list[Any] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(answers, _answer(manager), group=group)
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        return CheckWeightsReqOutput(success=False, message=failures[0])
    return CheckWeightsReqOutput(success=True, message=msgspec.json.encode(answers).decode())


def _answer(manager: Any) -> dict[str, Any] | str:
    """This rank's answer, or why there is none: the others wait for either."""
    from rl_rollout_sglang import live_weights

    try:
        return live_weights.of_runner(manager.tp_worker.model_runner)
    except Exception as error:  # noqa: BLE001 - edge of the process: SGLang would end everything
        return f"{type(error).__name__}: {error}"
