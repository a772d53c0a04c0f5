"""The card of an exported model: where the model comes from, and how it is loaded."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from torch import Tensor

from pfl.callbacks.run_result import versions
from pfl.files import read_json, read_records
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.loop import FederatedLoop

ONNX = """\
from onnxruntime import InferenceSession

session = InferenceSession("model.onnx")
(outputs,) = session.run(None, {"inputs": samples})  # a NumPy array
"""
FACTORED = """
network = load_factored({network}{dtype}, load_file("factored.safetensors")).eval()
"""
NOT_MERGED = ("adapter", "Bottleneck", "prompt", "SoftPrompt")  # they change no weights
LOADING = """\
from safetensors.torch import load_file
{imports}

network = {network}{dtype}.eval()
{adapt}network.load_state_dict(load_file("model.safetensors"))
"""


def card(
    algorithm: FederatedAlgorithm,
    loop: FederatedLoop,
    arguments: Namespace,
    folder: Path,
    inputs: Tensor,
    client: int | None,
) -> dict[str, Any]:
    """Returns what is known about a model, as plain values; `client` is None for the global model.

    The scores are read from the run's files, and left out where the files are of another round than
    the checkpoint: a client's row of `clients.csv`, or the global numbers of `summary.json`.
    """
    method = _class_of(arguments.model)
    network = _class_of(method["init_args"].pop("network"))
    summary = read_json(folder / "summary.json")
    if summary.get("round") != algorithm.rounds:  # the summary is another checkpoint's
        summary = {}
    names: dict[str, Any] = {"client": client, "classes": loop.datamodule.class_names}
    if client is not None and loop.datamodule.client_names is not None:
        names["client_name"] = loop.datamodule.client_names[client]
    seeds = {"data": loop.datamodule.seed, "loop": loop.seed}
    return {
        "model": "global" if client is None else "personalized",
        **{key: value for key, value in names.items() if value is not None},
        "method": method,
        "rounds": algorithm.rounds,
        "network": network,
        "parameters": sum(p.numel() for p in algorithm.network.parameters()),
        "dtype": str(algorithm.global_model.dtype).partition(".")[2],
        "input": {"shape": list(inputs.shape[1:]), "dtype": str(inputs.dtype).partition(".")[2]},
        "data": _class_of(arguments.data),
        "protocol": loop.describe(),
        "partition_hash": loop.datamodule.partition.hash,
        "seed": {"seed_everything": arguments.seed_everything, **seeds},
        "scores": _scores(folder, summary, client),
        "versions": {"run": summary.get("versions"), "export": versions()},
    }


def loading_code(content: dict[str, Any]) -> str:
    """Returns the lines of Python that load the model of a card."""
    modules: dict[str, set[str]] = {}
    network = _call(content["network"], modules)
    adapt = ""
    if "factored" in content:
        modules.setdefault("pfl.models.factored", set()).add("load_factored")
    trainable = content["method"]["init_args"].get("trainable")
    word = (trainable or {}).get("class_path", "") if not isinstance(trainable, str) else trainable
    if word.rpartition(".")[2] in NOT_MERGED:
        modules.setdefault("pfl.models.adapters", set()).add("train_only")
        adapt = f"train_only(network, {_call(trainable, modules)})\n"
    imports = "\n".join(f"from {m} import {', '.join(sorted(n))}" for m, n in modules.items())
    dtype = ".double()" if content["dtype"] == "float64" else ""
    code = LOADING + (FACTORED if "factored" in content else "")
    return code.format(imports=imports, network=network, dtype=dtype, adapt=adapt)


def sizes(content: dict[str, Any]) -> str:
    """Returns the sizes and latencies of a dense and a factored model as a Markdown table."""
    parameters, times = content["parameters"], content["milliseconds"]
    lines = [f"| form | parameters | ms a batch of {content['batch']} |", "|---|---|---|"]
    lines += [f"| {form} | {parameters[form]:,} | {times[form]:.3f} |" for form in parameters]
    threads = "one thread" if content["threads"] == 1 else f"{content['threads']} threads"
    error = f"outputs differ by at most {content['largest_difference']:.1g}"
    return "\n".join([*lines, "", f"On this CPU with {threads}; {error}."])


def _call(value: Any, modules: dict[str, set[str]]) -> str:
    """Returns the Python of a configured value, and adds the classes that it names to `modules`."""
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        modules.setdefault(module, set()).add(name)
        given = value.get("init_args") or {}
        arguments = ", ".join(f"{key}={_call(one, modules)}" for key, one in given.items())
        return f"{name}({arguments})"
    return repr(value)


def readme(content: dict[str, Any], code: str) -> str:
    """Returns a card as Markdown, with the lines that load the model."""
    whose = f"client {content['client']}'s" if "client" in content else "the global"
    method, data = (content[key]["class_path"].rpartition(".")[2] for key in ("method", "data"))
    rows = {
        "Network": content["network"]["class_path"],
        "Parameters": f"{content['parameters']:,}",
        "Input": f"{content['input']['dtype']} [samples, "
        f"{', '.join(map(str, content['input']['shape']))}]",
        "Rounds": content["rounds"],
        "Data": f"{data}; partition {content['partition_hash']}",
        "Seed": content["seed"]["seed_everything"],
        "Versions": ", ".join(f"{k} {v}" for k, v in content["versions"]["export"].items()),
        **content["scores"],
    }
    rows |= {"Client": content["client_name"]} if "client_name" in content else {}
    rows |= {"Classes": ", ".join(content["classes"])} if "classes" in content else {}
    cells = {key: " ".join(escape(str(value), quote=False).split()) for key, value in rows.items()}
    table = "\n".join(f"| {key} | {value.replace('|', '&#124;')} |" for key, value in cells.items())
    factored = f"## Factored\n\n{sizes(content['factored'])}\n\n" if "factored" in content else ""
    return (
        f"# {method}: {whose} model\n\n| | |\n|---|---|\n{table}\n\n{content['protocol']}\n\n"
        f"{factored}## Load it\n\n```python\n{code}```\n\n"
        f"`card.json` has all arguments of the method, the network and the data.\n"
    )


def _class_of(value: Namespace) -> dict[str, Any]:
    """Returns a configured class as plain values: `class_path` and `init_args`."""
    plain = value.as_dict() if isinstance(value, Namespace) else value
    return {"class_path": plain["class_path"], "init_args": plain.get("init_args") or {}}


def _scores(folder: Path, summary: dict[str, Any], client: int | None) -> dict[str, Any]:
    if client is None or not summary:
        return {k: v for k, v in summary.items() if "/global/" in k}
    rows = read_records(folder / "clients.csv")
    row = next(row for row in rows if int(row["client"]) == client)

    def number(text: str) -> float | int | None:
        value = float(text)
        # JSON does not have NaN.
        return None if value != value else int(value) if value.is_integer() else value

    skipped = ("client", "name", "label_")
    return {key: number(text) for key, text in row.items() if not key.startswith(skipped)}
