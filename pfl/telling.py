"""Lines about a run that its user must see before training, on the command line too.

In what the samples differ from what was read; that the run ends before its last round. Other
remarks go to Lightning's logger, which the command line silences, apart from what an option or a
callback of Lightning's was asked to show: a profile, a model's summary, a reason to stop.
"""

import logging

from lightning.pytorch.utilities import rank_zero_only

# Below Lightning's own logger, whose handler shows the lines.
NAME = "lightning.pytorch.pfl"
ASKED_FOR = ("lightning.pytorch.callbacks", "lightning.pytorch.profilers")


@rank_zero_only
def tell(line: str) -> None:
    """Says a line, in the first process of a run."""
    logging.getLogger(NAME).info(line)


def be_heard() -> None:
    """Has the lines shown where Lightning's own are silenced."""
    for name in (NAME, *ASKED_FOR):
        logging.getLogger(name).setLevel(logging.INFO)
