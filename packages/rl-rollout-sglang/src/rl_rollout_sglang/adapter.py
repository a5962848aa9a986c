"""The adapter: feeds one engine rank with weights; what it does is `rl_core.rollout.adapter`."""

from rl_core.rollout.adapter import StreamingAdapter


class SglangAdapter(StreamingAdapter):
    """Puts weights into one rank of an SGLang replica."""
