"""Registers as many bytes of ones as it is told, says where, and stays until it is killed."""

import sys
import time

import torch

from rl_ckpt_mooncake.transfer import Listening, Transfer

owner = Transfer(Listening("127.0.0.1", "tcp"))
memory = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
owner.register(memory.data_ptr(), memory.numel(), "memory")
sys.stdout.write(f"{owner.session} {memory.data_ptr()}\n")
sys.stdout.flush()
time.sleep(120)
