"""What a run says to its user before the first round."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pfl.aggregation.privacy import PrivateMean
from pfl.datamodules import FederatedDataModule, TensorSamples
from pfl.rounds.loop import FederatedLoop
from pfl.telling import tell

LARGE = 10.0  # a mean or standard deviation of a column
LOOKED_AT = 1000  # training samples whose columns are measured
NAMED = 5  # columns that are named


def tell_conversions(loop: FederatedLoop) -> None:
    """Says in what the samples differ from what was read, a line for each change."""
    for line in loop.datamodule.conversions:
        tell(f"data: {line}")


def tell_large_columns(loop: FederatedLoop, network: nn.Module) -> None:
    """Says which columns of a table are so large that the usual rates do not suit them.

    A rate that suits a column of size 1 suits one of size s if it is s^2 times smaller, at which
    the weights of the other columns hardly move. Networks that begin with a normalization are left
    out.
    """
    if "Norm" in type(_first_layer(network)).__name__:
        return
    large = _large_columns(loop.datamodule)
    if not large:
        return
    named = ", ".join(map(repr, large[:NAMED]))
    if len(large) > NAMED:
        named += f" and {len(large) - NAMED} more"
    tell(
        f"data: {named}: mean or standard deviation above {LARGE:.0f}, which needs far smaller "
        f"rates; transforms: [Normalize] gives each column mean 0 and standard deviation 1"
    )


def _large_columns(data: FederatedDataModule) -> list[str]:
    """Returns the names of large columns, or their numbers; none unless samples are vectors.

    Samples that are not in memory are not read, since that may take long.
    """
    if not data.has_samples:
        return []
    samples = data.samples
    if not isinstance(samples, TensorSamples) or samples.inputs.ndim != 2:
        return []
    number = int(data.partition.train.sizes.sum())
    if not number:
        return []
    places = np.linspace(0, number - 1, min(number, LOOKED_AT)).round().astype(np.int64)
    indices = torch.from_numpy(data.partition.train.flat[places])
    owners = torch.from_numpy(data.partition.train.owners[places])
    try:
        inputs = data.transforms(samples.gather(indices)[0], owners, indices)
    except Exception:  # of the user's transform; the run will say in which round and client
        return []
    if not inputs.is_floating_point() or inputs.ndim != 2:
        return []
    inputs = inputs.double()
    sizes = torch.maximum(inputs.mean(0).abs(), inputs.std(0, correction=0)).tolist()
    names = data.feature_names
    if names is None or len(names) != len(sizes):  # a transform makes other columns
        names = [str(column) for column in range(len(sizes))]
    large = []
    for name, size in zip(names, sizes, strict=True):
        if size > LARGE and name not in data.category_levels:  # which has codes of levels
            large.append(name)
    return large


def _first_layer(network: nn.Module) -> nn.Module:
    """Returns the first module with parameters of its own, or else the network."""
    for module in network.modules():
        if list(module.parameters(recurse=False)):
            return module
    return network


def tell_doubt(private: PrivateMean | None, loop: FederatedLoop) -> None:
    """Says in one line where the δ of a private run is so large that its ε says little."""
    if private is not None and private.doubt():
        tell(f"loop.privacy.delta: {private.accountant.delta:.2g} is {private.doubt()}")
    if loop.sample_privacy is not None:
        doubt = loop.sample_privacy.doubt(loop.datamodule.client_sizes)
        if doubt:
            tell(doubt)
