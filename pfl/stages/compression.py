"""Five compressors of what clients send; `loop.stages` takes one (docs/stages.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.datamodules.ranges import Count, PositiveShare, Range
from pfl.parameters import Layer
from pfl.stages.compressor import Compressor, Known, pack, unpack
from pfl.stages.stage import Initial, Served

__all__ = ["QSGD", "PowerSGD", "RandomK", "SignEF", "TopK"]


class TopK(Compressor):
    """The k values of an update that are largest in size, with error feedback.

    C(x)_j = x_j for the k largest |x_j|, and 0 elsewhere: |C(x) - x|^2 <= (1 - k/d) |x|^2
    (Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Aji and Heafield, EMNLP
    2017). What was left out is added to the client's next update.

    k values travel, and their places with ceil(log2 d) bits each.

    Args:
        share: k as a share of the d values; at least one value is sent.
        messages: The names of the messages that are compressed.

    Example:
        >>> topk = TopK(share=0.5)
        >>> known = Known(size=4)
        >>> parts = topk.encode(torch.tensor([1.0, -3.0, 0.5, 2.0]), known)
        >>> parts["values"], parts["places"].shape  # two places of 2 bits
        (tensor([-3.,  2.]), torch.Size([1]))
        >>> topk.decode(parts, known)
        tensor([ 0., -3.,  0.,  2.])
    """

    error_feedback: ClassVar[bool] = True

    def __init__(self, share: PositiveShare, messages: Sequence[str] = ("w",)) -> None:
        super().__init__(messages)
        self.share = share

    def encode(self, x: Tensor, known: Known) -> dict[str, Tensor]:
        count = _count(self.share, known.size)
        places = x.abs().topk(count, sorted=False).indices.sort().values
        return {"values": x[places], "places": pack(places, _bits(known.size))}

    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        values = parts["values"]
        places = unpack(parts["places"], len(values), _bits(known.size))
        update = values.new_zeros(known.size)
        update[places.to(values.device)] = values
        return update


class RandomK(Compressor):
    """k values of an update at random places, scaled so that their expectation is the update.

    C(x)_j = (d/k) x_j for k places drawn without replacement, and 0 elsewhere: E C(x) = x and
    E |C(x) - x|^2 = (d/k - 1) |x|^2. Server and client draw the same places, so that k values
    travel and nothing else.

    Args:
        share: k as a share of the d values; at least one value is sent.
        messages: The names of the messages that are compressed.
    """

    def __init__(self, share: PositiveShare, messages: Sequence[str] = ("w",)) -> None:
        super().__init__(messages)
        self.share = share

    def encode(self, x: Tensor, known: Known) -> dict[str, Tensor]:
        return {"values": x[self._places(known).to(x.device)]}

    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        values = parts["values"]
        update = values.new_zeros(known.size)
        update[self._places(known).to(values.device)] = values * (known.size / len(values))
        return update

    def _places(self, known: Known) -> Tensor:
        count = _count(self.share, known.size)
        drawn = known.draws().choice(known.size, count, replace=False)
        return torch.from_numpy(drawn).sort().values


class QSGD(Compressor):
    """Stochastic quantization to a few levels between 0 and the norm of an update.

    C(x)_j = |x| sign(x_j) l_j / s with l_j = floor(a_j) or floor(a_j) + 1, where a_j = s |x_j|/|x|
    and the larger one has the probability a_j - floor(a_j): E C(x) = x and E |C(x) - x|^2 <=
    min(d/s^2, sqrt(d)/s) |x|^2 (Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017,
    Lemma 3.1). A bit for each sign travels, ceil(log2(s + 1)) bits for each level, and the norm;
    the paper's Elias codes would be shorter where most levels are 0.

    Args:
        levels: s.
        messages: The names of the messages that are compressed.
    """

    def __init__(
        self,
        levels: Annotated[int, Range(least=1, most=32767, whole=True)],
        messages: Sequence[str] = ("w",),
    ) -> None:
        super().__init__(messages)
        self.levels = levels

    def encode(self, x: Tensor, known: Known) -> dict[str, Tensor]:
        norm = x.norm()
        scaled = x.abs().double() / norm.double().clamp_min(1e-300) * self.levels
        drawn = torch.from_numpy(known.draws().random(known.size)).to(x.device)
        levels = (scaled + drawn).floor().clamp_max(self.levels).long()
        return {"norm": norm[None], "codes": pack(2 * levels + (x < 0), self._bits)}

    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        norm = parts["norm"]
        codes = unpack(parts["codes"], known.size, self._bits).to(norm.device)
        levels = codes >> 1
        if int(levels.max()) > self.levels:
            raise ValueError(f"level {int(levels.max())} of {self.levels}")
        return norm * (levels * (1 - 2 * (codes & 1))).to(norm) / self.levels

    @property
    def _bits(self) -> int:
        """The bits of a level and a sign."""
        return self.levels.bit_length() + 1


class SignEF(Compressor):
    """The signs of an update with the mean of its sizes, with error feedback.

    C(x) = (|x|_1 / d) sign(x): |C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2 (Karimireddy,
    Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD", ICML 2019). A bit for each value travels
    (0 has the sign +), and one number.

    Args:
        messages: The names of the messages that are compressed.
    """

    error_feedback: ClassVar[bool] = True

    def encode(self, x: Tensor, known: Known) -> dict[str, Tensor]:
        return {"size": x.abs().mean()[None], "signs": pack((x < 0).long(), 1)}

    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        size = parts["size"]
        signs = 1 - 2 * unpack(parts["signs"], known.size, 1)
        return size * signs.to(size)


class PowerSGD(Compressor):
    """Two factors of rank r for each matrix of an update, with error feedback.

    M is sent as P = orth(M Q) and R = M' P, and read as P R' = P P' M; R is the client's Q of its
    next round, and the first Q is drawn (Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019). The
    paper's workers share P and R of their sum, which a server that reads messages once cannot have:
    here each client has its own. |C(M) - M|^2 <= |M|^2. Convolutions are matrices as
    `pfl.parameters.Layer` has them. 1-D parameters, and matrices that have no more values than
    their factors, are sent as they are.

    Args:
        rank: r.
        messages: The names of the messages that are compressed; they must be models or updates.
    """

    error_feedback: ClassVar[bool] = True

    def __init__(self, rank: Count, messages: Sequence[str] = ("w",)) -> None:
        super().__init__(messages)
        self.rank = rank

    def states(self) -> dict[str, Initial]:
        # The factors R of a model have fewer values than the model.
        return super().states() | {self.start(name): 0.0 for name in self.messages}

    def start(self, name: str) -> str:
        """Returns the name of the client state with the last R, or zeros."""
        return f"PowerSGD start of {name}"

    def encode_for(
        self, clients: Clients, row: int, name: str, x: Tensor, known: Known
    ) -> dict[str, Tensor]:
        return self.encode(x, known, clients.state[self.start(name)][row])

    def remember(self, clients: Clients, name: str, payload: Mapping[str, Tensor]) -> None:
        start = clients.state[self.start(name)].clone()
        start[:, : payload["right"].shape[1]] = payload["right"]
        clients.state[self.start(name)] = start

    def encode(self, x: Tensor, known: Known, start: Tensor | None = None) -> dict[str, Tensor]:
        draws = known.draws()
        matrices = _matrices(self._served, self.rank, known)
        left = [x[:0]]
        right = [x[:0]]
        used = 0
        for matrix in matrices:
            m = matrix.layer.to_matrix(x[matrix.span])
            q = x.new_zeros(matrix.columns * self.rank)
            if start is not None:
                q = start[used : used + len(q)].to(x)
            if not q.any():
                q = torch.from_numpy(draws.standard_normal(len(q))).to(x)
            basis = torch.linalg.qr(m @ q.view(matrix.columns, self.rank))[0]
            left.append(basis.flatten())
            right.append((m.T @ basis).flatten())
            used += len(q)
        rest = x[_outside(matrices, x)]
        return {"left": torch.cat(left), "right": torch.cat(right), "rest": rest}

    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        matrices = _matrices(self._served, self.rank, known)
        update = parts["rest"].new_empty(known.size)
        update[_outside(matrices, update)] = parts["rest"]
        left = parts["left"].view(-1, self.rank)
        right = parts["right"].view(-1, self.rank)
        for matrix in matrices:
            product = left[: matrix.rows] @ right[: matrix.columns].T
            update[matrix.span] = matrix.layer.from_matrix(product)
            left = left[matrix.rows :]
            right = right[matrix.columns :]
        return update


class _Matrix(NamedTuple):
    """A layer whose update is a matrix, and the layer's place among the values that travel."""

    layer: Layer
    span: slice
    rows: int
    columns: int


def _matrices(served: Served, rank: int, known: Known) -> list[_Matrix]:
    """Returns the matrices of an update whose factors are smaller; none if it is no model's."""
    travels = torch.ones(known.size, dtype=torch.bool)
    if known.mask is not None:
        travels = known.mask.cpu()
    if len(travels) != served.size:
        return []
    found = []
    for layer in served.layers:
        shape = layer.matrix_shape
        if shape is None or not travels[layer.span].all():
            continue
        if rank * sum(shape) < layer.size:
            begin = int(travels[: layer.start].sum())
            found.append(_Matrix(layer, slice(begin, begin + layer.size), *shape))
    return found


def _outside(matrices: Sequence[_Matrix], x: Tensor) -> Tensor:
    """Returns which of the values of an update [K] are in none of its matrices, bool [K]."""
    rest = torch.ones_like(x, dtype=torch.bool)
    for matrix in matrices:
        rest[matrix.span] = False
    return rest


def _count(share: float, size: int) -> int:
    """Returns how many of some values a share is, at least one."""
    return max(1, round(share * size))


def _bits(size: int) -> int:
    """Returns the bits of a place among some values."""
    return max(1, (size - 1).bit_length())
