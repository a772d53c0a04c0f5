"""What imports of `datamodules` and `models` load, and that the public names are the stub's."""

import pytest

import datamodules
from tests.commands import ROOT, finish

SCRIPT = """
import sys, tempfile
import numpy as np
import datamodules

heavy = ("torch", "lightning", "torchvision", "sklearn", "scipy", "pandas", "matplotlib", "pyarrow")
print(*(name for name in heavy if name in sys.modules))
from datamodules import Dirichlet, Given, Natural, Sampled, SplitOwn, Within
from pfl.datamodules.protocols.protocol import Pool
labels, rng = np.arange(60) % 3, np.random.default_rng(0)
rules = [Within(Natural(labels), Sampled(4)), Dirichlet(1.0, min_size=1)]
for rule in rules:
    owned = rule.assign(labels, 3, rng)
    partition = SplitOwn().split(owned, Pool(labels, 60, 60), rng)
file = tempfile.mkdtemp() + "/p.npz"
partition.save(file)
assert Given(file).count() == 3
print(*(name for name in heavy if name in sys.modules))

import models
print(*({"torchvision", "lightning", "pfl.datamodules.base"} & set(sys.modules)))
"""


@pytest.mark.processes
def test_rules_need_numpy_only_and_models_no_framework(tmp_path):
    """The large packages that Python has loaded after the import of rules, their use, and models.

    `models` needs PyTorch only: no framework, no data set, no torchvision.
    """
    assert finish("-c", SCRIPT, cwd=tmp_path, fresh=True) == "\n" * 3


def test_every_name_of_the_stub_is_public_and_found():
    """A name that the stub gives twice, or that its module lacks, would show here."""
    stub = (ROOT / "datamodules" / "__init__.pyi").read_text().splitlines()
    lines = [line.split() for line in stub if line.startswith("from ")]
    assert [line[3] for line in lines] == [line[5] for line in lines]  # import X as X
    assert sorted(line[3] for line in lines) == datamodules.__all__
    assert len(set(datamodules.__all__)) == len(datamodules.__all__) <= len(dir(datamodules))
    for _, module, _, name, *_ in lines:
        assert getattr(datamodules, name).__module__ == module
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        datamodules.Nothing  # noqa: B018
