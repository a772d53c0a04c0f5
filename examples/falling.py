"""FedPD that skips fewer and fewer rounds, a line of its authors' code for Figure 2.

`PYTHONPATH=examples pfl reproduce results/fedpd-falling` runs it.
"""

from pfl.algorithms import FedPD
from pfl.method import generator


class FallingFedPD(FedPD):
    """Round r of T, counted from 1, is skipped with the probability 1 - r / T, and not with
    `skip_probability`, which has to be above 0."""

    def communicates(self, round_index: int) -> bool:
        """Returns True if a round (from 0) ends with communication, by a coin for all clients."""
        assert self.max_rounds is not None
        coin = generator(self.seed, "communication", round_index).random()
        return bool(coin >= 1 - (round_index + 1) / self.max_rounds)
