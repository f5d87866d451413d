"""Watching a model: a recogniser per thread while its modules run, and what was seen in the end."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import (
    WeakStorage,
    has_numbers,
    is_in_backward,
    leave_mode,
    storage_address,
    without_modes,
)
from sqrtdk.torch.watch.calls import SeenCall
from sqrtdk.torch.watch.causes import read_causes
from sqrtdk.torch.watch.modules import (
    MOST_CALLS,
    CallCounter,
    Frame,
    find_learnt,
    is_compiled,
    name_modules,
    read_heads,
)
from sqrtdk.torch.watch.padding import Padding, read_keys, read_tokens
from sqrtdk.torch.watch.parts import Candidate, Stack
from sqrtdk.torch.watch.recognise import Recogniser
from sqrtdk.torch.watch.running import listen
from sqrtdk.torch.watch.seen import Seen, SeenRows

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
        A module that is called several times in a forward pass is as many layers: `path (call 0)`, `path (call 1)`, …

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument; also for a model whose parameters have no numbers.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with watch(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) as seen:
    ...     _ = layer(torch.zeros(1, 5, 16))           # not a call of the model: a copy of the layer is in it
    >>> seen.layers
    {}
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    for name, number in (("sample_rows", sample_rows), ("every", every), ("keep_rows", keep_rows)):
        if number is None and name != "every":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidTypeError(name, f"must be an integer, got {number!r}")
        if number < 1:
            raise InvalidValueError(name, f"must be at least 1, got {number}")
    _check_numbers(model)
    if scale is not None and not fuse:
        raise InvalidValueError("scale", "is for fuse=True alone: without it the model computes attention itself")
    if fuse:
        from sqrtdk.torch.watch.fuse import FusedWatch

        watching: Watch = FusedWatch(model, sample_rows, every, scale)
    else:
        watching = Watch(model, sample_rows, every)
    watching.seen.keep_rows = keep_rows
    return watching


def _check_numbers(model: nn.Module) -> None:
    """Refuse a model on the device meta or of fake tensors; one whose weights are loaded for each call is none."""
    name, parameter = next(model.named_parameters(), ("", None))
    if parameter is None or has_numbers(parameter) or any(map(has_numbers, model.parameters())):
        return
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        kind = "on the device meta" if parameter.device.type == "meta" else "fake"
        raise InvalidValueError(
            f"model must have parameters with numbers, got tensors that are {kind} ({name} and all others); load or "
            "initialise its weights first"
        )


def _device_of(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


class _Thread(threading.local):
    """What one thread is doing inside the model."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        # The frames as a recogniser is told them, until they change.
        self.stack: Stack | None = None
        self.calls = 0
        self.counter = CallCounter()
        self.recogniser: Recogniser | None = None
        self.is_on = False
        # Where weights are collected that somebody waits for, and an error that waits to be raised.
        self.wanted: list[Any] | None = None
        self.error: Exception | None = None


class Watch(AbstractContextManager[Seen]):
    """The passive watch: it is told which of the model's modules run, and has a recogniser on while one of them does.

    Left by an exception, or dropped without being left, it closes.
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
        self._close: weakref.finalize[..., Any] | None = None
        self.has_compiled = False
        self.seen = Seen()

    def __enter__(self) -> Seen:
        if self._names:
            raise InvalidValueError("a watch is entered once; call watch(model) again for another")
        self._names = name_modules(self._model)
        self.has_compiled = is_compiled(self._names)
        if self.has_compiled:
            self.seen.notes.append(_EAGER)
        if torch.is_autocast_enabled(_device_of(self._model)):
            # Weights that were cast before would not be known for weights.
            torch.clear_autocast_cache()
        self._close = weakref.finalize(self, listen(self))
        return self.seen

    def __exit__(self, *details: object) -> None:
        try:
            if self._close is not None:
                self._close()
        finally:
            self._thread.frames.clear()
            self._stop()

    # Calls of modules

    def follows(self, module: nn.Module) -> bool:
        """Whether a module is one of the model's."""
        return module in self._names

    def count_running(self) -> int:
        """How many modules of the model run in this thread."""
        return len(self._thread.frames)

    def begin_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module of the model is about to run."""
        thread = self._thread
        if not thread.frames:
            thread.counter.restart()
            if not is_in_backward():
                self._begin_call()
        recogniser = thread.recogniser
        products, taken = (0, 0) if recogniser is None else (recogniser.products, recogniser.taken)
        thread.calls += 1
        if module not in self._heads:
            self._heads[module] = read_heads(module)
        path, heads = self._names[module], self._heads[module]
        thread.frames.append(Frame(thread.calls, module, path, heads, products, taken, args, kwargs))
        thread.stack = None

    def end_module(self, running: int, output: Any, *, has_failed: bool) -> None:
        """A module has ended, by an exception or not; `running` of the model's modules ran when it began."""
        thread = self._thread
        recogniser = thread.recogniser
        if thread.is_on and not has_failed and recogniser is not None and len(thread.frames) == running + 1:
            frame = thread.frames[-1]
            is_projection = recogniser.products > frame.products and recogniser.taken == frame.taken
            recogniser.end_module(frame.number, frame.path, output, is_projection)
        del thread.frames[running:]
        thread.stack = None
        if not thread.frames:
            self._end_call(has_failed)
        error, thread.error = thread.error, None
        if error is not None and not has_failed:
            raise error

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
        learnt = find_learnt(self._names)
        addresses = frozenset(map(storage_address, learnt))
        if addresses != self._parameters:
            self._parameters = addresses
            self.seen.held += [WeakStorage(tensor) for tensor in learnt if storage_address(tensor)]
        thread.recogniser.is_measuring = turn
        # First, so that an interrupt in between leaves no recogniser behind.
        thread.is_on = True
        thread.recogniser.__enter__()

    def _end_call(self, has_failed: bool) -> None:
        self._stop()

    def _stop(self) -> None:
        thread = self._thread
        if thread.is_on and thread.recogniser is not None:
            leave_mode(thread.recogniser)
            thread.is_on = False
            thread.recogniser.end_call()

    def _locate(self) -> Stack:
        thread = self._thread
        if thread.stack is None:
            frames = thread.frames
            stack = tuple((frame.number, frame.path, frame.heads) for frame in frames)
            if frames and isinstance(frames[-1].module, nn.TransformerEncoderLayer):
                # The fast path computes its attention without calling it.
                stack += ((frames[-1].number, f"{frames[-1].path}.self_attn".removeprefix("."), None),)
            thread.stack = stack
        return thread.stack

    def _is_parameter(self, address: int) -> bool:
        return address in self._parameters

    def _take(self, candidate: Candidate) -> None:
        call = candidate.call
        if call is None or candidate.statistics is None:
            if candidate.reason is not None:
                with self._lock:
                    self.seen.miss(candidate.path, candidate.reason)
            return
        number, path = candidate.stack[-1][:2] if candidate.stack else (0, "")
        # Attention of another number of heads in one call of a module is a layer of its own.
        layer = self._thread.counter.find(path, (number, call.shape[1]))
        with without_modes(), torch.no_grad():
            tokens, padding = self._find_padding(call)
        record = self.seen.note_scale(layer, call)
        causes = None if call.logits is not None else read_causes(call, tokens, record.d_k)
        rows = SeenRows(candidate.statistics, call.first_position, tokens, causes)
        batch, heads, queries, _ = call.shape
        number = batch * heads * (queries if self._sample_rows is None else min(queries, self._sample_rows))
        with self._lock:
            for remark in candidate.remarks:
                self.seen.remark(path, remark)
            if layer.call == MOST_CALLS - 1:
                self.seen.note_loop(path)
            self.seen.note_heads(path, call)
            self.seen.keep(layer, call, tokens)
            self.seen.add(layer, rows, number, padding)

    def _find_padding(self, call: SeenCall) -> tuple[Tensor | None, Padding]:
        """Which rows `[B, L]` of a call are tokens, None for all, and by whom it was told."""
        batch, _, queries, keys = call.shape
        own_keys = None if call.first_position is None else keys
        # A module inside was called without a mask: what one around it was told is about other tokens, or says "all".
        is_unmasked = False
        for frame in reversed(self._thread.frames):
            is_told, tokens = read_tokens(frame.given, batch, queries, own_keys)
            if not is_told:
                continue
            if tokens is None:
                is_unmasked = True
            elif not is_unmasked or bool(tokens.all()):
                return tokens, "attention mask"
        tokens = read_keys(call)
        return tokens, "unknown" if tokens is None else "key padding"
