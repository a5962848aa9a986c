"""Tables of rotary positions, as engines keep them."""

import torch

from rl_core.layout import Rotary


def rotary_table(row: Rotary) -> torch.Tensor:
    """Cosines and sines of all positions, (positions, dim), float32, on the host.

    Computed as both engines do (Su et al., RoFormer, section 3.2.2): an angle for each position
    and pair of elements, in float32, so that it is theirs to the last bit where they compute on
    the host.
    """
    positions = torch.arange(row.positions, dtype=torch.float32)
    angles = torch.einsum("i,j -> ij", positions, rotary_frequencies(row.dim, row.base))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotary_frequencies(dim: int, base: float) -> torch.Tensor:
    """Angles of the second position, (dim / 2,), float32, on the host."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / torch.pow(base, exponents)
