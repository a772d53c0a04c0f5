"""Attackers in a round: what they send in place of their messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from pfl.aggregation.attacks import Attack
from pfl.aggregation.joined import join, split
from pfl.clients import Clients
from pfl.randomness import generator
from pfl.stages.stage import Messages, Place, References, Served, Stage


class ChangedMessages(Stage):
    """The messages of attackers, changed by their attack.

    Args:
        attack: What attackers do.
        attacking: Says which of some clients attack, by (round, ids).
    """

    place: ClassVar[Place] = Place.WIRE

    def __init__(self, attack: Attack, attacking: Callable[[int, np.ndarray], np.ndarray]) -> None:
        self._attack = attack
        self._attacking = attacking
        self._references = References()
        self._seed = 0

    @property
    def key(self) -> str:
        return "loop.attackers"

    def set_up(self, served: Served) -> None:
        self._seed = served.context.seed
        served.refuse_pooled(self.key)

    def begin(self, round_index: int) -> None:
        self._references.begin()

    def down(self, messages: Messages) -> Messages:
        self._references.note(messages)
        return messages

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        if not messages or not self._attack.replaces("change"):
            return messages
        references = self._references.of(messages)
        values = {name: message.values.clone() for name, message in messages.items()}
        for row in np.flatnonzero(self._attacking(clients.round, clients.ids)):
            rng = generator(self._seed, "attack", clients.round, int(clients.ids[row]))
            one = {name: rows[row : row + 1] for name, rows in values.items()}
            changed = self._attack.change(join(one, references)[0], rng)
            for name, message in split(changed, one, references).items():
                values[name][row] = message
        return {name: replace(m, values=values[name]) for name, m in messages.items()}
