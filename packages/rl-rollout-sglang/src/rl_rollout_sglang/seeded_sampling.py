"""Sampling with one seed for each row, as SGLang's torch sampler wants it, for cpu.

SGLang's own hashes every element of the vocabulary with a kernel that is not on PyPI. One random
number for a row is enough: it is looked up in the row's cumulated probabilities.
"""

from typing import Any

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each (seed, position), float64; the same wherever it is computed."""
    seed = seeds.cpu().numpy().astype(np.int64).view(np.uint64)
    position = positions.cpu().numpy().astype(np.int64).view(np.uint64)
    mixed = _mixed(_mixed(seed) + position * _GOLDEN)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def multinomial_with_seed(
    log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample one column of each row; takes the place of SGLang's function of that name.

    Args:
        log_probs: [n, m], not necessarily normalised; -inf is never sampled.
        seeds: [n] of the requests.
        positions: [n] of the tokens to sample in their sequences.

    Returns:
        [n, 1] int64. A row's result does not depend on the others.
    """
    cumulated = log_probs.exp().cumsum(-1, dtype=torch.float64)
    wanted = uniform(seeds, positions).to(cumulated.device).view(-1, 1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True).clamp_(max=log_probs.shape[1] - 1)


def _mixed(value: Any) -> Any:
    """One round of SplitMix64's finaliser."""
    with np.errstate(over="ignore"):
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * _MIX[0]
        value = (value ^ (value >> np.uint64(27))) * _MIX[1]
        return value ^ (value >> np.uint64(31))
