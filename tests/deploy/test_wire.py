"""Messages of the wire: every value arrives bit for bit, and nothing else is read."""

import json

import numpy as np
import pytest

from pfl.deploy.wire import MAGIC, WireError, pack, unpack
from tests.refusal import refused

SOME = np.zeros(1000)
SOME[[3, 500]] = -0.0, np.nan


@pytest.mark.parametrize(
    "array",
    [
        SOME,
        np.arange(6, dtype=np.float32).reshape(1, 2, 3),
        np.where(np.arange(64) % 3 == 0, 0.5, 0).astype(np.float16),
        np.array(7),
        np.zeros((0, 5), np.int32),
        np.array([True, False, True]),
    ],
    ids=["places", "all", "mask", "number", "empty", "bool"],
)
def test_arrays_arrive_bit_for_bit(array):
    actual = unpack(pack({"a": [array]}))["a"][0]
    assert (actual.dtype, actual.shape) == (array.dtype, array.shape)
    assert actual.tobytes() == array.tobytes()
    actual += actual.dtype.type(1)  # it can be written, as torch requires


def test_plain_values_arrive():
    value = {"a": [1, 0.1, None, True, "ü"], "b": {"c": float("inf")}}
    assert unpack(pack(value)) == value


def test_the_shortest_form_is_taken():
    """Two values of 8 bytes that are not zero, -0.0 among them: places take 2 * (4 + 8) bytes."""
    header = len(pack(SOME[:0])) - len(json.dumps([["float64", [0], "all", 0]]))
    assert len(pack(SOME)) - header < 24 + 60


@pytest.mark.parametrize("value", [object(), {1: 2}, {"#": 0}, np.array([None]), b"bytes", {1}])
def test_other_values_do_not_travel(value):
    with pytest.raises(WireError, match="cannot travel"):
        pack(value)


def header(tree, *arrays):
    text = json.dumps([tree, arrays]).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    "message, words",
    [
        (b"", "not a message"),
        (b"\x80\x04K\x01." + bytes(20), "not a message"),  # a pickle
        (pack({"a": 1})[:-1], "cannot be read|not a message"),
        (pack(SOME) + b"x", "more bytes"),
        (pack(np.ones(9))[:-1], "impossible array"),
        (header({"#": 0}, ["object", [1], "all", 8]) + bytes(8), "impossible array"),
        (header({"#": 0}, ["float64", [1 << 40], "places", 0]), "impossible array"),  # a bomb
        (header({"#": 0}, ["float64", [-1], "all", 0]), "impossible array"),
        (header({"#": 0}, ["float64", [2], "places", 12]) + b"\xff\0\0\0" + bytes(8), "out of"),
        (header({"#": 5}), "cannot be read"),
    ],
)
def test_other_bytes_are_refused(message, words):
    with pytest.raises(WireError, match=words):
        unpack(message)


def test_a_message_over_the_limit_is_refused():
    with refused("the message has"):
        unpack(pack(np.ones(1000)), limit=1000)


@pytest.mark.parametrize(
    "entry",
    [
        ["float32", [0, 10**30], "all", 0],
        ["float32", [0, 10**30], "mask", 0],
        ["float32", ["ab", 10**12], "all", 0],
        ["float32", [1] * 100, "all", 4],
        [["float32"], [1], "all", 4],
        ["object", [1], "all", 8],
        ["float32", [1.0], "all", 4],
        ["float32", [1], ["all"], 4],
        ["float32", 5, "all", 4],
    ],
)
def test_a_forged_shape_is_refused(entry):
    header = json.dumps([{"#": 0}, [entry]]).encode()
    message = MAGIC + len(header).to_bytes(4, "little") + header + bytes(entry[3])
    with pytest.raises(WireError):
        unpack(message)
