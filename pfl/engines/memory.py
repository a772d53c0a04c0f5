"""How many clients the memory of a GPU can train at once."""

from __future__ import annotations

import torch

from pfl.engines.batch import Batch
from pfl.engines.oracle import Oracle


def clients_that_fit(oracle: Oracle, batch: Batch, vectors: int, share: float) -> int:
    """Returns how many clients fit into a share of the free memory of the batch's GPU; at least 1.

    The memory of a gradient of two clients is measured, since what a network's layers keep cannot
    be computed. The batch is one client's, as large as any; `vectors` is the number of vectors of P
    values that a client needs besides, models and client states.
    """
    device = batch.inputs.device
    w = oracle.space.vector.detach().repeat(2, 1)
    inputs, targets = (x.repeat_interleave(2, 0) for x in (batch.inputs, batch.targets))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    oracle.gradient(w, Batch(inputs, targets, batch.counts * 2))
    of_step = (torch.cuda.max_memory_allocated(device) - before) / 2
    of_batch = batch.inputs.nbytes + batch.targets.nbytes
    each = of_step + of_batch + vectors * w[0].nbytes
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    return max(1, int(share * free / each))
