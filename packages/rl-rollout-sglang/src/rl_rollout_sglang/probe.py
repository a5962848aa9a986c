"""Asks a running SGLang, whoever started it, what it holds. Imports nothing of SGLang."""

import msgspec

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_ranks import together
from rl_core.rollout.probed_server import ProbedServer, said
from rl_rollout_sglang.live_plugin import ACTION


def probe(address: str, timeout: float) -> LiveWeights | None:
    """What the SGLang behind `address` (`host:port`) holds; None if it is no SGLang.

    Through our route where the server has it, which is where we started it, else through SGLang's
    `/weights_checker`, which our plugin teaches to answer.

    Errors: RolloutError if nobody answers, or SGLang was started without the plugin.
    """
    server = ProbedServer(address, timeout)
    _, model = server.ask("/model_info")
    if not isinstance(model, dict) or "model_path" not in model:
        return None
    found = server.live_weights()
    if found is not None:
        return found
    status, content = server.ask("/weights_checker", {"action": ACTION})
    if status != 200 or not isinstance(content, dict):
        words = said(status, content)
        if "Unsupported" in words or status in {404, 405}:
            words = "install rl-rollout-sglang where it runs, and start it again"
        msg = f"the SGLang at {address} does not tell what it holds: {words}"
        raise RolloutError(msg)
    try:
        answers = msgspec.json.decode(str(content.get("message")))
    except msgspec.DecodeError as error:
        msg = f"the SGLang at {address} answers for none, or for more than one engine"
        raise RolloutError(msg) from error
    return together("sglang", answers)
