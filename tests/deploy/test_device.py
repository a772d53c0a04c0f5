"""A party trains on its own device, and everything that travels or is kept lies on the CPU."""

import pytest
import torch

from pfl.deploy.app import _device
from tests.device import DEVICE, OtherDevice
from tests.refusal import refused


@pytest.mark.parametrize("name", ["FedAvg", "Ditto", "SCAFFOLD, option I", "FedPer"])
@pytest.mark.parametrize("normalized", [False, True], ids=["", "running statistics"])
def test_a_party_on_another_device_gives_the_numbers_of_the_cpu(
    federation, simulate, name, normalized
):
    expected = simulate(name, normalized=normalized)
    with OtherDevice():
        apart = federation(name)
        apart.what |= {"device": str(DEVICE), "normalized": normalized}
        for client in apart.channel.workers:
            apart.channel.workers[client] = apart.channel.start(client)
        apart.train()
    for worker in apart.channel.workers.values():
        assert worker._party.method.device == DEVICE
    server = apart.method
    assert server.device == torch.device("cpu")
    torch.testing.assert_close(server.global_model, expected.global_model, rtol=0, atol=1e-12)
    assert (server.progress.bytes_up, server.progress.bytes_down) == (
        expected.progress.bytes_up,
        expected.progress.bytes_down,
    )
    for key, numbers in expected.evaluation.scores.items():
        for number, column in numbers.items():
            told = server.evaluation.scores[key][number]
            assert told == pytest.approx(column, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("accelerator", "is_there", "device"),
    [
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", True, "cuda:0"),
        ("gpu", True, "cuda:0"),
    ],
)
def test_the_device_of_a_party(monkeypatch, tmp_path, accelerator, is_there, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    assert _device(tmp_path / "party.yaml", accelerator) == torch.device(device)


def test_a_party_without_a_gpu_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("party.yaml: accelerator: gpu; PyTorch finds no CUDA GPU here, give auto or cpu"):
        _device(tmp_path / "party.yaml", "gpu")
    with refused("party.yaml: accelerator: 'cuda'", "auto, cpu or gpu"):
        _device(tmp_path / "party.yaml", "cuda")
