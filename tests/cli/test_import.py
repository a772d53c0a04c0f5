"""`pfl import pfllib`: what a command of PFLlib is here, and its data."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import pfl.algorithms
import pfl.datamodules
import pfl.models
from datamodules import DigitsDataModule, SplitOwn
from pfl.cli.pfllib import DATA, FLAGS, METHODS, NETWORKS, OF_SOME_METHODS, translate
from pfl.cli.pfllib_files import read_dataset
from tests.commands import QUICKSTART, call, table

pytestmark = pytest.mark.cli
DITTO = "python main.py -data MNIST -m CNN -algo Ditto -mu 0.1 -nc 20 -gr 100 -lbs 10 -lr 0.005"


def test_the_command_of_the_documentation():
    config = yaml.safe_load(translate(f"{DITTO} -ls 1"))
    # The same run stands in docs/coming-from.md as a command of `pfl fit`.
    assert config["trainer"]["max_epochs"] == 100
    assert config["loop"] == {"clients_per_round": None}
    model = config["model"]["init_args"]
    network = {"in_channels": 1, "num_classes": 10, "image_size": 28, "padding": 0}
    assert config["model"]["class_path"] == "Ditto"
    assert model == {
        "network": {"class_path": "CNN", "init_args": network},
        "lr": 0.005,
        "batch_size": 10,
        "local_epochs": 1,
        "penalty": 0.1,
        "personal_epochs": 1,
    }
    data = config["data"]
    assert data["class_path"] == "MNISTDataModule"
    assert data["init_args"] == {
        "num_clients": 20,
        "partition": {"class_path": "PFLlibDirichlet", "init_args": {"alpha": 0.1}},
        "protocol": {"class_path": "SplitOwn", "init_args": {"test": 0.25, "validation": 0.0}},
        "transforms": [{"class_path": "Normalize", "init_args": {"mean": [0.5], "std": [0.5]}}],
    }


def test_images_are_those_of_pfllibs_generators():
    """They subtract 0.5 and divide by 0.5, and EMNIST is that of ten digits."""
    data = yaml.safe_load(translate("main.py -data Cifar10"))["data"]["init_args"]
    half = [0.5, 0.5, 0.5]
    expected = {"class_path": "Normalize", "init_args": {"mean": half, "std": half}}
    assert data["transforms"] == [expected]
    config = yaml.safe_load(translate("main.py -data EMNIST"))
    assert config["data"]["init_args"]["split"] == "digits"
    assert config["model"]["init_args"]["network"]["init_args"]["num_classes"] == 10


def test_flags_have_their_newer_and_their_older_names():
    """`-ncl` was `-nb` before November 2024; others came later."""
    for flag in ("-ncl", "-nb", "--num_classes"):
        network = yaml.safe_load(translate(f"main.py {flag} 100"))["model"]["init_args"]["network"]
        assert network["init_args"]["num_classes"] == 100
    text = translate("main.py -tc 50 -fd 300 -vs 80 -ml 20 -fs 5")
    assert yaml.safe_load(text)["data"]["init_args"]["num_clients"] == 20
    assert "-fs: it is not translated" in text


def test_googlenet_has_pfllibs_batch_normalization():
    network = yaml.safe_load(translate("main.py -m GoogleNet -data Cifar10"))["model"]["init_args"]
    module = pfl.models.GoogLeNet(**network["network"]["init_args"])
    kinds = [type(layer) for layer in module.modules()]
    assert nn.BatchNorm2d in kinds and nn.GroupNorm not in kinds


def test_what_means_something_else_is_said():
    text = translate(f"{DITTO} -cdr 0.2 -tsr 0.1 -nnc 3 -ld True -ldg 0.9 -t 5 -tau 2 -jr 0.55")
    notes = [line for line in text.splitlines() if line.startswith("# *")]
    config = yaml.safe_load(text)
    for part in ("101 rounds", "-tau: it is not translated", "-cdr loses the share 0.2", "-tsr"):
        assert [note for note in notes if part in note], part
    for part in ("seeds: 5", "smaller batch", "best test accuracy"):
        assert [note for note in notes if part in note], part
    assert config["model"]["init_args"]["lr_decay"] == 0.9
    assert config["data"]["init_args"]["num_clients"] == 23
    # The new clients are the last ones, and 0.55 of the 20 others are 11.
    expected = {"clients_per_round": 11, "unseen": [20, 21, 22], "dropout": 0.2, "stragglers": 0.1}
    assert config["loop"] == expected


def test_a_penalty_that_is_not_given_is_zero_as_in_pfllib():
    text = translate("main.py -algo FedProx")
    assert yaml.safe_load(text)["model"]["init_args"]["proximal_weight"] == 0.0
    assert "-mu is 0 unless it is given" in text
    text = translate("main.py -algo pFedMe")  # whose global model does not move in PFLlib
    assert "server_mixture" not in yaml.safe_load(text)["model"]["init_args"]
    assert "-bt is 0 in PFLlib" in text and "computes something else than pFedMe" in text


@pytest.mark.parametrize("flags", ["", "-mu 0.5 -al 0.5 -bt 1.0 -klw 2.0"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_its_arguments(name, flags):
    model = yaml.safe_load(translate(f"main.py -algo {name} {flags}"))["model"]
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    method = getattr(pfl.algorithms, model["class_path"])
    assert method(**{**model["init_args"], "network": network}).lr == 0.005


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_with_its_arguments(name, tmp_path):
    settings = yaml.safe_load(translate(f"main.py -algo {name} -gr 1 -nc 3 -se 2"))
    model = settings["model"]
    kind = getattr(pfl.algorithms, model["class_path"])
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    method = kind(**{**model["init_args"], "network": network})
    data = DigitsDataModule(3, protocol=SplitOwn(test=0.25, validation=0.0))
    trainer = pfl.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", enable_progress_bar=False
    )
    trainer.fit(method, datamodule=pfl.FederatedLoop(data, **settings["loop"]))
    assert trainer.recorder.rows[-1]["train/samples"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_images_of_cifar10(name):
    command = f"main.py -m {name} -data Cifar10 -nb 7"
    network = yaml.safe_load(translate(command))["model"]["init_args"]["network"]
    module = getattr(pfl.models, network["class_path"])(**network["init_args"]).eval()
    with torch.no_grad():
        assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_flags_of_fedfomo_and_apple_are_translated():
    """PFLlib's APPLE takes its penalty in the first int(L * global_rounds) rounds: 0.2 of 50."""
    fomo = yaml.safe_load(translate("main.py -algo FedFomo -M 3"))["model"]
    assert fomo["init_args"]["models"] == 3
    text = translate("main.py -algo APPLE -gr 50 -dlr 0.01 -mu 0.3 -L 0.2")
    settings = yaml.safe_load(text)["model"]["init_args"]
    assert settings["relationship_lr"] == 0.01
    assert settings["penalty"] == 0.3
    assert settings["penalized_rounds"] == 10
    assert "not translated" not in text


def test_flags_of_fedgen_fedamp_and_fd_are_translated():
    text = translate("main.py -algo FedGen -nd 8 -hd 16 -se 7 -glr 0.02 -lbs 20 -lf True")
    settings = yaml.safe_load(text)["model"]["init_args"]
    expected = {"noise": 8, "hidden": 16, "server_steps": 7, "server_lr": 0.02, "generated": 20}
    expected |= {"server_batch_size": 20, "shared": "head"}
    assert settings | expected == settings
    assert "-lf as True, also False" in text and "not translated" not in text
    text = translate("main.py -algo FedAMP -alk 2 -lam 0.5 -nc 20")
    settings = yaml.safe_load(text)["model"]["init_args"]
    expected = {"alpha": 2.0, "penalty": 0.5, "sigma": 38.0, "alpha_decay": 1.0}
    assert settings | expected == settings  # 19 other clients, each with a weight of at most 2/σ
    assert "trains every client alone" in text and "-sg: 1; sigma is -alk times" in text
    for name in ("FD", "FedDistill"):
        text = translate(f"main.py -algo {name} -lam 0.6")
        assert yaml.safe_load(text)["model"]["init_args"]["penalty"] == 0.6
        assert "computes something else than FedDistill" in text


def test_all_flags_of_methods_are_flags():
    names = {flag.long for flag in FLAGS}
    used = {flag for method in METHODS.values() for flag in method.arguments}
    assert used <= {flag.long for flag in OF_SOME_METHODS} and len(names) == len(FLAGS)
    assert OF_SOME_METHODS[0].short == "bt"  # the first one below "pFedMe / PerAvg" there


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("-datta MNIST", ["-datta", "did you mean -data?"]),
        ("-nc many", ["-nc/--num_clients", "'many'"]),
        ("-data AGNews", ["-data AGNews", "mnist", "--folder PFLlib/dataset/AGNews"]),
        ("-algo FedCAC", ["-algo FedCAC", "Ditto"]),
        ("-m lstm", ["-m lstm", "cnn"]),
        ("-m 'cnn", ["cannot be read"]),
    ],
)
def test_a_mistake_gets_one_line(words, parts):
    status, out, err = call("import", "pfllib", f"main.py {words}")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: import: ") and not [part for part in parts if part not in err]


def write_samples(folder, sizes, values=None):
    """Writes samples as PFLlib's generators do; returns the inputs and labels of each split."""
    content = {}
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for client, size in enumerate(sizes):
            x = random.normal(size=(size, 1, 8, 8)).astype(np.float32)
            y = random.integers(3, size=size)
            content[split, client] = (x, y)
            data = np.array({"x": x, "y": y} if values is None else values)
            np.savez_compressed(folder / split / f"{client}.npz", data=data)
    return content


def test_a_folder_of_samples_is_read_client_by_client(tmp_path):
    sizes = [3, 5, *[2] * 9]  # eleven clients: 10 comes after 9, not after 1
    content = write_samples(tmp_path / "Mine", sizes)
    arrays = read_dataset(tmp_path / "Mine")
    for split, prefix, begin in (("train", "", 0), ("test", "test_", sum(sizes))):
        owners = arrays["client_ids"][begin : begin + sum(sizes)]
        for client in range(len(sizes)):
            x, y = content[split, client]
            np.testing.assert_array_equal(arrays[f"{prefix}inputs"][owners == client], x)
            np.testing.assert_array_equal(arrays[f"{prefix}targets"][owners == client], y)


def test_samples_of_the_clients_that_the_command_has(tmp_path, monkeypatch):
    """PFLlib reads the files 0 to -nc - 1 of a folder, and those of new clients behind them."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "Mine", [3, 2, 4, 5, 6])
    words = ("import", "pfllib", "main.py -data Mine -m mlr -nb 3 -nc 2 -nnc 1", "--folder", "Mine")
    status, _, err = call(*words)
    assert status == 0, err
    with np.load("Mine.npz") as arrays:
        assert np.bincount(arrays["client_ids"]).tolist() == [2 * 3, 2 * 2, 2 * 4]
        assert len(arrays["inputs"]) == len(arrays["test_inputs"]) == 3 + 2 + 4


@pytest.mark.slow
def test_a_run_has_pfllibs_own_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data.num_clients", "5", "--pfllib", "PFLlib/dataset/Digits"]
    assert call("partition", "--config", QUICKSTART, *words)[0] == 0
    command = "main.py -data Digits -algo Ditto -mu 0.1 -nc 5 -gr 2 -m mlr -lbs 50"
    status, out, err = call("import", "pfllib", command, "--folder", "PFLlib/dataset/Digits")
    assert status == 0, err
    (tmp_path / "ditto.yaml").write_text(out)
    status, _, err = call("fit", "--config", "ditto.yaml")
    assert status == 0, err
    rows = table(tmp_path / "runs" / "Ditto-Digits" / "clients.csv")
    for row in rows:
        client = int(row["client"])
        for split in ("train", "test"):
            with np.load(f"PFLlib/dataset/Digits/{split}/{client}.npz", allow_pickle=True) as file:
                assert int(row[f"{split}_samples"]) == len(file["data"].item()["y"])


def test_samples_are_written_once_and_nothing_is_overwritten(tmp_path, monkeypatch):
    """A second command over the same samples takes the file; another file is refused."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "Mine", [3, 2])
    words = ("import", "pfllib", "main.py -data Mine -m mlr -nb 3", "--folder", "Mine")
    first = call(*words)
    written = Path("Mine.npz").stat().st_mtime_ns
    assert first[0] == 0 and call(*words) == first
    assert Path("Mine.npz").stat().st_mtime_ns == written
    for content in ({"inputs": np.zeros(2)}, None):
        if content is None:
            Path("Mine.npz").write_text("notes")
        else:
            np.savez(Path("Mine.npz"), **content)
        before = Path("Mine.npz").read_bytes()
        status, _, err = call(*words)
        assert status == 2 and "Mine.npz: another file is there already" in err
        assert Path("Mine.npz").read_bytes() == before


def test_what_the_shell_does_with_a_command_does_not_count():
    """Commands in READMEs run in the background, with their output in a file."""
    plain = translate("main.py -data MNIST -m ResNet18 -algo FedDBE -klw 0.1 -mo 0.2")
    shell = translate(
        "nohup python -u main.py -data MNIST -m ResNet18 -algo FedDBE -klw 0.1 -mo 0.2 "
        "> result-mnist.out 2>&1 &"
    )
    assert yaml.safe_load(shell) == yaml.safe_load(plain)
    network = yaml.safe_load(plain)["model"]["init_args"]["network"]
    assert network["init_args"]["name"] == "resnet18"


class Evil:
    def __reduce__(self):
        return (print, ("never",))


@pytest.mark.parametrize("values", [{"x": Evil(), "y": 0}, {"x": np.zeros(2)}, 3])
def test_nothing_but_arrays_is_unpickled(values, tmp_path, capsys):
    write_samples(tmp_path / "Mine", [2], values)
    status, out, err = call("import", "pfllib", "main.py", "--folder", tmp_path / "Mine")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "0.npz: it is no file of PFLlib's samples" in err
    assert "never" not in capsys.readouterr().out
    assert pickle.loads(pickle.dumps(Evil())) is None  # it would have printed


def test_a_folder_without_samples_gets_one_line(tmp_path):
    status, _, err = call("import", "pfllib", "main.py", "--folder", tmp_path)
    assert (status, err.count("\n")) == (2, 1) and "there is no train/0.npz" in err


def test_every_data_set_is_a_data_module():
    assert not [name for name, _, _ in DATA.values() if not hasattr(pfl.datamodules, name)]
