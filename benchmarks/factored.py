"""Time of a ResNet-18 with thin layers, of the sizes of FedSLR's Table 9, beside the dense one.

`python -m benchmarks.factored > docs/data/results/fedslr-table9.csv` takes a minute. Batches are 20
images of 32 x 32; CPU time on one thread, the two networks in turn. The ranks are those that a
threshold leaves of the initial weights: a trained network's are spread over its layers otherwise.
"""

import csv
import sys
import time

import torch

from models import ResNet18
from models.factored import factored

torch.set_num_threads(1)
torch.manual_seed(0)
dense, images = ResNet18(), torch.randn(20, 3, 32, 32)
values: dict[str, torch.Tensor] = {}
for name, weight in dense.named_parameters():
    if weight.ndim > 1:
        matrix = weight.detach()
        if weight.ndim == 4:  # (o d1) x (i d2) of a convolution
            matrix = matrix.transpose(1, 2).flatten(2).flatten(0, 1)
        values[name] = torch.linalg.svdvals(matrix)
rows = csv.writer(sys.stdout)
rows.writerow(["threshold", "parameters", "repeat", "dense_ms", "factored_ms"])
for threshold in (0.0, 0.898, 0.952, 1.026, 1.221, 1.407):
    thin = factored(dense, {k: int((v > threshold).sum()) for k, v in values.items()})
    size = sum(p.numel() for p in thin.parameters())
    with torch.inference_mode():
        for repeat in range(-1, 4):  # the first is a warm-up
            times = []
            for network in (dense, thin):
                begun = time.process_time()
                network(images)
                times.append(round(1000 * (time.process_time() - begun)))
            if repeat >= 0:
                rows.writerow([threshold, size, repeat, *times])
