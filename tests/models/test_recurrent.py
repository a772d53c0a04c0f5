"""LEAF's recurrent networks: their parameters, and their cells by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from models import LSTM, CharLSTM, Sent140LSTM


def trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def cell(inputs: int, hidden: int) -> int:
    """TensorFlow's BasicLSTMCell: a kernel [inputs + hidden, 4 hidden] and one bias."""
    return (inputs + hidden) * 4 * hidden + 4 * hidden


def test_char_lstm_has_the_parameters_of_leaf():
    expected = 80 * 8 + cell(8, 256) + cell(256, 256) + 256 * 80 + 80
    assert trainable(CharLSTM()) == expected == 817_872


def test_sent140_lstm_has_the_parameters_of_leaf():
    """Without the word vectors; the linear layer has 128 units."""
    expected = 2 * cell(100, 100) + 100 * 128 + 128 + 128 * 2 + 2
    assert trainable(Sent140LSTM(vocabulary=7)) == 7 * 100 + expected


def test_given_word_vectors_stay_as_they_are(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(9, 300)).astype(np.float32)
    np.save(tmp_path / "glove.npy", vectors)
    network = Sent140LSTM(embeddings=str(tmp_path / "glove.npy"))
    expected = cell(300, 100) + cell(100, 100) + 100 * 128 + 128 + 128 * 2 + 2
    assert trainable(network) == expected
    assert np.array_equal(network.body.embedding.weight.numpy(), vectors)


def test_cells_are_leafs():
    """One layer by hand; gates i, f, g, o as in PyTorch, and 1 is added for the forget gate."""
    torch.manual_seed(0)
    network = LSTM(vocabulary=6, num_classes=3, embedding=4, hidden=5, layers=1).double()
    lstm = network.body.lstm
    with torch.no_grad():
        lstm.bias_ih_l0.normal_()
    x = torch.randint(6, (2, 7))
    h = c = torch.zeros(2, 5, dtype=torch.float64)
    for t in range(7):
        z = network.body.embedding.weight[x[:, t]] @ lstm.weight_ih_l0.T + lstm.bias_ih_l0
        i, f, g, o = (z + h @ lstm.weight_hh_l0.T).split(5, 1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    torch.testing.assert_close(network(x), h @ network.head.weight.T + network.head.bias)


def test_scores_of_every_token_are_those_of_the_text_up_to_there():
    torch.manual_seed(0)
    network = CharLSTM(num_classes=6, hidden=5, every_token=True)
    last = CharLSTM(num_classes=6, hidden=5)
    last.load_state_dict(network.state_dict())
    x = torch.randint(6, (2, 4))
    scores = network(x)
    assert scores.shape == (2, 6, 4)
    for t in range(4):
        torch.testing.assert_close(scores[:, :, t], last(x[:, : t + 1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, r"^LSTM\.hidden: 0; it must be at least 1$"),
        ({"embeddings": "none.npy"}, r"^LSTM\.embeddings: none\.npy; there is no such file$"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LSTM(**arguments)


def test_vectors_other_than_a_matrix_are_refused(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros(4))
    with pytest.raises(ValueError, match=r"it must hold a matrix, and has shape \[4\]$"):
        LSTM(embeddings=str(tmp_path / "flat.npy"))
