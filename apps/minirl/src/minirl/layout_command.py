"""`minirl layout`: what each rank of a rollout engine holds of a model, by the backend's table.

Starts nothing and reads no weights.
"""

from collections.abc import Sequence

from minirl.config import load_config
from minirl.devices import detect_device
from minirl.live_plan import layout_of
from minirl.models import resolve_model
from minirl.plan import rollout_config
from rl_core import plugins
from rl_core.layout_text import described


def layout_lines(arguments: Sequence[str]) -> list[str]:
    """The table's lines.

    Args:
        arguments: a model's directory (none: that of the configuration), then `key=value`s.

    Errors: ConfigError for a wrong key, a directory without a model, an architecture or a backend
    without a table.
    """
    given = list(arguments)
    model = given.pop(0) if given and "=" not in given[0] else None
    config = load_config(given)
    path, _ = resolve_model(model or config.actor.model_config.local_path)
    backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, config.rollout.name)
    device = detect_device(config.cluster.device)
    return list(described(layout_of(backend, path, rollout_config(config, path), device)))
