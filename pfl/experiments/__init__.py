"""Many runs with one purpose: comparisons, tuning, and figures and tables of papers."""

from pfl.experiments.comparison import Comparison
from pfl.experiments.reproduction import Reproduction, comparison_of
from pfl.experiments.results import Results
from pfl.experiments.search import Search
from pfl.experiments.tuning import Tuned, Tuning

__all__ = ["Comparison", "Reproduction", "Results", "Search", "Tuned", "Tuning", "comparison_of"]
