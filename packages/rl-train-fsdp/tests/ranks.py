"""A rank process for tests: runs scripts of engine calls that arrive on its standard input.

Started as a program (`python ranks.py`), once for the whole session, because importing torch and
transformers takes seconds. Each line of input is a JSON object that names a file holding the
rank's place, the engine's config and a list of calls; the results go to another file.
"""

import json
import logging
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rl_core.interfaces import RankPlace
from rl_core.plugins import build_config
from rl_core.versions import PolicyVersion
from rl_train_fsdp.config import FsdpConfig
from rl_train_fsdp.conversions import module_tensors
from rl_train_fsdp.engine import FsdpTrainEngine
from rl_train_fsdp.optimizer import local


class Script:
    """The calls a test can make besides the engine's own methods."""

    def __init__(self, place, config):
        self.place = place
        self.config = config
        self.engine = FsdpTrainEngine(build_config(FsdpConfig, config, "actor"), place)

    def tensors(self):
        """The whole stream, cloned: [(meta, tensor)]."""
        return [(meta, tensor.clone()) for meta, tensor in self.engine.get_per_tensor_param()]

    def manifest(self):
        return self.engine.manifest(PolicyVersion(1, 0), "run")

    def gradients(self):
        """Full gradients of the last step by module name."""
        model = self.engine._parts.policy.model
        return {name: tensor.grad.full_tensor() for name, tensor in module_tensors(model).items()}

    def watch_layers(self):
        """Count from now on how often the first decoder layer computes."""
        self.passes = 0

        def count(*_):
            self.passes += 1

        self.engine._parts.policy.model.base_model.layers[0].mlp.register_forward_pre_hook(count)

    def layer_passes(self):
        return self.passes

    def shards(self):
        """This rank's own shards."""
        model = self.engine._parts.policy.model
        return {name: local(t).detach().clone() for name, t in module_tensors(model).items()}

    def reference(self, samples):
        """Log-probs by a second engine in the same process, then its shutdown."""
        other = FsdpTrainEngine(self.engine._config, self.place)
        other.initialize()
        scores = other.compute_log_prob(samples)
        other.shutdown()
        return scores, dist.is_initialized()

    def draw(self):
        """Random numbers from torch's generator."""
        return torch.rand(3).tolist()

    def threads(self):
        return torch.get_num_threads()

    def gloo_threads(self):
        """How many threads run collectives, and of how many gloo devices, one for each group."""
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return names.count("pt_gloo_runloop"), names.count("gloo_tcp_loop")

    def lines(self):
        """What the package logged so far."""
        return list(LINES)

    def run(self, calls):
        results = []
        for name, *args in calls:
            method = getattr(self, name, None) or getattr(self.engine, name)
            results.append(method(*args))
        return results


LINES = []


class _Keep(logging.Handler):
    def emit(self, record):
        LINES.append(record.getMessage())


def say(word):
    """One word to the test, on its own line."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main():
    logger = logging.getLogger("rl_train_fsdp")
    logger.addHandler(_Keep())
    logger.setLevel(logging.INFO)
    say("ready")
    for line in sys.stdin:
        job = json.loads(line)
        LINES.clear()
        work = torch.load(job["work"], weights_only=False)
        script = None
        try:
            script = Script(RankPlace(**work["place"]), work["config"])
            results = script.run(work["calls"])
            outcome = {"results": results, "error": None}
        except Exception as error:  # noqa: BLE001  # the edge of the process
            trace = traceback.format_exc()
            outcome = {
                "results": None,
                "error": error,
                "kind": type(error).__name__,
                "trace": trace,
            }
        finally:
            if script is not None:
                script.engine.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group()
        torch.save(outcome, job["out"])
        say("done")


if __name__ == "__main__":
    main()
