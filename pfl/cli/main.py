"""The entry of the command line: which command runs, and the exit status of an error."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import pfl
from pfl.cli.options import (
    COMMANDS,
    LIGHT,
    OPEN,
    CommandParser,
    add_parsers,
    predict_parser,
)
from pfl.current_folder import add_current_folder
from pfl.datamodules.errors import optional_module
from pfl.errors import ConfigError, printable

TRACEBACK = "PFL_TRACEBACK"  # environment variable: every error comes with its traceback
UNREAD = 141  # exit status: 128 plus the number of SIGPIPE, which ends other programs then
RUNS = {  # commands of LightningCLI, whose options take seconds to collect
    "fit": "train a method on clients' data, round by round",
    "validate": "evaluate a checkpoint on validation and test data",
    "test": "evaluate a checkpoint on test data",
    "predict": "write the predictions of a checkpoint",
}


def parser(options: Mapping[str, Sequence[str] | None] | None = None) -> CommandParser:
    """Returns the parser of all commands.

    The commands of `RUNS`, which LightningCLI parses, get these options, with their choices.
    """
    top = CommandParser(
        prog="pfl",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
        description="Personalized federated learning.",
        epilog="`pfl COMMAND --help` lists the options of a command; `pfl fit --model.help FedSLR` "
        "the options of a method.",
    )
    top.add_argument("--version", action="version", version=f"pfl {pfl.__version__}")
    top.add_argument("--completion", choices=("bash", "zsh"), help="print a script of completions")
    commands = top.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, words in RUNS.items():
        command = commands.add_parser(name, help=words, add_help=False)
        for option, choices in (options or {}).items():
            command.add_argument(f"--{option}", choices=choices)
    add_parsers(commands)
    return top


def main(args: list[str] | None = None) -> int:
    """Runs the command line, that of the program by default, and returns the exit status.

    It is 2 for a mistake of the user, told in one line, 1 for a lost process, and 128 plus its
    number for a signal. `--traceback`, or `PFL_TRACEBACK=1`, shows the traceback of every error.
    A command whose reader has gone, as in `pfl data FILE | head -1`, ends without a word.
    """
    try:
        try:
            status = _command(args)
        except SystemExit:  # after the text of --help
            _flush()
            raise
        _flush()
    except BrokenPipeError:
        if not _lost_its_reader():  # the pipe is another one
            raise
        return UNREAD
    return status


def _flush() -> None:
    """Writes what was printed; at the interpreter's end nobody can catch the error."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _lost_its_reader() -> bool:
    """Returns whether nobody reads what this process prints, and then has it go nowhere."""
    lost = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None or not hasattr(select, "poll"):  # Windows
            continue
        poll = select.poll()
        poll.register(stream, 0)
        if poll.poll(0):  # an error or a hang-up, which are told in any case
            lost = True
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    return lost


def _command(args: list[str] | None) -> int:
    if args is None:
        args = sys.argv[1:]
        # The command `pfl` starts without this folder.
        add_current_folder()
    everything = bool(os.environ.get(TRACEBACK)) or "--traceback" in args
    args = [arg for arg in args if arg != "--traceback"]
    try:
        given = _parse(args)
        if given is None:
            return 0
        if given.command in LIGHT:
            given.run(given)
            return 0
        # Where PyTorch is imported already, the parser takes no longer. The environment may change
        # how it parses.
        quick = given.command in RUNS and not everything and "torch" not in sys.modules
        quick = quick and not any(name.startswith("JSONARGPARSE_") for name in os.environ)
        if quick and (lines := _quick(args)):
            return _refuse(lines)
    except ConfigError as error:
        return _refuse([str(error)])
    return _run(given, args, everything, quick)


def _quick(args: list[str]) -> list[str]:
    """Shows the help of a run, or returns a line about each mistake, if that needs no PyTorch."""
    from pfl.configuration import light

    if text := light.read_help(args):
        print(text, end="")
        sys.exit(0)
    return light.check(args)


def _parse(args: list[str]) -> argparse.Namespace | None:
    """Returns the options of a command, or what `LightningCLI` will parse; None for no command."""
    top = parser()
    known = [*RUNS, *COMMANDS]
    if not args:
        top.print_help()
        return None
    command, *rest = args
    if command.partition("=")[0] in ("--config", "-c"):
        raise ConfigError(f"config: give it after a command: {', '.join(RUNS)}")
    if command in (*RUNS, *OPEN):
        if not rest and command == "data":
            raise ConfigError("data: give a file, such as patients.csv, or --config quickstart")
        if not rest:
            raise ConfigError(f"{command}: give a configuration, such as --config quickstart")
        is_run = not rest[0].startswith("-") and Path(rest[0]).exists()
        if command == "predict" and (is_run or "--rows" in rest or "--party" in rest):
            return predict_parser().parse_args(rest)
        if not rest[0].startswith("-") and command != "data":
            raise ConfigError(f"{command}: {rest[0]}; give the configuration as --config {rest[0]}")
    if command in RUNS:
        return argparse.Namespace(command=command)
    if command not in known and not command.startswith("-"):
        hint = ""
        if close := get_close_matches(command, known, n=1):
            hint = f" did you mean {close[0]!r}?"
        raise ConfigError(
            f"{command}: there is no such command;{hint} the commands are {', '.join(known)}"
        )
    given, others = top.parse_known_args(args)
    if given.completion:
        from pfl.configuration.messages import option_keys

        shtab = optional_module("completion", "shtab")
        print(shtab.complete(parser(option_keys()), given.completion))
        return None
    if others and command not in OPEN:
        raise ConfigError(f"{command}: unrecognized arguments: {' '.join(others)}")
    given.others = others
    return given


def _run(given: argparse.Namespace, args: list[str], everything: bool, learns: bool) -> int:
    """Runs a command and returns the exit status; its imports take seconds.

    A run that `learns` notes its options, so that the next answer about them is quick.
    """
    from pfl.configuration import light
    from pfl.configuration.app import FederatedCLI, Parser
    from pfl.configuration.messages import quiet
    from pfl.configuration.user_code import mistake
    from pfl.distributed.launch import Ended, ProcessLost, report_signals
    from pfl.experiments.workers import WorkerLost
    from pfl.telling import be_heard

    quiet()
    try:
        with report_signals():
            if given.command in RUNS:
                be_heard()
                FederatedCLI(args, learns)
            else:
                given.run(given)
    except Ended as error:
        return int(error.code or 1)
    except ProcessLost:  # the launcher has said why
        return 1
    except WorkerLost as error:
        return _refuse([str(error)], 1)
    except BrokenPipeError:  # perhaps of what was printed
        raise
    except (Exception, SystemExit) as error:
        if learns and Parser.shown:
            light.keep_help(args, Parser.shown)
        line = mistake(error)
        if line is None and isinstance(error, OSError) and error.filename:
            line = f"{error.filename}: the file cannot be read or written ({error.strerror})"
        if line is None or everything:
            raise
        status = 2
        if isinstance(error, SystemExit):  # called by a user's code: the run has not ended well
            status = 1
            if isinstance(error.code, int) and error.code:
                status = error.code
        lines = [line]
        if learns:
            lines = _beside(line, args)
        return _refuse(lines, status)
    return 0


def _beside(line: str, args: list[str]) -> list[str]:
    """Returns the lines about all mistakes of a command; the parser ends at one of them, `line`.

    It is `line` alone if that is about something else, such as a round of a run.
    """
    from pfl.configuration import light

    try:
        lines = light.check(args)
    except ConfigError:  # a file has changed while the run went on
        lines = []
    if line in lines:
        return lines
    return [line]


def _refuse(lines: list[str], status: int = 2) -> int:
    for line in lines:
        print(f"error: {printable(line)}", file=sys.stderr)
    return status
