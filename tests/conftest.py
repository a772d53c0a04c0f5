"""What all tests share."""

import os

# Before torch is imported, and so that processes which tests start inherit it: the tests run in
# one process per core, where a second thread only gets in the way. W&B never asks for a network.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import torch

torch.set_num_threads(1)
