"""Lets a vLLM server that was started by anybody tell what its engine holds.

It is given to `vllm serve` as `--middleware rl_rollout_vllm.live_route.VllmLiveRoute`, and needs
`--worker-extension-cls rl_rollout_vllm.worker_extension.RolloutWorkerExtension`. Imported in vLLM's
API server; see `rl_core.rollout.live_route` for what it answers.
"""

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.gated_app import App, Message
from rl_core.rollout.live_ranks import together
from rl_core.rollout.live_route import LiveRoute

EXTENSION = "rl_rollout_vllm.worker_extension.RolloutWorkerExtension"
"""What the workers need; vLLM's `--worker-extension-cls`."""


class VllmLiveRoute(LiveRoute):
    """The route, for vLLM's `--middleware`."""

    def __init__(self, app: App) -> None:
        super().__init__(app, look)


async def look(scope: Message) -> LiveWeights:
    """Ask the worker extension in every rank of the application's engine."""
    client = scope["app"].state.engine_client
    try:
        return together("vllm", await client.collective_rpc("rl_live_weights"))
    except Exception as error:
        # Edge of the engine: what fails in its processes arrives as any kind of error.
        msg = (
            f"vLLM's workers, which need --worker-extension-cls {EXTENSION}, do not tell what they"
        )
        raise RolloutError(f"{msg} hold: {error}") from error
