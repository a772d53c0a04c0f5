"""Networks whose layers are two thin layers each, with a sparse part apart: FedSLR's form."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from .classifier import replace_layer

Factorable = (nn.Linear, nn.Conv2d)


class FactoredLayer(nn.Module):
    """A linear layer or convolution of low rank as two thin layers, plus a sparse part.

    The matrix of a linear layer is W = L R with r columns in L: R x is one layer, L the next. A
    convolution's is W[(o,u),(i,v)] = w[o,i,u,v] (FedSLR, footnote to Section 4), so that R is a
    convolution along rows, of 1 x d2, and L one along columns, of d1 x 1.

    The layer gives sizes, stride, padding, dilation and bias; `nonzero` values are in the sparse
    part.

    Example:
        >>> layer = FactoredLayer(torch.nn.Conv2d(8, 16, 3, padding=1), rank=2)
        >>> layer(torch.zeros(1, 8, 5, 5)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([1, 16, 5, 5]), 160)
    """

    index: Tensor
    values: Tensor
    sparse_weight: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, nonzero: int = 0) -> None:
        super().__init__()
        has_bias = layer.bias is not None
        like = layer.weight.new_empty(0)
        self.shape = tuple(layer.weight.shape)
        self.nonzero = nonzero
        self.settings: tuple | None = None
        self.first: nn.Module
        self.second: nn.Module
        if isinstance(layer, nn.Conv2d):
            d1, d2 = layer.kernel_size
            s1, s2 = layer.stride
            l1, l2 = layer.dilation
            p1, p2 = (int(p) for p in layer.padding)
            self.settings = (s1, s2), (p1, p2), (l1, l2)
            row = (1, d2), (1, s2), (0, p2), (1, l2)
            column = (d1, 1), (s1, 1), (p1, 0), (l1, 1)
            self.first = nn.Conv2d(layer.in_channels, rank, *row, bias=False)
            self.second = nn.Conv2d(rank, layer.out_channels, *column, bias=has_bias)
        else:
            self.first = nn.Linear(layer.in_features, rank, bias=False)
            self.second = nn.Linear(rank, layer.out_features, bias=has_bias)
        self.to(like)
        self.register_buffer("index", torch.zeros(nonzero, dtype=torch.int32))
        self.register_buffer("values", like.new_zeros(nonzero))
        self.register_buffer("sparse_weight", like.new_zeros(0), persistent=False)

    def place_sparse_part(self) -> None:
        """Computes the sparse part's weight from `index` and `values`, after these have changed."""
        if self.nonzero:
            weight = self.values.new_zeros(self.shape)
            weight.view(-1)[self.index.long()] = self.values
            self.sparse_weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if not self.nonzero:
            return y
        if self.settings is None:
            return y + linear(x, self.sparse_weight)
        stride, padding, dilation = self.settings
        return y + conv2d(x, self.sparse_weight, None, stride, padding, dilation)


def factored(
    network: nn.Module, ranks: Mapping[str, int], sparse: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Returns a copy of a network with thin layers wherever these have fewer values.

    A layer with the matrix d1 x d2 has r (d1 + d2) values in its thin layers. Linear layers and
    convolutions without groups are replaced, where that is less than d1 d2; others stay as they
    are, with their sparse part.

    The network's weights are w + p, w of low rank and p sparse. `ranks` are w's ranks by the name
    of the weight, such as "body.conv1.weight"; `sparse` are dense tensors p.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Linear(100, 50))
        >>> thin = factored(network, {"0.weight": 4})  # 4 * 150 + 50
        >>> sum(p.numel() for p in thin.parameters())
        650
    """
    result = copy.deepcopy(network)
    for name, rank in ranks.items():
        path, _, own = name.rpartition(".")
        layer = network.get_submodule(path)
        rank = max(1, rank)
        if own == "weight" and _thinner(layer, rank):
            part = None
            if sparse is not None:
                part = sparse[name]
            replace_layer(result, path, _factored_layer(layer, rank, part))
    return result


def load_factored(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns the network with the layers and values of a file that `factored` has led to.

    The network, of the same class and arguments, is changed. The tensors are as
    `safetensors.torch.load_file` returns them.

    Example:
        >>> thin = factored(torch.nn.Sequential(torch.nn.Linear(100, 50)), {"0.weight": 4})
        >>> network = torch.nn.Sequential(torch.nn.Linear(100, 50))
        >>> load_factored(network, thin.state_dict())[0].first.weight.shape
        torch.Size([4, 100])
    """
    ending = ".first.weight"
    for path in [name.removesuffix(ending) for name in tensors if name.endswith(ending)]:
        rank = len(tensors[path + ending])
        nonzero = len(tensors[f"{path}.index"])
        replace_layer(network, path, FactoredLayer(network.get_submodule(path), rank, nonzero))  # type: ignore[arg-type]
    network.load_state_dict(tensors)
    for module in network.modules():
        if isinstance(module, FactoredLayer):
            module.place_sparse_part()
    return network


def _thinner(layer: nn.Module, rank: int) -> bool:
    """Returns whether a layer can be two thin layers of this rank, and has fewer values then."""
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.padding_mode == "zeros"
        if not plain or isinstance(layer.padding, str):
            return False
    elif type(layer) is not nn.Linear:
        return False
    rows, columns = _matrix(layer.weight).shape
    return rank * (rows + columns) < rows * columns


@torch.no_grad()
def _factored_layer(layer: nn.Module, rank: int, sparse: Tensor | None) -> FactoredLayer:
    assert isinstance(layer, Factorable)
    weight = layer.weight
    index = torch.zeros(0)
    values = weight.new_zeros(0)
    if sparse is not None:
        weight = weight - sparse
        index = sparse.flatten().nonzero().flatten()
        values = sparse.flatten()[index]
    u, s, vh = torch.linalg.svd(_matrix(weight), full_matrices=False)
    root = s[:rank].sqrt()
    left = u[:, :rank] * root
    right = root[:, None] * vh[:rank]
    result = FactoredLayer(layer, rank, len(index))
    if isinstance(layer, nn.Conv2d):
        o, i, d1, d2 = layer.weight.shape
        left = left.view(o, d1, rank).transpose(1, 2).unsqueeze(3)
        right = right.view(rank, i, d2).unsqueeze(2)
    tensors = {"first.weight": right, "second.weight": left}
    if layer.bias is not None:
        tensors["second.bias"] = layer.bias
    result.load_state_dict({**tensors, "index": index, "values": values})
    result.place_sparse_part()
    return result


def _matrix(weight: Tensor) -> Tensor:
    """Returns the matrix of a weight, for a convolution o x i x d1 x d2 of size (o d1) x (i d2)."""
    if weight.ndim == 4:
        o, i, d1, d2 = weight.shape
        return weight.transpose(1, 2).reshape(o * d1, i * d2)
    return weight.flatten(1)
