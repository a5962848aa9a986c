"""Asks a running vLLM, whoever started it, what it holds. Imports nothing of vLLM."""

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_ranks import together
from rl_core.rollout.probed_server import ProbedServer, said
from rl_rollout_vllm.live_route import EXTENSION

ROUTE = "rl_rollout_vllm.live_route.VllmLiveRoute"


def probe(address: str, timeout: float) -> LiveWeights | None:
    """What the vLLM behind `address` (`host:port`) holds; None if it is no vLLM.

    Through our route where the server has it, else through vLLM's own `/collective_rpc`, which it
    has in its development mode.

    Errors: RolloutError if nobody answers, or vLLM was not started with the worker extension.
    """
    server = ProbedServer(address, timeout)
    _, version = server.ask("/version")
    if not isinstance(version, dict) or "version" not in version:
        return None
    found = server.live_weights()
    if found is not None:
        return found
    status, content = server.ask("/collective_rpc", {"method": "rl_live_weights"})
    if status == 200 and isinstance(content, dict):
        return together("vllm", content.get("results", ()))
    words = "" if status in {404, 405} else f" ({said(status, content)})"
    msg = (
        f"the vLLM at {address} does not tell what it holds{words}: start it with "
        f"--worker-extension-cls {EXTENSION} --middleware {ROUTE}"
    )
    raise RolloutError(msg)
