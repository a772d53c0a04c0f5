"""A party's own noise: what it sends after training is clipped, and gets noise at the party itself.

x = all of the party's messages joined, minus what the server has sent (w)
x <- x min(1, C / |x|) + z C N(0, I)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from pfl.aggregation.joined import clipped_sums
from pfl.clients import Clients
from pfl.communication import Message
from pfl.errors import ConfigError
from pfl.randomness import Secret
from pfl.stages.stage import Messages, Place, Stage


def fresh() -> np.random.Generator:
    """Returns a generator that nobody can repeat: its key is new, and forgotten."""
    return Secret().generator("a party's own noise")


class OwnNoise(Stage):
    """Clips what one client sends, and adds noise, after all that the method and the run do to it.

    Compression comes after it. A message that is not finite counts as zero.

    Args:
        clip: C, the largest norm of the client's messages together, measured from their references:
            for the message "w" the one that the server has sent to everyone, and else zero.
        noise: z; the noise has the standard deviation z C in every value.
        draws: Returns a generator for the noise of one message.
    """

    place: ClassVar[Place] = Place.CLIENT

    def __init__(
        self, clip: float, noise: float, draws: Callable[[], np.random.Generator] = fresh
    ) -> None:
        self.clip = clip
        self.noise = noise
        self.draws = draws

    @property
    def key(self) -> str:
        return "policy.noise"

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        self._check(messages)
        references = {}
        for name, message in messages.items():
            if message.reference is not None:
                references[name] = message.reference.to(message.values)
            elif name == "w" and "w" not in clients.personal_messages:
                w = clients.received.get("w")
                if w is not None and w.shape == message.values.shape[1:]:
                    references[name] = w.to(message.values)
            if message.mask is not None and name in references:
                references[name] = torch.where(message.mask, references[name], 0.0)
        values = {name: message.values for name, message in messages.items()}
        sums, _ = clipped_sums(values, references, self.clip)
        rng = self.draws()
        changed = {}
        for name, message in messages.items():
            drawn = torch.from_numpy(rng.standard_normal(sums[name].numel())).to(sums[name])
            noisy = sums[name] + self.noise * self.clip * drawn
            if name in references:
                noisy += references[name]
            changed[name] = self._message(message, noisy)
        return changed

    def _message(self, message: Message, values: torch.Tensor) -> Message:
        """Returns a message with other values [K], all of which are sent, or those under a mask."""
        count = values.numel()
        if message.mask is not None:
            values = torch.where(message.mask, values, 0.0)
            count = int(message.mask.sum())
        nbytes = message.nbytes
        if self.noise:  # neither zeros nor a low rank are left
            nbytes = count * values.element_size()
        return replace(message, values=values[None], nbytes=nbytes)

    def _check(self, messages: Messages) -> None:
        """Refuses messages that noise would make impossible values of."""
        for name, message in messages.items():
            reason = ""
            if name == "buffers":
                reason = "running statistics with noise can be impossible; give model.buffers local"
            elif not message.values.is_floating_point():
                reason = "whole numbers cannot have noise; take another method"
            elif message.payload is not None:
                reason = "the method writes it in a form of its own; take another method"
            if reason:
                raise ConfigError(f"policy.clip: the run sends the message {name!r}: {reason}")
