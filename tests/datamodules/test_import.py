"""What imports of `datamodules` and `models` load, and that the public names are found."""

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


@pytest.mark.processes
@pytest.mark.parametrize("module", ["pfl.datamodules", "pfl.models"])
def test_data_modules_and_networks_load_no_other_module_of_pfl(tmp_path, module):
    """No guard of a run's processes either; when imported, and when a first class is used."""
    code = f"""
import sys, {module} as package
print(*(m for m in sys.modules if m.split(".")[0] == "pfl" and not m.startswith("{module}")))
package.DigitsDataModule(3).setup() if "data" in "{module}" else package.MLP(3)
print(*(m for m in sys.modules if m.split(".")[0] == "pfl" and not m.startswith("{module}")))
"""
    assert finish("-c", code, cwd=tmp_path, fresh=True) == "pfl\n" * 2


def test_every_name_that_type_checkers_read_is_public_and_found():
    """A name that the imports give twice, or that its module lacks, would show here."""
    source = (ROOT / "datamodules" / "__init__.py").read_text().splitlines()
    lines = [line.split() for line in source if line.startswith("    from pfl.datamodules.")]
    assert [line[3] for line in lines] == [line[5] for line in lines]  # import X as X
    assert sorted(line[3] for line in lines) == datamodules.__all__
    assert len(set(datamodules.__all__)) == len(datamodules.__all__) <= len(dir(datamodules))
    for _, module, _, name, *_ in lines:
        assert getattr(datamodules, name).__module__ == module
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        datamodules.Nothing  # noqa: B018
