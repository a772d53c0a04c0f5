"""Newton's method for clients' models that a quadratic penalty ties together."""

from __future__ import annotations

import math

import numpy as np

_STEPS = 200
_ACCURACY = 1e-10  # of the last step, relative; the error behind it is about its square
_FLAT = 1e-10  # curvature relative to that at 0 below which there is no solution


def coupled_step(
    hessians: np.ndarray, gradients: np.ndarray, own: np.ndarray, penalty: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Newton's step for min over w and all w_i of mean_i [f_i(w_i) + λ/2 |w_i - w|^2].

    The variables are w and δ_i = w_i - w, whose mean is 0: there the gradient in w vanishes, and a
    step keeps it so. With A_i = H_i + λI and r_i = g_i + λ δ_i, the steps s of w and d_i of δ_i
    solve A_i (s + d_i) - λ s = -r_i and mean_i d_i = 0. So

        (mean_i λ A_i^-1 H_i) s = -mean_i λ A_i^-1 r_i,        d_i = -A_i^-1 (r_i + H_i s).

    No term is a difference of nearly equal ones, however large or small λ is.

    Args:
        hessians: H_i of f_i at w_i, [M, P, P].
        gradients: g_i of f_i at w_i, [M, P].
        own: δ_i, [M, P].
        penalty: λ, from 0 to inf.

    Returns:
        s [P], d_i [M, P], and the matrices whose curvature decides whether there is a solution: of
        w after elimination of the w_i, [1, P, P], or for λ = 0 of each client, [M, P, P].

    Raises:
        numpy.linalg.LinAlgError: One of these is singular.
    """
    if penalty == 0:
        steps = -_solve(hessians, gradients)
        return steps.mean(0), steps - steps.mean(0), hessians
    if math.isinf(penalty):
        curvature = hessians.mean(0)
        return -_solve(curvature, gradients.mean(0)), np.zeros_like(own), curvature[None]
    prox = hessians + penalty * np.eye(hessians.shape[-1])
    residuals = gradients + penalty * own
    curvature = penalty * np.linalg.solve(prox, hessians).mean(0)
    common = -_solve(curvature, penalty * _solve(prox, residuals).mean(0))
    return common, -_solve(prox, residuals + hessians @ common), (curvature + curvature.T)[None] / 2


def coupled_softmax(
    x: np.ndarray, y: np.ndarray, classes: int, penalty: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Solve min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] for f_i the mean cross entropy of W_i x.

    Newton's method with backtracking. One vector added to all rows of all W_i and W changes
    nothing, so there is a space of solutions: this is the one in which the rows add up to zero.

    Args:
        x: Inputs, [M, n, d].
        y: Classes, integers [M, n].
        penalty: λ, from 0 to inf.

    Returns:
        w [P] and w_i [M, P], P = classes d, row by row; None where no finite solution exists: the
        samples of all clients (for λ = 0, of one of them) can be separated, so that the loss falls
        forever along some direction.
    """
    loss = _Softmax(x, y, classes)
    common = np.zeros((classes - 1) * x.shape[2])
    own = np.zeros((len(x), len(common)))
    tie = 0.0 if math.isinf(penalty) else penalty / 2  # for inf, own stays 0

    def objective(common: np.ndarray, own: np.ndarray) -> float:
        return float((loss.values(common + own) + tie * np.square(own).sum(1)).mean())

    flat = None
    for _ in range(_STEPS):
        gradients, hessians = loss.derivatives(common + own)
        try:
            s, d, curvature = coupled_step(hessians, gradients, own, penalty)
        except np.linalg.LinAlgError:
            return None
        eigenvalues = np.linalg.eigvalsh(curvature)
        flat = _FLAT * eigenvalues.max() if flat is None else flat
        if eigenvalues.min() <= flat:
            return None
        slope = float((gradients * (s + d) + 2 * tie * own * d).sum(1).mean())
        before, length = objective(common, own), 1.0
        rounding = 1e-14 * (1 + before)
        while objective(common + length * s, own + length * d) > (
            before + 1e-4 * length * slope + rounding
        ):
            length /= 2
        common, own = common + length * s, own + length * d
        if np.abs(s + d).max() <= _ACCURACY * (1 + np.abs(common + own).max()):
            return loss.models(common[None])[0], loss.models(common + own)
    return None


class _Softmax:
    """Mean cross entropy of each client, in coordinates Z [classes - 1, d] of W = B Z.

    B [classes, classes - 1] has orthonormal columns that are orthogonal to ones, so W's rows add up
    to zero, and distances are the same in both.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: int) -> None:
        self.x, self.hit = x, np.eye(classes)[y]
        start = np.eye(classes)
        start[:, 0] = 1  # so the first column of Q is the constant one
        self.basis = np.linalg.qr(start)[0][:, 1:]

    def models(self, z: np.ndarray) -> np.ndarray:
        """W, row by row [M, classes d], of coordinates [M, (classes - 1) d]."""
        return np.einsum("ck,mkd->mcd", self.basis, self._shaped(z)).reshape(len(z), -1)

    def values(self, z: np.ndarray) -> np.ndarray:
        """f_i, [M]."""
        scores = self._scores(z)
        return (np.log(np.exp(scores).sum(-1)) - (scores * self.hit).sum(-1)).mean(1)

    def derivatives(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradients [M, Q] and Hessians [M, Q, Q]."""
        x, basis, (clients, size) = self.x, self.basis, z.shape
        share = np.exp(self._scores(z))
        share /= share.sum(-1, keepdims=True)
        residual, own = (share - self.hit) @ basis, share @ basis
        gradients = np.einsum("mnk,mnd->mkd", residual, x).reshape(z.shape)
        spread = np.einsum("ck,mnc,cl->mnkl", basis, share, basis)
        spread -= own[..., None] * own[..., None, :]
        hessians = np.einsum("mnkl,mnd,mne->mkdle", spread, x, x, optimize=True)
        return gradients / x.shape[1], hessians.reshape(clients, size, size) / x.shape[1]

    def _scores(self, z: np.ndarray) -> np.ndarray:
        """W_i x [M, n, classes], less the largest of each sample."""
        scores = np.einsum("mnd,mkd->mnk", self.x, self._shaped(z)) @ self.basis.T
        return scores - scores.max(-1, keepdims=True)

    def _shaped(self, z: np.ndarray) -> np.ndarray:
        return z.reshape(len(z), -1, self.x.shape[2])


def _solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]
