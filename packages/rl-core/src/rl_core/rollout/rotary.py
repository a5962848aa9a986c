"""Tables of rotary positions, as engines keep them."""

import torch

from rl_core.layout import Rotary


def rotary_table(row: Rotary) -> torch.Tensor:
    """Cosines and sines of all positions, (positions, dim), float32, on the host.

    Computed as both engines do (Su et al., RoFormer, section 3.2.2): an angle for each position
    and pair of elements, in float32, so that it is theirs to the last bit where they compute on
    the host.
    """
    exponents = torch.arange(0, row.dim, 2, dtype=torch.float32) / row.dim
    frequencies = 1.0 / (row.base**exponents)
    positions = torch.arange(row.positions, dtype=torch.float32)
    angles = torch.einsum("i,j -> ij", positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
