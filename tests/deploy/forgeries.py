"""Answers and requests that are drawn from the protocol of `pfl/deploy/schema.py`, or break it.

Each function changes an honest message. "right": some values are others that the schema takes.
"large": arrays are finite, and may be too large. "extra": there is a key that nobody reads. All
other kinds break the schema in one place: "wrong" has a value out of its range or of another type,
"missing" lacks a key, and "foreign" has a name that is not declared.
"""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from pfl.deploy import schema
from pfl.deploy.wire import LIMIT

RIGHT = ("right", "large", "extra")
BROKEN = ("wrong", "missing", "foreign")
BIG = 10**40
OTHERS = [math.nan, math.inf, -math.inf, "", "5", "=1+1", "a\nb", [], {}, [math.nan], {"x": 1}]
NAMES = ["=cmd|x", "test/global", "a\nb", "client", "x" * 99, "", "\x1b[2J", "w2"]


class Part(NamedTuple):
    """A value of a message: where it is, what it may be, and what it may not be."""

    path: tuple[Any, ...]
    right: st.SearchStrategy
    wrong: st.SearchStrategy


def whole(path, least, most, null=False):
    """A whole number in a range."""
    right = st.integers(least, most)
    wrong = [True, False, least + 0.5, float(least), least - 1, most + 1, BIG, -BIG, *OTHERS]
    if null:
        right = st.none() | right
    else:
        wrong.append(None)
    beyond = st.integers(max_value=least - 1) | st.integers(min_value=most + 1)
    return Part(path, right, st.sampled_from(wrong) | beyond)


def number(path, least, most, nan=False, whole_only=False):
    """A floating-point number in a range; with `nan` it may also be NaN."""
    right = st.floats(least, most)
    wrong = [True, None, 0, 1, BIG, math.inf, -math.inf, "", "0.5", [], {}]
    if whole_only:
        right = st.integers(int(least), int(most)).map(float)
        wrong.append(0.5)
    if nan:
        right = right | st.just(math.nan)
    else:
        wrong.append(math.nan)
    beyond = st.floats(max_value=least, exclude_max=True, allow_infinity=False)
    beyond |= st.floats(min_value=most, exclude_min=True, allow_infinity=False)
    return Part(path, right, st.sampled_from(wrong) | beyond)


def array(path, like, most=1e5):
    """A finite array of one shape and type."""
    wrong = [None, 5, 0.5, "w", [], {}, [0.0], like.tolist()]
    wrong += [like[..., 1:], like.reshape(-1), np.concatenate([like, like]), np.array(5.0)]
    floating = np.issubdtype(like.dtype, np.floating)
    if floating:
        wrong += [like.astype(np.float16), like.astype(np.int64)]
        wrong += [np.full_like(like, value) for value in (np.nan, np.inf, -np.inf)]
        wrong += [np.full_like(like, sign * np.finfo(like.dtype).max / 2) for sign in (1, -1)]
    else:
        wrong += [like.astype(np.float64), like.astype(bool)]
    unlike = [one for one in wrong if not same_kind(one, like) or floating]
    return Part(path, values(like, most), st.sampled_from(unlike))


def same_kind(one, like):
    return isinstance(one, np.ndarray) and (one.shape, one.dtype) == (like.shape, like.dtype)


@st.composite
def values(draw, like, most):
    """Another finite array of this shape and type."""
    if not np.issubdtype(like.dtype, np.floating):
        return like
    found = np.random.default_rng(draw(st.integers(0, 1 << 30))).uniform(-1, 1, like.shape)
    return (found * most ** draw(st.floats(-1, 1))).astype(like.dtype)


def forge(draw, answer, parts, kind, dicts, optional=()):
    """Returns a changed copy of a message.

    Args:
        draw: Hypothesis's `data.draw`.
        answer: An honest message.
        parts: What the schema says of its values.
        kind: A name of `RIGHT` or `BROKEN`.
        dicts: The paths of the mappings whose names are declared.
        optional: The paths of values that may be missing.
    """
    answer = copy.deepcopy(answer)
    if kind in ("right", "large"):
        chosen = draw(st.lists(st.sampled_from(parts), max_size=4, unique_by=id))
        for part in chosen:
            put(answer, part.path, draw(part.right))
        if kind == "large":
            scale = 10.0 ** draw(st.integers(0, 300))
            enlarge(answer, scale)
    elif kind == "extra":
        answer[draw(st.sampled_from([*NAMES, "refuse"]))] = draw(
            st.sampled_from([*OTHERS, BIG, None])
        )
    elif kind == "wrong":
        part = draw(st.sampled_from(parts))
        put(answer, part.path, draw(part.wrong))
    elif kind == "missing":
        needed = [part.path for part in parts if part.path not in optional]
        *above, last = draw(st.sampled_from(needed))
        del at(answer, above)[last]
    else:
        mapping = at(answer, draw(st.sampled_from(dicts)))
        name = draw(st.sampled_from([name for name in NAMES if name not in mapping]))
        old = draw(st.sampled_from(sorted(mapping)))
        mapping[name] = mapping.pop(old)
    return answer


def at(value, path):
    for key in path:
        value = value[key]
    return value


def put(value, path, new):
    at(value, path[:-1])[path[-1]] = copy.deepcopy(new)


def enlarge(value, scale):
    """Multiplies the arrays of a message, as far as their type has such numbers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(items):
        if isinstance(one, dict | list):
            enlarge(one, scale)
        elif isinstance(one, np.ndarray) and np.issubdtype(one.dtype, np.floating):
            with np.errstate(over="ignore", invalid="ignore"):
                value[key] = np.nan_to_num(
                    one * one.dtype.type(min(scale, np.finfo(one.dtype).max))
                )


# ---- answers ------------------------------------------------------------------------------------


def hello_parts(answer, count):
    """The facts of a party; what others must have in common stays as it is."""
    client = answer["client"]
    others = [one for one in range(-1, count + 1) if one != client]
    parts = [
        Part(("client",), st.just(client), st.sampled_from([*others, BIG, None, True, *OTHERS])),
        Part(("hides",), st.just(False), st.sampled_from([None, 0, 1, "no", *OTHERS])),
        Part(
            ("sizes",), st.just(answer["sizes"]), st.sampled_from([None, 5, [1], [1] * 4, "many"])
        ),
    ]
    parts += [whole(("sizes", place), int(place == 0), schema.SAMPLES) for place in range(3)]
    if answer["classes"] is not None:
        most = answer["classes"]
        parts.append(whole(("classes",), 1, most))
    for key in ("input", "target"):
        kinds = [["object", [3]], ["float64"], ["float64", [-1]], ["float64", [1 << 40]], [5, [3]]]
        kinds += [["float64", ["3"]], ["float64", [1.0]], ["int8", [7, 7]]]
        kinds += [["float64", [1 << 28]], ["float32", [1 << 20, 1 << 8]], None, 5, "x", {}]
        parts.append(Part((key,), st.just(answer[key]), st.sampled_from(kinds)))
    for key in ("class_names", "feature_names", "transforms"):
        names = [[5], [None], 5, "ab", {}, ["x" * (schema.LETTERS + 1)], ["a", "b"], [[]], [True]]
        parts.append(Part((key,), st.just(answer[key]), st.sampled_from(names)))
    levels = [None, 5, "ab", [], {"a": []}, {"a": [5]}, {"a": "b"}, {"a": ["b"]}]
    parts.append(Part(("levels",), st.just(answer["levels"]), st.sampled_from(levels)))
    return parts


def message_parts(answer):
    parts = []
    for name, (content, _) in answer["messages"].items():
        if isinstance(content, dict):
            for key, one in content.items():
                parts.append(array(("messages", name, 0, key), one))
        else:
            parts.append(array(("messages", name, 0), content))
            parts.append(whole(("messages", name, 1), 0, LIMIT))
        broken = [None, 5, "w", [], {}, [[]]]
        parts.append(Part(("messages", name), st.just([content, 8]), st.sampled_from(broken)))
    return parts


def losses(most):
    """Losses of some type, and their counts."""

    def made(counts, kind, value):
        largest = min(float(np.finfo(kind).max), most)
        return [np.full(len(counts), np.clip(value, -largest, largest), kind), counts]

    kinds = st.sampled_from([np.float64, np.float32, np.float16])
    counts = st.lists(st.integers(0, schema.SAMPLES), max_size=3)
    return st.builds(made, counts, kinds, st.floats(-most, most))


def train_parts(answer, client):
    parts = [*message_parts(answer), whole(("taken",), 0, schema.WHOLE - 1)]
    one = np.ones(1)
    wrong = [[one * 1e31, [1]], [one * np.nan, [1]], [one * np.inf, [1]], [one, [-1]], [one, [BIG]]]
    wrong += [[one, [0.5]], [one, [True]], [one, []], [one, [1, 1]], [one[None], [1]], [one, 1]]
    wrong += [[one.astype(int), [1]], [[1.0], [1]], None, 5, [], [one], {}, "x", [one > 0, [1]]]
    for name in answer["losses"]:
        parts.append(Part(("losses", name), losses(schema.LARGEST), st.sampled_from(wrong)))
    for name, chunks in answer["tables"].items():
        columns = chunks[0]
        rows = len(columns["client"])
        forged = [
            columns | {"client": np.full(rows, client + 1)},
            columns | {"client": np.full(rows, np.nan)},
            columns | {"more": np.zeros(rows)},
            columns | {"=cmd": np.zeros(rows)},
            columns | {"client": np.zeros(rows + 1, np.int64)},
            columns | {"client": 5},
            columns | {"client": np.zeros((rows, 1), np.int64)},
            {},
            5,
            None,
        ]
        broken = [[one] for one in forged] + [None, 5, "x", {}]
        parts.append(Part(("tables", name), st.just(chunks), st.sampled_from(broken)))
    for key in ("losses", "tables", "messages"):
        parts.append(Part((key,), st.just(answer[key]), st.sampled_from([None, 5, [], "x", [1]])))
    if "gradients" in answer:
        parts.append(number(("gradients",), 0, schema.WHOLE))
    else:
        parts.append(Part(("gradients",), st.none(), st.sampled_from([math.nan, -1.0, 1e300, "x"])))
    return parts


def evaluate_parts(answer):
    parts = []
    for place, (_, _, scores) in enumerate(answer["scores"]):
        for name in scores:
            path = ("scores", place, 2, name)
            if name == "count":
                parts.append(number(path, 0, schema.SAMPLES, whole_only=True))
            elif name == "accuracy":
                parts.append(number(path, 0, 1, nan=True))
            else:
                parts.append(number(path, -schema.LARGEST, schema.LARGEST))
        broken = [None, 5, [], ["test"], ["test", "global", None], [1, 2, {}]]
        parts.append(
            Part(("scores", place), st.just(answer["scores"][place]), st.sampled_from(broken))
        )
    parts += [number(("numbers", place), 0, schema.WHOLE) for place in (0, 1)]
    for key in ("scores", "numbers"):
        broken = [None, 5, [], "x", {}, [1]]
        parts.append(Part((key,), st.just(answer[key]), st.sampled_from(broken)))
    return parts


def forged_answer(draw, do, answer, client, count):
    """Returns a forged answer of a party to a task, and its kind."""
    kinds = [*RIGHT, *BROKEN, *BROKEN]
    dicts: list[tuple[Any, ...]] = []
    optional = {("gradients",)}
    if do == "hello":
        parts = hello_parts(answer, count)
        optional |= {("class_names",), ("feature_names",), ("transforms",), ("classes",)}
        optional |= {("sizes", place) for place in range(2)}
        dicts.append(())
    elif do == "train":
        parts = train_parts(answer, client)
        dicts += [(key,) for key in ("losses", "tables", "messages") if answer[key]]
        optional |= {(key, name) for key in ("losses", "tables") for name in answer[key]}
    elif do == "first":
        parts = message_parts(answer)
        dicts.append(("messages",))
    else:
        parts = evaluate_parts(answer)
        dicts += [("scores", place, 2) for place in range(len(answer["scores"]))]
    if do == "hello":
        kinds = ["right", "extra", "right", "wrong", "missing"]  # else nobody comes to train
    kind = draw(st.sampled_from(kinds))
    return forge(draw, answer, parts, kind, dicts, optional), kind


# ---- requests -----------------------------------------------------------------------------------


def request_parts(request):
    """What the schema says of a request for training, scores, or what is sent first."""
    task = request["task"]
    runs = ["../x", "", "a/b", "x" * 65, "a\nb", 5, None, "é", {}]
    none = ["", "another", None, 5, [], {}]
    parts = [
        Part(("do",), st.just(request["do"]), st.sampled_from(["exec", "", None, 5, [], {}])),
        Part(("agreed",), st.just(request["agreed"]), st.sampled_from(none)),
        Part(
            ("run",), st.sampled_from([request["run"], "second", "x" * 64]), st.sampled_from(runs)
        ),
        whole(("classes",), 1, schema.CLASSES, null=True),
        whole(("keep",), 0, schema.SAMPLES, null=True),
        whole(("task", "round"), task["counted"] or 0, schema.SAMPLES),
        number(("task", "work"), 5e-324, 1),
        Part(("task",), st.just(task), st.sampled_from([None, 5, [], "x", {}])),
        Part(("task", "received"), st.just(task["received"]), st.sampled_from([None, 5, [], "x"])),
        Part(("task", "personal"), st.just(task["personal"]), st.sampled_from([None, 5, ["no"]])),
    ]
    parts.append(whole(("task", "counted"), 0, task["round"], null=True))
    for name, like in task["received"].items():
        bad = [None, 5, "x", [], {}, np.full(3, np.nan), np.append(like, np.inf)]
        parts.append(Part(("task", "received", name), values(like, 1e300), st.sampled_from(bad)))
    if request["do"] == "evaluate":
        good = [["val"], ["test"], ["val", "test"], []]
        bad = [["train"], ["test", "test"], "test", None, [5], {}, ["test", "=1"]]
        parts.append(Part(("splits",), st.sampled_from(good), st.sampled_from(bad)))
        good = [None]
        if "w" in task["received"]:
            good += ["w", task["received"]["w"].copy()]
        bad = ["v", 5, [], {}, np.full(3, np.nan), True]
        parts.append(Part(("model",), st.sampled_from(good), st.sampled_from(bad)))
        parts.append(whole(("parameters",), 0, schema.WHOLE))
    return parts


def forged_request(draw, request):
    """Returns a forged request of a server, and its kind."""
    kind = draw(st.sampled_from(["right", "large", "extra", "wrong", "wrong", "wrong", "missing"]))
    optional = {("task", "received", name) for name in request["task"]["received"]}
    return forge(draw, request, request_parts(request), kind, [], optional), kind
