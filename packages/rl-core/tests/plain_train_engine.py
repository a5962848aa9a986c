"""A bigram model trained by hand, replicated on every rank: enough to hold the train contract."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_core.errors import LifecycleError
from rl_core.interfaces import TrainEngine
from rl_core.metadata import Manifest
from rl_core.testing.weights_directory import save_weights
from rl_core.torch import meta_of
from rl_core.trajectory import LogProbs


@dataclass
class PlainConfig:
    lr: float
    vocab: int = 11
    hidden: int = 4


class PlainTrainEngine(TrainEngine):
    def __init__(self, config, place):
        self._config, self._place, self._weights = config, place, None
        self._kept = {}
        self._begun = None

    def initialize(self):
        if self._place.world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{self._place.master_address}:{self._place.master_port}",
                rank=self._place.rank,
                world_size=self._place.world_size,
            )
        generator = torch.Generator().manual_seed(3)
        shape = (self._config.vocab, self._config.hidden)
        self._weights = {
            "embed.weight": torch.randn(shape, generator=generator, requires_grad=True),
            "head.weight": torch.randn(shape, generator=generator, requires_grad=True),
        }
        self._momentum = {name: torch.zeros(shape) for name in self._weights}

    def _score(self, sample):
        if self._weights is None:
            raise LifecycleError("initialize comes first")
        before = torch.tensor([sample.prompt_ids[-1], *sample.response_ids[:-1]])
        logits = self._weights["embed.weight"][before] @ self._weights["head.weight"].t()
        log_probs = torch.log_softmax(logits / sample.temperature, -1)
        chosen = log_probs.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def compute_log_prob(self, samples):
        with torch.no_grad():
            scores = [self._score(sample) for sample in samples]
        return [LogProbs(chosen.tolist(), entropy.tolist()) for chosen, entropy in scores]

    def update_policy(self, samples):
        loss, entropies = torch.zeros(()), []
        for sample in samples:
            chosen, entropy = self._score(sample)
            weights = torch.tensor(sample.loss_mask) * torch.tensor(sample.advantages)
            loss = loss - (weights * chosen).sum()
            entropies.append(entropy.mean().detach())
        weights = list(self._weights.values())
        gradients = torch.autograd.grad(loss, weights)
        metrics = torch.stack([loss.detach(), torch.stack(entropies).mean()])
        for value in (metrics, *gradients):
            self._reduce(value)
        # Momentum by hand: importing torch.optim costs seconds.
        with torch.no_grad():
            for momentum, weight, gradient in zip(
                self._momentum.values(), weights, gradients, strict=True
            ):
                momentum.mul_(0.9).add_(gradient)
                weight.sub_(self._config.lr * momentum)
        return {
            "loss": float(metrics[0]),
            "entropy": float(metrics[1]),
            "grad_norm": float(torch.stack([item.norm() for item in gradients]).norm()),
            "lr": self._config.lr,
            "kl": 0.0,
            "clip_fraction": 0.0,
            "optimizer_steps": 1.0,
        }

    def _reduce(self, value):
        if self._place.world_size > 1:
            dist.all_reduce(value)

    def manifest(self, version, run_id):
        metas = tuple(meta_of(name, weight) for name, weight in self._weights.items())
        return Manifest(version, metas, run_id)

    def get_per_tensor_param(self):
        for name, weight in self._weights.items():
            yield meta_of(name, weight), weight.detach()

    def save_checkpoint(self, path):
        if self._place.rank == 0:
            path.mkdir(exist_ok=True)
            state = {"weights": self._weights, "momentum": self._momentum}
            torch.save(state, path / "state")
        self._barrier()

    def begin_checkpoint(self, path):
        if self._begun is not None:
            raise LifecycleError("finish the one before first")
        self._begun = (path, copy.deepcopy((self._weights, self._momentum)))

    def checkpoint_written(self):
        return self._begun is None

    def finish_checkpoint(self, timeout_s):
        if self._begun is None:
            return
        path, state = self._begun
        now = (self._weights, self._momentum)
        self._weights, self._momentum = state
        self.save_checkpoint(path)
        (self._weights, self._momentum), self._begun = now, None

    def load_checkpoint(self, path):
        state = torch.load(path / "state")
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(state["weights"][name])
        self._momentum = state["momentum"]

    def save_pretrained(self, path):
        if self._place.rank == 0:
            save_weights({name: item.detach() for name, item in self._weights.items()}, path)
        self._barrier()

    def _barrier(self):
        if self._place.world_size > 1:
            dist.barrier()

    def perturb(self, delta):
        if self._kept:
            raise LifecycleError("perturbed already")
        with torch.no_grad():
            self._kept = {name: item.clone() for name, item in self._weights.items()}
            for weight in self._weights.values():
                weight.add_(delta)

    def restore(self):
        with torch.no_grad():
            for name, weight in self._kept.items():
                self._weights[name].copy_(weight)
        self._kept = {}

    def offload(self):
        pass

    def onload(self):
        pass

    def shutdown(self):
        if dist.is_initialized():
            dist.destroy_process_group()


class DriftsWithoutRate(PlainTrainEngine):
    """Weight decay is applied whatever the learning rate is."""

    def update_policy(self, samples):
        with torch.no_grad():
            for weight in self._weights.values():
                weight.mul_(1 - 1e-6)
        return super().update_policy(samples)


class StreamsOldCopy(PlainTrainEngine):
    """What is published was copied once."""

    old = None

    def get_per_tensor_param(self):
        self.old = self.old or {
            name: weight.detach().clone() for name, weight in self._weights.items()
        }
        for name, weight in self.old.items():
            yield meta_of(name, weight), weight


class WritesWhatCameLater(PlainTrainEngine):
    """Nothing is copied when a checkpoint is begun."""

    def begin_checkpoint(self, path):
        super().begin_checkpoint(path)
        self._begun = (path, (self._weights, self._momentum))


class ForgetsOptimizer(PlainTrainEngine):
    """A checkpoint restores weights only."""

    def load_checkpoint(self, path):
        momentum = self._momentum
        super().load_checkpoint(path)
        self._momentum = momentum


class LearnsFromMaskedTokens(PlainTrainEngine):
    def update_policy(self, samples):
        return super().update_policy(
            [
                type(item)(
                    item.prompt_ids, item.response_ids, [1] * len(item.loss_mask), item.advantages
                )
                for item in samples
            ]
        )


class ForgetsToReduce(PlainTrainEngine):
    """Every rank learns from its own samples only."""

    def _reduce(self, value):
        pass


class SavesSomethingElse(PlainTrainEngine):
    def save_pretrained(self, path):
        save_weights({name: item.detach() * 1.001 for name, item in self._weights.items()}, path)


class StreamsInAnotherOrder(PlainTrainEngine):
    def get_per_tensor_param(self):
        yield from list(super().get_per_tensor_param())[::-1]


class PerturbsOneTensor(PlainTrainEngine):
    def perturb(self, delta):
        super().perturb(delta)
        with torch.no_grad():
            self._weights["head.weight"].copy_(self._kept["head.weight"])


class RestoresRounded(PlainTrainEngine):
    """Close to what was there, not the same bits."""

    def restore(self):
        self._kept = {name: item.bfloat16() for name, item in self._kept.items()}
        super().restore()
