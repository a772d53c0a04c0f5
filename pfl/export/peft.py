"""LoRA adapters of a model as files that the package peft opens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from pfl.errors import ConfigError
from pfl.files import replaced, write_json
from pfl.models.adapters import LoRALayer, adapted_layers
from pfl.models.pretrained import Pretrained

ADAPTER = """\
from peft import PeftModel
from transformers import {kind}

network = {kind}.from_pretrained({folder!r}{classes})
network = PeftModel.from_pretrained(network, ".").eval()
"""
HEAD = """
# The scores are `head` of the mean of network(...).last_hidden_state over the tokens of a text.
import torch
from safetensors.torch import load_file

values = load_file("head.safetensors")
head = torch.nn.Linear(*values["weight"].shape[::-1])
head.load_state_dict(values)
"""


def adapter_code(network: Pretrained) -> str:
    """Returns the lines of Python that load an adapter."""
    kind = "AutoModel"
    classes = ""
    head = ""
    if network.task == "causal":
        kind = "AutoModelForCausalLM"
    elif network.head_path is not None:
        kind = "AutoModelForSequenceClassification"
        classes = f", num_labels={network.outputs}"
    else:
        head = HEAD
    return ADAPTER.format(kind=kind, folder=network.folder, classes=classes) + head


def require_adapter(network: nn.Module) -> dict[str, LoRALayer]:
    """Returns the layers with LoRA of a `Pretrained`, by the names of its transformer.

    Raises:
        ConfigError: The network is another one, or is trained in another way.
    """
    found = adapted_layers(network).items()
    layers = {n.removeprefix("model."): x for n, x in found if isinstance(x, LoRALayer)}
    if not isinstance(network, Pretrained) or not layers:
        raise ConfigError(
            "export: --format: peft; it needs a Pretrained network with model.trainable: lora"
        )
    if any(layer.residual is not None for layer in layers.values()):
        raise ConfigError(
            "export: --format: peft; the method moves the frozen weights, too, which adapters do "
            "not hold; give safetensors, whose weights are merged"
        )
    return layers


def save_adapter(network: Pretrained, folder: Path) -> None:
    """Writes a network's adapters, and a head of our own, into a folder.

    Adapters with a pair are one of twice the rank, whose factors are stacked.

    Args:
        network: A `Pretrained` with LoRA.
        folder: Gets `adapter_model.safetensors` and `adapter_config.json`, and `head.safetensors`
            where transformers has no such head.

    Raises:
        ConfigError: The network is trained in another way.
    """
    from safetensors.torch import save

    layers = require_adapter(network)
    first = next(iter(layers.values()))
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        a = [getattr(layer, f"{kind}_A") for kind in first.shares]
        b = [share * getattr(layer, f"{kind}_B") for kind, share in first.shares.items()]
        tensors[f"{name}.lora_A.weight"] = torch.cat(a)
        tensors[f"{name}.lora_B.weight"] = torch.cat(b, 1)
    head: dict[str, Tensor] = {}
    if network.head is not None:
        head = network.head.state_dict()
    files = {}
    task = None
    kept = None
    if network.task == "causal":
        task = "CAUSAL_LM"
    if network.head_path is not None:
        tensors |= {f"{network.head_path}.{name}": value for name, value in head.items()}
        task = task or "SEQ_CLS"
        kept = [network.head_path]
    elif head:
        files["head"] = head
    files["adapter_model"] = {f"base_model.model.{name}": t for name, t in tensors.items()}
    for file_name, values in files.items():
        with replaced(folder / f"{file_name}.safetensors") as file:
            file.write(save({k: v.detach().clone().contiguous() for k, v in values.items()}))
    rank = first.get_parameter("lora_A").shape[0] * len(first.shares)
    content = {
        "peft_type": "LORA",
        "task_type": task,
        "r": rank,
        "lora_alpha": rank * first.scale,
        "target_modules": list(layers),
        "fan_in_fan_out": first.transposed,
        "modules_to_save": kept,
        "base_model_name_or_path": network.folder,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", content)
