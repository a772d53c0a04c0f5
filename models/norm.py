"""GroupNorm in the place of BatchNorm, for networks of any origin."""

from typing import Any

from torch import nn

from .classifier import Classifier, replace_layer

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def replace_batch_norm(network: Classifier | nn.Module, groups: int = 2) -> nn.Module:
    """Replaces every BatchNorm of a network by GroupNorm, in place, and returns the network.

    BatchNorm's running statistics mix the data of clients that differ, and rule out the batched
    engines. The scales and shifts of the layers are kept. In a YAML file the function stands where
    a class would: `class_path: pfl.models.replace_batch_norm`, with the network in `init_args`.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> replace_batch_norm(network, groups=4)[1].num_groups
        4
    """
    if isinstance(network, BATCH_NORMS):
        return _group_norm("network", network, groups)
    for name, module in list(network.named_modules()):
        if isinstance(module, BATCH_NORMS):
            replace_layer(network, name, _group_norm(name, module, groups))
    return network


def _group_norm(name: str, norm: Any, groups: int) -> nn.Module:
    channels = norm.num_features
    if groups < 1 or channels % groups:
        raise ValueError(
            f"replace_batch_norm.groups: {groups}; it must divide {channels}, the channels of "
            f"layer {name}"
        )
    layer = nn.GroupNorm(groups, channels, norm.eps, norm.affine)
    if norm.affine:
        layer.weight = norm.weight
        layer.bias = norm.bias
    if isinstance(getattr(norm, "act", None), nn.Module):  # timm's layers of norm and activation
        return nn.Sequential(layer, getattr(norm, "drop", nn.Identity()), norm.act)
    return layer
