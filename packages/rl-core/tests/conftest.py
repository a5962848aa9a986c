import torch

from rl_core.testing.summary import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

torch.set_num_threads(1)  # tensors here are tiny
