"""All messages of a client as one vector, measured from what is public of them (references)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

NOT_FINITE = "not finite"  # among the sums: how many clients' messages counted as zero
Values: TypeAlias = Mapping[str, Tensor]
"""The values of messages, or references, by name."""


def join(messages: Values, references: Values) -> Tensor:
    """Returns the messages [C, K_i] by name as rows [C, sum K_i], minus their references.

    Example:
        >>> join({"a": torch.tensor([[5.0]]), "b": torch.tensor([[2.0]])}, {"a": torch.ones(1)})
        tensor([[4., 2.]])
    """
    return torch.cat([v - references[n] if n in references else v for n, v in messages.items()], 1)


def split(joined: Tensor, messages: Values, references: Values) -> dict[str, Tensor]:
    """Returns values [..., sum K_i] as messages [..., K_i] by name, with their references."""
    parts = joined.split([values.shape[1] for values in messages.values()], -1)
    return {
        name: part + references[name] if name in references else part
        for name, part in zip(messages, parts, strict=True)
    }


def clipped_sums(
    messages: Values, references: Values, limit: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the sums of C clients' messages, scaled to a joint norm of at most `limit`.

    A client's message that is not finite counts as zero.

    Args:
        messages: The values [C, K] by name.
        references: Public values [K] that are subtracted, for some of the names.
        limit: The largest norm of a client's messages together.

    Returns:
        The sums [K] by name, with the number of messages that were not finite as `NOT_FINITE`, and
        the norms of the clients' messages, float64 [C].
    """
    rows = {n: v - references[n] if n in references else v for n, v in messages.items()}
    # Inner products of single rows need no memory, and are exact to the rounding of the messages.
    squares = [
        torch.tensor([float(x.dot(x)) for x in v], dtype=torch.float64, device=v.device)
        for v in rows.values()
    ]
    norms = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(0)
    bad = ~norms.isfinite()
    scale = torch.where(bad, 0.0, limit / norms.clamp_min(limit))
    # An infinite value times 0 is not a number, so such rows are replaced.
    sums = {
        name: scale.to(values) @ (values.masked_fill(bad[:, None], 0) if bad.any() else values)
        for name, values in rows.items()
    }
    if sums:
        sums[NOT_FINITE] = bad.sum().reshape(1).to(scale)
    return sums, norms
