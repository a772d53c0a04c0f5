"""The sweep file for W&B: the command that W&B makes of it runs, and logs what W&B looks for."""

import pytest
import wandb
import yaml

from pfl.cli.main import main
from tests.commands import ROOT, table

VALUES = {  # for each distribution of a parameter, a value that W&B may send
    "log_uniform_values": lambda parameter: (parameter["min"] * parameter["max"]) ** 0.5,
    None: lambda parameter: parameter["values"][-1],
}


@pytest.mark.slow
@pytest.mark.cli
def test_the_command_of_a_trial_runs(tmp_path, monkeypatch):
    """W&B's own functions put the command together; only the rounds are fewer."""
    # The import takes seconds, which every worker would need to collect this file.
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "configs/sweep/fedavg.yaml").read_text())
    values = {
        key: {"value": VALUES[parameter.get("distribution")](parameter)}
        for key, parameter in sweep["parameters"].items()
    }
    flags = create_sweep_command_args({"args": values})["args"]
    words = create_sweep_command(list(sweep["command"]))
    place = words.index("${args}")
    words = [*words[:place], *flags, *words[place + 1 :]]
    assert words[:2] == ["${env}", "pfl"]  # `/usr/bin/env pfl`

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    try:
        assert main([*words[2:], "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]) == 0
    finally:
        wandb.finish()
        wandb.teardown()
    folder = tmp_path / "runs" / "quickstart"
    assert sweep["metric"]["name"] in table(folder / "metrics.csv")[0]
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model["class_path"].endswith("FedAvg")
    for key, entry in values.items():
        assert model["init_args"][key.removeprefix("model.")] == entry["value"]
