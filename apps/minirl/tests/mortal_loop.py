"""The trainer's loop with plain parts in place of Ray, torch and an engine, in a process that dies.

Weights are a few numbers; what is sampled depends on them, on the request's seed, and nothing else.
An update depends on the samples, on momentum, and on a random generator.
"""

import copy
import json
import os
import random
import signal
import threading
import time
from functools import cache
from types import SimpleNamespace

import xxhash

from minirl.config import load_config
from minirl.resume import FRESH, find_resumption
from minirl.run_output import RunOutput, create_run_dir, open_run_dir
from minirl.run_state import VERSION_FILE
from minirl.trainer import Trainer
from rl_core.trajectory import Completion, LogProbs, VersionSpan
from rl_core.versions import PolicyVersion, VersionStore

STEPS = 6
WRITING_S = 0.004


class Fate:
    """Kills the process when it has been asked so many times."""

    def __init__(self, moments=None):
        self.moments, self.left = 0, moments
        self._lock = threading.Lock()

    def ask(self):
        with self._lock:
            self.moments += 1
            if self.moments == self.left:
                os.kill(os.getpid(), signal.SIGKILL)


class PlainWorkers:
    """The actor ranks."""

    world_size = 2

    def __init__(self, fate):
        self._fate = fate
        self.state = {"weights": [0.1, 0.2], "momentum": [0.0, 0.0], "random": [1, 2]}
        self._thread = None

    def call(self, method, *args, timeout_s):
        self._fate.ask()
        result = getattr(self, method)(*args)
        self._fate.ask()
        return [result]

    def call_rank(self, rank, method, *, timeout_s):
        return self.call(method, timeout_s=timeout_s)[0]

    def call_each(self, method, arguments, *, timeout_s):
        self._fate.ask()
        parts = [arguments(rank)[0] for rank in range(self.world_size)]
        return getattr(self, f"_{method}")(parts)

    def _compute_log_prob(self, parts):
        return [[LogProbs([-1.0] * len(s.response_ids), [1.0]) for s in part] for part in parts]

    def _update_policy(self, parts):
        total = sum(sum(s.response_ids) * s.advantages[0] for part in parts for s in part)
        state = self.state
        for rank, seed in enumerate(state["random"]):
            drawn = random.Random(seed)
            momentum = 0.9 * state["momentum"][rank] + total + drawn.random()
            state["momentum"][rank] = momentum
            state["weights"][rank] += 0.01 * momentum
            state["random"][rank] = drawn.randrange(1 << 30)
        self._fate.ask()
        return [{"loss": total, "grad_norm": 1.0}] * len(parts)

    def tells_update_scores(self):
        return False

    def begin_checkpoint(self, path):
        assert self._thread is None
        kept = copy.deepcopy(self.state)
        self._thread = threading.Thread(target=self._write, args=(path, kept))
        self._thread.start()

    def checkpoint_written(self):
        return not self._thread.is_alive()

    def finish_checkpoint(self, timeout_s):
        self._thread.join(timeout_s)
        self._thread = None

    def load_checkpoint(self, path):
        with open(f"{path}/state.json") as file:
            self.state = json.load(file)

    def save_pretrained(self, path):
        with open(f"{path}.json", "w") as file:
            json.dump(self.state, file)

    def _write(self, path, state):
        os.mkdir(path)
        text = json.dumps(state)
        with open(f"{path}/state.json", "w") as file:
            for part in (text[:20], text[20:]):
                self._fate.ask()
                file.write(part)
                file.flush()
                time.sleep(WRITING_S)
        self._fate.ask()


class PlainSync:
    """Publishes by digest; what was expected has to be what is there."""

    def __init__(self, fate, workers, versions):
        self._fate, self._workers, self._versions = fate, workers, versions
        self._digests = {}
        self.served = None

    def version_of(self, epoch, step):
        return PolicyVersion(epoch, step)

    def expect(self, version, digest):
        self._digests[version] = digest

    def digest_of(self, version):
        return self._digests.get(version)

    def sync(self, version, phase):
        self._fate.ask()
        self._versions.record(version)
        weights = json.dumps(self._workers.state["weights"])
        digest = xxhash.xxh3_64_hexdigest(weights.encode())
        assert self._digests.setdefault(version, digest) == digest
        self.served = (version, weights)
        return SimpleNamespace(error=None)

    def catch_up(self, version):
        pass

    def release(self):
        pass


class PlainRollout:
    def __init__(self, fate, sync):
        self._fate, self._sync = fate, sync

    def generate(self, requests):
        self._fate.ask()
        return [self._complete(request) for request in requests]

    def _complete(self, request):
        version, weights = self._sync.served
        drawn = random.Random(f"{weights} {request.sampling.seed} {request.prompt_ids}")
        tokens = [drawn.randrange(50) for _ in range(4)]
        spans = [VersionSpan(version, 0, 4)]
        return Completion(request.request_id, tokens, [-1.0] * 4, "length", spans)


class Torn:
    """A file that can die in the middle of what it is given."""

    def __init__(self, file, fate):
        self._file, self._fate = file, fate

    def write(self, content):
        for part in (content[: len(content) // 2], content[len(content) // 2 :]):
            self._fate.ask()
            self._file.write(part)
            self._file.flush()

    def __getattr__(self, name):
        return getattr(self._file, name)


@cache
def parsed(arguments):
    """A configuration; reading one takes longer than a step here."""
    return load_config(arguments)


def configured(run_dir, **changes):
    """Of a run that can be killed and resumed."""
    values = {
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 2,
        "trainer.report_to": "[]",
        "data.train_batch_size": 3,
        "data.num_generations": 4,
        "algorithm.ppo_mini_batch_size": 12,
        **changes,
    }
    resume = values.pop("trainer.resume", None)
    config = copy.deepcopy(parsed(tuple(f"{key}={value}" for key, value in values.items())))
    config.trainer.run_dir = None if run_dir is None else str(run_dir)
    config.trainer.resume = None if resume is None else str(resume)
    return config


def run(config, data, model, fate):
    """One incarnation, in this process."""
    resumption = find_resumption(config)
    if resumption is None:
        beginning, run_dir = FRESH, create_run_dir(config.trainer.run_dir)
    else:
        resumption.check(config, model)
        if resumption.checkpoint is not None:
            data.loader.load_state(resumption.state.data)
        run_dir = open_run_dir(resumption.run_dir)
        beginning = resumption.begin(run_dir)
    workers = PlainWorkers(fate)
    sync = PlainSync(fate, workers, VersionStore(run_dir / VERSION_FILE))
    system = SimpleNamespace(workers=workers, weight_sync=sync, rollout=PlainRollout(fate, sync))
    with RunOutput(run_dir, config, beginning.state) as output:
        output._metrics = Torn(output._metrics, fate)
        output._trajectories = Torn(output._trajectories, fate)
        Trainer(config, data, output, system, beginning).fit()
