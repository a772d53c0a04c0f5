"""Every method goes on from a checkpoint as if it had never stopped."""

import torch

from pfl import FederatedLoop
from tests.algorithms.methods import (
    BATCHES,
    EVERY_VARIANT,
    differing,
    everything,
    learned,
    small_network,
    small_world,
)
from tests.problems import quiet


def begin(root, method, rounds, seed, ckpt_path=None):
    """Train with checkpoints and evaluation; the algorithm."""
    algorithm = method.make(small_network(seed), lr_decay=0.9, **BATCHES)
    trainer = quiet(root, rounds, precision="64-true")
    count = None if method.everyone else 2
    loop = FederatedLoop(small_world(classes=method.classes), clients_per_round=count)
    trainer.fit(algorithm, datamodule=loop, ckpt_path=ckpt_path)
    return algorithm


@EVERY_VARIANT
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, method):
    """Bit for bit, although it resumes with another initial network: states and tables."""
    expected = begin(tmp_path / "straight", method, 4, 6)
    early = begin(tmp_path / "parts", method, 2, 6)
    last = early.trainer.run_dir / "checkpoints" / "last.ckpt"
    torch.load(last, weights_only=True)
    before = everything(early)
    actual = begin(tmp_path / "parts", method, 4, 7, last)
    assert differing(everything(actual), everything(expected)) == set()
    assert learned(differing(before, everything(actual)))
    files = ["metrics.csv", "clients.csv", *(f"{name}.csv" for name in actual.tables)]
    for file in files:
        one, other = ((a.trainer.run_dir / file).read_bytes() for a in (actual, expected))
        assert one == other, file
