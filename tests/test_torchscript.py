"""Functions run with the same results where TorchScript is missing or fails."""

import torch

from pfl.torchscript import is_scripted, scripted


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def unscriptable(*args):
    return args


def test_a_function_that_cannot_be_compiled_stays_as_it_is():
    assert scripted(unscriptable) is unscriptable and not is_scripted(unscriptable)


def test_any_failure_of_torchscript_leaves_the_function(monkeypatch):
    class FrontendError(Exception):
        """PyTorch's errors of this kind derive from `Exception` alone."""

    def fail(function):
        raise FrontendError

    monkeypatch.setattr(torch.jit, "script", fail)
    assert scripted(double) is double


def test_a_missing_torchscript_leaves_the_function(monkeypatch):
    monkeypatch.delattr(torch.jit, "script")
    assert scripted(double) is double
