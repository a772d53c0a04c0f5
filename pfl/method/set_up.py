"""The set-up of a method for a run: its network is tried, and the chunks of clients are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pfl.clients import Clients, LocalSchedule
from pfl.clients.memory_tiers import DEVICE_SHARE
from pfl.communication import Ledger
from pfl.distributed.collectives import gather
from pfl.engines.memory import clients_that_fit
from pfl.engines.runner import Precision
from pfl.engines.threads import ClientThreads
from pfl.errors import ConfigError
from pfl.method.frozen_part import store_frozen_part
from pfl.method.groups import ONE_THREAD
from pfl.method.states import GRADIENTS
from pfl.rounds.loop import FederatedLoop

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm

CHUNK_FLOATS = 1 << 26  # of one [C, P] matrix if `clients_at_once` is left open: 256 MiB
MEMORY_SHARE = 0.8  # of a GPU's free memory; the rest is for what libraries take as they go
SCALED = ("16-mixed", "16")  # precisions that scale losses
# Local steps of smaller models take milliseconds. A second thread within such a step costs more
# than it gains, many times more on a machine with other work to do.
ONE_THREAD_PARAMETERS = 1 << 18


def check_precision(trainer: Trainer, loop: FederatedLoop) -> None:
    """Refuses a precision in which methods would not be what they are.

    Raises:
        ConfigError: The precision scales losses or keeps the models in 16 bits.
    """
    if trainer.precision in (*SCALED, "16-true", "bf16-true"):
        raise refused_precision(trainer.precision)
    if trainer.precision == "64-true" and (rounded := loop.datamodule.rounded_arrays):
        rank_zero_warn(
            f"trainer.precision: 64-true, but {type(loop.datamodule).__name__} keeps "
            f"{', '.join(rounded)} as float32, with 7 digits; TensorDataModule keeps all",
            category=UserWarning,
        )


def refused_precision(precision: Any) -> ConfigError:
    """Returns the error about a precision in which methods would not be what they are."""
    return ConfigError(
        f"trainer.precision: {precision!r} scales losses or keeps the models themselves in 16 "
        f"bits; use bf16-mixed, 32-true or 64-true"
    )


def inspect_network(
    method: FederatedAlgorithm,
    loop: FederatedLoop,
    device: torch.device,
    precision: Precision,
    client: int | None = None,
    store: bool = True,
) -> Clients:
    """Tries network, loss and metrics on a few samples; the oracle then has its engine.

    Args:
        method: The method.
        loop: The loop whose data are used.
        device: Where the samples and models are.
        precision: Opens the precision context in which the network runs.
        client: The client whose samples are used; None: the client with the most samples.
        store: Whether the network's frozen part may run once, in the dtype that the network has.

    Returns:
        The client whose samples were used.
    """
    data, space, oracle = loop.client_data(device), method.space, method.oracle
    data.poisson = False
    data.show(data.whole_samples)
    if loop.sample_privacy is not None:
        method.states.declare(GRADIENTS, lambda: torch.zeros(1), False)
    sizes, size = loop.datamodule.client_sizes, method.batch_size
    client = int(sizes.argmax()) if client is None else client
    probe = Clients(np.array([client]), 0, data, dtype=space.vector.dtype)
    # Two samples, or one if some client has a batch of one, which BatchNorm refuses.
    left = sizes if size is None else sizes % size
    count = 1 if size == 1 or (left[sizes > 0] == 1).any() else 2
    batch = next(probe.batches(LocalSchedule(count)))
    inputs, targets = batch.inputs[0], batch.targets[0]
    oracle.inspect(inputs, targets, loop.datamodule.num_classes, precision)
    if store and (rest := store_frozen_part(oracle, data, batch)) is not None:
        inputs = next(probe.batches(LocalSchedule(count))).inputs[0]
        oracle.inspect(inputs, targets, loop.datamodule.num_classes, precision, rest)
    if loop.metrics:
        outputs = oracle.predict(method.global_model, inputs).cpu()
        loop.metrics.values(*oracle.runner.predicted(outputs, targets.cpu()))
    return probe


def make_private(method: FederatedAlgorithm, loop: FederatedLoop) -> None:
    """Gives the gradients of a method sample-level privacy, if the loop asks for it.

    Raises:
        ConfigError: The method or its network cannot have it.
    """
    privacy = loop.sample_privacy
    if privacy is None:
        return
    if method.pooled:
        raise ConfigError(
            f"loop.sample_privacy: {type(method).__name__} trains on the samples of all clients in "
            f"one place; take another method"
        )
    if method.oracle.buffers.size:
        raise ConfigError(
            "loop.sample_privacy: the network's running statistics mix samples; take GroupNorm"
        )
    if loop.state_dtype is not None and loop.state_dtype.itemsize < 4:
        raise ConfigError(
            f"loop.state_dtype: {str(loop.state_dtype).removeprefix('torch.')}; gradients are "
            f"counted in a client state for loop.sample_privacy, give null"
        )
    loop.client_data(method.device).poisson = True
    method.oracle.make_private(privacy.clip, privacy.noise_multiplier, method.batch_size, loop.seed)


def end_within_budget(method: FederatedAlgorithm) -> None:
    """Ends a private run before it passes `loop.privacy.epsilon`.

    Raises:
        ConfigError: The first round passes it.
    """
    private, rounds = method.run.private, method.max_rounds
    if private is None or rounds is None or (budget := private.privacy.epsilon) is None:
        return
    allowed = private.accountant.rounds_within(budget, rounds)
    if allowed == 0:
        raise ConfigError(
            f"loop.privacy.epsilon: {budget}; the first round alone takes "
            f"{private.accountant.epsilon(1):.4g}; give more noise or a larger budget"
        )
    if allowed < rounds:
        rank_zero_info(
            f"loop.privacy: the run ends after {allowed} of {rounds} rounds, as the next one "
            f"would pass epsilon {budget:g}"
        )
        method.trainer.fit_loop.max_epochs = allowed


def plan_chunks(method: FederatedAlgorithm, loop: FederatedLoop, probe: Clients) -> None:
    """Tells the loop how many clients train together, and which process has a client.

    The number is the same for all processes, or they would not agree on who trains whom.
    """
    size = min(gather(loop.clients_at_once or _clients_that_fit(method, loop, probe)))
    stateful = bool(method.states.all_names)
    loop.plan(size, stateful=stateful, cost=method.cost, buffer=method.buffer_size)


def _clients_that_fit(method: FederatedAlgorithm, loop: FederatedLoop, probe: Clients) -> int:
    """Returns how many clients to train together, judged by one client with many samples."""
    if method.device.type != "cuda":
        return max(1, CHUNK_FLOATS // method.space.size)
    # The received model, the client's own, momentum and the message; and each client state
    # three times: before and after the update, and read ahead.
    declared = len(method.states.declared)
    vectors = 4 + 3 * declared
    share = MEMORY_SHARE * (1 - DEVICE_SHARE * bool(declared)) / loop.sharing
    batch = next(probe.batches(LocalSchedule(method.batch_size)))
    return clients_that_fit(method.oracle, batch, vectors, share)


def allocate(method: FederatedAlgorithm, loop: FederatedLoop) -> None:
    """Allocates threads and, for a new population, the rows of states and kept messages."""
    method.oracle.runner.to(method.device, method.space.vector.dtype)
    on_cpu = method.device.type == "cpu"
    if method.threads is ONE_THREAD and on_cpu:
        count = method.oracle.allocate_replicas(method.process_threads)
        method.groups.threads = ClientThreads(count)
    if on_cpu and method.space.size < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    if not hasattr(method.states, "store") or method.store.num_clients != loop.num_clients:
        method.ledger = Ledger(loop.num_clients)
        method.bytes_down = method.bytes_up = 0
        method.states.allocate(loop.client_store(method.device), loop.state_dtype)
        method.groups.free_memory = method.states.store.disable_prefetch
