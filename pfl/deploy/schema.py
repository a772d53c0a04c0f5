"""The protocol of server and parties: the kind and the range of every value, in both directions.

Each function returns what it has read, or raises a `WireError` that says what is wrong. A server
names the party and leaves it out of the round; after `STRIKES` such answers in one run it does not
ask this party again until it is started anew. A party refuses the request. So nothing that one of
them tells ends the other, or reaches a file outside of its range.

What a party tells the server:

| answer | value | what it may be |
|---|---|---|
| hello | `client` | a number from 0 to M - 1; with `nodes`, the number of this node |
| | `sizes` | three numbers of samples from 0 to 2^31 - 1, the first at least 1 |
| | `classes` | from 1 to 2^20, or null for a regression; at most as many as there are names |
| | `hides` | true or false |
| | `input`, `target` | a type and the lengths of a sample, of at most 2^28 values |
| | `class_names`, `feature_names`, `transforms` | up to 2^20 texts of 2^16 letters, or null |
| | `levels` | up to 2^20 lists of such texts by column |
| | `versions` | up to 16 names with texts of up to 60 letters, or nothing |
| | `overview` | `classes` and `missing`: up to 2^20 numbers of samples; `ranges`: as many pairs |
| | | of numbers from -1e30 to 1e30; each of them null if it is not told |
| | `noise` | true or false: whether the party adds noise of its own; or nothing |
| first, train | `messages` | arrays as method and stages declare them; finite (`far_away`) |
| | their bytes | from 0 to 2^31 |
| train | `taken` | sample gradients from 0 to 2^53 |
| | `losses` | those that the method declares, from -1e30 to 1e30 |
| | their counts | numbers of samples from 0 to 2^31 - 1 |
| | `tables` | those that the method declares, with the columns of most parties |
| | their rows | at most 2^20, finite; `client` is the party's own number |
| | `gradients` | private gradients from 0 to 2^53, or nothing |
| evaluate | `accuracy` | from 0 to 1; NaN where it is not defined |
| | `count` | a whole number of samples from 0 to 2^31 - 1 |
| | `loss`, other scores | from -1e30 to 1e30; NaN without samples, or where not defined |
| | `numbers` | the parameters of personal models and how many models, from 0 to 2^53 |
| any | `refused` | a text, of which the server shows 500 letters in one line |

What the server asks of a party:

| request | value | what it may be |
|---|---|---|
| all | `do` | hello, first, train, evaluate or finish |
| hello | `agreed` | a mapping, with the number of this protocol |
| | `versions` | as a party's |
| others | `agreed` | the digest of what party and server have in common |
| | `run` | up to 64 letters and digits |
| | `classes` | from 1 to 2^20, or null |
| | `keep` | a round from 0 to 2^31 - 1, or null |
| | `task` | `round` as `keep`; `counted` at most as much, or null; `work` above 0 and at most 1 |
| | `received` in `task` | finite arrays by name |
| | `personal` in `task` | names of these arrays |
| evaluate | `splits` | val, test or both |
| | `model` | a finite array, "w" for the message of this name, or null |
| | `parameters` | a whole number from 0 to 2^53 |
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.deploy.wire import LIMIT, TYPES, WireError
from pfl.method.log import Log
from pfl.scores.names import SPLITS
from pfl.stages.stage import Messages, Stage

PROTOCOL = 3  # changes with what must be in a message
SAMPLES = (1 << 31) - 1
CLASSES = 1 << 20
VALUES = 1 << 28  # of one sample
WHOLE = 1 << 53  # up to here float64 has all whole numbers
ROWS = 1 << 20  # of a table, from one party in one round
NAMES = 1 << 20
PROGRAMS = 16  # whose versions are told
VERSION_LETTERS = 60
LETTERS = 1 << 16  # of one name, or of the numbers of one transform
LARGEST = 1e30  # of losses and scores: any sum of them over samples and parties is finite
FAR = 1e6  # how many times the values of others a message's largest value may be
STRIKES = 3  # answers out of the protocol after which a party is not asked again
SHOWN = 500  # letters of a party's text in a line
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./ -]{0,59}")  # becomes the name of a column
RUN = re.compile(r"[A-Za-z0-9]{1,64}")  # becomes the name of a folder
TASKS = ("hello", "first", "train", "evaluate", "finish")
OVERVIEW = ("classes", "missing", "ranges")
"""What a party may tell of its samples beside their numbers."""
Columns = tuple[tuple[str, str], ...]
"""The names and the types of a table's columns."""


def one_line(text: str) -> str:
    """Returns a text that somebody else has written as part of a line of one's own."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text[:SHOWN])
    return " ".join(plain.split())


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
        _check_texts(answer, 0, key)
    facts["levels"] = part(answer, dict, "levels")
    _within("the number of columns with levels", len(facts["levels"]), 0, NAMES)
    for column in facts["levels"]:
        _within("the letters of levels", len(column), 0, LETTERS)
        _check_texts(answer, 1, "levels", column)
    names = facts["class_names"]
    if names and facts["classes"] is not None:
        _within("classes", facts["classes"], 1, len(names))
    facts["versions"] = _read_versions(answer)
    facts["overview"] = _read_overview(answer)
    facts["noise"] = "noise" in answer and part(answer, bool, "noise")
    return facts


def _check_texts(answer: dict[str, Any], least: int, *path: Any) -> None:
    """Refuses a list in an answer that is too long or too short, or has parts that are no texts."""
    count = len(part(answer, list, *path))
    _within(f"the number of {path[0]}", count, least, NAMES)
    for place in range(count):
        name = part(answer, str, *path, place)
        _within(f"the letters of {path[0]}", len(name), 0, LETTERS)


def _read_versions(told: dict[str, Any]) -> dict[str, str]:
    """Returns versions of programs by name; none where there are none."""
    if "versions" not in told:
        return {}
    found = part(told, dict, "versions")
    _within("the number of versions", len(found), 0, PROGRAMS)
    _check_names(found)
    for name in found:
        _within("the letters of versions", len(part(found, str, name)), 0, VERSION_LETTERS)
    return {name: one_line(version) for name, version in found.items()}


def _read_overview(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what a party tells of its samples beside their numbers."""
    found: dict[str, Any] = dict.fromkeys(OVERVIEW)
    if "overview" not in answer:
        return found
    told = part(answer, dict, "overview")
    for key in OVERVIEW:
        if told.get(key) is None:
            continue
        values = part(told, list, key)
        _within(f"the number of {key}", len(values), 0, NAMES)
        for place in range(len(values)):
            if key != "ranges":
                _within(key, part(values, int, place), 0, SAMPLES)
                continue
            if len(part(values, list, place)) != 2:
                raise WireError("ranges: each must be two numbers")
            least = part(values[place], float, 0)
            most = part(values[place], float, 1)
            _within(key, least, -LARGEST, LARGEST)
            _within(key, most, least, LARGEST)
        found[key] = values
    return found


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


def largest(messages: Mapping[str, Message] | Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest absolute value of each message of floating-point numbers."""
    found = {}
    for name, message in messages.items():
        values = message if isinstance(message, Tensor) else message.values
        if values.is_floating_point():
            found[name] = float(values.abs().max()) if values.numel() else 0.0
    return found


def far_away(told: Mapping[int, Mapping[str, float]], sent: float) -> dict[int, str]:
    """Returns in one line for each party that is far away from others what is too large.

    A finite value can be so large that the mean over parties trains nobody. So no value may be more
    than `FAR` times the largest of three: 1, the largest value that the server has sent in this
    round, and the lower median over parties of the largest values of this message.

    Args:
        told: The largest values of each party's messages, by client and name.
        sent: The largest value that the server has sent.
    """
    lines: dict[int, str] = {}
    for name in dict.fromkeys(name for one in told.values() for name in one):
        values = sorted(one[name] for one in told.values())
        most = FAR * max(1.0, sent, values[(len(values) - 1) // 2])
        for client, one in told.items():
            if one[name] > most:
                lines[client] = (
                    f"the message {name!r} has the value {one[name]:.3g}, far beyond those of "
                    f"others; it must be at most {most:.3g}"
                )
    return lines


def read_log(
    answer: dict[str, Any], client: int, losses: Collection[str], tables: Collection[str]
) -> Log:
    """Returns what a party has logged.

    Args:
        answer: The answer.
        client: The party's number.
        losses: The names of the losses that the method logs.
        tables: The names of the tables to which the method adds rows.
    """
    log = Log(taken=[part(answer, int, "taken")])
    if not 0 <= log.gradients < WHOLE:
        raise WireError(f"{log.gradients} sample gradients; they must be from 0 to 2^53")
    for name in part(answer, dict, "losses"):
        if name not in losses:
            raise WireError(
                f"the loss {name!r} is not one of the method, whose class declares losses = "
                f"{tuple(losses)}"
            )
        values = torch.from_numpy(part(answer, np.ndarray, "losses", name, 0))
        counts = part(answer, list, "losses", name, 1)
        if values.ndim != 1 or len(values) != len(counts) or {*map(type, counts)} - {int}:
            raise WireError(f"the losses {name!r} do not fit their counts")
        for count in counts:
            _within(f"the counts of the losses {name!r}", count, 0, SAMPLES)
        if not values.is_floating_point() or not values.isfinite().all():
            raise WireError(f"the losses {name!r} are not finite numbers")
        if len(values):
            _within(f"the losses {name!r}", float(values.double().abs().max()), 0, LARGEST)
        log.losses[name] = [(values, counts)]
    for name in part(answer, dict, "tables"):
        chunks = part(answer, list, "tables", name)
        if name not in tables:
            raise WireError(f"the table {name!r} is not one of the method")
        rows = sum(_check_rows(name, chunk, client) for chunk in chunks)
        _within(f"the rows of the table {name!r}", rows, 0, ROWS)
        log.tables[name] = chunks
    return log


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not PLAIN.fullmatch(name):
            raise WireError(f"{name[:60]!r} is not the name of a column")


def _check_rows(name: str, chunk: Any, client: int) -> int:
    """Checks some rows of a table, which are arrays by column; returns their number."""
    if type(chunk) is not dict or any(type(column) is not np.ndarray for column in chunk.values()):
        raise WireError(f"the table {name!r} has other columns than arrays")
    _check_names(chunk)
    if len({column.shape for column in chunk.values()}) != 1:
        raise WireError(f"the columns of the table {name!r} have different lengths")
    for key, column in chunk.items():
        if column.ndim != 1 or not np.isfinite(column).all():
            raise WireError(
                f"the column {key!r} of the table {name!r} is not one of finite numbers"
            )
    if "client" in chunk and (chunk["client"] != client).any():
        raise WireError(f"the table {name!r} has rows of another client")
    return len(next(iter(chunk.values())))


def _columns(log: Log) -> dict[str, set[Columns]]:
    """Returns the columns that the parts of each table of a log have."""
    found = {}
    for name, chunks in log.tables.items():
        found[name] = {tuple((k, v.dtype.name) for k, v in chunk.items()) for chunk in chunks}
    return found


def other_columns(logs: Mapping[int, Log], known: dict[str, Columns]) -> dict[int, str]:
    """Returns in one line for each party with other columns than most what is wrong.

    Args:
        logs: What the parties have logged, by client.
        known: The columns of the tables of earlier rounds, to which new ones are added.
    """
    told = {client: _columns(log) for client, log in logs.items()}
    votes: dict[str, Counter[Columns]] = {}
    for tables in told.values():
        for name, columns in tables.items():
            votes.setdefault(name, Counter()).update(columns)
    for name, counter in votes.items():
        if counter:
            known.setdefault(name, counter.most_common(1)[0][0])
    lines: dict[int, str] = {}
    for client, tables in told.items():
        for name, columns in tables.items():
            if columns - {known.get(name)}:
                lines[client] = f"the table {name!r} has other columns than {known[name]}"
    return lines


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
        elif not math.isnan(value):
            _within(title, value, -LARGEST, LARGEST)
        found[key, name] = value
    for key, name in found:
        if name == "loss" and math.isnan(found[key, name]) and found[key, "count"] > 0:
            raise WireError(f"{'/'.join(key)}/loss: it is not a number, and there are samples")
    numbers = [part(answer, float, "numbers", place) for place in (0, 1)]
    for number in numbers:
        _within("numbers", number, 0, WHOLE)
    return found, numbers


# ---- what the server asks -----------------------------------------------------------------------


def read_request(request: Any, agreed: str) -> dict[str, Any]:
    """Returns a request of the server.

    Args:
        request: What has come.
        agreed: The digest of what party and server must have in common.
    """
    if type(request) is not dict or request.get("do") not in list(TASKS):
        raise WireError("the message has no task of pfl")
    if request["do"] == "hello":
        part(request, dict, "agreed")
        return {**request, "versions": _read_versions(request)}
    if part(request, str, "agreed") != agreed:
        raise WireError("the server has not asked whether party and server agree")
    if not RUN.fullmatch(part(request, str, "run")):
        raise WireError(f"{one_line(request['run'])!r} is not the name of a run")
    if _present(request, "classes") is not None:
        _within("classes", part(request, int, "classes"), 1, CLASSES)
    if _present(request, "keep") is not None:
        _within("keep", part(request, int, "keep"), 0, SAMPLES)
    part(request, dict, "task")
    index = _within("round", part(request, int, "task", "round"), 0, SAMPLES)
    if _present(request["task"], "counted") is not None:
        _within("counted", part(request, int, "task", "counted"), 0, index)
    work = part(request, float, "task", "work")
    if not 0 < work <= 1:
        raise WireError(f"work: {work}; it must be above 0 and at most 1")
    received = part(request, dict, "task", "received")
    for name in received:
        _check_finite(f"the server's message {name!r}", part(received, np.ndarray, name))
    personal = part(request, list, "task", "personal")
    for place, name in enumerate(personal):
        if part(personal, str, place) not in received:
            raise WireError(f"personal: {one_line(name)!r} is no message that the server has sent")
    if request["do"] == "evaluate":
        _check_evaluation(request, received)
    return request


def _present(value: Mapping[str, Any], key: str) -> Any:
    """Returns a value that may be null, but must be there."""
    if key not in value:
        raise WireError(f"the request lacks {key!r}")
    return value[key]


def _check_finite(title: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise WireError(f"{title} is not finite")


def _check_evaluation(request: dict[str, Any], received: Mapping[str, Any]) -> None:
    """Checks what a request for scores has beside its task."""
    splits = part(request, list, "splits")
    for place in range(len(splits)):
        if part(splits, str, place) not in SPLITS or splits.count(splits[place]) > 1:
            raise WireError(f"splits: {splits[:3]}; they must be val, test or both")
    model = _present(request, "model")
    if isinstance(model, np.ndarray):
        _check_finite("the server's model", model)
    elif model is not None and not (model == "w" and "w" in received):
        raise WireError("model: it must be an array, or the name of one that the server has sent")
    _within("parameters", part(request, int, "parameters"), 0, WHOLE)
