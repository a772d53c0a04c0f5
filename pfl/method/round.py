"""One round of a run: what goes down, who trains, what comes up, what the server makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import nn

from pfl.communication import by_name
from pfl.context import RunContext
from pfl.errors import Diverged
from pfl.method.exchange import number_of_bytes
from pfl.method.hooks import Method
from pfl.method.naming import clients_text
from pfl.method.round_totals import STATE, RoundTotals, not_finite
from pfl.method.transport import Transport
from pfl.models.classifier import head_name
from pfl.rounds.cohort import Cohort
from pfl.stages.mean import Stages
from pfl.stages.stage import Messages


class RoundResult(NamedTuple):
    """What a round leaves.

    Attributes:
        row: The round's row of metrics.
        tables: The round's rows of each of the method's tables, by column.
    """

    row: dict[str, float]
    tables: dict[str, dict[str, np.ndarray]]


def run_round(
    method: Method,
    cohort: Cohort,
    transport: Transport,
    stages: Stages,
    context: RunContext,
    loss_names: list[str],
) -> RoundResult:
    """Runs one round, as the head of `pfl.method.hooks` says it.

    Args:
        method: The method.
        cohort: The clients of the round.
        transport: Carries messages down and up, and has the clients trained.
        stages: What acts on messages between their sender and their reader.
        context: The facts of the run.
        loss_names: The names of losses that the rounds before have had, to which new ones are
            added.

    Raises:
        Diverged: A model, a state or a message is no longer finite.
    """
    progress = method.progress
    metrics = method.new_metrics()
    totals = RoundTotals(
        stages.mean,
        method.states.messages,
        method.space.vector,
        transport.expected(cohort),
        loss_names,
    )
    for stage in stages:
        stage.begin(cohort.round)

    # What clients send before they receive anything is kept for each of them.
    if method.sends_first:
        for clients, sent in transport.first_messages(method, cohort.ids):
            method.states.keep_messages(clients.ids, sent)
            _, up = progress.ledger.add(clients.ids, 0, number_of_bytes(sent))
            totals.counts.up += up

    # The server sends the same messages to all clients of the round, and others to each.
    method.begin_round(cohort.round)
    download: Messages = by_name(method.download())
    for stage in stages:
        download = stage.down(download)

    # The clients train. What they send and remember counts only if it arrives.
    progress.trained = 0
    progress.to_train = sum(map(len, cohort.chunks))
    for group in transport.train(method, cohort, download, totals.read):
        progress.trained += len(group.clients.ids)
        down, up = progress.ledger.add(group.clients.ids, group.down, group.up)
        transport.settle(method, group)
        if group.parcel is None:
            totals.add_lost(group.clients, down, group.log)
        else:
            if group.parcel.kept:
                method.states.keep_messages(group.clients.ids, group.parcel.kept)
            totals.add(group.clients, group.parcel, down, up, group.log)

    # The server reads the means over all processes, and moves the model.
    totals.reduce()
    participants = stages.mean.participants(len(totals.ids))
    progress.note_participants(participants, totals.ids)
    received = totals.means(context.sizes, metrics)
    if totals.not_finite:
        culprits = totals.culprits(STATE + name for name in totals.not_finite)
        raise diverged(method, "the client state", totals.not_finite, culprits)
    if received is not None:
        bad = not_finite(received)
        if bad:
            raise diverged(method, "the clients' message", bad, totals.culprits(bad))
        for stage in stages:
            stage.read(received, metrics)
        method.server_update(received)
    _step(method)
    if received is not None:
        method.train_server(received)
    counts = totals.counts
    progress.end_round(counts.gradients, int(counts.down), int(counts.up))

    row = {"round": progress.rounds, **totals.mean_losses()}
    row["train/samples"] = progress.samples
    row["comm/uplink_bytes"] = progress.bytes_up
    row["comm/downlink_bytes"] = progress.bytes_down
    if cohort.seconds is not None:
        row["virtual_seconds"] = cohort.seconds
    row["participants"] = participants
    if cohort.may_fail:
        row["dropped"] = int(counts.lost)
    row |= transport.numbers(int(counts.lost))
    tables = {}
    if method.tables:
        tables = totals.tables(method.tables)
    return RoundResult(row | metrics, tables)


def _step(method: Method) -> None:
    """Takes the step of the server's optimizer, and checks that all values are finite.

    Without a gradient (the method set the model itself, or no client took part) the step moves
    nothing. Lightning counts rounds, and saves checkpoints, by optimizer steps.
    """
    optimizer = cast(torch.optim.Optimizer, method.optimizers())
    vector = method.space.vector
    optimizer.step()
    gradient = vector.grad
    optimizer.zero_grad(set_to_none=True)
    names = not_finite(method.server_tensors() | optimizer.state.get(vector, {}))
    if not names:
        return
    own = {name for name in names if name.startswith("self.")}
    if gradient is not None:
        own.discard("self.global_model")  # the optimizer has moved it
        own |= not_finite({"self.space.vector.grad": gradient})
    if own:
        raise Diverged(
            f"model: server_update of {type(method).__name__} gave values that are not finite "
            f"in round {method.rounds + 1}: {', '.join(sorted(own))}"
        )
    raise diverged(method, "the server's", names)


def diverged(method: Method, whose: str, names: set[str], clients: Sequence[int] = ()) -> Diverged:
    """Returns the error about values that are not finite, with their names and the clients'."""
    listed = ", ".join(sorted(name.removeprefix("self.") for name in names))
    of = ""
    data = method.run.loop.datamodule
    values = data.num_classes is None
    advice = f"try model.lr: {smaller_rate(method, values):.1g}"
    if values and not data.scale_targets:
        advice += ", or data.scale_targets: true"
    if len(clients):
        of = f" of {clients_text(method.run.loop, clients)}"
        advice += ", or a look at these clients' samples"
    return Diverged(
        f"model.lr: {method.lr}; {whose} {listed}{of} is no longer finite in round "
        f"{method.rounds + 1}; {advice}"
    )


def smaller_rate(method: Method, values: bool) -> float:
    """Returns the local rate that is worth a try after a run that has diverged.

    A tenth; and, where the loss compares values, at most 5 / m for a head of m inputs. With
    PyTorch's initial values and standardized samples the curvature of a squared error grows with m,
    and steps are stable up to some 12 / m.
    """
    rate = method.lr / 10
    head = method.network.get_submodule(head_name(method.network))
    if values and isinstance(head, nn.Linear):
        rate = min(rate, 5 / head.in_features)
    return rate
