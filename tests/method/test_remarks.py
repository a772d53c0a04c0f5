"""What a run says to its user before the first round."""

import pytest
import torch
from torch import nn

from datamodules import Apply, Normalize, SplitOwn, TableDataModule, TensorDataModule
from pfl.algorithms import FedAvg
from pfl.telling import NAME
from tests.problems import run

# Means 3 and 40, standard deviations 1 and 0; the constant column is large, too.
ROWS = "site,small,large,y\n" + "a,2,40,0\na,4,40,1\nb,2,40,1\nb,4,40,0\n"
SAID = "data: 'large': mean or standard deviation above 10, which needs far smaller rates; "
SAID += "transforms: [Normalize] gives each column mean 0 and standard deviation 1"


class Divided(nn.Module):
    def forward(self, x):
        return x / 8


class Second(nn.Module):
    """The second column alone, so that the names of the table are not those of the inputs."""

    def forward(self, x):
        return x[:, 1:]


def said(caplog, tmp_path, data, network):
    """The lines that a run of one round says about its data."""
    method = FedAvg(network, lr=0.01, batch_size=None)
    with caplog.at_level("INFO", logger=NAME):
        run(method, data, 1, root=tmp_path, precision="32-true")
    return [record.message for record in caplog.records if record.message.startswith("data: ")]


@pytest.mark.parametrize(
    ("changes", "first", "lines"),
    [
        ((), nn.Identity(), [SAID]),
        ([Normalize()], nn.Identity(), []),
        ([Apply(Divided())], nn.Identity(), []),  # 5
        ([Apply(Second())], nn.Linear(1, 2), [SAID.replace("large", "0")]),
        ((), nn.BatchNorm1d(2), []),
        ((), nn.Linear(2, 2), [SAID]),
    ],
)
def test_large_columns_of_a_table_are_told(tmp_path, caplog, changes, first, lines):
    file = tmp_path / "rows.csv"
    file.write_text(ROWS)
    data = TableDataModule(
        file,
        "y",
        client_column="site",
        transforms=changes,
        protocol=SplitOwn(test=0.0, validation=0.0),
    )
    network = nn.Sequential(first, nn.Linear(2, 2))
    assert said(caplog, tmp_path, data, network) == lines


def test_columns_without_names_have_numbers_and_many_are_counted(tmp_path, caplog):
    """Columns 1 to 7 of 8 are large: their standard deviations are 10 k, of values 0 and 20 k."""
    inputs = torch.tensor([[0.0], [20.0]]) * torch.arange(8)
    inputs[:, 1] += 0.1  # a mean of 10.1; those of 0 and of ten exactly are not told
    data = TensorDataModule(
        inputs, torch.tensor([0, 1]), num_clients=1, protocol=SplitOwn(test=0.0, validation=0.0)
    )
    lines = said(caplog, tmp_path, data, nn.Linear(8, 2))
    assert lines == [SAID.replace("'large'", "'1', '2', '3', '4', '5' and 2 more")]


def test_images_are_not_measured(tmp_path, caplog):
    inputs = torch.full((2, 1, 2, 2), 255.0)
    data = TensorDataModule(
        inputs, torch.tensor([0, 1]), num_clients=1, protocol=SplitOwn(test=0.0, validation=0.0)
    )
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    assert said(caplog, tmp_path, data, network) == []
