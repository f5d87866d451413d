"""Watches a model: runs one recogniser per thread while the model's modules run, and collects the results."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import (
    WeakStorage,
    has_numbers,
    is_compiled,
    is_in_backward,
    is_plain_linear,
    is_spread,
    leave_mode,
    local_part,
    put_back,
    read_linear,
    storage_address,
    take_off,
    unseen,
)
from sqrtdk.torch.transformers_internals import is_loaded_per_call
from sqrtdk.torch.watch.modules import (
    MOST_CALLS,
    CallCounter,
    Frame,
    LayerKey,
    find_learnt,
    name_modules,
    read_heads,
)
from sqrtdk.torch.watch.padding import Padding, read_keys, read_tokens
from sqrtdk.torch.watch.recognise.calls import SeenCall, are_one_sequence, place_queries, read_slopes
from sqrtdk.torch.watch.recognise.masks import forget_mask
from sqrtdk.torch.watch.recognise.parts import Candidate, Stack
from sqrtdk.torch.watch.recognise.recogniser import Recogniser
from sqrtdk.torch.watch.recognise.repeated import NONE, UNLIKE, FusedOnly, Known
from sqrtdk.torch.watch.running import listen
from sqrtdk.torch.watch.score_sums import read_causes
from sqrtdk.torch.watch.seen import Seen, SeenRows
from sqrtdk.wording.numbers import write_number

_EAGER = "compiled regions ran eagerly while watched"
# Numbers of the repeated calls that are followed in the whole model.
_WHOLE = frozenset(4**power for power in range(1, 32))


def watch(model: nn.Module, *, keep_rows: int | None = None) -> AbstractContextManager[Seen]:
    """Measure every attention call of a model while it runs, head by head. The model's outputs stay bit-identical.

    Inside the `with` block, every call of the model or of its modules is observed: F.scaled_dot_product_attention,
    nn.MultiheadAttention and the encoder's fast path, Hugging Face models, `sqrtdk.torch.attention`, and hand-written
    attention, from the product of queries and keys to the softmax. Calls outside the model do not count, nor does the
    recomputation of a checkpoint. Compiled regions run eagerly meanwhile, and F.scaled_dot_product_attention is a
    function that calls torch's. The model is not changed. After the block, even if an exception ends the block,
    everything is as before.

    After a call whose attention was all fused, such as the first of `generate`, later calls are followed for fused
    attention alone: where F.scaled_dot_product_attention is called, in modules that computed other fused attention
    before, in new modules, and in calls 4, 16, 64 and so on in the whole model. Attention of another kind there, and a
    module without its attention, are listed in `unattributed`, and calls after that are followed fully.

    Args:
        model: any module.
        keep_rows: the number of rows per layer whose scores are kept for `counterfactual`, sampled uniformly. Each row
            takes 4 bytes per head and visible key. None keeps no rows.

    Returns:
        A context manager that yields `Seen`: `layers` {layer name: `HeadSummary`}, `scales`, `unattributed`, `padding`.
        A module that is called several times in a forward pass makes several layers: `path (call 0)`, `path (call 1)`.

    Raises:
        InvalidTypeError, InvalidValueError: an argument is wrong, or the model's parameters have no numbers.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with watch(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) as seen:
    ...     _ = layer(torch.zeros(1, 5, 16))           # not a call of the model: a copy of the layer is in it
    >>> seen.layers
    {}
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    keep_rows = None if keep_rows is None else checks.integer("keep_rows", keep_rows, 1)
    _check_numbers(model)
    watching = Watch(model, known=Known())
    watching.seen.keep_rows = keep_rows
    return watching


def _check_numbers(model: nn.Module) -> None:
    """Raise for a model of meta or fake tensors, but not for a model whose weights are loaded for each call."""
    name, parameter = next(model.named_parameters(), ("", None))
    if parameter is None or has_numbers(parameter) or any(map(has_numbers, model.parameters())):
        return
    if not any(map(is_loaded_per_call, model.modules())):
        kind = "on the device meta" if parameter.device.type == "meta" else "fake"
        raise InvalidValueError(
            f"model must have parameters with numbers, got tensors that are {kind} ({name} and all others); load or "
            "initialise its weights first"
        )


def _device_of(model: nn.Module) -> str:
    """Return the kind of device that a model computes on. Weights on meta are loaded to another one for each call."""
    return next((one.device.type for one in model.parameters() if one.device.type != "meta"), "cpu")


class _Thread(threading.local):
    """State of one thread inside the model."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = 0
        self.counter = CallCounter()
        self.recogniser: Recogniser | None = None
        self.is_on = False
        # Whether the call is a repeated one, its mode, and the number of running modules when the mode was entered.
        self.is_repeated = False
        self.fused_only: FusedOnly | None = None
        self.fused_from: int | None = None
        # Whether torch's attention function runs.
        self.is_in_function = False
        # Collects requested weights; None if no weights are requested.
        self.wanted: list[Any] | None = None


class Watch(AbstractContextManager[Seen]):
    """Passive watch: is notified of the model's module calls and keeps a recogniser on while a module runs.

    The watch closes at the end of the `with` block, after an exception, or when it is garbage collected.
    """

    def __init__(self, model: nn.Module, *, known: Known | None = None) -> None:
        self._model = model
        # Collects facts that spare work in repeated calls; None follows every call fully.
        self._known = known
        self.spares_work = known is not None
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._names: dict[nn.Module, str] = {}
        self._heads: dict[nn.Module, int | None] = {}
        self._parameters: frozenset[int] = frozenset()
        self._is_sharded = False
        self._close: weakref.finalize[..., Any] | None = None
        self.has_compiled = False
        self.seen = Seen()

    def __enter__(self) -> Seen:
        if self._names:
            raise InvalidValueError("a watch is entered once; call watch(model) again for another")
        self._names = name_modules(self._model)
        self.has_compiled = any(map(is_compiled, self._names))
        if self.has_compiled:
            self.note_eager()
        if torch.is_autocast_enabled(_device_of(self._model)):
            # Weights that were cast earlier would not be recognised as weights.
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
            # Both refer to this watch. Without the cycle, memory is freed at once and not by a later collection.
            self._thread.recogniser = self._thread.fused_only = None

    # Module calls

    def follows(self, module: nn.Module) -> bool:
        """Return whether calls of a module matter: in a repeated call those around attention, and unknown modules."""
        known, thread = self._known, self._thread
        if known is not None and thread.is_repeated and thread.fused_from != 0 and module in known.ran:
            return module in known.around
        return module in self._names

    def count_running(self) -> int:
        """Return the number of the model's modules that run in this thread."""
        return len(self._thread.frames)

    def begin_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a module call."""
        thread = self._thread
        if not thread.frames:
            thread.counter.restart()
            if not is_in_backward():
                self._begin_call()
        if self._known is not None:
            self._note_run(self._known, module)
        recogniser, products, taken = thread.recogniser, 0, 0
        if recogniser is not None:
            recogniser.settle()  # products before this module are not its own
            products, taken = recogniser.products, recogniser.taken
        thread.calls += 1
        thread.frames.append(Frame(thread.calls, module, self._names[module], products, taken, args, kwargs))

    def run_whole(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the output of a linear layer, which is one product and is seen without its operations.

        Return NotImplemented for any other module, which is then followed.
        """
        thread = self._thread
        recogniser = thread.recogniser
        if (
            not thread.is_on
            or recogniser is None
            or not thread.frames
            or self._is_sharded  # parameters are whole only while their own module runs
            or not is_plain_linear(module, args, kwargs)
            or is_in_backward()
            or not recogniser.is_learnt(read_linear(module)[0])
            or recogniser.knows_scores(args[0])
            or not take_off(recogniser)
        ):
            return NotImplemented
        try:
            output = call(module, *args)
        finally:
            put_back(recogniser)
        if self._known is not None:
            self._known.ran.add(module)
            # Some linear layers of strided tensors are such a product, which is not seen here.
            self._known.heard.add((self._names[module], "aten::bmm"))
        recogniser.note_linear(self._names[module], args[0], *read_linear(module), output)
        return output

    def end_module(self, running: int, output: Any, *, has_failed: bool) -> None:
        """Handle the end of a module call, also by an exception; `running` modules ran when the call began."""
        thread = self._thread
        recogniser = thread.recogniser
        if recogniser is not None:
            recogniser.settle()
        if thread.is_on and not has_failed and recogniser is not None and len(thread.frames) == running + 1:
            frame = thread.frames[-1]
            is_projection = recogniser.products > frame.products and recogniser.taken == frame.taken
            recogniser.end_module(frame.number, frame.path, output, is_projection)
        if thread.is_repeated and not has_failed and self._known is not None and len(thread.frames) > running:
            self._check_repeated(self._known, thread.frames[running])
        del thread.frames[running:]
        if thread.fused_from is not None and running <= thread.fused_from:
            self._leave_fused()
        if not thread.frames:
            self._end_call(has_failed)

    def begin_function(self) -> bool:
        """Handle the start of a call of torch's attention function, and return whether its end matters."""
        thread = self._thread
        if not thread.frames or self._known is None:
            return False
        if thread.is_repeated:
            if thread.fused_from is not None:
                return False
            self._enter_fused(self._known)
        thread.is_in_function = True
        return True

    def end_function(self) -> None:
        """Handle the end of that call."""
        self._thread.is_in_function = False
        if self._thread.is_repeated:
            self._leave_fused()

    def note_eager(self) -> None:
        """Add a note that compiled code runs eagerly."""
        with self._lock:
            if _EAGER not in self.seen.notes:
                self.seen.notes.append(_EAGER)

    # Model calls

    def _begin_call(self) -> None:
        thread = self._thread
        with self._lock:
            self.seen.calls += 1
        if self._known is not None and self._known.is_enough:
            thread.is_repeated = True
            # Now and then the whole model is observed, in case that another module computes attention now.
            if self.seen.calls in _WHOLE:
                self._enter_fused(self._known)
        else:
            self._follow()

    def _follow(self) -> None:
        """Follow all operations of this thread until the model call ends."""
        thread = self._thread
        if thread.recogniser is None:
            thread.recogniser = Recogniser(self._take, self._locate, self._name_running, self._is_parameter, self._hear)
        learnt = find_learnt(self._names)
        self._is_sharded = self._is_sharded or any(map(is_spread, learnt))
        learnt = local_part(learnt)
        addresses = frozenset(map(storage_address, learnt))
        if addresses != self._parameters:
            self._parameters = addresses
            self.seen.held += [WeakStorage(tensor) for tensor in learnt if storage_address(tensor)]
        # Set before entering, so that an interrupt in between leaves no recogniser behind.
        thread.is_on = True
        thread.recogniser.__enter__()

    def _end_call(self, has_failed: bool) -> None:
        self._stop()

    # Repeated calls

    def _note_run(self, known: Known, module: nn.Module) -> None:
        """Handle the start of a module call: an unknown module is followed fully, a known one where it attends."""
        thread = self._thread
        if module not in known.ran:
            known.ran.add(module)
            if thread.is_repeated:
                self._leave_fused()
                thread.is_repeated = False
                self._follow()
        elif thread.is_repeated and thread.fused_from is None and module in known.attending:
            self._enter_fused(known)

    def _check_repeated(self, known: Known, frame: Frame) -> None:
        """List a module that called torch's attention function before and does not now."""
        if known.is_all_fused and frame.module in known.calling and not frame.has_attended:
            known.is_all_fused = False
            with self._lock:
                self.seen.miss(frame.path, NONE)

    def _enter_fused(self, known: Known) -> None:
        thread = self._thread
        if thread.fused_only is None:
            thread.fused_only = FusedOnly(known, self._take, self._locate)
        thread.fused_from = len(thread.frames)
        thread.fused_only.__enter__()

    def _leave_fused(self) -> None:
        thread = self._thread
        if thread.fused_from is not None and thread.fused_only is not None:
            leave_mode(thread.fused_only)
            thread.fused_from = None

    def _hear(self, name: str) -> None:
        if self._known is not None:
            self._known.heard.update((frame.path, name) for frame in self._thread.frames)

    def _learn(self, known: Known, candidate: Candidate, layer: LayerKey | None) -> None:
        """Collect the facts of a candidate; attention that is not fused or not understood ends repeated following."""
        call, frames = candidate.call, self._thread.frames
        if call is None or layer is None or not candidate.is_plain:
            known.is_all_fused = False
            return
        known.one_sequence[layer] = call.last is not None or are_one_sequence(call)
        known.around.update(frame.module for frame in frames)
        (known.calling if self._thread.is_in_function else known.attending).add(frames[-1].module)

    def _stop(self) -> None:
        thread = self._thread
        thread.is_repeated = False
        self._leave_fused()
        if thread.is_on and thread.recogniser is not None:
            leave_mode(thread.recogniser)
            thread.is_on = False
            thread.recogniser.end_call()
        forget_mask()

    def _locate(self) -> Stack:
        frames = self._thread.frames
        if not frames:
            return ()
        running = frames[-1]
        if running.stack is None:
            stack: Stack = ()
            for frame in frames:
                if frame.stack is None:
                    frame.stack = (*stack, (frame.number, frame.path, self._read_heads(frame.module)))
                stack = frame.stack
        assert running.stack is not None
        if isinstance(running.module, nn.TransformerEncoderLayer):
            return (*running.stack, (running.number, self._name_running(), None))
        return running.stack

    def _name_running(self) -> str:
        """Return the path of the running module."""
        frames = self._thread.frames
        if not frames:
            return ""
        path = frames[-1].path
        if isinstance(frames[-1].module, nn.TransformerEncoderLayer):
            # The fast path computes the attention of `self_attn` without calling that module.
            return f"{path}.self_attn".removeprefix(".")
        return path

    def _read_heads(self, module: nn.Module) -> int | None:
        if module not in self._heads:
            self._heads[module] = read_heads(module)
        return self._heads[module]

    def _is_parameter(self, address: int) -> bool:
        return address in self._parameters or (self._is_sharded and self._is_gathered(address))

    def _is_gathered(self, address: int) -> bool:
        """Return whether the running module has a parameter at this address. FSDP gathers it only for that time."""
        if address in self.seen.gathered:
            return True
        frames = self._thread.frames
        for name, parameter in frames[-1].module.named_parameters(recurse=False) if frames else ():
            local = local_part(parameter)
            if storage_address(local) == address:
                with self._lock:
                    self.seen.held.append(WeakStorage(local))
                    self.seen.gathered[address] = f"{frames[-1].path}.{name}".removeprefix(".")
                return True
        return False

    def _take(self, candidate: Candidate) -> None:
        call = candidate.call
        known = self._known
        if call is None or candidate.statistics is None:
            if known is not None:
                self._learn(known, candidate, None)
            if candidate.reason is not None:
                with self._lock:
                    self.seen.miss(candidate.path, candidate.reason)
            return
        number, path = candidate.stack[-1][:2] if candidate.stack else (0, "")
        # Within one module call, attention with another number of heads is a separate layer.
        layer = self._thread.counter.find(path, (number, call.shape[1]))
        if known is not None and not candidate.is_repeated:
            self._learn(known, candidate, layer)
        elif known is not None:
            one_sequence = known.one_sequence.get(layer)
            if one_sequence is None:  # another module, more of its calls or other heads than before
                known.is_all_fused = False
                with self._lock:
                    self.seen.miss(path, UNLIKE.format("attention"))
                return
            call = place_queries(call, one_sequence=one_sequence)
            self._thread.frames[-1].has_attended = True
        with unseen():
            tokens, padding = self._find_padding(call)
            slopes = read_slopes(call) if self.seen.is_new(layer) else None
        is_repeated = candidate.is_repeated
        record = self.seen.scale_of(layer) if is_repeated else self.seen.note_scale(layer, call)
        causes = None if call.logits is not None else read_causes(call, tokens, record.d_k)
        rows = SeenRows(candidate.statistics, call.first_position, tokens, causes)
        batch, heads, queries, _ = call.shape
        with self._lock:
            if slopes is not None:
                least, largest = (write_number(float(one)) for one in slopes.abs().aminmax())
                self.seen.remark(path, f"an ALiBi bias is added to the logits, with slopes from {least} to {largest}")
            for remark in candidate.remarks:
                self.seen.remark(path, remark)
            if layer.call == MOST_CALLS - 1:
                self.seen.note_loop(path)
            if not is_repeated:
                self.seen.note_heads(path, call)
            self.seen.keep(layer, call, tokens)
            self.seen.add(layer, rows, batch * heads * queries, padding)

    def _find_padding(self, call: SeenCall) -> tuple[Tensor | None, Padding]:
        """Return a mask `[B, L]` of the rows that are tokens (None: all), and the source of the mask."""
        batch, _, queries, keys = call.shape
        own_keys = None if call.first_position is None else keys
        # True if an inner module ran without a mask. An outer mask is then about other tokens, or hides nothing.
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
