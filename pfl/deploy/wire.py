"""Messages between server and parties as bytes: arrays and plain values, never code.

A message is `MAGIC`, the length of a header, the header as JSON, and the bytes of its arrays. The
header is the value, in which `{"#": i}` stands for the i-th array, and a list of the arrays' types,
shapes, forms and lengths. The form is the shortest of

* `all`: all entries, little-endian;
* `mask`: a bit for each entry, and the entries that are not zero;
* `places`: the positions (int32) of these entries, and the entries.

A zero is an entry whose bits are all 0, so that -0.0 arrives as it was.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from pfl.errors import ConfigError

MAGIC = b"PFL1"
TYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
}
DIMENSIONS = 32
LIMIT = 1 << 31
"""The largest message, in bytes, where no other limit is given."""


class WireError(ConfigError):
    """Bytes that are not a message, or a message that has not the parts it should have."""


def pack(value: Any) -> bytes:
    """Returns a message of dicts, lists, strings, numbers, booleans, None and arrays.

    Example:
        >>> message = pack({"round": 3, "w": np.zeros(1000)})
        >>> len(message) < 300, unpack(message)["w"].shape
        (True, (1000,))

    Raises:
        WireError: A part is something else.
    """
    bodies: list[bytes] = []
    arrays: list[list[Any]] = []
    header = json.dumps([_plain(value, arrays, bodies), arrays], separators=(",", ":")).encode()
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *bodies])


def unpack(data: bytes, limit: int = LIMIT) -> Any:
    """Returns the value of a message.

    Args:
        data: The message.
        limit: The most bytes that the message, and its arrays once they are read, may have.

    Raises:
        WireError: The bytes are not a message, or are too many.
    """
    if len(data) > limit:
        raise WireError(f"the message has {len(data)} bytes; at most {limit} are taken")
    begin = 8 + int.from_bytes(data[4:8], "little")
    if data[:4] != MAGIC or begin > len(data):
        raise WireError("the bytes are not a message of pfl")
    try:
        tree, entries = json.loads(data[8:begin])
        arrays = []
        for name, shape, form, length in entries:
            numbers = [*shape, length]
            known = name in list(TYPES) and len(numbers) <= DIMENSIONS
            known = known and all(type(n) is int and 0 <= n <= LIMIT for n in numbers)
            if known:
                limit -= math.prod(shape) * np.dtype(name).itemsize
            if not known or limit < 0 or begin + length > len(data):
                raise WireError(f"the message has an impossible array, {name} {shape}")
            arrays.append(_read(memoryview(data)[begin : begin + length], name, shape, form))
            begin += length
        if begin != len(data):
            raise WireError("the message has more bytes than its arrays")
        return _with_arrays(tree, arrays)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"the message cannot be read: {error}") from error


def _plain(value: Any, arrays: list[list[Any]], bodies: list[bytes]) -> Any:
    """Returns a value with places instead of its arrays, which are added to the lists."""
    if isinstance(value, np.ndarray):
        form, body = _written(value)
        arrays.append([value.dtype.name, list(value.shape), form, len(body)])
        bodies.append(body)
        return {"#": len(arrays) - 1}
    if isinstance(value, dict) and all(isinstance(key, str) and key != "#" for key in value):
        return {key: _plain(part, arrays, bodies) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, arrays, bodies) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise WireError(f"{type(value).__name__} {value!r} cannot travel; arrays and plain values can")


def _with_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {"#"}:
            return arrays[tree["#"]]
        return {key: _with_arrays(part, arrays) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_with_arrays(part, arrays) for part in tree]
    return tree


def _written(array: np.ndarray) -> tuple[str, bytes]:
    """Returns the shortest form of an array, and its bytes."""
    if array.dtype.name not in TYPES:
        raise WireError(f"an array of {array.dtype} cannot travel; numbers can")
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    used = flat.view(f"u{array.itemsize}") != 0
    count = int(used.sum())
    lengths = {
        "all": flat.nbytes,
        "mask": -(-flat.size // 8) + count * array.itemsize,
    }
    if flat.size < 1 << 31:
        lengths["places"] = count * (4 + array.itemsize)
    form = min(lengths, key=lambda name: lengths[name])
    if form == "all":
        return form, flat.tobytes()
    where = np.flatnonzero(used).astype("<i4")
    if form == "mask":
        where = np.packbits(used)
    return form, where.tobytes() + flat[used].tobytes()


def _read(data: memoryview, name: str, shape: list[int], form: str) -> np.ndarray:
    """Returns an array from its form and bytes; a ValueError or IndexError if they do not fit."""
    dtype = np.dtype(name).newbyteorder("<")
    size = math.prod(shape)
    if form == "all":
        flat = np.frombuffer(data, dtype).copy()
    else:
        flat = np.zeros(size, dtype)
        if form == "mask":
            bits = np.frombuffer(data[: -(-size // 8)], np.uint8)
            where = np.flatnonzero(np.unpackbits(bits, count=size))
            rest = data[-(-size // 8) :]
        elif form == "places":
            count = len(data) // (4 + dtype.itemsize)
            where = np.frombuffer(data[: 4 * count], "<i4")
            rest = data[4 * count :]
        else:
            raise WireError(f"the message has an array in the unknown form {form!r}")
        flat[where] = np.frombuffer(rest, dtype)
    return flat.reshape(shape).astype(name, copy=False)
