"""Local steps that are recorded once and replayed, as CUDA graphs.

A local step of small models is tens of kernels that take a few microseconds each, and about as long
to be started. A recorded step is started as a whole. What it reads and writes lies at fixed places
of the GPU's memory: a step's samples, the models, and the numbers of the step are copied there.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pfl.datamodules.samples.samples import scaled
from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, StepBlock, cast, some_rows
from pfl.engines.local_step import Step
from pfl.engines.objective import Objective

Work = Callable[[], None]
Record = Callable[[Work, torch.device, Any], Work]
"""Records what a function does on a device, with memory of a pool; returns what does it again."""

TENSORS = ("shift", "offset", "scale", "mask", "part")
RECORDED = 32
"""How many recorded steps an engine keeps: one for each shape."""
STEPS = 64
PICKS = 1 << 22
"""For how many steps the samples are laid out at a time, and how many samples at most."""
WARM_UP = 3


def record_cuda_graph(work: Work, device: torch.device, pool: Any) -> Work:
    """Records the kernels that a function starts; returns the function that starts them again.

    The function runs a few times before, since libraries choose kernels and take memory in their
    first calls. All recordings with one pool use its memory in turn.

    Raises:
        RuntimeError: The function waits for the GPU, or does what else a CUDA graph cannot hold.
    """
    # A recording has the streams that it was made with, whatever autograd says about speed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        return _record(work, device, pool)


def _record(work: Work, device: torch.device, pool: Any) -> Work:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    try:
        # Other threads read data ahead meanwhile, which must not end the recording.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    except BaseException:
        # PyTorch leaves the generator as if the recording went on.
        generator.graphsafe_set_state(generator.clone_state())
        raise
    replay: Work = graph.replay
    return replay


RECORDERS: dict[str, Record] = {"cuda": record_cuda_graph}
"""How work is recorded, by the type of the device; there is none for CPUs."""


def records(device: torch.device) -> bool:
    """Returns whether local steps can be recorded on a device."""
    return device.type in RECORDERS


def new_pool(device: torch.device) -> Any:
    """Returns memory for recordings that run one after another; None on CPUs."""
    if device.type == "cuda":
        return torch.cuda.graph_pool_handle()
    return None


class Shape(NamedTuple):
    """What must be equal for two steps to be one recording.

    Attributes:
        clients, samples: How many clients it has room for, and samples of each.
        source: Where the samples are read: the addresses and number of lasting ones; None: the
            samples of a step are copied to a place of the recording.
        inputs, targets: Shape and dtype of a sample's input and target.
        terms: The terms of a `Step` that there are; None: the gradient is written down, and no step
            is taken.
    """

    clients: int
    samples: int
    source: tuple[int, int, int] | None
    inputs: tuple[torch.Size, torch.dtype]
    targets: tuple[torch.Size, torch.dtype]
    terms: frozenset[str] | None


class Places:
    """Where recordings read and write models and the terms of a step, at fixed addresses.

    Args:
        v: Models, [C, P].
        buffers: Their running statistics; None: the network has none.

    Attributes:
        v: Room for as many models.
        buffers: Room for their running statistics.
        terms: The tensors of a `Step` by name, with room for as many clients.
        numbers: The learning rate with a minus, the factor, threshold and decay of a step, [4].
    """

    def __init__(self, v: Tensor, buffers: Buffers) -> None:
        self.v = v.new_zeros(room(len(v)), v.shape[1])
        self.buffers: Buffers = None
        if buffers is not None:
            self.buffers = buffers.new_ones(len(self.v), buffers.shape[1])
        self.terms: dict[str, Tensor] = {}
        self.numbers = v.new_zeros(4)
        self._known: tuple[float, ...] = ()

    def hold(self, v: Tensor, buffers: Buffers) -> bool:
        """Whether there is a place for models [C, P] and their statistics."""
        if (buffers is None) != (self.buffers is None):
            return False
        return len(v) <= len(self.v) and v.dtype == self.v.dtype

    def load_models(self, rows: slice, v: Tensor, buffers: Buffers) -> None:
        """Copies some of the models [C, P] and their statistics to their places."""
        self.v[rows].copy_(v[rows])
        if self.buffers is not None and buffers is not None:
            self.buffers[rows].copy_(buffers[rows])

    def keep_models(self, rows: slice, v: Tensor, buffers: Buffers) -> None:
        """Copies some models and their statistics from their places into v [C, P] and buffers."""
        v[rows].copy_(self.v[rows])
        if self.buffers is not None and buffers is not None:
            buffers[rows].copy_(self.buffers[rows])

    def load(self, v: Tensor, step: Step | None, buffers: Buffers) -> None:
        """Copies models [C, P], their statistics and the terms of their step to their places."""
        self.load_models(slice(len(v)), v, buffers)
        if step is None:
            return
        for name in TENSORS:
            term = getattr(step, name)
            if term is None:
                continue
            if name not in self.terms:
                shape = term.shape
                if name != "part":
                    shape = (len(self.v), *term.shape[1:])
                self.terms[name] = term.new_zeros(shape)
            self.terms[name][: len(term)].copy_(term)
        numbers = (-step.lr, step.shrink, step.threshold, step.decay)
        if numbers != self._known:
            self._known = numbers
            self.numbers.copy_(torch.tensor(numbers, dtype=self.numbers.dtype))

    def point(self, rows: int, terms: frozenset[str]) -> Tensor:
        """Returns where the first rows' gradients are taken, as `Step.gradient_point`."""
        v = self.v[:rows]
        if "offset" not in terms:
            return v
        if "scale" in terms:
            v = self.terms["scale"][:rows] * v
        return self.terms["offset"][:rows] + v

    def move(self, rows: int, u: Tensor, g: Tensor, terms: frozenset[str]) -> None:
        """Takes the step of the first rows of v along -g, as `Step` has it, with these terms."""
        rate, shrink, threshold, decay = self.numbers.unbind()
        v = self.v[:rows]
        moved = v
        if "part" in terms:
            moved = v.clone()
        if "shrink" in terms:
            moved.mul_(shrink)
        moved.addcmul_(g, rate)
        if "decay" in terms:
            moved.addcmul_(u, rate * decay)
        if "shift" in terms:
            moved.add_(self.terms["shift"][:rows])
        if "threshold" in terms:
            moved.copy_(moved.sign() * (moved.abs() - threshold).clamp_min(0))
        if "mask" in terms:
            moved.mul_(self.terms["mask"][:rows])
        if "part" in terms:
            torch.where(self.terms["part"], moved, v, out=v)


def terms_of(step: Step) -> frozenset[str]:
    """Returns the names of the terms that a step has besides its learning rate."""
    terms = {name for name in TENSORS if getattr(step, name) is not None}
    if step.shrink != 1:
        terms.add("shrink")
    if step.threshold > 0:
        terms.add("threshold")
    if step.decay > 0:
        terms.add("decay")
    return frozenset(terms)


class RecordedStep:
    """A local step, or a gradient, of some clients, with the places of what it reads and writes.

    It keeps lasting samples: while there is a recording that reads their address, no other samples
    can have it.

    Args:
        inner: The engine that is recorded.
        places: The models and the terms of the step.
        shape: The sizes and terms.
        block: Steps of this shape; lasting samples are read where they are.

    Attributes:
        losses: The losses of the steps that were laid out last, [steps, clients].
        g: The gradient, [clients, P]; nothing where a step is taken.
        steps: How many steps can be laid out at a time.
    """

    def __init__(self, inner: Engine, places: Places, shape: Shape, block: StepBlock) -> None:
        v = places.v
        device = v.device
        A = shape.clients
        B = shape.samples
        terms = shape.terms
        self.steps = 1
        self.inputs = block.inputs
        self.targets = block.targets
        if shape.source is None:
            self.inputs = block.inputs.new_zeros(A * B, *block.inputs.shape[1:])
            self.targets = block.targets.new_zeros(A * B, *block.targets.shape[1:])
        else:
            self.steps = max(1, min(STEPS, PICKS // (A * B)))
        self.is_lasting = shape.source is not None
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.picks = torch.zeros(self.steps, A, B, dtype=torch.int64, device=device)
        if shape.source is None:
            self.picks.copy_(torch.arange(A * B, device=device).view(1, A, B))
        self.weights = v.new_zeros(self.steps, A, B)
        self.seeds = torch.zeros(self.steps, A, dtype=torch.int64, device=device)
        self.has_keys = inner.runner.has_keys
        self.losses = v.new_zeros(self.steps, A)
        self.g = v.new_zeros(0)
        if terms is None:
            self.g = torch.zeros_like(v[:A])
        self.sizes = torch.full([A], B, device=device)
        self.inner = inner
        self.places = places
        self.terms = terms

    def record(self, record: Record, pool: Any) -> None:
        """Records the step; the models and their statistics are as before afterwards."""
        places = self.places
        v = places.v.clone()
        buffers = places.buffers
        if buffers is not None:
            buffers = buffers.clone()
        self.replay = record(self._take, v.device, pool)
        places.load_models(slice(len(v)), v, buffers)

    def _take(self) -> None:
        """Takes the next step that was laid out, or writes its gradient down."""
        A, B = self.picks.shape[1:]
        v = self.places.v
        picks = self.picks.index_select(0, self.step).flatten()
        inputs = scaled(self.inputs.index_select(0, picks)).unflatten(0, (A, B))
        targets = self.targets.index_select(0, picks).unflatten(0, (A, B))
        weights = self.weights.index_select(0, self.step)[0]
        batch = Batch(cast(inputs, v.dtype), cast(targets, v.dtype), [B] * A, weights=weights)
        batch.sizes = self.sizes
        batch.row_seeds = self.seeds.index_select(0, self.step)[0]
        u = v[:A]
        if self.terms is not None:
            u = self.places.point(A, self.terms)
        loss, g = self.inner.gradient(u, batch, some_rows(self.places.buffers, slice(A)))
        self.losses.index_copy_(0, self.step, loss.to(v.dtype)[None])
        if self.terms is None:
            self.g.copy_(g)
        else:
            self.places.move(A, u, g, self.terms)
        self.step.add_(1).remainder_(self.steps)

    def lay_out(self, block: StepBlock, first: int) -> int:
        """Puts the samples of the steps of a block from `first` on in place; returns how many."""
        assert block.weights is not None
        last = min(first + self.steps, len(block.picks))
        count = last - first
        A = block.picks.shape[1]
        self.step.zero_()
        self.weights[:count, :A].copy_(block.weights[first:last])
        if self.has_keys:
            self.seeds[:count, :A].copy_(block.seeds()[first:last])
        if self.is_lasting:
            self.picks[:count, :A].copy_(block.picks[first:last])
            return count
        picks = block.picks[first].flatten()
        torch.index_select(block.inputs, 0, picks, out=self.inputs[: len(picks)])
        torch.index_select(block.targets, 0, picks, out=self.targets[: len(picks)])
        return count


class GraphEngine(Engine):
    """Records the steps of another engine, once for each shape, and replays them.

    A recording has room for a few clients and samples more than a step has: rows that nobody
    reads, and samples of weight 0. Steps with objectives are not recorded, nor are evaluations,
    nor, in networks whose samples of a batch change each other (BatchNorm), steps in which a client
    has fewer samples than another one.

    Args:
        inner: The engine whose gradients are recorded. It runs several clients, without random
            numbers, and does not wait for the GPU.
        evaluator: The engine of all that is not recorded.
    """

    batched = True

    def __init__(self, inner: Engine, evaluator: Engine) -> None:
        super().__init__(inner.runner)
        self.inner = inner
        self.evaluator = evaluator
        self.name = recording_of(inner)
        self.serves_objectives = evaluator.serves_objectives
        self.keeps_inputs = evaluator.keeps_inputs  # steps are taken of copies
        self._record = RECORDERS[self.runner.device.type]
        self._forget(None)

    def release(self) -> None:
        super().release()
        self.inner.release()
        self.evaluator.release()
        self._forget(None)

    def _forget(self, places: Places | None) -> None:
        """Drops all recordings, and takes other places."""
        self._places = places
        self._recorded: OrderedDict[Shape, RecordedStep] = OrderedDict()
        # A pool is gone with its last recording.
        self._pool = new_pool(self.runner.device)

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        if objective is not None or (self.runner.mixes_samples and not batch.is_full):
            return self.evaluator.gradient(w, batch, buffers, objective)
        block = with_room(StepBlock.of(batch, w.dtype), self.runner.mixes_samples)
        places = self._load(w, None, buffers)
        one = self._recorded_step(places, block, None)
        one.lay_out(block, 0)
        one.replay()
        rows = slice(len(w))
        if places.buffers is not None and buffers is not None:
            buffers[rows].copy_(places.buffers[rows])
        return one.losses[0, rows].clone(), one.g[rows].clone()

    def descend(
        self,
        v: Tensor,
        blocks: Iterable[StepBlock],
        step: Step,
        buffers: Buffers = None,
        objective: Objective | None = None,
    ) -> tuple[Tensor, list[int]]:
        if objective is not None:
            return self.evaluator.descend(v, blocks, step, buffers, objective)
        if step.rule is not None:  # its gradients are recorded
            return super().descend(v, blocks, step, buffers)
        places = self._load(v, step, buffers)
        terms = terms_of(step)
        active = len(v)
        losses = [v.new_empty(0)]
        counts: list[int] = []
        for block in self._parts(blocks):
            A = block.clients
            places.keep_models(slice(A, active), v, buffers)  # they have used up their steps
            places.load_models(slice(active, A), v, buffers)  # if any: their place was not kept
            active = A
            counts += block.counts.ravel().tolist()
            if self.runner.mixes_samples and not block.is_full:
                rows = slice(A)
                places.keep_models(rows, v, buffers)
                own = some_rows(buffers, rows)
                losses.append(self.evaluator.descend(v[rows], [block], step.rows(rows), own)[0])
                places.load_models(rows, v, buffers)
                continue
            block = with_room(block, self.runner.mixes_samples)
            if self.runner.has_keys:
                block.row_seeds = block.seeds()
            one = self._recorded_step(places, block, terms)
            first = 0
            while first < len(block.picks):
                count = one.lay_out(block, first)
                for _ in range(count):
                    one.replay()
                losses.append(one.losses[:count, :A].clone().flatten())
                first += count
        places.keep_models(slice(active), v, buffers)
        return torch.cat(losses), counts

    def _parts(self, blocks: Iterable[StepBlock]) -> Iterator[StepBlock]:
        """Yields blocks, with BatchNorm cut where their steps are full."""
        for block in blocks:
            if self.runner.mixes_samples:
                yield from block.cut_where_full()
            else:
                yield block

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        return self.evaluator.outputs(w, batch, buffers)

    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        return self.evaluator.predict(w, inputs, buffers)

    def scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.evaluator.scores(outputs, targets)

    def _load(self, v: Tensor, step: Step | None, buffers: Buffers) -> Places:
        """Copies models, and what belongs to their step, to where recordings read them."""
        if self._places is None or not self._places.hold(v, buffers):
            self._forget(Places(v, buffers))
        assert self._places is not None
        self._places.load(v, step, buffers)
        return self._places

    def _recorded_step(
        self, places: Places, block: StepBlock, terms: frozenset[str] | None
    ) -> RecordedStep:
        """Returns the recording of the steps of a block, which is made if there is none."""
        _, A, B = block.picks.shape
        inputs = block.inputs
        targets = block.targets
        source = None
        if block.lasting:
            source = (inputs.data_ptr(), targets.data_ptr(), len(inputs))
        kinds = [(x.shape[1:], x.dtype) for x in (inputs, targets)]
        shape = Shape(min(room(A), len(places.v)), B, source, kinds[0], kinds[1], terms)
        one = self._recorded.get(shape)
        if one is None:
            one = RecordedStep(self.inner, places, shape, block)
            one.record(self._record, self._pool)
            self._recorded[shape] = one
            if len(self._recorded) > RECORDED:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(shape)
        return one


def recording_of(engine: Engine) -> str:
    """Returns the name of the engine that records the steps of another one."""
    return f"CUDA graph of {engine.name}"


def with_room(block: StepBlock, mixes_samples: bool) -> StepBlock:
    """Returns a block with the samples' weights, and with samples of weight 0 for a round size.

    In networks whose samples change each other no sample is added, as it would change the others.
    """
    K, A, B = block.picks.shape
    weights = block.sample_weights()
    if weights is None:
        weights = block.picks.new_full((K, A, B), 1 / B, dtype=block.dtype)
    picks = block.picks
    more = room(B, digits=4) - B
    if more and not mixes_samples:
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
