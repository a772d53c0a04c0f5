"""What data and loss mean together: labels of one output, void labels, integer tables, classes."""

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import ArrayDataModule, TableDataModule, TensorDataModule
from models import LogisticRegression
from pfl.algorithms import FedAvg
from tests.problems import run

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def rows(data, tmp_path, outputs=1, network=None, **settings):
    """The rows of metrics.csv after two rounds of FedAvg."""
    torch.manual_seed(0)
    built = LogisticRegression(3, outputs) if network is None else network()
    method = FedAvg(built, lr=0.5, **settings)
    return run(method, data, 2, root=tmp_path, precision="32-true").trainer.recorder.rows


def of(targets, inputs=X):
    return TensorDataModule(inputs, targets, num_clients=2, batch_size=5)


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss])
def test_floating_labels_n_are_labels_n_1_of_one_output(engine, loss, tmp_path):
    flat = rows(of(Y.astype(np.float32)), tmp_path, loss=loss(), engine=engine)
    column = rows(of(Y.astype(np.float32)[:, None]), tmp_path, loss=loss(), engine=engine)
    assert flat == column
    assert max(value for key, value in flat[-1].items() if key.endswith("accuracy")) > 0.7


@pytest.mark.parametrize("engine", ["auto", "sequential", "vmap"])
@pytest.mark.parametrize(
    "loss", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss]
)
def test_values_n_are_values_n_1_of_one_output(engine, loss, tmp_path):
    values = X.sum(1).astype(np.float32)
    flat = rows(of(values), tmp_path, loss=loss(), engine=engine)
    assert flat == rows(of(values[:, None]), tmp_path, loss=loss(), engine=engine)
    if loss is nn.MSELoss:
        assert flat == rows(of(values), tmp_path, engine=engine)  # the default


def test_a_loss_of_ones_own_gets_values_as_they_are(tmp_path):
    """It may do without PyTorch's axis for one output."""

    class Own(nn.L1Loss):
        def forward(self, outputs, targets):
            assert targets.ndim == 1
            return super().forward(outputs.flatten(), targets)

    values = X.sum(1).astype(np.float32)
    expected = rows(of(values), tmp_path, loss=nn.L1Loss())
    assert rows(of(values), tmp_path, loss=Own()) == expected


def test_labels_of_a_csv_file_for_one_output(tmp_path):
    lines = [",".join(map(str, [*x, y])) for x, y in zip(X.tolist(), Y.tolist(), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,c,y", *lines, ""]))
    table = TableDataModule(
        tmp_path / "a.csv", "y", target_kind="numbers", num_clients=2, batch_size=5
    )
    loss = nn.BCEWithLogitsLoss()
    expected = rows(of(Y.astype(np.float32)), tmp_path, loss=loss)
    assert rows(table, tmp_path, loss=loss) == expected


def test_integer_labels_of_one_output_are_told_what_works(tmp_path, one_line):
    told = "num_classes=2, or, for one output with BCEWithLogitsLoss", "target_kind: numbers"
    with one_line(*told, "targets.float()"):
        rows(of(Y), tmp_path, loss=nn.BCEWithLogitsLoss())
    with one_line("num_classes=2, or, for a regression", "targets.float()"):
        rows(of(Y), tmp_path)


def test_floating_classes_are_told_what_works(tmp_path, one_line):
    with one_line("data: the targets", "targets.long(), or of target_kind: classes in a Table"):
        rows(of(Y.astype(np.float32)), tmp_path, outputs=2)


def test_integer_tables_are_told_what_works(tmp_path, one_line):
    with one_line('the inputs are torch.int64: make them floating, as inputs.astype("float32")'):
        rows(of(Y, np.arange(120).reshape(40, 3)), tmp_path, outputs=2)


GAPS = np.resize([3, 10, 700], 40)


def test_classes_that_do_not_occur_are_told(tmp_path):
    """Classes keep their numbers; a line says so, and none does where all classes occur."""
    said = (
        "targets: 3 of the classes 0 to 700 occur; they keep their numbers, so that a network "
        "needs 701 outputs"
    )
    np.savez(tmp_path / "gaps.npz", inputs=X, targets=GAPS)
    read = ArrayDataModule(file=tmp_path / "gaps.npz", num_clients=2)
    read.setup()
    for data in (read, ArrayDataModule(X, GAPS, num_clients=2), of(GAPS)):
        assert data.num_classes == 701
        assert data.conversions == [said]
    whole = TensorDataModule(X, 2 * Y, X[:5], np.ones(5, np.int64), num_clients=2)
    for data in (of(Y), of(Y.astype(np.float32)), whole):
        assert data.conversions == []


def test_too_few_outputs_for_classes_with_gaps_are_told_what_works(tmp_path, one_line):
    numbered = np.unique(GAPS, return_inverse=True)[1]
    assert rows(of(numbered), tmp_path, outputs=3)
    told = "num_classes=701", "and 3 of the classes 0 to 700 occur, which np.unique("
    with one_line(*told):
        rows(of(GAPS), tmp_path, outputs=3)


class Pixels(nn.Module):
    """Three outputs for each of four pixels."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 12)

    def forward(self, x):
        return self.head(x).view(-1, 3, 2, 2)


def test_a_void_label_is_that_which_the_loss_ignores(tmp_path, one_line):
    """With ignore_index=255, 255 is what -100 is without it."""
    classes = np.random.default_rng(1).integers(0, 3, (40, 2, 2))
    void = classes == 2
    classes[::3] = 2  # a third class that is not void
    void[::3] = False
    masked = [np.where(void, ignored, classes) for ignored in (255, -100)]
    loss = nn.CrossEntropyLoss(ignore_index=255)
    assert (masked[0] == 255).any()
    ignoring, usual = (
        rows(of(masked[0]), tmp_path, network=Pixels, loss=loss),
        rows(of(masked[1]), tmp_path, network=Pixels, loss=nn.CrossEntropyLoss()),
    )
    assert ignoring == usual
    told = "num_classes=256", "if 255 means that there is no class, make it -100", "ignore_index"
    with one_line("network: Pixels gives outputs of shape [3, 2, 2]", *told):
        rows(of(masked[0]), tmp_path, network=Pixels)
    with one_line("with 4 classes; give it num_classes=4"):
        rows(of(np.where(classes == 2, 3, masked[0])), tmp_path, network=Pixels, loss=loss)
