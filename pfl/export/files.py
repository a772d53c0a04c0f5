"""The files of an exported model: safetensors, FedSLR's factored form, ONNX."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pfl.errors import ConfigError
from pfl.files import write
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.exported import client_rows
from pfl.models.factored import factored

BATCH = 20  # samples, as in FedSLR's Table 9
REPEATS = 30


def save_network(network: nn.Module, path: Path) -> None:
    """Writes a network's state dict as a safetensors file."""
    from safetensors.torch import save as as_bytes

    tensors = {k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}
    write(path, as_bytes(tensors))


def factored_network(
    algorithm: FederatedAlgorithm, network: nn.Module, client: int | None
) -> nn.Module:
    """Returns a low-rank model of a method, perhaps a client's, as thin layers and a sparse part.

    The method is FedSLR, or one without personal models that keeps `ranks`; else a ConfigError.
    """
    ranks = getattr(algorithm, "ranks", None)
    if ranks is None:
        name = type(algorithm).__name__
        raise ConfigError(f"export: --factored: {name} has no low-rank model, as FedSLR has")
    global_is_sparse = getattr(algorithm, "global_component", None) == "sparse"
    personal_is_sparse = getattr(algorithm, "personal_component", None) == "sparse"
    if global_is_sparse or (client is not None and not personal_is_sparse):
        raise ConfigError(
            "export: --factored: it needs model.global_component: low_rank, and for --client "
            "model.personal_component: sparse"
        )
    space = algorithm.space
    sparse = None
    if client is not None:
        sparse = space.split(client_rows(algorithm, client).state["p"][0])
    names = [layer.name for layer in space.matrices]
    return factored(network, dict(zip(names, ranks.tolist(), strict=True)), sparse)


def measure(dense: nn.Module, thin: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """Returns the sizes and the latencies of a dense and a factored network, as in Table 9.

    The networks run in turn, so that other work on the machine slows both.
    """
    times: dict[str, list[float]] = {"dense": [], "factored": []}
    with torch.inference_mode():
        for number in range(REPEATS + 3):
            for name, network in (("dense", dense), ("factored", thin)):
                begun = time.perf_counter()
                network(inputs)
                if number >= 3:
                    times[name].append(1000 * (time.perf_counter() - begun))
        error = float((dense(inputs) - thin(inputs)).abs().max())
    return {
        "parameters": {"dense": _values(dense), "factored": _values(thin)},
        "milliseconds": {name: median(values) for name, values in times.items()},
        "batch": len(inputs),
        "threads": torch.get_num_threads(),
        "largest_difference": error,
    }


def _values(network: nn.Module) -> int:
    """Returns the number of values of a network, sparse parts included."""
    sparse = sum(getattr(module, "nonzero", 0) for module in network.modules())
    return sparse + sum(p.numel() for p in network.parameters())


def save_onnx(network: nn.Module, path: Path, inputs: Tensor) -> None:
    """Writes a network as an ONNX graph from `inputs` to `outputs`, for any number of samples.

    The graph computes in float32: runtimes have no float64 convolutions.
    """
    if inputs.is_floating_point():
        inputs = inputs.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own use of what it deprecates
        program = torch.onnx.export(
            copy.deepcopy(network).float(),
            (inputs,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("samples")},),
            input_names=["inputs"],
            output_names=["outputs"],
            verbose=False,
        )
    assert program is not None
    write(path, program.model_proto.SerializeToString())
