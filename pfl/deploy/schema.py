"""What a party may tell the server: the kind and the range of every value, in one place.

Each function returns what it has read, or raises a `WireError` that says what is wrong. The server
then names the party, and goes on without it: nothing that a party tells ends a run, or reaches a
file outside of its range.

| answer | value | what it may be |
|---|---|---|
| hello | `client` | a number from 0 to M - 1 |
| | `sizes` | three numbers of samples from 0 to 2^31 - 1, the first at least 1 |
| | `classes` | from 1 to 2^20, or null for a regression |
| | `hides` | true or false |
| | `input`, `target` | a type and the lengths of a sample, of at most 2^28 values |
| | `class_names`, `feature_names`, `transforms` | a list of texts, or null |
| first, train | `messages` | arrays as method and stages declare them; finite, no mean overflows |
| | their bytes | from 0 to 2^31 |
| train | `taken` | sample gradients from 0 to 2^53 |
| | `losses` | finite numbers by plain names, with numbers of samples from 0 to 2^31 - 1 |
| | `tables` | those that the method declares, with the party's own number as `client` |
| | `gradients` | private gradients from 0 to 2^53, or nothing |
| evaluate | `accuracy` | from 0 to 1; NaN where it is not defined |
| | `count` | a whole number of samples from 0 to 2^31 - 1 |
| | `loss`, other scores | finite; NaN where there are no samples, or the score is not defined |
| | `numbers` | the parameters of personal models and how many models, from 0 to 2^53 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.deploy.wire import LIMIT, TYPES, WireError
from pfl.method.log import Log
from pfl.stages.stage import Messages, Stage

SAMPLES = (1 << 31) - 1
CLASSES = 1 << 20
VALUES = 1 << 28  # of one sample
WHOLE = 1 << 53  # up to here float64 has all whole numbers
ROWS = 1 << 20  # of a table, from one party in one round
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./ -]{0,59}")  # becomes the name of a column


def part(answer: Any, kind: type, *path: Any) -> Any:
    """Returns a part of an answer, which must be there and have this type."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError) as error:
            raise WireError(f"the answer lacks {key!r}") from error
    if type(answer) is not kind:
        raise WireError(f"the answer's {path[-1]!r} is not a {kind.__name__}")
    return answer


def _within(name: str, value: Any, least: float, most: float) -> Any:
    """Returns a number that must be in a range; NaN is in none."""
    if not least <= value <= most:
        raise WireError(f"{name}: {value}; it must be from {least} to {most}")
    return value


# ---- hello --------------------------------------------------------------------------------------


def read_facts(answer: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the facts that a party has told of itself and its samples.

    Args:
        answer: The answer.
        count: The number of parties, M.
    """
    client = part(answer, int, "client")
    if not 0 <= client < count:
        raise WireError(f"client {client!r}; it must be from 0 to {count - 1}")
    facts: dict[str, Any] = {"client": client, "hides": part(answer, bool, "hides")}
    facts["sizes"] = part(answer, list, "sizes")
    if len(facts["sizes"]) != 3:
        raise WireError(f"sizes: {len(facts['sizes'])} numbers; they must be three")
    for place, least in enumerate((1, 0, 0)):
        _within("sizes", part(answer, int, "sizes", place), least, SAMPLES)
    facts["classes"] = answer.get("classes")
    if facts["classes"] is not None:
        _within("classes", part(answer, int, "classes"), 1, CLASSES)
    for key in ("input", "target"):
        facts[key] = part(answer, list, key)
        _check_kind(key, part(answer, str, key, 0), part(answer, list, key, 1))
    for key in ("class_names", "feature_names", "transforms"):
        facts[key] = answer.get(key)
        if facts[key] is None:
            continue
        for place in range(len(part(answer, list, key))):
            part(answer, str, key, place)
    return facts


def _check_kind(key: str, kind: str, shape: list[Any]) -> None:
    known = kind in {*TYPES, "bfloat16"} and all(type(n) is int and n >= 0 for n in shape)
    if not known or math.prod(shape) > VALUES:
        raise WireError(f"{key}: {kind} {shape} is no type and shape of a sample")


# ---- messages and what is logged ----------------------------------------------------------------


def read_messages(
    answer: dict[str, Any], like: Messages, clients: Clients, stages: Sequence[Stage]
) -> Messages:
    """Returns the messages in an answer.

    Args:
        answer: The answer.
        like: Messages that have all of them but values, payloads and bytes.
        clients: The party, with what it has received.
        stages: What reads payloads.
    """
    messages: Messages = {name: _read_message(answer, name, like[name]) for name in like}
    for stage in stages:
        try:
            messages = stage.arrived(clients, messages)
        except (ValueError, IndexError, RuntimeError) as error:
            raise WireError(f"a message cannot be read by {stage.key}: {error}") from error
    read = {}
    for name, message in messages.items():
        _check_values(name, message.values)
        read[name] = replace(message, values=message.values.to(like[name].values.device))
    return read


def _read_message(answer: dict[str, Any], name: str, like: Message) -> Message:
    """Returns a message; where it has a payload, its values are still missing."""
    nbytes = part(answer, int, "messages", name, 1)
    _within(f"the bytes of the message {name!r}", nbytes, 0, LIMIT)
    if like.payload is None:
        values = _tensor(part(answer, np.ndarray, "messages", name, 0), name, like.values)
        return replace(like, values=values, nbytes=torch.tensor([nbytes]))
    payload = {}
    for key, expected in like.payload.items():
        array = part(answer, np.ndarray, "messages", name, 0, key)
        payload[key] = _tensor(array, f"{name}.{key}", expected)
    nbytes = sum(values.nbytes for values in payload.values())
    return replace(like, payload=payload, nbytes=torch.tensor([nbytes]))


def _tensor(array: np.ndarray, name: str, like: Tensor) -> Tensor:
    """Returns an array as a tensor that has the dtype of `like`, and a row of its length."""
    values = torch.from_numpy(array)
    expected = [1, *like.shape[1:]]
    if list(values.shape) != expected or values.dtype != like.dtype:
        raise WireError(
            f"the message {name!r} is {values.dtype} {list(values.shape)}; it must be "
            f"{like.dtype} {expected}"
        )
    return values


def _check_values(name: str, values: Tensor) -> None:
    """Refuses values that are not finite, or so large that a mean over parties overflows."""
    if not values.isfinite().all():
        raise WireError(f"the message {name!r} is not finite")
    if not values.is_floating_point() or not values.numel():
        return
    largest = float(values.abs().max())
    most = torch.finfo(values.dtype).max / (1 << 40)  # a sum of 2^40 such values is finite
    if largest > most:
        raise WireError(
            f"the message {name!r} has the value {largest:.3g}, with which a mean overflows; it "
            f"must be at most {most:.3g}"
        )


def read_log(answer: dict[str, Any], client: int, tables: Collection[str]) -> Log:
    """Returns what a party has logged.

    Args:
        answer: The answer.
        client: The party's number.
        tables: The names of the tables to which the method adds rows.
    """
    log = Log(taken=[part(answer, int, "taken")])
    if not 0 <= log.gradients < WHOLE:
        raise WireError(f"{log.gradients} sample gradients; they must be from 0 to 2^53")
    for name in part(answer, dict, "losses"):
        losses = torch.from_numpy(part(answer, np.ndarray, "losses", name, 0))
        counts = part(answer, list, "losses", name, 1)
        if losses.ndim != 1 or len(losses) != len(counts) or {*map(type, counts)} - {int}:
            raise WireError(f"the losses {name!r} do not fit their counts")
        _check_names([name])
        for count in counts:
            _within(f"the counts of the losses {name!r}", count, 0, SAMPLES)
        if not losses.is_floating_point() or not losses.isfinite().all():
            raise WireError(f"the losses {name!r} are not finite numbers")
        log.losses[name] = [(losses, counts)]
    for name in part(answer, dict, "tables"):
        rows = part(answer, list, "tables", name)
        if name not in tables:
            raise WireError(f"the table {name!r} is not one of the method")
        for row in rows:
            _check_rows(name, row, client)
        log.tables[name] = rows
    return log


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not PLAIN.fullmatch(name):
            raise WireError(f"{name[:60]!r} is not the name of a column")


def _check_rows(name: str, row: Any, client: int) -> None:
    """Checks some rows of a table, which are arrays by column."""
    if type(row) is not dict or any(type(column) is not np.ndarray for column in row.values()):
        raise WireError(f"the table {name!r} has other columns than arrays")
    _check_names(row)
    if len({column.shape for column in row.values()}) != 1:
        raise WireError(f"the columns of the table {name!r} have different lengths")
    for key, column in row.items():
        if column.ndim != 1 or len(column) > ROWS or not np.isfinite(column).all():
            raise WireError(
                f"the column {key!r} of the table {name!r} is not one of finite numbers"
            )
    if "client" in row and (row["client"] != client).any():
        raise WireError(f"the table {name!r} has rows of another client")


def check_columns(log: Log, known: dict[str, list[str]]) -> None:
    """Checks that the tables of a log have the columns of others, which are noted in `known`."""
    for name, rows in log.tables.items():
        for row in rows:
            if list(row) != known.setdefault(name, list(row)):
                raise WireError(f"the table {name!r} has other columns than {known[name]}")


def read_gradients(answer: dict[str, Any]) -> float | None:
    """Returns how many private gradients a party has taken so far; None: it does not say."""
    if answer.get("gradients") is None:
        return None
    return float(_within("gradients", part(answer, float, "gradients"), 0, WHOLE))


# ---- scores -------------------------------------------------------------------------------------


def read_scores(
    answer: dict[str, Any], wanted: Iterable[tuple[Any, str]]
) -> tuple[dict[tuple[Any, str], float], list[float]]:
    """Returns a party's scores, and the two numbers of its evaluation.

    Args:
        answer: The answer.
        wanted: ((split, model), name) of the scores that the server has asked for.
    """
    told = {}
    for entry in part(answer, list, "scores"):
        told[part(entry, str, 0), part(entry, str, 1)] = part(entry, dict, 2)
    found = {}
    for key, name in wanted:
        value = part(told, float, key, name)
        title = f"{'/'.join(key)}/{name}"
        if name == "count":
            _within(title, value, 0, SAMPLES)
            if value != int(value):
                raise WireError(f"{title}: {value}; it must be a whole number")
        elif math.isinf(value):
            raise WireError(f"{title}: {value}; it must be finite")
        elif name == "accuracy" and not math.isnan(value):
            _within(title, value, 0, 1)
        found[key, name] = value
    for key, name in found:
        if name == "loss" and math.isnan(found[key, name]) and found[key, "count"] > 0:
            raise WireError(f"{'/'.join(key)}/loss: it is not a number, and there are samples")
    numbers = [part(answer, float, "numbers", place) for place in (0, 1)]
    for number in numbers:
        _within("numbers", number, 0, WHOLE)
    return found, numbers
