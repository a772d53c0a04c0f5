"""Initial values of a network from a file, or from an earlier run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from pfl.datamodules.errors import optional_module
from pfl.errors import ConfigError
from pfl.rounds.checkpoint_io import last_checkpoint

SHOWN = 3  # names in a message


def load_weights(network: nn.Module, given: str | Path) -> dict[str, str]:
    """Gives a network the values of a file; returns the file and its checksum, for the record.

    Args:
        network: What gets the values, all of its parameters and buffers; or where the file is one
            of a client's own network, and the module has a messenger besides, its part `own`.
        given: A `.safetensors` file, a state dict that `torch.save` has written, a checkpoint of a
            run, or the folder of a run; of a run it is the global model.

    Raises:
        ConfigError: The file cannot be read, or is not one of this network.
    """
    key = "model.weights"
    path = Path(given).expanduser()
    if path.is_dir():
        path = last_checkpoint(path)
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is not a file; it must be one, or the folder of a run")
    values = _read(key, path)
    own_part = getattr(network, "own", None)  # beside a messenger
    if isinstance(own_part, nn.Module) and values.keys() == own_part.state_dict().keys():
        network = own_part
    own = network.state_dict()
    missing = [name for name in own if name not in values]
    unknown = [name for name in values if name not in own]
    name = type(network).__name__
    if missing:
        raise ConfigError(
            f"{key}: {path} lacks {_listed(missing)} of {name}; it must have all values of the "
            f"network, as files of pfl export --global have"
        )
    if unknown:
        raise ConfigError(f"{key}: {path} has {_listed(unknown)}, which {name} has not")
    for part, tensor in own.items():
        if tensor.shape != values[part].shape:
            raise ConfigError(
                f"{key}: {path} has {part} of the shape {list(values[part].shape)}; that of {name} "
                f"is {list(tensor.shape)}"
            )
    network.load_state_dict(values)
    return {"file": str(given), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _read(key: str, path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by the names of the network."""
    content: Any
    if path.suffix == ".safetensors":
        library = optional_module(f"{key}: {path}", "safetensors.torch", "safetensors")
        load = library.load_file
    else:
        load = _load_pickled
    try:
        content = load(path)
    except UnpicklingError as error:  # whose text is about PyTorch's own options
        raise ConfigError(
            f"{key}: {path} cannot be read: it must be a .safetensors file, or hold tensors by "
            f"their names, as torch.save(network.state_dict(), file) writes"
        ) from error
    except Exception as error:  # whatever a damaged file leads to
        reason = " ".join(str(error).split())[:100]
        raise ConfigError(f"{key}: {path} cannot be read: {reason}") from error
    if isinstance(content, dict) and "federated" in content:
        _require_global(key, path, content["federated"])
        saved = content["state_dict"].items()
        prefix = "network."
        return {k.removeprefix(prefix): v for k, v in saved if k.startswith(prefix)}
    is_state = isinstance(content, dict) and all(isinstance(v, Tensor) for v in content.values())
    if not is_state:
        raise ConfigError(f"{key}: {path} must hold a state dict: tensors by their names")
    return dict(content)


def _require_global(key: str, path: Path, run: dict[str, Any]) -> None:
    """Refuses the checkpoint of a method that has no global model.

    One that was written before checkpoints said whether there is one is not refused.
    """
    if not run.get("has_global", True):
        raise ConfigError(
            f"{key}: {path} is a run of {run['algorithm']}, which has no global model; give the "
            f"model.safetensors of a client, which pfl export --client writes"
        )


def _load_pickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        shown += f" and {len(names) - SHOWN} more"
    return shown
