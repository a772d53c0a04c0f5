"""Each method runs each task as its paper says, or refuses it in one line, as the page says."""

from pathlib import Path

import pytest

from tests.algorithms.task_cells import TASKS, cell, column, refusals

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
OFTEN = ("regression", "pixels", "next token")
CASES = [pytest.param(key, marks=[] if key in OFTEN else pytest.mark.slow, id=key) for key in TASKS]


@pytest.mark.parametrize("key", CASES)
def test_the_table_of_the_page_is_what_methods_do(key, tmp_path):
    cells = column(TASKS[key], tmp_path)
    assert not [name for name, line in cells.items() if "\n" in line]
    assert [name for name, line in cells.items() if line == "FedAvg"] == []
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    assert [row[1:] for row in rows if key in row[0].split("; ")] == [[refusals(cells)]]


@pytest.mark.parametrize(("name", "said"), [("FedMD", ""), ("MOON", "FedAvg"), ("FedProto", "Loc")])
def test_a_frozen_body(name, said, tmp_path):
    """Public samples pass through all of a network whose frozen body runs once for the clients';
    a penalty on features that nothing moves would leave another method."""
    line = cell(name, TASKS["classes, a frozen body"], tmp_path)
    if not said:
        assert line == ""
        return
    assert line.startswith("model.trainable: the head alone is trained, so that the penalty of ")
    assert f"{name} would be {said}" in line
