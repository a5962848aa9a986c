"""The adapter: feeds one engine rank with weights; what it does is `rl_core.rollout.adapter`."""

from rl_core.rollout.adapter import StreamingAdapter


class VllmAdapter(StreamingAdapter):
    """Puts weights into one rank of a vLLM replica."""
