"""The card of an exported model: where the model comes from, and how it is loaded."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from torch import Tensor

from pfl.callbacks.run_result import versions
from pfl.datamodules import FederatedDataModule, Normalize
from pfl.deploy.data import RemoteData
from pfl.export.normalization import gap_values, normalization
from pfl.files import read_json, read_records, reading
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.exported import has_own_models
from pfl.method.messenger import Joined, own_network
from pfl.rounds.loop import FederatedLoop

ONNX = """\
from onnxruntime import InferenceSession

session = InferenceSession("model.onnx")
(outputs,) = session.run(None, {"inputs": samples})  # a NumPy array
"""
FACTORED = """
network = load_factored({network}{dtype}, load_file("factored.safetensors")).eval()
{hook}"""
PROMPTS = ("prompt", "SoftPrompt")  # they change no weights, and are no layers
LOADING = """\
{standard}from safetensors.torch import load_file
{imports}

network = {network}{dtype}.eval()
{adapt}network.load_state_dict(load_file("model.safetensors"))
{statistics}"""
STANDARD = "import json\nfrom pathlib import Path\n\nimport torch\n"
STATISTICS = """
raw = json.loads(Path("card.json").read_text())["input"]
mean = torch.tensor(raw["mean"]{kind}){view}
std = torch.tensor(raw["std"]{kind}){view}
"""
OUTPUT = """
unit = json.loads(Path("card.json").read_text())["output"]
target_mean = torch.tensor(unit["mean"]{kind})
target_std = torch.tensor(unit["std"]{kind})
"""
OUTPUT_HOOK = (
    "network.register_forward_hook(lambda _, inputs, outputs: outputs * target_std + target_mean)\n"
)
GAPS = """
raw = json.loads(Path("card.json").read_text())["input"]
gaps = torch.tensor(raw["missing"]{kind})
"""
GAPS_HOOK = (
    "network.register_forward_pre_hook(\n"
    "    lambda _, inputs: torch.where(inputs[0].isnan(), gaps, inputs[0])\n"
    ")\n"
)
HOOK = "network.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(mean) - mean) / std)\n"
MEMBERSHIP = (
    "A client's model can reveal which samples it was trained with: in one trial, an attack told "
    "them from others with an AUC of 0.65 to 0.91 for the worst clients."
)
PARTIES = "the transforms of the party's own data module"


def card(
    algorithm: FederatedAlgorithm,
    loop: FederatedLoop,
    arguments: Namespace,
    folder: Path,
    inputs: Tensor,
    client: int | None,
    parameters: int,
) -> dict[str, Any]:
    """Returns what is known about a model, as plain values; `client` is None for the global model.

    The scores are read from the run's files, and left out where the files are of another round than
    the checkpoint: a client's row of `clients.csv`, or the global numbers of `summary.json`.
    """
    method = _class_of(arguments.model)
    network = _class_of(method["init_args"].pop("network"))
    messenger = method["init_args"].get("messenger")
    if client is None and messenger is not None:  # it is the model that all have
        network = _class_of(messenger)
    summary = read_json(folder / "summary.json")
    if summary.get("round") != algorithm.rounds:  # the summary is another checkpoint's
        summary = {}
    kind = "global"
    names: dict[str, Any] = {}
    if client is not None:
        names["client"] = client
        if has_own_models(algorithm):
            kind = "personalized"
    if loop.datamodule.class_names is not None:
        names["classes"] = loop.datamodule.class_names
    if client is not None and loop.datamodule.client_names is not None:
        names["client_name"] = loop.datamodule.client_names[client]
    if algorithm.family is not None and (client is not None or messenger is None):
        place = 0  # the server's
        if client is not None:
            place = int(algorithm.kinds[client])
        names["member"] = algorithm.family.names[place]
    if algorithm.wrapper is not None:
        names["wrapper"] = f"{algorithm.wrapper.__module__}.{algorithm.wrapper.__qualname__}"
    both = own_network(algorithm.network)
    if client is not None and isinstance(both, Joined):
        names["joined"] = f"{type(both).__module__}.{type(both).__qualname__}"
    seeds = {"data": loop.datamodule.seed, "loop": loop.seed}
    return {
        "model": kind,
        **names,
        "method": method,
        "rounds": algorithm.rounds,
        "network": network,
        "parameters": parameters,
        "dtype": str(algorithm.global_model.dtype).partition(".")[2],
        "input": samples_of(loop.datamodule, inputs, client),
        **_output(loop.datamodule, client),
        "data": _data(arguments.data, loop.datamodule),
        "protocol": loop.describe(),
        "partition_hash": loop.datamodule.partition.hash,
        "privacy": MEMBERSHIP,
        "seed": {"seed_everything": arguments.seed_everything, **seeds},
        "scores": _scores(folder, summary, client),
        "versions": {"run": summary.get("versions"), "export": versions()},
    }


def network_code(content: dict[str, Any]) -> str:
    """Returns the lines of Python that load the model of a card, for samples as they are."""
    modules: dict[str, set[str]] = {}
    parts = dict.fromkeys(("standard", "statistics", "hook", "adapt", "dtype", "kind", "view"), "")
    parts["network"] = _network_of(content, modules)
    code = LOADING
    if "factored" in content:
        modules.setdefault("pfl.models.factored", set()).add("load_factored")
        code += FACTORED
    trainable = content["method"]["init_args"].get("trainable") or ""
    word = trainable
    if isinstance(trainable, dict):
        word = trainable["class_path"]
    if "adapters" in content or word.rpartition(".")[2] in PROMPTS:
        modules.setdefault("pfl.models.adapters", set()).add("train_only")
        parts["adapt"] = f"train_only(network, {_call(trainable, modules)})\n"
    if "wrapper" in content:
        module, _, name = content["wrapper"].rpartition(".")
        modules.setdefault(module, set()).add(name)
        parts["adapt"] += f"network = {name}(network).eval()\n"
    if content["dtype"] == "float64":
        parts["dtype"] = ".double()"
        parts["kind"] = ", dtype=torch.float64"
    if "missing" in content["input"]:
        parts["standard"] = STANDARD
        parts["hook"] += GAPS_HOOK
        parts["statistics"] += GAPS.format(**parts) + GAPS_HOOK
    if "mean" in content["input"]:
        further = len(content["input"]["shape"]) - 1  # axes after that of the channels
        if further:
            parts["view"] = f".view(-1{', 1' * further})"
        parts["standard"] = STANDARD
        parts["hook"] += HOOK
        parts["statistics"] += STATISTICS.format(**parts) + HOOK
    if "output" in content:
        parts["standard"] = STANDARD
        parts["hook"] += OUTPUT_HOOK
        parts["statistics"] += OUTPUT.format(**parts) + OUTPUT_HOOK
    imports = "\n".join(f"from {m} import {', '.join(sorted(n))}" for m, n in modules.items())
    return code.format(imports=imports, **parts)


def sizes(content: dict[str, Any]) -> str:
    """Returns the sizes and latencies of a dense and a factored model as a Markdown table."""
    parameters = content["parameters"]
    times = content["milliseconds"]
    lines = [f"| form | parameters | ms a batch of {content['batch']} |", "|---|---|---|"]
    lines += [f"| {form} | {parameters[form]:,} | {times[form]:.3f} |" for form in parameters]
    threads = f"{content['threads']} threads"
    if content["threads"] == 1:
        threads = "one thread"
    error = f"outputs differ by at most {content['largest_difference']:.1g}"
    return "\n".join([*lines, "", f"On this CPU with {threads}; {error}."])


def _network_of(content: dict[str, Any], modules: dict[str, set[str]]) -> str:
    """Returns the Python that builds the network of a card, perhaps joined with a messenger."""
    own = _member_of(content, content.get("member"), modules)
    if "joined" not in content:
        return own
    module, _, name = content["joined"].rpartition(".")
    modules.setdefault(module, set()).add(name)
    given = content["method"]["init_args"]["messenger"]
    if given is not None:
        return f"{name}({own}, {_call(given, modules)})"
    first = None
    if "member" in content:
        first = next(iter(content["network"]["init_args"]["networks"]))
    return f"{name}({own}, {_member_of(content, first, modules)})"


def _member_of(content: dict[str, Any], name: str | None, modules: dict[str, set[str]]) -> str:
    """Returns the Python that builds the network of a card, of a family that of this name."""
    network = content["network"]
    if name is None:
        return _call(network, modules)
    given = network["init_args"]
    one = {key: given[key] for key in ("features", "reduce") if key in given}
    one = {"networks": {name: given["networks"][name]}, **one}
    return f"{_call({**network, 'init_args': one}, modules)}.networks[{name!r}]"


def _call(value: Any, modules: dict[str, set[str]]) -> str:
    """Returns the Python of a configured value, and adds the classes that it names to `modules`."""
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        modules.setdefault(module, set()).add(name)
        given = value.get("init_args") or {}
        arguments = ", ".join(f"{key}={_call(one, modules)}" for key, one in given.items())
        return f"{name}({arguments})"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key!r}: {_call(one, modules)}" for key, one in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list):
        return f"[{', '.join(_call(one, modules) for one in value)}]"
    if hasattr(value, "__qualname__"):  # a function or a class
        modules.setdefault(value.__module__, set()).add(value.__qualname__)
        return value.__qualname__
    return repr(value)


def readme(content: dict[str, Any], code: str) -> str:
    """Returns a card as Markdown, with the lines that load the model."""
    whose = "the global"
    if "client" in content:
        whose = f"client {content['client']}'s"
    method, data = (content[key]["class_path"].rpartition(".")[2] for key in ("method", "data"))
    rows = {
        "Network": content["network"]["class_path"],
        "Parameters": f"{content['parameters']:,}",
        **_input_rows(content["input"]),
        **_output_row(content),
        "Rounds": content["rounds"],
        "Data": f"{data}; partition {content['partition_hash']}",
        "Seed": content["seed"]["seed_everything"],
        "Versions": ", ".join(f"{k} {v}" for k, v in content["versions"]["export"].items()),
        **{name: score for name, score in content["scores"].items() if score is not None},
    }
    if "client_name" in content:
        rows["Client"] = content["client_name"]
    if "classes" in content:
        rows["Classes"] = ", ".join(content["classes"])
    cells = {key: " ".join(escape(str(value), quote=False).split()) for key, value in rows.items()}
    table = "\n".join(f"| {key} | {value.replace('|', '&#124;')} |" for key, value in cells.items())
    factored = ""
    if "factored" in content:
        factored = f"## Factored\n\n{sizes(content['factored'])}\n\n"
    return (
        f"# {method}: {whose} model\n\n| | |\n|---|---|\n{table}\n\n{content['protocol']}\n\n"
        f"{content['privacy']}\n\n{factored}## Load it\n\n```python\n{code}```\n\n"
        f"{_package(code)}{_weights(content['network'])}"
        f"`card.json` has all arguments of the method, the network and the data.\n"
    )


def _package(code: str) -> str:
    """Returns a line of a README about this package, which is not called `pfl`, if it is needed."""
    if "from pfl.models" not in code:
        return ""
    return (
        "`pfl.models` is in the package lightning-pfl, and needs PyTorch and NumPy alone of its "
        "dependencies; `load_file` is in the package safetensors.\n\n"
    )


def _weights(network: dict[str, Any]) -> str:
    """Returns a line of a README about weights that an export does not have; "" without any."""
    if not network["class_path"].endswith(".Pretrained"):
        return ""
    folder = network["init_args"]["folder"]
    return (
        f"The pretrained weights were in `{folder}` where the run was started; give the path that "
        "they have on your machine.\n\n"
    )


def samples_of(
    datamodule: FederatedDataModule, inputs: Tensor, client: int | None = None
) -> dict[str, Any]:
    """Returns what an exported model takes: samples before the run's normalization."""
    content: dict[str, Any] = {
        "shape": list(inputs.shape[1:]),
        "dtype": str(inputs.dtype).partition(".")[2],
    }
    if datamodule.feature_names is not None:
        content["columns"] = datamodule.feature_names
    if datamodule.category_levels:
        content["levels"] = datamodule.category_levels
    if datamodule.conversions:
        content["conversions"] = datamodule.conversions
    used = normalization(datamodule.transforms, client)
    if used.mean is not None:
        content["mean"] = used.mean
        content["std"] = used.std
    if (gaps := gap_values(datamodule, client)) is not None:
        content["missing"] = gaps
    if isinstance(datamodule, RemoteData):
        content["after"] = [PARTIES]
    elif used.before:
        content["after"] = list(map(repr, used.before))
        if (first := datamodule.gap_values(client)) is not None:
            content["after"].insert(0, f"missing values as {first}")
    return content


def _output(datamodule: FederatedDataModule, client: int | None) -> dict[str, Any]:
    """Returns the numbers by which outputs get the unit of the targets; {} where they have it."""
    scale = datamodule.scale_of(client)
    if scale is None:
        return {}
    return {"output": {"mean": scale.mean.tolist(), "std": scale.std.tolist()}}


def _input_rows(content: dict[str, Any]) -> dict[str, str]:
    """Returns the rows of a README about the samples that a model takes."""
    shape = ", ".join(map(str, ["samples", *content["shape"]]))
    rows = {"Input": f"{content['dtype']} [{shape}]"}
    if "mean" in content:
        rows["Input"] += ", not normalized: the model does it"
    if "missing" in content:
        rows["Missing values"] = "NaN, which the model takes as the mean of its training samples"
    if "after" in content:
        rows["Before"] = "; ".join(content["after"])
    if "columns" in content:
        rows["Columns"] = ", ".join(content["columns"])
    for name, levels in content.get("levels", {}).items():
        rows[f"Levels of {name}"] = ", ".join(levels)
    if "conversions" in content:
        rows["Reading"] = "; ".join(content["conversions"])
    return rows


def _output_row(content: dict[str, Any]) -> dict[str, str]:
    """Returns the row of a README about a unit that the model gives its outputs."""
    if "output" not in content:
        return {}
    return {"Output": "in the unit of the file's targets: the model does it"}


def _data(value: Namespace, datamodule: FederatedDataModule) -> dict[str, Any]:
    """Returns the configured data module, with the statistics that its transforms have used."""
    data = _class_of(value)
    given = data["init_args"].get("transforms") or []
    used = datamodule.transforms.transforms
    if len(given) == len(used):  # else the data module has transforms of its own
        entries = []
        for entry, transform in zip(given, used, strict=True):
            entry = _class_of(entry)
            if type(transform) is Normalize:
                entry["init_args"] = {"mean": transform.mean, "std": transform.std}
            entries.append(entry)
        if entries:
            data["init_args"] = {**data["init_args"], "transforms": entries}
    return data


def _class_of(value: Namespace | dict[str, Any]) -> dict[str, Any]:
    """Returns a configured class as plain values: `class_path` and `init_args`."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    return {"class_path": value["class_path"], "init_args": value.get("init_args") or {}}


def _scores(folder: Path, summary: dict[str, Any], client: int | None) -> dict[str, Any]:
    if client is None or not summary:
        return {k: _number(v) for k, v in summary.items() if "/global/" in k}
    path = folder / "clients.csv"
    skipped = ("client", "name", "label_")
    with reading(path):
        rows = [row for row in read_records(path) if int(row["client"]) == client]
        if not rows:
            raise ValueError(f"it has no row of client {client}")
        return {k: _number(text) for k, text in rows[0].items() if not k.startswith(skipped)}


def _number(score: str | float) -> float | int | None:
    """Returns a score as a number; None for NaN and infinity, which JSON does not have."""
    value = float(score)
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value)
    return value
