"""The private names of other packages that pfl uses: each with the reason and the version.

`tests/test_private_names.py` holds that they exist and mean what is said here.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

# ---- Private names of Lightning's command line and of jsonargparse -------------------------------


class CommandLine(LightningCLI):
    """LightningCLI with two public hooks where it has private steps (lightning 2.5.5 to 2.6).

    jsonargparse's private names are not used. Its error messages are read by `pfl/cli/messages.py`.
    """

    def _parse_ckpt_path(self) -> None:
        # Lightning loads the whole file here, for hyperparameters that our checkpoints do not have.
        self.check_checkpoint()

    def _run_subcommand(self, subcommand: str) -> None:
        # Lightning's `before_fit` and `after_fit` cannot handle what a run raises.
        self.run_subcommand(subcommand)

    def check_checkpoint(self) -> None:
        """Checks the file of `ckpt_path`, after parsing."""

    def run_subcommand(self, subcommand: str) -> None:
        """Runs `fit`, `validate`, `test` or `predict`."""
        super()._run_subcommand(subcommand)
