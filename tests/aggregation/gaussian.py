"""What the Gaussian mechanism reveals, in closed form."""

import math

from scipy import stats


def gaussian_delta(epsilon, sensitivity):
    """δ of the Gaussian mechanism of deviation 1 (Balle and Wang 2018, Theorem 8)."""
    a = sensitivity / 2
    b = epsilon / sensitivity
    return stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b))
