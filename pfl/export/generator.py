"""FedGen's generator, as a file that plain PyTorch reads."""

from __future__ import annotations

from pathlib import Path

import torch

from pfl.algorithms import FedGen
from pfl.export.files import BATCH, save_network, save_onnx
from pfl.files import make_folder, write

GENERATOR = """\
# FedGen: the generator

It makes features of a class, inputs of the head of the run's models, from standard normal noise.

```python
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import one_hot

layers = nn.Linear({inputs}, {hidden}), nn.ReLU(), nn.Linear({hidden}, {features})
generator = nn.Sequential(*layers).to({dtype}).eval()
generator.load_state_dict(load_file("model.safetensors"))

labels = torch.arange({classes})
noise = torch.randn({classes}, {noise}, dtype={dtype})
features = generator(torch.cat([noise, one_hot(labels, {classes}).to(noise)], 1))
```
"""


def save_generator(algorithm: FedGen, folder: Path, onnx: bool) -> Path:
    """Writes the generator of a method, and the lines that load it; returns the folder."""
    make = algorithm.make
    network = make.network(algorithm.generator)
    inputs = make.noise + make.classes
    make_folder(folder, "export: --out")
    if onnx:
        save_onnx(network, folder / "model.onnx", torch.zeros(BATCH, inputs))
        write(
            folder / "README.md",
            f"# FedGen: the generator\n\n`inputs` are {make.noise} numbers of standard normal "
            f"noise, then a 1 at the place of the class among {make.classes}; `outputs` are "
            "features.\n",
        )
        return folder
    save_network(network, folder / "model.safetensors")
    text = GENERATOR.format(
        inputs=inputs,
        hidden=make.hidden,
        features=make.features,
        classes=make.classes,
        noise=make.noise,
        dtype=algorithm.generator.dtype,
    )
    write(folder / "README.md", text)
    return folder
