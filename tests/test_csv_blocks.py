"""Tables of the recorder are written block by block; the blocks do not show in the file."""

import numpy as np
import pytest

from pfl.callbacks import recorder


@pytest.mark.parametrize("rows", [1, 2, 3, 100])  # of a block
def test_blocks_of_rows_do_not_show(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "CSV_ROWS", rows)
    columns = {"client": np.arange(5), "loss": np.array([0.1, np.nan, 1e-9, 2.0, 1 / 3])}
    path = tmp_path / "table.csv"
    recorder._write_csv(path, columns)
    recorder._write_csv(path, columns, append=True)
    lines = [f"{i},{x!r}\r\n" for i, x in enumerate(columns["loss"].tolist())]
    assert path.read_bytes().decode() == "client,loss\r\n" + "".join(lines) * 2
