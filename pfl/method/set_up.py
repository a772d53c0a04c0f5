"""The set-up of a method for a run: its network is tried, and the chunks of clients are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from pfl.aggregation.privacy import PrivateMean
from pfl.clients import Clients, LocalSchedule
from pfl.clients.memory_tiers import DEVICE_SHARE
from pfl.context import RunContext
from pfl.distributed.collectives import gather
from pfl.engines.batch import StepBlock
from pfl.engines.graph import records
from pfl.engines.memory import clients_that_fit
from pfl.engines.oracle import Oracle
from pfl.engines.probe import TooFewOutputs
from pfl.engines.runner import Precision, name_of
from pfl.engines.threads import ClientThreads
from pfl.errors import ConfigError
from pfl.method.architectures import architectures_of
from pfl.method.frozen_part import store_frozen_part
from pfl.method.groups import ONE_THREAD
from pfl.method.hooks import Method
from pfl.parameters import ParameterSpace
from pfl.randomness import Secret
from pfl.rounds.loop import FederatedLoop
from pfl.rounds.participation import Participation
from pfl.stages.attackers import ChangedMessages
from pfl.stages.mean import Stages
from pfl.stages.private import ClippedSum, CountedGradients
from pfl.stages.products import MeanWithProducts
from pfl.stages.robust import BoundedMean, RuledMean
from pfl.stages.stage import Served, Stage
from pfl.stages.statistics import RunningStatistics
from pfl.telling import tell

CHUNK_FLOATS = 1 << 26  # of one [C, P] matrix if `clients_at_once` is left open: 256 MiB
MEMORY_SHARE = 0.8  # of a GPU's free memory; the rest is for what libraries take as they go
TIMED_STEPS = 4  # local steps on which engines are compared on a GPU
SCALED = ("16-mixed", "16")  # precisions that scale losses
# Local steps of smaller models take milliseconds. A second thread within such a step costs more
# than it gains, many times more on a machine with other work to do.
ONE_THREAD_PARAMETERS = 1 << 18
# Which method's vector has the values of a module that a run has used. The vector is not kept
# alive, as it would keep the module.
_SPACES: WeakKeyDictionary[nn.Module, ReferenceType[ParameterSpace]] = WeakKeyDictionary()


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


def refuse_shared_network(method: Method) -> None:
    """Refuses a network whose parameters another method has used in a run.

    The method would begin with what the other one has trained, and train the other one's model on.

    Raises:
        ConfigError: The network, or a part of it, is also another method's.
    """
    for module in _trained_modules(method.network):
        known = _SPACES.get(module)
        if known is not None and known() is not method.space:
            name = type(method.network).__name__
            raise ConfigError(
                f"model.network: this {name}, or a part of it, is already another method's, and "
                f"both would train one model; give each method a network of its own, such as "
                f"copy.deepcopy(network)"
            )


def keep_network(method: Method) -> None:
    """Notes that the network is the method's, for `refuse_shared_network`."""
    for module in _trained_modules(method.network):
        _SPACES[module] = ref(method.space)


def _trained_modules(network: nn.Module) -> list[nn.Module]:
    """Returns the modules that have trained parameters of their own; others may be shared."""
    return [
        module
        for module in network.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def refused_precision(precision: Any) -> ConfigError:
    """Returns the error about a precision in which methods would not be what they are."""
    return ConfigError(
        f"trainer.precision: {precision!r} scales losses or keeps the models themselves in 16 "
        f"bits; use bf16-mixed, 32-true or 64-true"
    )


def inspect_network(
    method: Method,
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
    data = loop.client_data(device)
    space = method.space
    oracle = method.oracle
    data.draw_poisson_samples(None)
    data.show(data.whole_samples)
    sizes = loop.datamodule.client_sizes
    size = method.batch_size
    if client is None:
        client = int(sizes.argmax())
    probe = Clients(np.array([client]), 0, data, dtype=space.vector.dtype)
    # Two samples, or one if some client has a batch of one, which BatchNorm refuses.
    count = 2
    if _has_batch_of_one(sizes, size, method.accumulate):
        count = 1
    if not loop.datamodule.has_samples:
        probe = Clients(probe.ids, 0, data.few(count), dtype=probe.dtype)
    batch = next(probe.batches(LocalSchedule(count)))
    inputs = batch.inputs[0]
    targets = batch.targets[0]
    _check_places(method, loop)
    scale = loop.datamodule.target_scale
    if loop.datamodule.scale_targets and oracle.runner.label_threshold is not None:
        raise ConfigError(
            f"data.scale_targets: {loop.datamodule.scale_targets}, but "
            f"{name_of(oracle.runner.loss)} compares labels of 0 and 1; it must be false"
        )
    classes = loop.datamodule.num_classes
    try:
        oracle.inspect(inputs, targets, classes, precision, target_scale=scale)
    except TooFewOutputs as error:
        raise ConfigError(f"{error}{_largest_class(loop)}") from error
    store = store and not method.reads_other_samples
    if store and (rest := store_frozen_part(oracle, data, batch)) is not None:
        inputs = next(probe.batches(LocalSchedule(count))).inputs[0]
        oracle.inspect(inputs, targets, classes, precision, rest, scale)
    if loop.metrics:
        outputs = oracle.predict(method.global_model, inputs).cpu()
        loop.metrics.values(*oracle.runner.predicted(outputs, targets.cpu()))
    return probe


def _has_batch_of_one(sizes: np.ndarray, batch_size: int | None, parts: int) -> bool:
    """Whether a mini-batch, or one of the parts in which it is computed, has one sample.

    Args:
        sizes: The clients' numbers of samples, int64 [M].
        batch_size: The samples of a mini-batch; None: all of a client's.
        parts: `model.accumulate`.
    """
    counts = sizes
    if batch_size is not None:
        counts = np.append(sizes % batch_size, batch_size * (sizes >= batch_size).any())
    counts = counts[counts > 0]
    each = -(-counts // parts)
    return bool(((each == 1) | (counts % each == 1)).any())


def _check_places(method: Method, loop: FederatedLoop) -> None:
    """Refuses a negative class of a pixel or a token that the loss does not ignore.

    A sample with one class cannot be without it: such a sample would teach nothing.

    Raises:
        ConfigError: There is one.
    """
    classes = loop.datamodule.samples.targets
    if classes is None or classes.is_floating_point():
        return
    ignored = method.oracle.runner.ignored
    if classes.ndim == 1:
        void = torch.nonzero(classes == ignored).flatten().tolist()
        if void:
            raise ConfigError(
                f"data: {len(void)} samples have the class {ignored}, which model.loss ignores "
                f"(ignore_index), first sample {void[0]}{_owner(loop, void[0])}; leave them out of "
                f"the data"
            )
        return
    wrong = (classes < 0) & (classes != ignored)
    if not wrong.any():
        return
    sample = int(wrong.flatten(1).any(1).int().argmax())
    raise ConfigError(
        f"data: the targets of sample {sample}{_owner(loop, sample)} hold the class "
        f"{int(classes[sample][wrong[sample]][0])}; classes must be at least 0, and {ignored} "
        f"where there is none"
    )


def _largest_class(loop: FederatedLoop) -> str:
    """Returns where the largest class is, for an error."""
    classes = loop.datamodule.samples.targets
    if classes is None:
        return ""
    number = int(classes.max())
    rows = (classes == number).reshape(len(classes), -1)
    sample = int(rows.any(1).int().argmax())
    found = len(classes.unique())
    few = ""
    if loop.datamodule.has_labels and found <= number:
        few = (
            f", and {found} of the classes 0 to {number} occur, which "
            f"np.unique(targets, return_inverse=True)[1] numbers from 0"
        )
    return f"; the class {number} is in sample {sample}{_owner(loop, sample)}{few}"


def _owner(loop: FederatedLoop, sample: int) -> str:
    """Returns the client that owns a sample, in brackets; "" if nobody does."""
    for arrays in loop.datamodule.partition.splits.values():
        if arrays.is_shared:
            continue
        for client in range(len(arrays)):
            if sample in arrays[client]:
                return f" ({loop.name_of(client)})"
    return ""


def classes_to_weigh(method: Method) -> int:
    """Returns the number of classes, for `class_weights`.

    Raises:
        ConfigError: The samples have no classes, or several labels each.
    """
    classes = method.problem_constant("num_classes")
    if classes is None or not method.problem_constant("has_labels"):
        raise ConfigError(
            f"model.class_weights: {method.class_weights}; it needs one class per sample, but the "
            f"targets are values, or several labels per sample; leave it out"
        )
    return int(classes)


def check_patience(method: Method, loop: FederatedLoop) -> None:
    """Refuses `local_patience` where clients have no validation samples that may be looked at.

    Raises:
        ConfigError: There are none, or they are not to be.
    """
    patience = method.local_patience
    if patience is None:
        return
    key = f"model.local_patience: {patience}"
    if method.pooled:
        raise ConfigError(f"{key}; {type(method).__name__} trains no single clients; leave it out")
    if loop.sample_privacy is not None:
        raise ConfigError(
            f"{key}; loop.sample_privacy does not count validation samples, by which clients would "
            f"stop; leave it out"
        )
    if not loop.datamodule.partition.val.sizes.any():
        raise ConfigError(f"{key}; it needs validation samples; give data.protocol a share of them")


def check_by_client(method: Method, loop: FederatedLoop) -> None:
    """Refuses what `loop.by_client` says of clients, where the method cannot follow it.

    Raises:
        ConfigError: The method trains no clients, or sets their rates itself.
    """
    who = loop.participation
    if not who.by_client:
        return
    name = type(method).__name__
    if method.pooled:
        raise ConfigError(f"loop.by_client: {name} trains no single clients; leave it out")
    if not method.takes_client_rates and (who.rates(who.population) != 1).any():
        raise ConfigError(f"loop.by_client: {name} sets the rates of clients; leave rate out")


def make_private(method: Method, loop: FederatedLoop) -> None:
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
    everyone = [method, *method.members]
    if any(one.oracle.runner.mixes_samples for one in everyone):
        raise ConfigError(
            "loop.sample_privacy: the network's BatchNorm or running statistics mix samples; take "
            "GroupNorm"
        )
    if method.accumulate > 1:
        raise ConfigError(
            f"model.accumulate: {method.accumulate}; loop.sample_privacy takes the gradients of "
            f"single samples in any case; leave it out"
        )
    if loop.state_dtype is not None and loop.state_dtype.itemsize < 4:
        raise ConfigError(
            f"loop.state_dtype: {str(loop.state_dtype).removeprefix('torch.')}; gradients are "
            f"counted in a client state for loop.sample_privacy, give null"
        )
    draws = loop.sample_draws
    loop.client_data(method.device).draw_poisson_samples(draws.number("mini-batches"))
    for one in everyone:
        one.oracle.make_private(privacy.clip, privacy.noise_multiplier, method.batch_size, draws)


def share_secret(loop: FederatedLoop) -> None:
    """Gives all processes the secret key of the first one; every process must call it."""
    if loop.secret is not None:
        loop.take_secret(Secret(gather(loop.secret.key)[0]))


def rounds_within_budget(private: PrivateMean | None, rounds: int | None) -> int | None:
    """Returns the number of rounds after which a private run must end; None: where it would anyway.

    Raises:
        ConfigError: The first round passes `loop.privacy.epsilon`.
    """
    if private is None or rounds is None or private.privacy.epsilon is None:
        return None
    budget = private.privacy.epsilon
    allowed = private.accountant.rounds_within(budget, rounds)
    if allowed == 0:
        raise ConfigError(
            f"loop.privacy.epsilon: {budget}; the first round alone takes "
            f"{private.accountant.epsilon(1):.4g}; give more noise or a larger budget"
        )
    if allowed == rounds:
        return None
    tell(
        f"loop.privacy: the run ends after {allowed} of {rounds} rounds, as the next one "
        f"would pass epsilon {budget:g}"
    )
    return allowed


def stages_of(method: Method, loop: FederatedLoop, private: PrivateMean | None) -> Stages:
    """Returns what stands between "sent" and "read" in a run; nothing in a plain one.

    Raises:
        ConfigError: A stage takes what the method or another stage needs.
    """
    who = loop.participation
    oracle = method.oracle
    stages: list[Stage] = []
    if method.family is not None:
        stages.append(architectures_of(method, loop))
    elif oracle.buffers.size:
        stages.append(
            RunningStatistics(
                method.network,
                method.space,
                oracle,
                travel=method.sends_statistics,
                kept=method.keeps_model or method.buffer_policy == "local",
                personal=method.personal_buffers,
            )
        )
    if loop.sample_privacy is not None:
        stages.append(CountedGradients([oracle, *(one.oracle for one in method.members)]))
    stages += loop.stages
    if who.attackers is not None:
        stages.append(ChangedMessages(who.attackers.attack, who.attacking))
    stages += _mean_of(method, who, private)
    ordered = Stages(stages, method.weighting)
    for stage in ordered:
        if method.reads_products and "products" in stage.takes:
            raise ConfigError(
                f"{stage.key}: {type(method).__name__} needs the mean of the products B A of the "
                f"clients' factors, which this option does not protect or combine; take FedAvg"
            )
    return ordered


def set_up_stages(method: Method, stages: Sequence[Stage], context: RunContext) -> None:
    """Has stages check, before the first round, that they fit the method and the run.

    Raises:
        ConfigError: One does not.
    """
    served = Served(
        method=type(method).__name__,
        context=context,
        size=method.space.size,
        cohort_size=method.cohort_size,
        layers=method.space.layers,
        kept=list(method.states.messages),
        pooled=method.pooled,
        sends_first=method.sends_first,
        statistics=method.sends_statistics,
    )
    for stage in stages:
        stage.set_up(served)


def _mean_of(method: Method, who: Participation, private: PrivateMean | None) -> list[Stage]:
    """Returns the stages that make the means in place of the weighted mean."""
    made: list[Stage] = []
    attack = None
    if who.attackers is not None and who.attackers.attack.replaces("collude"):
        attack = who.attackers.attack
    rule = who.aggregation
    if private is not None:
        made.append(ClippedSum(private))
    if rule is not None and rule.limit is not None and attack is None:
        made.append(BoundedMean(method.weighting, rule.limit))
    elif rule is not None or attack is not None:
        made.append(RuledMean(method.weighting, rule, attack, who.attacking))
    if method.factors and not made:
        made.append(MeanWithProducts(method.weighting, method.factors))
    return made


def declare_states(method: Method, stages: Sequence[Stage]) -> None:
    """Declares the client states of the stages, and the statistics of kept models."""
    for stage in stages:
        for name, initial in stage.states().items():
            always = name in stage.always_kept
            method.states.declare(name, initial, rounded=stage.rounded, always=always)
    if "w" in method.states.messages and method.sends_statistics:
        method.states.keep("buffers", lambda: method.global_buffers)


def plan_chunks(method: Method, loop: FederatedLoop, probe: Clients) -> None:
    """Tells the loop how many clients train together, and which process has a client.

    The number is the same for all processes, or they would not agree on who trains whom.
    """
    size = min(gather(loop.clients_at_once or _clients_that_fit(method, loop, probe)))
    stateful = bool(method.states.all_names)
    loop.plan(
        size,
        stateful=stateful,
        cost=method.cost,
        schedule=method.local_schedule,
        buffer=method.buffer_size,
        pooled=method.pooled,
    )


def _clients_that_fit(method: Method, loop: FederatedLoop, probe: Clients) -> int:
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


def choose_engine(
    method: Method, loop: FederatedLoop, device: torch.device, name: str | None
) -> None:
    """Takes the engine that is fastest on a GPU for as many clients as the run trains together.

    Processes take the engine of the first one; every process must call this.

    Args:
        method: The method.
        loop: The loop of the run, which has planned its chunks.
        device: Where the samples are.
        name: The engine of an interrupted run that continues; None: there is none.
    """
    if not records(device) or not loop.datamodule.has_samples:
        return
    data = loop.client_data(device)
    ids = np.array([int(loop.datamodule.client_sizes.argmax())])
    probe = Clients(ids, 0, data, dtype=method.space.vector.dtype)
    one = next(iter(probe.step_blocks(method.local_schedule)), None)
    if one is None:
        return
    share = -(-method.cohort_size // len(gather(None)))
    clients = max(1, min(share, loop.chunk_size))
    steps = np.arange(TIMED_STEPS) % len(one.counts)
    picks = one.picks[torch.from_numpy(steps).to(device)].expand(-1, clients, -1)
    counts = one.counts[steps].repeat(clients, 1)
    block = StepBlock(one.inputs, one.targets, picks.contiguous(), counts, one.dtype)
    block.lasting = one.lasting
    method.oracle.choose_fastest(block, name)
    first = gather(method.oracle.engine.name)[0]
    if first != method.oracle.engine.name:
        method.oracle.choose_fastest(block, first)


def allocate_member(member: Method, threads: ClientThreads) -> None:
    """Allocates a member's part of the threads that train clients, which are the server's."""
    member.oracle.runner.to(member.device, member.space.vector.dtype)
    if member.device.type == "cpu":
        member.oracle.allocate_replicas(threads.count)
    member.groups.use(threads)


def tell_engine(oracle: Oracle, before: str | None) -> None:
    """Warns that a run goes on with another engine than `before`: equal, but not bit for bit."""
    now = oracle.engine.name
    if before not in (None, now) and oracle.requested == "auto":
        rank_zero_warn(
            f"engine: the run began with {before!r} and goes on with {now!r}, which gives the same "
            f"values to rounding",
            category=UserWarning,
        )


def allocate(
    method: Method, loop: FederatedLoop, context: RunContext, process_threads: int
) -> None:
    """Allocates threads and, for a new population, the rows of states and kept messages.

    Args:
        method: The method.
        loop: The loop of the run.
        context: The facts of the run.
        process_threads: The number of threads that the process may use.
    """
    method.oracle.runner.to(method.device, method.space.vector.dtype)
    on_cpu = method.device.type == "cpu"
    if method.groups.threads is ONE_THREAD and on_cpu:
        count = method.oracle.allocate_replicas(process_threads)
        method.groups.use(ClientThreads(count))
    if on_cpu and method.space.size < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    if not method.states.belongs_to(loop.num_clients):
        store = loop.client_store(method.device)
        method.progress.begin(loop.num_clients)
        method.states.allocate(store, loop.state_dtype, method.global_model, context)
        method.groups.free_with(store.disable_prefetch)
