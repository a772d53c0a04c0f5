"""What a checkpoint holds beyond what Lightning saves: client states, ledger, counts, identity."""

from __future__ import annotations

import copy
import inspect
import math
import re
import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pfl.aggregation.accountant import Accountant
from pfl.clients.memory_tiers import SMALLEST, mapped
from pfl.clients.store import ClientStore
from pfl.communication import Ledger
from pfl.distributed.collectives import gather_parts
from pfl.errors import ConfigError
from pfl.method.hooks import Method
from pfl.randomness import Secret
from pfl.rounds.checkpoint_io import KEY_FILE, SECRET, Malformed, check_parts
from pfl.telling import tell

NOISE = "noise"  # what the ε of clients follows from, in a checkpoint
SAMPLE_NOISE = "sample noise"  # what the ε of samples follows from


def save(module: Method, ledger: Ledger) -> dict[str, Any]:
    """Returns tensors and plain values only, which `torch.load(weights_only=True)` reads.

    Rows of client states live on the process that owns the client. The checkpoint has the rows of
    all processes, so that a run can continue with another number of processes. Every process must
    call this function; the first process, which writes the file, gets the rows.

    Args:
        module: The method.
        ledger: Every client's bytes, over all processes.
    """
    private = module.run.private
    sample_privacy = module.run.loop.sample_privacy
    saved = {**_identity(module), **_fixed_settings(module)}
    if private is not None:
        saved["clip"] = private.clip
        saved[NOISE] = _noise_of(private.accountant, module.progress.rounds)
    if sample_privacy is not None:
        saved[SAMPLE_NOISE] = {
            "noise_multiplier": float(sample_privacy.noise_multiplier),
            "batch_size": module.batch_size,
        }
    if module.body_digest is not None:
        saved["body"] = module.body_digest
    if module.oracle.chosen is not None:
        saved["engine"] = module.oracle.chosen
    saved["ran_with"] = module.oracle.engine.name
    saved["server_optimizer"] = _server_arguments(module)
    saved["has_global"] = module.has_global
    who = module.run.loop.participation
    saved["virtual_seconds"] = who.ended(module.progress.rounds)
    saved["arrivals"] = None
    if who.timetable is not None:
        saved["arrivals"] = who.timetable.checksum(module.progress.rounds)
    saved |= module.progress.state_dict()
    saved["clients"] = client_states(module.store)
    saved["ledger"] = ledger.state_dict()
    secret = module.run.loop.secret
    if secret is not None:
        saved[SECRET] = secret.key  # goes to a file of its own
    return saved


def client_states(store: ClientStore) -> dict[str, Any]:
    """Returns the rows of all processes on the first process; every process must call it."""
    return store.state_dict(partial(gather_parts, empty=_empty))


def check(module: Method, checkpoint: dict[str, Any]) -> None:
    """Refuses a checkpoint that does not fit the run, or has parts missing or of another kind.

    Raises:
        ConfigError: The file is not a federated checkpoint, or its method, number of parameters,
            partition, samples or client states are not those of the run; or, where training
            continues, its network or seed.
        Malformed: A part is missing, or of another kind.
    """
    saved = checkpoint.get("federated")
    if saved is None:
        raise ConfigError("ckpt_path: this is not a checkpoint of a federated run")
    ledger = Ledger(0).state_dict()
    counts = {"rounds": 0, "samples_seen": 0.0, "bytes": [0, 0], "clients": {}, "ledger": ledger}
    if module.run.private is not None:
        counts["clip"] = 0.0
    fits = module.trainer.state.fn == "fit"
    own_run = _identity(module)
    if fits:
        own_run |= _fixed_settings(module)
    check_parts(saved, {**own_run, **counts}, "federated")
    actual = {**saved, "client states": sorted(saved["clients"])}
    expected = {**own_run, "client states": sorted(module.states.all_names)}
    # The seed first: another one makes another partition, too.
    for what, value in sorted(expected.items(), key=lambda item: item[0] != "seed"):
        if not _equal(actual[what], value):
            if what == "samples":
                raise ConfigError(
                    "ckpt_path: the samples are other ones than those that the checkpoint was made "
                    "with; give the data of then"
                )
            raise ConfigError(
                f"ckpt_path: the checkpoint's {what} is {actual[what]}, this run's is {value}; use "
                f"the configuration that it was made with"
            )
    own: dict[str, Any] = {"state_dict": dict(module.state_dict())}
    if fits:
        loops = {"fit_loop": module.trainer.fit_loop.state_dict()}
        own |= {"loops": loops, "callbacks": {}, "optimizer_states": [{}]}
    check_parts(checkpoint, own, "checkpoint")
    if fits:
        _check_arrivals(module, saved)
        _check_noise(module, saved)
        _try_step(module, checkpoint["optimizer_states"][0])


def _check_arrivals(module: Method, saved: dict[str, Any]) -> None:
    """Refuses settings with which other messages would have come so far, or at other times.

    The models with which the clients in training have begun would be taken for other ones.
    Checkpoints from before this was checked do not have what is compared.

    Raises:
        ConfigError: The messages would have come otherwise.
    """
    who = module.run.loop.participation
    if who.timetable is None or "arrivals" not in saved:
        return
    rounds = saved["rounds"]
    known = saved["arrivals"] == who.timetable.checksum(rounds)
    if not known or not math.isclose(saved["virtual_seconds"], who.ended(rounds) or 0.0):
        raise ConfigError(
            f"ckpt_path: with this run's settings other messages would have come in the "
            f"checkpoint's {rounds} rounds, or at other times; give the loop.clock, "
            f"clients_per_round, unseen, buffer_size, batch_size and local steps of then"
        )


def _noise_of(accountant: Accountant, rounds: int) -> dict[str, Any]:
    """Returns what ε after some rounds follows from, but for δ, as plain values."""
    return {
        "noise_multiplier": float(accountant.noise_multiplier),
        "sampling": accountant.sampling,
        "cohort": accountant.cohort,
        "population": accountant.population,
        "times": accountant.times(rounds),
    }


def _check_noise(module: Method, saved: dict[str, Any]) -> None:
    """Refuses settings with which the ε of a private run would not count what was revealed so far.

    ε counts all rounds alike, with the present settings. Checkpoints from before this was checked
    do not have what is compared.

    Raises:
        ConfigError: The rounds of the checkpoint have revealed more than they would count for.
    """
    private = module.run.private
    if private is not None and NOISE in saved and not private.privacy.reproducible:
        check_parts(saved[NOISE], _noise_of(private.accountant, 0), f"federated.{NOISE}")
        counted = dict(saved[NOISE])
        times = counted.pop("times")
        before = Accountant(delta=private.accountant.delta, **counted)
        revealed = before.epsilon(times)
        known = private.accountant.epsilon(saved["rounds"])
        if revealed > known * (1 + 1e-9):
            raise ConfigError(
                f"ckpt_path: the checkpoint's {saved['rounds']} rounds had the noise multiplier "
                f"{before.noise_multiplier!r} and {before.cohort} of {before.population} clients "
                f"each, and have revealed epsilon {revealed:.4g}; with this run's "
                f"{private.noise_multiplier:.4g} and {private.cohort} they would count as "
                f"{known:.4g}; give the noise_multiplier and the cohorts of then"
            )
    privacy = module.run.loop.sample_privacy
    if privacy is not None and SAMPLE_NOISE in saved and not privacy.reproducible:
        parts = {"noise_multiplier": 0.0, "batch_size": None}
        check_parts(saved[SAMPLE_NOISE], parts, f"federated.{SAMPLE_NOISE}")
        z = saved[SAMPLE_NOISE]["noise_multiplier"]
        size = saved[SAMPLE_NOISE]["batch_size"]
        fewer = module.batch_size is not None and (size is None or module.batch_size < size)
        if privacy.noise_multiplier > z or fewer:
            raise ConfigError(
                f"ckpt_path: the checkpoint's gradients had loop.sample_privacy.noise_multiplier: "
                f"{z!r} and model.batch_size: {size}; with this run's {privacy.noise_multiplier} "
                f"and {module.batch_size} epsilon would count less than they have revealed; give "
                f"those of then"
            )


def check_body(module: Method, saved: dict[str, Any] | None) -> None:
    """Refuses a checkpoint whose models belong to other frozen parameters than the network has.

    Raises:
        ConfigError: The frozen parameters are others.
    """
    if saved is None:
        return
    theirs = saved.get("body")
    own = module.body_digest
    if theirs != own:
        raise ConfigError(
            f"ckpt_path: the checkpoint belongs to a network whose frozen parameters have the "
            f"checksum {theirs}, this run's have {own}; give the network that it was made with"
        )


def _try_step(module: Method, saved: dict[str, Any]) -> None:
    """Refuses a saved state with which a copy of the server's optimizer takes no step."""
    optimizer = copy.deepcopy(module.configure_optimizers())
    assert isinstance(optimizer, torch.optim.Optimizer)
    try:
        optimizer.load_state_dict(copy.deepcopy(saved))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except Exception as error:  # whatever an optimizer lacks
        raise Malformed(
            f"checkpoint.optimizer_states: the server's optimizer cannot continue: "
            f"{type(error).__name__}: {error}"
        ) from error


def take_server_arguments(module: Method, checkpoint: dict[str, Any]) -> None:
    """Gives a checkpoint's server optimizer the arguments that have changed since.

    PyTorch restores the arguments of then with the state, and another rate would have no effect.
    The state stays, such as a momentum, and what callbacks have made of other arguments.
    Checkpoints from before arguments were kept do not have what is compared.
    """
    saved = checkpoint["federated"]
    if "server_optimizer" not in saved:
        return
    check_parts(saved, {"server_optimizer": {}}, "federated")
    before = saved["server_optimizer"]
    now = _server_arguments(module)
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group.update(changed)


def _server_arguments(module: Method) -> dict[str, Any]:
    """Returns the arguments of the server's optimizer, as the configuration has them."""
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    names = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
    return {name: value for name, value in optimizer.defaults.items() if name in names}


def restore_run(module: Method, saved: dict[str, Any], rank: int, world: int) -> None:
    """Takes all counts over, and the rows of the clients that process `rank` of `world` owns.

    Raises:
        Malformed: The states are not those that the method has declared.
    """
    module.progress.load_state_dict(saved)
    private = module.run.private
    if private is not None and private.privacy.adaptive is not None:
        private.clip = saved["clip"]
    restore_states(module.store, saved["clients"], rank, world)
    seconds = saved.get("virtual_seconds")
    if seconds is not None:
        module.run.loop.participation.go_on_from(saved["rounds"], seconds)
    if rank == 0:  # ledgers are added up over processes
        _check_ids(saved["ledger"]["clients"], module.store.num_clients, "federated.ledger.clients")
        module.progress.ledger.load_state_dict(saved["ledger"])


def secret_of(module: Method, saved: dict[str, Any]) -> Secret | None:
    """Returns the secret key of a private run, which lies beside its checkpoint; None: a new one.

    Raises:
        ConfigError: It is not there, and the noise of several rounds belongs together.
    """
    loop = module.run.loop
    if loop.secret is None:
        return None
    if SECRET in saved:
        return Secret(saved[SECRET])
    privacy = loop.participation.privacy
    if privacy is not None and privacy.bands > 1:
        raise ConfigError(
            f"ckpt_path: {KEY_FILE} is not beside the checkpoint, and loop.privacy.bands: "
            f"{privacy.bands} continues the noise of earlier rounds; give the folder that the run "
            f"has written"
        )
    tell(
        f"ckpt_path: {KEY_FILE} is not beside the checkpoint; the noise of the rounds to come is "
        f"drawn from a new key, and is not that of an uninterrupted run"
    )
    return None


def restore_states(store: ClientStore, saved: dict[str, Any], rank: int, world: int) -> None:
    """Puts the rows of the clients that process `rank` of `world` owns into a store.

    Raises:
        Malformed: The rows are not those of this store's states.
    """
    for name, entry in saved.items():
        where = f"clients.{name}"
        check_parts(entry, {"initial": store.initial(name), "parts": []}, where)
        if entry["initial"].shape != store.initial(name).shape:
            raise Malformed(f"{where}.initial has {len(entry['initial'])} values")
        for part in entry["parts"]:
            check_parts(part, {"ids": torch.zeros(0, dtype=torch.int64)}, f"{where}.parts")
            _check_ids(part["ids"], store.num_clients, f"{where}.parts.ids")
    try:
        store.load_state_dict(saved, lambda ids: ids % world == rank)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Malformed(f"rows of clients: {type(error).__name__}: {error}") from error


def _check_ids(ids: Tensor, count: int, where: str) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise Malformed(f"{where} has ids that no client has")


def _identity(module: Method) -> dict[str, Any]:
    """Returns by what the checkpoint of a run is recognised, whatever is done with it."""
    return {
        "algorithm": type(module).__name__,
        "parameters": module.space.size,
        "partition": module.run.loop.datamodule.partition.hash,
        "samples": module.run.sample_sums,
    }


def _fixed_settings(module: Method) -> dict[str, Any]:
    """Returns what must stay the same where training continues.

    The network's layers enter as a checksum of their description, without addresses in memory.
    """
    layers = repr(module.network)
    if module.family is not None:
        layers += repr([member.network for member in module.members]) + str(module.kinds.tolist())
    layers = re.sub(r" at 0x\w+", "", layers)
    return {
        "network": f"{type(module.network).__name__} {zlib.crc32(layers.encode()):08x}",
        "seed": module.seed,
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):  # another machine may round otherwise
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, equal_nan=True)
    return bool(one == other)


def _empty(like: Tensor) -> Tensor:
    """Returns room for rows of another process until they are written, in a file if it is large."""
    if like.nbytes < SMALLEST:
        return torch.empty_like(like, device="cpu")
    what = "a checkpoint of several processes: what the others' clients remember"
    return mapped(like.numel(), like.dtype, what).view(like.shape)
