"""Local steps that are recorded once and replayed, as CUDA graphs.

A local step of small models is tens of kernels that take a few microseconds each, and about as long
to be started. A recorded step is started as a whole. What it reads and writes lies at fixed places
of the GPU's memory: a step's samples, the models, and the numbers of the step are copied there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pfl.datamodules.samples.samples import scaled
from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, StepBlock, cast
from pfl.engines.local_step import Step
from pfl.engines.objective import Objective

Work = Callable[[], None]
Record = Callable[[Work, torch.device], Work]
"""Records what a function does on a device; the function that it returns does it again."""

TERMS = ("shift", "offset", "scale", "mask", "part")
RECORDED = 32
"""How many recorded steps an engine keeps: one for each shape."""
WARM_UP = 3


def record_cuda_graph(work: Work, device: torch.device) -> Work:
    """Records the kernels that a function starts; returns the function that starts them again.

    The function runs a few times before, since libraries choose kernels and take memory in their
    first calls.

    Raises:
        RuntimeError: The function waits for the GPU, or does what else a CUDA graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    # Other threads read data ahead meanwhile, which must not end the recording.
    with torch.cuda.graph(graph, pool=_pool(device), capture_error_mode="thread_local"):
        work()
    replay: Work = graph.replay
    return replay


_pools: dict[torch.device, Any] = {}


def _pool(device: torch.device) -> Any:
    """Returns the memory that all recordings of a device share, as they run one after another."""
    if device not in _pools:
        _pools[device] = torch.cuda.graph_pool_handle()
    return _pools[device]


class Shape(NamedTuple):
    """What must be equal for two steps to be one recording.

    Attributes:
        clients, samples: How many clients it has room for, and samples of each.
        inputs, targets: Shape and dtype of a sample's input and target.
        terms: Which terms of a `Step` there are; None: the gradient is written down, and no step is
            taken.
    """

    clients: int
    samples: int
    inputs: tuple[torch.Size, torch.dtype]
    targets: tuple[torch.Size, torch.dtype]
    terms: tuple[bool, ...] | None


class Places:
    """Where recordings read and write models and the terms of a step, at fixed addresses.

    Attributes:
        v, shift, offset, scale, mask: As in `Step`, with room for more clients; None: not needed
            so far.
        part: As in `Step`.
        numbers: The learning rate with a minus, the factor, threshold and decay of a step, [4].
    """

    def __init__(self, v: Tensor) -> None:
        self.v = v.new_zeros(room(len(v)), v.shape[1])
        self.shift: Tensor | None = None
        self.offset: Tensor | None = None
        self.scale: Tensor | None = None
        self.mask: Tensor | None = None
        self.part: Tensor | None = None
        self.numbers = v.new_zeros(4)
        self._known: tuple[float, ...] = ()

    def hold(self, v: Tensor) -> bool:
        """Whether there is a place for models [C, P]."""
        return len(v) <= len(self.v) and v.dtype == self.v.dtype

    def load(self, v: Tensor, step: Step | None) -> None:
        """Copies models [C, P], and the terms of their step, to their places."""
        self.v[: len(v)].copy_(v)
        if step is None:
            return
        for name in TERMS:
            term = getattr(step, name)
            if term is None:
                continue
            if getattr(self, name) is None:
                rows = () if name == "part" else (len(self.v),)
                shape = (*rows, *term.shape[len(rows) :])
                setattr(self, name, term.new_zeros(shape))
            getattr(self, name)[: len(term)].copy_(term)
        numbers = (-step.lr, step.shrink, step.threshold, step.decay)
        if numbers != self._known:
            self._known = numbers
            self.numbers.copy_(torch.tensor(numbers, dtype=self.numbers.dtype))

    def move(self, rows: int, u: Tensor, g: Tensor, terms: tuple[bool, ...]) -> None:
        """Takes the step of the first rows of v along -g, as `Step` has it, with these terms."""
        shifts, _, _, masks, selects, shrinks, has_threshold, decays = terms
        rate, shrink, threshold, decay = self.numbers.unbind()
        v = self.v[:rows]
        moved = v
        if selects:
            moved = v.clone()
        if shrinks:
            moved.mul_(shrink)
        moved.addcmul_(g, rate)
        if decays:
            moved.addcmul_(u, rate * decay)
        if shifts:
            moved.add_(self.shift[:rows])
        if has_threshold:
            moved.copy_(moved.sign() * (moved.abs() - threshold).clamp_min(0))
        if masks:
            moved.mul_(self.mask[:rows])
        if selects:
            torch.where(self.part, moved, v, out=v)

    def point(self, rows: int, terms: tuple[bool, ...]) -> Tensor:
        """Returns where the first rows' gradients are taken, as `Step.gradient_point`."""
        v = self.v[:rows]
        if self.offset is None or not terms[1]:
            return v
        if self.scale is None or not terms[2]:
            return self.offset[:rows] + v
        return self.offset[:rows] + self.scale[:rows] * v


def terms_of(step: Step) -> tuple[bool, ...]:
    """Returns which tensors a step has, and whether it shrinks, has a threshold and a decay."""
    tensors = [getattr(step, name) is not None for name in TERMS]
    return (*tensors, step.shrink != 1, step.threshold > 0, step.decay > 0)


class RecordedStep:
    """A local step, or a gradient, of some clients, with the places of its samples.

    Args:
        inner: The engine that is recorded.
        places: The models and the terms of the step.
        shape: The sizes and terms.
        record: Records work.
    """

    def __init__(self, inner: Engine, places: Places, shape: Shape, record: Record) -> None:
        v = places.v
        device = v.device
        A, B = shape.clients, shape.samples
        sample, dtype = shape.inputs
        self.inputs = torch.zeros(A * B, *sample, dtype=dtype, device=device)
        target, dtype = shape.targets
        self.targets = torch.zeros(A * B, *target, dtype=dtype, device=device)
        self.weights = v.new_zeros(A, B)
        self.loss = v.new_zeros(A)
        self.g = v.new_zeros(0)
        terms = shape.terms
        if terms is None:
            self.g = torch.zeros_like(v[:A])
        sizes = torch.full([A], B, device=device)

        def work() -> None:
            inputs = cast(scaled(self.inputs), v.dtype).unflatten(0, (A, B))
            targets = cast(self.targets, v.dtype).unflatten(0, (A, B))
            batch = Batch(inputs, targets, [B] * A, weights=self.weights)
            batch.sizes = sizes
            u = v[:A]
            if terms is not None:
                u = places.point(A, terms)
            loss, g = inner.gradient(u, batch)
            self.loss.copy_(loss)
            if terms is None:
                self.g.copy_(g)
            else:
                places.move(A, u, g, terms)

        before = v[:A].clone()
        self.replay = record(work, device)
        v[:A].copy_(before)


class GraphEngine(Engine):
    """Records the steps of another engine, once for each shape, and replays them.

    A recording has room for a few clients and samples more than a step has: rows that nobody
    reads, and samples of weight 0. Steps with objectives are not recorded.

    Args:
        inner: The engine whose gradients are recorded. It runs several clients, without running
            statistics and random numbers, and does not wait for the GPU.
        record: Records work; tests have one for the CPU.
    """

    batched = True

    def __init__(self, inner: Engine, record: Record = record_cuda_graph) -> None:
        super().__init__(inner.runner)
        self.inner = inner
        self.name = f"CUDA graph of {inner.name}"
        self.serves_objectives = inner.serves_objectives
        self.keeps_inputs = inner.keeps_inputs
        self._record = record
        self.release()

    def release(self) -> None:
        super().release()
        self._places: Places | None = None
        self._recorded: OrderedDict[Shape, RecordedStep] = OrderedDict()

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        if objective is not None:
            return self.inner.gradient(w, batch, buffers, objective)
        block = with_room(StepBlock.of(batch, w.dtype))
        self._load(w, None)
        one = self._read(block, 0, None)
        one.replay()
        return one.loss[: len(w)].clone(), one.g[: len(w)].clone()

    def descend(
        self,
        v: Tensor,
        blocks: Iterable[StepBlock],
        step: Step,
        buffers: Buffers = None,
        objective: Objective | None = None,
    ) -> tuple[Tensor, list[int]]:
        if objective is not None:
            return self.inner.descend(v, blocks, step, buffers, objective)
        own = self._load(v, step).v
        terms = terms_of(step)
        active = len(v)
        losses = [v.new_empty(0)]
        counts: list[int] = []
        for block in blocks:
            A = block.clients
            v[A:active].copy_(own[A:active])  # these clients have used up their steps
            active = A
            counts += block.counts.ravel().tolist()
            block = with_room(block)
            for k in range(len(block.counts)):
                one = self._read(block, k, terms)
                one.replay()
                losses.append(one.loss[:A].clone())
        v[:active].copy_(own[:active])
        return torch.cat(losses), counts

    def _load(self, v: Tensor, step: Step | None) -> Places:
        """Copies models, and the terms of their step, to where recordings read them."""
        places = self._places
        if places is None or not places.hold(v):
            self._recorded.clear()
            places = self._places = Places(v)
        places.load(v, step)
        return places

    def _read(self, block: StepBlock, k: int, terms: tuple[bool, ...] | None) -> RecordedStep:
        """Returns the recording of a step of a block, with the step's samples in their places."""
        assert self._places is not None
        assert block.weights is not None
        _, A, B = block.picks.shape
        inputs = block.inputs
        targets = block.targets
        kinds = [(x.shape[1:], x.dtype) for x in (inputs, targets)]
        shape = Shape(min(room(A), len(self._places.v)), B, kinds[0], kinds[1], terms)
        one = self._recorded.get(shape)
        if one is None:
            one = RecordedStep(self.inner, self._places, shape, self._record)
            self._recorded[shape] = one
            if len(self._recorded) > RECORDED:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(shape)
        picks = block.picks[k].reshape(-1)
        torch.index_select(inputs, 0, picks, out=one.inputs[: A * B])
        torch.index_select(targets, 0, picks, out=one.targets[: A * B])
        one.weights[:A].copy_(block.weights[k])
        return one


def with_room(block: StepBlock) -> StepBlock:
    """Returns a block with the samples' weights, and with samples of weight 0 for a round size."""
    K, A, B = block.picks.shape
    weights = block.sample_weights()
    if weights is None:
        weights = block.picks.new_full((K, A, B), 1 / B, dtype=block.dtype)
    picks = block.picks
    more = room(B, digits=4) - B
    if more:
        picks = torch.cat([picks, picks[..., -1:].expand(K, A, more)], -1)
        weights = nn.functional.pad(weights, (0, more))
    return replace(block, picks=picks, weights=weights)


def room(n: int, digits: int = 3) -> int:
    """Returns the next number from n on with few binary digits, so that few sizes are recorded.

    Example:
        >>> [room(n) for n in (5, 9, 20, 33)]
        [5, 10, 20, 40]
    """
    unit = 1 << max(0, n.bit_length() - digits)
    return -(-n // unit) * unit
