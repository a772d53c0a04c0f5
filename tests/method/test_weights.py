"""Runs that begin with the weights of a file or of another run."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models import MLP, HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, FedPer, LocalTrain
from pfl.errors import ConfigError
from tests.problems import quiet, run, scalar_problem


def values(network):
    return nn.utils.parameters_to_vector(network.parameters()).detach().clone()


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_file_gives_the_first_values(tmp_path, kind):
    torch.manual_seed(1)
    theirs = MLP(4, (3,), 2)
    path = tmp_path / f"model.{kind}"
    if kind == "pt":
        torch.save(theirs.state_dict(), path)
    else:
        save_file(theirs.state_dict(), path)
    torch.manual_seed(2)
    method = FedAvg(MLP(4, (3,), 2), weights=str(path))
    assert torch.equal(method.global_model, values(theirs))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert method.initial_weights == {"file": str(path), "sha256": digest}


def test_a_run_begins_where_another_has_ended(tmp_path):
    """One step a round on (w - 1)^2 / 2 multiplies w - 1 by 1/2: 2, 1 after the first run; the
    second begins there and ends at 1 + 1/4."""
    problem = scalar_problem([1.0])
    settings = dict(lr=0.5, batch_size=None, loss=HalfSquaredError())
    first = FedAvg(problem.network(3.0), **settings)
    loop = FederatedLoop(problem.datamodule)
    quiet(tmp_path, 1, precision="64-true").fit(first, datamodule=loop)
    for place in ("run", "run/checkpoints/last.ckpt"):
        method = FedAvg(problem.network(7.0), weights=str(tmp_path / place), **settings)
        run(method, problem, 2, root=tmp_path / "second")
        assert float(method.global_model) == pytest.approx(1.25, abs=1e-12)


def lacks(state):
    del state["head.bias"]


def has_more(state):
    state["extra"] = torch.zeros(1)


def is_wider(state):
    state["head.weight"] = torch.zeros(2, 9)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lacks, "lacks head.bias of MLP; it must have all values"),
        (has_more, "has extra, which MLP has not"),
        (is_wider, "has head.weight of the shape [2, 9]; that of MLP is [2, 3]"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path, change, line):
    state = MLP(4, (3,), 2).state_dict()
    change(state)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ConfigError) as error:
        FedAvg(MLP(4, (3,), 2), weights=str(tmp_path / "a.pt"))
    assert str(error.value).startswith(f"model.weights: {tmp_path / 'a.pt'} {line}")


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"nothing", "cannot be read: "), (None, "is not a file; it must be one, or the folder of")],
)
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_that_is_none_is_refused(tmp_path, name, content, line):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=line):
        FedAvg(MLP(4, (3,), 2), weights=str(tmp_path / name))


def test_a_file_of_another_kind_is_told_what_can_be_read(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    line = (
        "model.onnx cannot be read: it must be a .safetensors file, or hold tensors by their names"
    )
    with pytest.raises(ConfigError, match=line):
        FedAvg(MLP(4, (3,), 2), weights=str(tmp_path / "model.onnx"))


@pytest.mark.parametrize("kind", [LocalTrain, FedPer])
def test_a_run_without_a_global_model_has_nothing_to_begin_with(tmp_path, kind):
    """Its checkpoint has the initial values, or a part of them."""
    torch.manual_seed(0)
    network = MLP(1, (3,), 1)
    first = kind(network, lr=0.1, loss=nn.MSELoss())
    loop = FederatedLoop(scalar_problem([1.0, 2.0]).datamodule)
    quiet(tmp_path, 1, precision="64-true").fit(first, datamodule=loop)
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    line = f"is a run of {kind.__name__}, which has no global model; give the model.safetensors of"
    with pytest.raises(ConfigError, match=line):
        FedAvg(MLP(1, (3,), 1), weights=str(checkpoint))
