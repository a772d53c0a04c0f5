"""A command of PFLlib as a configuration of `pfl fit`.

Flags and defaults are those of `system/main.py` in PFLlib `d832e76`, and older names of them. What
means something else under the same name is in docs/coming-from.md.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml

from pfl.errors import ConfigError

Given = argparse.Namespace
SHELL = re.compile(r"\d?>|[&|;]")  # a word that ends a command's arguments


class Flag(NamedTuple):
    """A flag of PFLlib: its short and its long name, its type, its default, an older short name."""

    short: str
    long: str
    kind: Callable[[str], Any]
    default: Any
    older: str = ""


OF_EVERY_METHOD = [
    Flag("go", "goal", str, "test"),
    Flag("dev", "device", str, "cuda"),
    Flag("did", "device_id", str, "0"),
    Flag("data", "dataset", str, "MNIST"),
    Flag("ncl", "num_classes", int, 10, older="nb"),  # since November 2024
    Flag("m", "model", str, "cnn"),
    Flag("lbs", "batch_size", int, 10),
    Flag("lr", "local_learning_rate", float, 0.005),
    Flag("ld", "learning_rate_decay", bool, False),
    Flag("ldg", "learning_rate_decay_gamma", float, 0.99),
    Flag("gr", "global_rounds", int, 2000),
    Flag("tc", "top_cnt", int, 100),
    Flag("ls", "local_epochs", int, 1),
    Flag("algo", "algorithm", str, "FedAvg"),
    Flag("jr", "join_ratio", float, 1.0),
    Flag("rjr", "random_join_ratio", bool, False),
    Flag("nc", "num_clients", int, 20),
    Flag("pv", "prev", int, 0),
    Flag("t", "times", int, 1),
    Flag("eg", "eval_gap", int, 1),
    Flag("sfn", "save_folder_name", str, "items"),
    Flag("ab", "auto_break", bool, False),
    Flag("dlg", "dlg_eval", bool, False),
    Flag("dlgg", "dlg_gap", int, 100),
    Flag("bnpc", "batch_num_per_client", int, 2),
    Flag("nnc", "num_new_clients", int, 0),
    Flag("ften", "fine_tuning_epoch_new", int, 0),
    Flag("fd", "feature_dim", int, 512),
    Flag("vs", "vocab_size", int, 80),
    Flag("ml", "max_len", int, 200),
    Flag("fs", "few_shot", int, 0),
    Flag("cdr", "client_drop_rate", float, 0.0),
    Flag("tsr", "train_slow_rate", float, 0.0),
    Flag("ssr", "send_slow_rate", float, 0.0),
    Flag("ts", "time_select", bool, False),
    Flag("tth", "time_threthold", float, 10000.0),
]
OF_SOME_METHODS = [
    Flag("bt", "beta", float, 0.0),
    Flag("lam", "lamda", float, 1.0),
    Flag("mu", "mu", float, 0.0),
    Flag("K", "K", int, 5),
    Flag("lrp", "p_learning_rate", float, 0.01),
    Flag("M", "M", int, 5),
    Flag("itk", "itk", int, 4000),
    Flag("alk", "alphaK", float, 1.0),
    Flag("sg", "sigma", float, 1.0),
    Flag("al", "alpha", float, 1.0),
    Flag("pls", "plocal_epochs", int, 1),
    Flag("tau", "tau", float, 1.0),
    Flag("fte", "fine_tuning_epochs", int, 10),
    Flag("dlr", "dr_learning_rate", float, 0.0),
    Flag("L", "L", float, 1.0),
    Flag("nd", "noise_dim", int, 512),
    Flag("glr", "generator_learning_rate", float, 0.005),
    Flag("hd", "hidden_dim", int, 512),
    Flag("se", "server_epochs", int, 1000),
    Flag("lf", "localize_feature_extractor", bool, False),
    Flag("slr", "server_learning_rate", float, 1.0),
    Flag("et", "eta", float, 1.0),
    Flag("s", "rand_percent", int, 80),
    Flag("p", "layer_idx", int, 2),
    Flag("mlr", "mentee_learning_rate", float, 0.005),
    Flag("Ts", "T_start", float, 0.95),
    Flag("Te", "T_end", float, 0.98),
    Flag("mo", "momentum", float, 0.1),
    Flag("klw", "kl_weight", float, 0.0),
    Flag("fsb", "first_stage_bound", int, 0),
    Flag("ca", "fedcross_alpha", float, 0.99),
    Flag("cmss", "collaberative_model_select_strategy", int, 1),
]
FLAGS = OF_EVERY_METHOD + OF_SOME_METHODS


class Method(NamedTuple):
    """A method of PFLlib.

    Attributes:
        name: Our class.
        arguments: The argument that each of its flags (long) is here.
        differs: Whether PFLlib computes something else.
        others: Returns further arguments, and adds to the notes.
        flags: The flags (long) that `others` reads, or on which it has a note.
    """

    name: str
    arguments: dict[str, str]
    differs: bool = False
    others: Callable[[Given, list[str]], dict[str, Any]] = lambda given, notes: {}
    flags: tuple[str, ...] = ()


def _first_order(given: Given, notes: list[str]) -> dict[str, Any]:
    return {"alpha": given.local_learning_rate, "variant": "FO"}


def _own_head(given: Given, notes: list[str]) -> dict[str, Any]:
    return {"head_epochs": 1, "head_lr": given.local_learning_rate}


def _penalized_rounds(given: Given, notes: list[str]) -> dict[str, Any]:
    return {"penalized_rounds": int(given.L * given.global_rounds)}


def _batches_of_features(given: Given, notes: list[str]) -> dict[str, Any]:
    settings = {"generated": given.batch_size, "server_batch_size": given.batch_size}
    if not given.localize_feature_extractor:
        return settings
    notes.append("PFLlib reads any value of -lf as True, also False.")
    return settings | {"shared": "head"}


def _positive_weights(given: Given, notes: list[str]) -> dict[str, Any]:
    notes.append("PFLlib's FedAMP trains every client alone, as -algo Local does.")
    least = given.alphaK * (given.num_clients - 1)
    if given.sigma < least:
        notes.append(
            f"-sg: {given.sigma:g}; sigma is -alk times the number of other clients here, as no "
            "weight may be negative."
        )
    return {"alpha_decay": 1.0, "sigma": max(given.sigma, least)}


def _judged_on_training(given: Given, notes: list[str]) -> dict[str, Any]:
    notes.append("PFLlib's FedFomo holds out a fifth of the training samples to judge models.")
    return {"judged_on": "training"}


def _mixed_head(given: Given, notes: list[str]) -> dict[str, Any]:
    notes.append("-p counts layers of PFLlib's network; here the head is mixed (`adaptive`).")
    return {"share": given.rand_percent / 100}


METHODS = {
    "FedAvg": Method("FedAvg", {}),
    "Local": Method("LocalTrain", {}),
    "PerAvg": Method("PerFedAvg", {}, differs=True, others=_first_order),
    "FedProx": Method("FedProx", {"mu": "proximal_weight"}),
    "Ditto": Method("Ditto", {"mu": "penalty", "plocal_epochs": "personal_epochs"}),
    "pFedMe": Method(
        "pFedMe",
        {
            "lamda": "penalty",
            "K": "personal_steps",
            "p_learning_rate": "personal_lr",
            "beta": "server_mixture",
        },
        differs=True,
    ),
    "APFL": Method("APFL", {"alpha": "alpha"}, differs=True),
    "FedDyn": Method("FedDyn", {"alpha": "alpha"}, differs=True),
    "FedPer": Method("FedPer", {}),
    "FedRep": Method("FedRep", {"plocal_epochs": "head_epochs"}),
    "FedBN": Method("FedBN", {}),
    "FedROD": Method("FedRoD", {}, differs=True),
    "FedProto": Method("FedProto", {"lamda": "penalty"}, differs=True),
    "MOON": Method("MOON", {"mu": "contrast", "tau": "temperature"}),
    "FedBABU": Method("FedBABU", {"fine_tuning_epochs": "finetune_epochs"}, differs=True),
    "SCAFFOLD": Method("SCAFFOLD", {"server_learning_rate": "server_lr"}),
    "FedALA": Method(
        "FedALA",
        {"eta": "weight_lr"},
        differs=True,
        others=_mixed_head,
        flags=("rand_percent", "layer_idx"),
    ),
    "FedPAC": Method("FedPAC", {"lamda": "penalty"}, others=_own_head),
    "LG-FedAvg": Method("LGFedAvg", {}),
    "FedNTD": Method("FedNTD", {"beta": "distillation", "tau": "temperature"}, differs=True),
    "FedGH": Method("FedGH", {"server_learning_rate": "server_lr"}, differs=True),
    "FedFomo": Method("FedFomo", {"M": "models"}, differs=True, others=_judged_on_training),
    "APPLE": Method(
        "APPLE",
        {"dr_learning_rate": "relationship_lr", "mu": "penalty"},
        differs=True,
        others=_penalized_rounds,
        flags=("L",),
    ),
    "GPFL": Method("GPFL", {"lamda": "penalty", "mu": "shared_decay"}, differs=True),
    "FedCP": Method("FedCP", {"lamda": "penalty"}, differs=True),
    "FedDistill": Method("FedDistill", {"lamda": "penalty"}, differs=True),
    "FedAS": Method("FedAS", {}),
    "FedLC": Method("FedLC", {"tau": "calibration"}, differs=True),
    "FedGen": Method(
        "FedGen",
        {
            "noise_dim": "noise",
            "hidden_dim": "hidden",
            "server_epochs": "server_steps",
            "generator_learning_rate": "server_lr",
        },
        differs=True,
        others=_batches_of_features,
        flags=("localize_feature_extractor",),
    ),
    "FedAMP": Method(
        "FedAMP",
        {"alphaK": "alpha", "lamda": "penalty"},
        differs=True,
        others=_positive_weights,
        flags=("sigma",),
    ),
    "FML": Method("FML", {"alpha": "alpha", "beta": "beta"}, differs=True),
    "FedKD": Method("FedKD", {"T_start": "first_energy", "T_end": "last_energy"}, differs=True),
    "FedAvgDBE": Method("FedDBE", {"kl_weight": "penalty", "momentum": "momentum"}, differs=True),
}
# As newer versions call them:
METHODS["FedDBE"] = METHODS["FedAvgDBE"]
METHODS["FD"] = METHODS["FedDistill"]
POSITIVE = {"alpha": "FedDyn", "server_mixture": "pFedMe"}  # PFLlib's default or use allows 0
DATA = {  # of PFLlib's data sets in small letters: our data module, channels and side of an image
    "mnist": ("MNISTDataModule", 1, 28),
    "fashionmnist": ("FashionMNISTDataModule", 1, 28),
    "fmnist": ("FashionMNISTDataModule", 1, 28),
    "emnist": ("EMNISTDataModule", 1, 28),
    "cifar10": ("CIFAR10DataModule", 3, 32),
    "cifar100": ("CIFAR100DataModule", 3, 32),
    "svhn": ("SVHNDataModule", 3, 32),
    "tinyimagenet": ("TinyImageNetDataModule", 3, 64),
}
TORCHVISION = {  # of PFLlib's names in small letters, those of older versions first
    "resnet": "resnet18",
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "mobilenet_v2": "mobilenet_v2",
    "mobilenet": "mobilenet_v2",
}
NETWORKS = ("mlr", "cnn", "dnn", "alexnet", "googlenet", *TORCHVISION)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"import: {message}")


def translate(command: str, dataset: Path | None = None) -> str:
    """Returns the YAML of a command of PFLlib; comments at its head say what differs.

    Args:
        command: Such as "main.py -data MNIST -m CNN -algo Ditto"; words before the first flag of
            main.py, and what the shell does with its output, do not count.
        dataset: An .npz file of PFLlib's own samples, by `read_dataset`; None: our data module.

    Raises:
        ConfigError: A flag is unknown, or there is no such method, data set or network here.
    """
    given = _parse(command)
    notes: list[str] = []
    data, channels, side = _data(given, dataset, notes)
    config = {
        "seed_everything": 0,
        "trainer": _trainer(given, notes),
        "model": _model(given, channels, side, notes),
        "data": data,
        "loop": _loop(given, notes),
    }
    text = yaml.safe_dump(config, sort_keys=False)
    lines = [
        f"From PFLlib: {' '.join(command.split())}",
        "What differs in meaning (more in docs/coming-from.md):",
    ]
    lines += [f"* {note}" for note in notes]
    return "".join(f"# {line}\n" for line in lines) + text


def clients_of(command: str) -> int:
    """Returns the number of clients of a command of PFLlib, new ones included."""
    return _clients(_parse(command))


def _clients(given: Given) -> int:
    return given.num_clients + given.num_new_clients


def _parse(command: str) -> Given:
    """Returns the values of all flags by their long names; `given` has the names of those given."""
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        names = [f"-{flag.short}", f"--{flag.long}"]
        if flag.older:
            names.append(f"-{flag.older}")
        parser.add_argument(*names, dest=flag.long, type=flag.kind)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"import: {command}; it cannot be read ({error})") from error
    begin = 0
    programs = [place for place, word in enumerate(words) if word.endswith(".py")]
    if programs:
        begin = programs[0] + 1  # options of Python stand before
    while begin < len(words) and not words[begin].startswith("-"):
        begin += 1
    end = begin
    while end < len(words) and not SHELL.match(words[end]):
        end += 1
    given, others = parser.parse_known_args(words[begin:end])
    if others:
        known = [f"-{flag.short}" for flag in FLAGS] + [f"--{flag.long}" for flag in FLAGS]
        hint = ""
        if close := get_close_matches(others[0], known, n=1):
            hint = f"; did you mean {close[0]}?"
        raise ConfigError(f"import: {others[0]}: PFLlib's main.py has no such flag{hint}")
    values = {flag.long: flag.default for flag in FLAGS} | vars(given)
    return argparse.Namespace(**values, given=set(vars(given)))


def _data(given: Given, dataset: Path | None, notes: list[str]) -> tuple[dict[str, Any], int, int]:
    """Returns the part `data` of a configuration, and channels and side of an image."""
    clients = _clients(given)
    protocol: dict[str, Any] = {"class_path": "SplitOwn"}
    if dataset is not None:
        with np.load(dataset) as arrays:
            shape = arrays["inputs"].shape[1:]
        protocol = {"class_path": "OfficialSplit", "init_args": {"validation": 0.0}}
        settings: dict[str, Any] = {"file": str(dataset), "num_clients": None}
        settings |= {"partition": {"class_path": "Natural"}, "protocol": protocol}
        notes.append(f"The samples of each client are PFLlib's own, in {dataset}.")
        side = 1
        if len(shape) == 3:
            side = shape[-1]
        return {"class_path": "ArrayDataModule", "init_args": settings}, shape[0], side
    found = DATA.get(given.dataset.lower())
    if found is None:
        raise ConfigError(
            f"import: -data {given.dataset}: there is no such data set here; there are "
            f"{', '.join(DATA)}; --folder PFLlib/dataset/{given.dataset} reads PFLlib's own files"
        )
    name, channels, side = found
    protocol["init_args"] = {"test": 0.25, "validation": 0.0}
    rule = {"class_path": "PFLlibDirichlet", "init_args": {"alpha": 0.1}}
    notes.append(
        "The partition is not in the command: here it is that of `noniid - dir`; "
        "`PFLlibPathological` is `noniid - pat`. --folder takes the one of PFLlib's files."
    )
    settings = {"num_clients": clients, "partition": rule, "protocol": protocol}
    middle = [0.5] * channels  # PFLlib's generators write values from -1 to 1
    scale = {"class_path": "Normalize", "init_args": {"mean": middle, "std": middle}}
    settings["transforms"] = [scale]
    if name == "EMNISTDataModule":
        settings["split"] = "digits"  # the only one that PFLlib's generator reads
    return {"class_path": name, "init_args": settings}, channels, side


def _trainer(given: Given, notes: list[str]) -> dict[str, Any]:
    """Returns the part `trainer`."""
    notes.append(
        "PFLlib reports the best test accuracy over rounds, pooled over samples; here the last "
        "round counts (validation: 0), and the mean over clients."
    )
    notes.append(f"PFLlib trains {given.global_rounds + 1} rounds with -gr {given.global_rounds}.")
    if given.times > 1:
        notes.append(f"-t {given.times}: `pfl compare` repeats runs (`seeds: {given.times}`).")
    if given.auto_break:
        notes.append("-ab: no early stop is translated.")
    trainer = {
        "name": f"{given.algorithm}-{given.dataset}",
        "max_epochs": given.global_rounds,
        "check_val_every_n_epoch": given.eval_gap,
    }
    if given.device == "cpu":
        trainer["accelerator"] = "cpu"
    return trainer


def _model(given: Given, channels: int, side: int, notes: list[str]) -> dict[str, Any]:
    """Returns the part `model`."""
    method = METHODS.get(given.algorithm)
    if method is None:
        raise ConfigError(
            f"import: -algo {given.algorithm}: there is no such method here; there are "
            f"{', '.join(METHODS)}"
        )
    settings: dict[str, Any] = {
        "network": _network(given, channels, side, notes),
        "lr": given.local_learning_rate,
        "batch_size": given.batch_size,
        "local_epochs": given.local_epochs,
    }
    notes.append("PFLlib drops the last, smaller batch of every epoch; here all samples count.")
    if given.learning_rate_decay:
        settings["lr_decay"] = given.learning_rate_decay_gamma
        notes.append("The rate falls in every round; in PFLlib when a client trains.")
        notes.append("PFLlib reads any value of -ld as True, also False.")
    for flag, argument in method.arguments.items():
        value = getattr(given, flag)
        if value == 0 and POSITIVE.get(argument) == method.name:
            notes.append(f"{_flag(flag)} is 0 in PFLlib; {argument} must be positive: its default.")
            continue
        settings[argument] = value
        if value == 0:
            notes.append(f"{_flag(flag)} is 0 unless it is given, and so is {argument} then.")
    settings |= method.others(given, notes)
    used = {*method.arguments, *method.flags}
    for other in OF_SOME_METHODS:
        if other.long in given.given and other.long not in used:
            notes.append(f"-{other.short}: it is not translated for {given.algorithm}; left out.")
    if method.differs:
        notes.append(
            f"PFLlib's {given.algorithm} computes something else than {method.name} here: "
            "docs/compared-with-other-implementations.md."
        )
    return {"class_path": method.name, "init_args": settings}


def _network(given: Given, channels: int, side: int, notes: list[str]) -> dict[str, Any]:
    """Returns the configuration of a network."""
    name = given.model.lower()
    classes = {"num_classes": given.num_classes}
    values = channels * side * side
    if name == "mlr":
        return {"class_path": "LogisticRegression", "init_args": {"in_features": values, **classes}}
    if name == "dnn":
        layers: dict[str, Any] = {"in_features": values, "hidden": [100]}
        return {"class_path": "MLP", "init_args": {**layers, **classes}}
    images = {"in_channels": channels, **classes}
    if name == "cnn":
        return {"class_path": "CNN", "init_args": {**images, "image_size": side, "padding": 0}}
    if name == "alexnet":
        notes.append("-m alexnet: PFLlib's own network; here it is `AlexNet`, for small images.")
        return {"class_path": "AlexNet", "init_args": images}
    if name == "googlenet":
        plain = {"norm": "batch", "small_images": False}
        return {"class_path": "GoogLeNet", "init_args": {**images, **plain}}
    if name in TORCHVISION:
        network = TORCHVISION[name]
        if network == "mobilenet_v2":
            notes.append(f"-m {given.model}: PFLlib's own network; here it is torchvision's.")
        return {"class_path": "TorchVision", "init_args": {"name": network, **images}}
    raise ConfigError(
        f"import: -m {given.model}: there is no such network here; there are {', '.join(NETWORKS)}"
    )


def _loop(given: Given, notes: list[str]) -> dict[str, Any]:
    """Returns the part `loop`."""
    loop: dict[str, Any] = {"clients_per_round": None}
    if given.join_ratio < 1:
        loop["clients_per_round"] = max(1, int(given.num_clients * given.join_ratio))
    if given.random_join_ratio:
        notes.append("-rjr: a random number of clients in a round is not translated.")
    if given.num_new_clients:
        end = _clients(given)
        loop["unseen"] = list(range(given.num_clients, end))
        notes.append(
            f"-ften {given.fine_tuning_epoch_new} counts epochs of new clients; `loop.finetune` "
            "counts steps, and is left out."
        )
    if given.client_drop_rate:
        loop["dropout"] = given.client_drop_rate
        notes.append(
            f"-cdr loses the share {given.client_drop_rate:g} of every cohort; `dropout` loses "
            "each client with this probability."
        )
    if given.train_slow_rate:
        loop["stragglers"] = given.train_slow_rate
        notes.append(
            "-tsr: slow clients take a random number of epochs in PFLlib, and here the share "
            "`straggler_work` of their steps."
        )
    for name in ("send_slow_rate", "time_select", "dlg_eval", "few_shot"):
        if getattr(given, name):
            notes.append(f"{_flag(name)}: it is not translated.")
    return loop


def _flag(long: str) -> str:
    """Returns the short flag of a long name."""
    return next(f"-{flag.short}" for flag in FLAGS if flag.long == long)
