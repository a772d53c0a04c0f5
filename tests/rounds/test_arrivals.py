"""Who trains when, if a server takes messages as they come."""

import numpy as np

from pfl.rounds.arrivals import Timetable


def test_every_start_follows_an_arrival_and_has_the_model_of_its_time():
    """60 moves of 4 messages, 5 of 12 clients at a time: what each round says, held against what
    must be. A client's start is its arrival less its duration: the beginning, or the instant of an
    arrival, and its version counts the moves up to that instant. Five train at any time, of whom
    nobody has a message in the buffer."""
    rng = np.random.default_rng(3)
    seconds = rng.integers(1, 9, 12) / 4.0  # exact sums, and ties
    ids = np.sort(rng.choice(50, 12, replace=False))
    table = Timetable(ids, seconds, slots=5, buffer=4, seed=1)
    rounds = [table.of(number) for number in range(60)]
    of, ends = dict(zip(ids.tolist(), seconds, strict=True)), [one.time for one in rounds]
    assert ends == sorted(ends)
    for number, one in enumerate(rounds):
        assert len(set(one.ids.tolist())) == 4 and (np.diff(one.ids) > 0).all()
        assert (one.versions <= number).all()
    # The clients that have begun and not arrived, replayed by their slots.
    training = {}
    for number, one in enumerate(rounds):
        begun = one.begun.tolist()
        for version, slot in zip(one.versions.tolist(), one.slots.tolist(), strict=True):
            if version < number:
                assert training.pop(slot) == version
            else:  # began within the round
                begun.remove(slot)
        assert len({*begun}) == len(begun) and not training.keys() & {*begun}
        training |= dict.fromkeys(begun, number)
        assert len(training) <= 5
    last = [ends[version - 1] if version else 0.0 for version in range(60)]
    for number, one in enumerate(rounds):
        later = ends[number + 1] if number + 1 < 60 else np.inf
        for client, version in zip(one.ids.tolist(), one.versions, strict=True):
            assert last[version] <= one.time - of[client] <= later


def test_idle_clients_are_drawn_uniformly():
    """One of six clients at a time, equally fast: 6000 starts, of which each client has a sixth;
    a client's number has the deviation sqrt(6000 5/36) = 29, and is within four of it."""
    table = Timetable(np.arange(6), np.ones(6), slots=1, buffer=1, seed=2)
    drawn = np.array([table.of(number).ids[0] for number in range(6000)])
    assert np.abs(np.bincount(drawn) - 1000).max() < 4 * 29
    pairs = np.bincount(6 * drawn[:-1] + drawn[1:], minlength=36)  # independent of the last one
    assert np.abs(pairs - 6000 / 36).max() < 4.5 * np.sqrt(6000 / 36)


def test_all_messages_of_an_instant_are_taken_before_anyone_begins():
    """Two clients take a second and one takes two; each message moves the model.

    At 1 the first two arrive, one after the other, and then both begin again with the model after
    two moves. At 2 all three arrive, that which began first before the others, and then all begin
    with the model after five moves.
    """
    table = Timetable(np.arange(3), np.array([1.0, 1.0, 2.0]), slots=3, buffer=1, seed=0)
    rounds = [table.of(number) for number in range(7)]
    assert [one.time for one in rounds] == [1, 1, 2, 2, 2, 3, 3]
    assert [one.versions.item() for one in rounds] == [0, 0, 0, 2, 2, 5, 5]
    ids = [one.ids.item() for one in rounds]
    assert sorted(ids[:2]) == sorted(ids[3:5]) == sorted(ids[5:]) == [0, 1] and ids[2] == 2
    assert [len(one.begun) for one in rounds] == [3, 0, 2, 0, 0, 3, 0]
