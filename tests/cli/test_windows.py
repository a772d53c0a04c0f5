"""What does not run on Windows is refused there in one line."""

import sys

import pytest

from tests.commands import call


@pytest.mark.parametrize(
    "words",
    [
        ["deploy", "--config", "quickstart", "--out", "app"],
        ["node", "--config", "party.yaml"],
    ],
)
def test_real_parties_are_refused_in_one_line(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    line = f"error: {words[0]}: this command cannot run on Windows; use Linux, or the Windows "
    assert call(*words) == (2, "", line + "Subsystem for Linux\n")
    assert list(tmp_path.iterdir()) == []
