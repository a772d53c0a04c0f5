"""Newton's method for clients' models that are coupled by a quadratic penalty."""

import math

import numpy as np

_STEPS = 200
_ACCURACY = 1e-10  # relative length of the last step; the remaining error is about its square
_FLAT = 1e-10  # curvature, relative to the curvature at 0, below which there is no solution


def coupled_step(
    hessians: np.ndarray, gradients: np.ndarray, own: np.ndarray, penalty: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns Newton's step for min over w and all w_i of mean_i [f_i(w_i) + λ/2 |w_i - w|^2].

    The variables are w and δ_i = w_i - w. The mean of all δ_i is 0: there the gradient of the
    penalty in w vanishes, and a step preserves this. With A_i = H_i + λI and r_i = g_i + λ δ_i, the
    steps s of w and d_i of δ_i solve A_i (s + d_i) - λ s = -r_i and mean_i d_i = 0. Therefore

        (mean_i λ A_i^-1 H_i) s = -mean_i λ A_i^-1 r_i,        d_i = -A_i^-1 (r_i + H_i s).

    No term is a difference of nearly equal numbers, however large or small λ is.

    Args:
        hessians: H_i of f_i at w_i, [M, P, P].
        gradients: g_i of f_i at w_i, [M, P].
        own: δ_i, [M, P].
        penalty: λ, from 0 to inf.

    Returns:
        s [P], d_i [M, P], and matrices that are positive definite if there is a solution: the
        Hessian in w after elimination of the w_i, [1, P, P], or for λ = 0 the Hessian of each
        client, [M, P, P]. A singular one raises `numpy.linalg.LinAlgError`.
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
    """Minimizes mean_i [f_i(w_i) + λ/2 |w_i - w|^2], where f_i is the mean cross entropy of W_i x.

    The method is Newton's with backtracking. Adding one vector to all rows of W and of all W_i does
    not change the objective; of all solutions the function returns the one whose rows add up to 0.

    Args:
        x: Inputs, [M, n, d].
        y: Classes, integers [M, n].
        classes: The number of classes.
        penalty: λ, from 0 to inf.

    Returns:
        w [P] and w_i [M, P], P = classes d, row by row. None if there is no finite solution: the
        samples of all clients together (for λ = 0, of any single client) are separable, so that
        the loss decreases without end in some direction.
    """
    loss = _Softmax(x, y, classes)
    common = np.zeros((classes - 1) * x.shape[2])
    own = np.zeros((len(x), len(common)))
    tie = 0.0 if math.isinf(penalty) else penalty / 2  # for inf, `own` stays 0

    def objective(common: np.ndarray, own: np.ndarray) -> float:
        """Returns the objective at w = `common` and w_i = `common` + `own`."""
        return float((loss.values(common + own) + tie * np.square(own).sum(1)).mean())

    flat = None
    for _ in range(_STEPS):
        gradients, hessians = loss.derivatives(common + own)
        try:
            s, d, curvature = coupled_step(hessians, gradients, own, penalty)
        except np.linalg.LinAlgError:
            return None
        eigenvalues = np.linalg.eigvalsh(curvature)
        if flat is None:
            flat = _FLAT * eigenvalues.max()
        if eigenvalues.min() <= flat:
            return None
        slope = float((gradients * (s + d) + 2 * tie * own * d).sum(1).mean())
        before = objective(common, own)
        length = 1.0
        rounding = 1e-14 * (1 + before)
        while objective(common + length * s, own + length * d) > (
            before + 1e-4 * length * slope + rounding
        ):
            length /= 2
        common = common + length * s
        own = own + length * d
        if np.abs(s + d).max() <= _ACCURACY * (1 + np.abs(common + own).max()):
            return loss.models(common[None])[0], loss.models(common + own)
    return None


class _Softmax:
    """The mean cross entropy of each client, as a function of Z [classes - 1, d] with W = B Z.

    The columns of B [classes, classes - 1] are orthonormal and orthogonal to the vector of ones.
    Therefore the rows of W add up to 0, and W and Z have the same distances.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: int) -> None:
        self.x = x
        self.hit = np.eye(classes)[y]
        start = np.eye(classes)
        start[:, 0] = 1  # makes the first column of Q constant
        self.basis = np.linalg.qr(start)[0][:, 1:]

    def models(self, z: np.ndarray) -> np.ndarray:
        """Returns W, row by row [M, classes d], from coordinates `z` [M, (classes - 1) d]."""
        return np.einsum("ck,mkd->mcd", self.basis, self._as_matrices(z)).reshape(len(z), -1)

    def values(self, z: np.ndarray) -> np.ndarray:
        """Returns the values of all f_i, [M]."""
        scores = self._scores(z)
        return (np.log(np.exp(scores).sum(-1)) - (scores * self.hit).sum(-1)).mean(1)

    def derivatives(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns gradients [M, Q] and Hessians [M, Q, Q] of all f_i, Q = (classes - 1) d."""
        x = self.x
        basis = self.basis
        clients, size = z.shape
        share = np.exp(self._scores(z))
        share /= share.sum(-1, keepdims=True)
        residual = (share - self.hit) @ basis
        own = share @ basis
        gradients = np.einsum("mnk,mnd->mkd", residual, x).reshape(z.shape)
        spread = np.einsum("ck,mnc,cl->mnkl", basis, share, basis)
        spread -= own[..., None] * own[..., None, :]
        hessians = np.einsum("mnkl,mnd,mne->mkdle", spread, x, x, optimize=True)
        return gradients / x.shape[1], hessians.reshape(clients, size, size) / x.shape[1]

    def _scores(self, z: np.ndarray) -> np.ndarray:
        """Returns the scores W_i x [M, n, classes], minus the largest score of each sample."""
        scores = np.einsum("mnd,mkd->mnk", self.x, self._as_matrices(z)) @ self.basis.T
        return scores - scores.max(-1, keepdims=True)

    def _as_matrices(self, z: np.ndarray) -> np.ndarray:
        return z.reshape(len(z), -1, self.x.shape[2])


def _solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]
