"""The two projects of datamodules/README.md run as they stand on the page."""

import re

import pytest

from tests.commands import ROOT, finish

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "datamodules" / "README.md").read_text(), re.S)
# Lines after a project: which modules of pfl it has loaded beside the data modules.
OTHERS = """
import sys
names = {name for name in sys.modules if name.split(".")[0] == "pfl"}
print(sorted(name for name in names if not name.startswith("pfl.datamodules")))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("block", "needs"), [(0, "torch"), (1, "transformers")])
def test_a_client_of_the_page_learns(tmp_path, block, needs):
    pytest.importorskip(needs)
    lines = finish("-c", BLOCKS[block] + OTHERS, cwd=tmp_path, fresh=True).splitlines()
    # Guessing one of ten classes is right for a tenth of the samples.
    assert float(lines[-2].split()[-1]) > 0.5
    assert lines[-1] == "['pfl']"
