"""Watching a model: hooks around its modules, a recogniser per thread, and what was seen in the end."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import (
    WeakStorage,
    add_module_hooks,
    is_in_backward,
    is_mode_active,
    is_mode_on_top,
    storage_address,
)
from sqrtdk.torch.watch.causes import read_causes
from sqrtdk.torch.watch.modules import Frame, bind_forward, find_tensors, is_compiled, name_modules, read_heads
from sqrtdk.torch.watch.padding import read_keys, read_tokens
from sqrtdk.torch.watch.recognise import Candidate, Recogniser, Stack
from sqrtdk.torch.watch.seen import Pending, Seen

# What a compiled model says at every call while there are global hooks; the extra call of one of them does no harm.
_COMPILED_WARNING = r"Using `torch.compile\(module\)` when there are global hooks on modules"
_EAGER = "compiled regions ran eagerly while watched"


def watch(
    model: nn.Module,
    *,
    fuse: bool = False,
    scale: Any = None,
    sample_rows: int | None = None,
    every: int = 1,
    keep_rows: int | None = None,
) -> AbstractContextManager[Seen]:
    """Measure every attention call of a model while it runs, head by head; its outputs stay the same to the bit.

    Inside the `with` block any call of the model, or of a module of it, is looked at: F.scaled_dot_product_attention,
    nn.MultiheadAttention and the encoder's fast path, the models of transformers, `sqrtdk.torch.attention`, and
    attention written by hand, from the product of queries and keys to the softmax. Calls outside the model do not
    count, nor does the recomputation of a checkpoint. Compiled regions run eagerly meanwhile. The model is not changed,
    and after the block, left by an exception or not, nothing is different from before.

    Args:
        model: any module.
        fuse: let sqrtdk compute the attention it can reach, with statistics from the same pass.
        scale: with `fuse`: the effective scale of every call, in place of the model's own.
        sample_rows: measure that many query positions per head and call only; maxima are then lower bounds.
        every: look at every n-th call of the model only, the first included.
        keep_rows: keep the scores of that many rows per layer, a uniform sample of all, for `counterfactual`; it takes
            4 bytes per row, head and key that the row sees. None keeps nothing.

    Returns:
        A context manager that gives `Seen`: `layers` {module path: `HeadSummary`}, `scales`, `unattributed`, `padding`.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with watch(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) as seen:
    ...     _ = layer(torch.zeros(1, 5, 16))           # not a call of the model: a copy of the layer is in it
    >>> seen.layers
    {}
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, number in (("sample_rows", sample_rows), ("every", every), ("keep_rows", keep_rows)):
        if number is None and name != "every":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidTypeError(f"{name} must be an integer, got {number!r}")
        if number < 1:
            raise InvalidValueError(f"{name} must be at least 1, got {number}")
    if scale is not None and not fuse:
        raise InvalidValueError("scale is for fuse=True alone: without it the model computes attention itself")
    if fuse:
        from sqrtdk.torch.watch.fuse import FusedWatch

        watching: Watch = FusedWatch(model, sample_rows, every, scale)
    else:
        watching = Watch(model, sample_rows, every)
    watching.seen.keep_rows = keep_rows
    return watching


def _device_of(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


@contextmanager
def _without_warning(message: str) -> Iterator[None]:
    """Leave out one warning, and leave the filters that others may set meanwhile."""
    warnings.filterwarnings("ignore", message=message)
    own = warnings.filters[0]
    try:
        yield
    finally:
        if own in warnings.filters:
            cast(list[Any], warnings.filters).remove(own)


class _Thread(threading.local):
    """What one thread is doing inside the model."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = 0
        self.pending: list[Pending] = []
        self.recogniser: Recogniser | None = None
        self.is_on = False
        # Where weights are collected that somebody waits for, and an error that waits to be raised.
        self.wanted: list[Any] | None = None
        self.error: Exception | None = None


class Watch(AbstractContextManager[Seen]):
    """The passive watch: two global hooks that find the model's modules, and a recogniser while one of them runs.

    The hooks are torch's global ones: a hook on the encoder's own modules would switch its fast path off.
    """

    def __init__(self, model: nn.Module, sample_rows: int | None, every: int) -> None:
        self._model = model
        self._sample_rows = sample_rows
        self._every = every
        self._needs_every_call = False
        self._calls = 0
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._names: dict[nn.Module, str] = {}
        self._heads: dict[nn.Module, int | None] = {}
        self._parameters: frozenset[int] = frozenset()
        self._stack = ExitStack()
        self.seen = Seen()

    def __enter__(self) -> Seen:
        if self._names:
            raise InvalidValueError("a watch is entered once; call watch(model) again for another")
        self._names = name_modules(self._model)
        with ExitStack() as stack:
            # Loaded only where something may be compiled: importing the compiler takes a second.
            if {"torch._dynamo", "torch.nn.attention.flex_attention"} & set(sys.modules):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_without_warning(_COMPILED_WARNING))
                if is_compiled(self._model):
                    self.seen.notes.append(_EAGER)
            stack.callback(add_module_hooks(self._begin_module, self._end_module))
            if torch.is_autocast_enabled(_device_of(self._model)):
                # Weights that were cast before would not be known for weights.
                torch.clear_autocast_cache()
            self._stack = stack.pop_all()
        return self.seen

    def __exit__(self, *details: object) -> None:
        try:
            self._stack.close()
        finally:
            # An interrupt passes the hooks by.
            self._thread.frames.clear()
            self._stop()

    # Hooks

    def _begin_module(self, module: nn.Module, args: Any) -> None:
        path = self._names.get(module)
        if path is None:
            return
        thread = self._thread
        if not thread.frames and not is_in_backward():
            self._begin_call()
        recogniser = thread.recogniser
        products, taken = (0, 0) if recogniser is None else (recogniser.products, recogniser.taken)
        number = thread.calls = thread.calls + 1
        heads = self._heads.get(module)
        if heads is None:
            heads = self._heads[module] = read_heads(module)
        thread.frames.append(Frame(number, module, path, heads, products, taken, len(thread.pending)))

    def _end_module(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # After an exception torch hands over no keyword arguments.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        thread = self._thread
        if not any(frame.module is module for frame in thread.frames):
            return
        while thread.frames[-1].module is not module:
            thread.frames.pop()
        frame = thread.frames[-1]
        recogniser = thread.recogniser
        if thread.is_on and recogniser is not None:
            if recogniser.products > frame.products and recogniser.taken == frame.taken:
                recogniser.leave_module(frame.path, find_tensors(output))
            self._tell_padding(frame, args, kwargs)
        thread.frames.pop()
        if not thread.frames:
            self._end_call()
        error, thread.error = thread.error, None
        if error is not None and output is not None:
            raise error

    def _tell_padding(self, frame: Frame, args: Any, kwargs: dict[str, Any]) -> None:
        open_ones = [one for one in self._thread.pending[frame.pending :] if not one.is_told]
        if not open_ones:
            return
        given = bind_forward(frame.module, args, kwargs)
        for one in open_ones:
            batch, queries, keys = one.batch, one.queries, one.keys if one.is_self else None
            told, tokens = read_tokens(given, batch, queries, keys)
            if told:
                one.tell(tokens)

    # A call of the model

    def _begin_call(self) -> None:
        thread = self._thread
        with self._lock:
            turn = self._calls % self._every == 0
            self._calls += 1
            if turn:
                self.seen.calls += 1
            else:
                self.seen.passed_over += 1
        if not turn and not self._needs_every_call:
            return
        if thread.recogniser is None:
            thread.recogniser = Recogniser(self._take, self._locate, self._is_parameter, self._sample_rows)
        # Quantised weights are buffers of integers.
        learnt = [*self._model.parameters(), *(b for b in self._model.buffers() if not b.is_floating_point())]
        addresses = frozenset(storage_address(tensor) for tensor in learnt)
        if addresses != self._parameters:
            self._parameters = addresses
            self.seen.held += [WeakStorage(tensor) for tensor in learnt if storage_address(tensor)]
        thread.recogniser.is_measuring = turn
        thread.recogniser.__enter__()
        thread.is_on = True

    def _end_call(self) -> None:
        pending, self._thread.pending = self._thread.pending, []
        self._stop()
        with self._lock:
            for one in pending:
                self.seen.add(one)

    def _stop(self) -> None:
        thread = self._thread
        if thread.is_on and thread.recogniser is not None:
            thread.is_on = False
            if is_mode_on_top(thread.recogniser) or is_mode_active(thread.recogniser):
                thread.recogniser.__exit__(None, None, None)
            thread.recogniser.memory.end_call()
        thread.pending = []

    def _locate(self) -> Stack:
        frames = self._thread.frames
        stack = tuple((frame.number, frame.path, frame.heads) for frame in frames)
        if frames and isinstance(frames[-1].module, nn.TransformerEncoderLayer):
            # The fast path computes its attention without calling it.
            stack += ((0, f"{frames[-1].path}.self_attn".removeprefix("."), None),)
        return stack

    def _is_parameter(self, address: int) -> bool:
        return address in self._parameters

    def _take(self, candidate: Candidate) -> None:
        call = candidate.call
        if call is None or candidate.statistics is None:
            if candidate.reason is not None:
                with self._lock:
                    self.seen.miss(candidate.path, candidate.reason)
            return
        batch, _, queries, keys = call.shape
        tokens = read_keys(call)
        record = self.seen.note_scale(candidate.path, call)
        with self._lock:
            self.seen.note_heads(candidate.path, call)
            drawn = self.seen.draw_rows(candidate.path, call, tokens)
        first = call.first_position
        causes = read_causes(call, tokens, record.d_k)
        self._thread.pending.append(
            Pending(
                candidate.path,
                candidate.statistics,
                batch,
                queries,
                keys,
                first is not None,
                first,
                tokens,
                causes=causes,
                drawn=drawn,
            )
        )
