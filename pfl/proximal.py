"""Proximal operators: Prox_{t h}(x) = argmin_z h(z) + |z - x|^2 / (2 t), in closed form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pfl.parameters import ParameterSpace

Prox = Callable[[Tensor, float], Tensor]
"""A function of a tensor and a threshold that returns the proximal point."""


def soft_threshold(x: Tensor, threshold: float) -> Tensor:
    """Returns the prox of threshold * |x|_1: sign(x) max(|x| - threshold, 0), elementwise.

    The tensor may have any shape. The result is exactly zero where |x| <= threshold.

    Example:
        >>> soft_threshold(torch.tensor([-3.0, 0.5, 2.0]), 1.0)
        tensor([-2.,  0.,  1.])
    """
    return torch.nn.functional.softshrink(x, threshold)


def singular_value_threshold(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns the prox of threshold * (nuclear norm) of matrices x.

    For x = U diag(s) V' the prox is U diag(max(s - threshold, 0)) V'.

    Args:
        x: Matrices [..., m, n].
        threshold: At least 0; with 0 the matrices are returned unchanged.

    Returns:
        The thresholded matrices, and the rank of each (int64, shape [...]). A matrix with a value
        that is not finite, which has no singular values, gives NaN.

    References:
        Cai, Candes, Shen, "A singular value thresholding algorithm for matrix completion", 2010.

    Example:
        >>> matrix, rank = singular_value_threshold(torch.diag(torch.tensor([3.0, 1.0])), 2.0)
        >>> int(rank)
        1
    """
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, x, 0.0), full_matrices=False)
    kept = s - threshold
    if threshold == 0:  # no rounding; the rank as in NumPy and MATLAB
        tolerance = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
        return x, (s > tolerance).sum(-1)
    kept = kept.clamp_min(0)
    return torch.where(finite, (u * kept.unsqueeze(-2)) @ vh, torch.nan), (kept > 0).sum(-1)


def nuclear_norm_prox(space: ParameterSpace, w: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Applies `singular_value_threshold` to every matrix layer; 1-D layers stay as they are.

    Args:
        space: The layers of the models.
        w: Flat models [..., P].
        threshold: At least 0.

    Returns:
        The models [..., P], and the ranks int64 [..., number of matrix layers].
    """
    result = w.clone()
    ranks = []
    for layer in space.matrices:
        matrix, rank = singular_value_threshold(layer.to_matrix(w[..., layer.span]), threshold)
        result[..., layer.span] = layer.from_matrix(matrix)
        ranks.append(rank)
    if not ranks:
        return result, w.new_zeros((*w.shape[:-1], 0), dtype=torch.int64)
    return result, torch.stack(ranks, -1)
