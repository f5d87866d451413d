"""Watches a model: runs one recogniser per thread while the model's modules run, and collects the results."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.torch.internals import (
    WeakStorage,
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
from sqrtdk.torch.watch.modules import (
    MOST_CALLS,
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
from sqrtdk.torch.watch.thread_state import ThreadState
from sqrtdk.torch.watch.uninvolved import (
    WHOLE_CALLS,
    CallRecord,
    Uninvolved,
    find_inputs,
    may_be_unfollowed,
)
from sqrtdk.wording.numbers import write_number

_EAGER = "compiled regions ran eagerly while watched"


def _device_of(model: nn.Module) -> str:
    """Return the kind of device that a model computes on. Weights on meta are loaded to another one for each call."""
    return next((one.device.type for one in model.parameters() if one.device.type != "meta"), "cpu")


class Watch(AbstractContextManager[Seen]):
    """Passive watch: is notified of the model's module calls and keeps a recogniser on while a module runs.

    The watch closes at the end of the `with` block, after an exception, or when it is garbage collected.

    Args:
        model: the model.
        known: collects facts that spare work in repeated calls with fused attention; None follows such calls too.
        uninvolved: modules that need not be followed, as earlier calls showed; None follows all modules.
    """

    def __init__(self, model: nn.Module, *, known: Known | None = None, uninvolved: Uninvolved | None = None) -> None:
        self._model = model
        self._known = known
        self._uninvolved = uninvolved
        self._had_repeated = False
        self.spares_work = known is not None or uninvolved is not None
        self._lock = threading.Lock()
        self._thread = ThreadState()
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
        if self._uninvolved is not None:
            self._uninvolved.check_modules()
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
        if thread.unfollowed is not None:
            return False
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
                # A call of a part of the model says nothing about the other parts.
                if module is self._model and thread.is_on and self._uninvolved is not None:
                    self._spare(self._uninvolved)
        if self._known is not None:
            self._note_run(self._known, module)
        recogniser, products, taken = thread.recogniser, 0, 0
        if recogniser is not None:
            recogniser.settle()  # products before this module are not its own
            products, taken = recogniser.products, recogniser.taken
        thread.calls += 1
        thread.frames.append(Frame(thread.calls, module, self._names[module], products, taken, args, kwargs))

    def run_whole(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the output of a module that is seen without its operations: uninvolved, or a linear layer.

        Return NotImplemented for any other module, which is then followed.
        """
        thread = self._thread
        recogniser = thread.recogniser
        if (
            not thread.is_on
            or recogniser is None
            or not thread.frames
            or self._is_sharded  # parameters are whole only while their own module runs
            or is_in_backward()
        ):
            return NotImplemented
        if module in thread.uninvolved:
            return self._run_unfollowed(recogniser, module, call, args, kwargs)
        if (
            not is_plain_linear(module, args, kwargs)
            or not recogniser.is_learnt(read_linear(module)[0])
            or recogniser.knows_scores(args[0])
            or not take_off(recogniser)
        ):
            return NotImplemented
        try:
            output = call(module, *args)
        finally:
            if thread.is_on:  # the watch may have been closed meanwhile
                put_back(recogniser)
        for known in (self._known, thread.record):
            if known is not None:
                known.ran.add(module)
                # Some linear layers of strided tensors are such a product, which is not seen here.
                known.heard.add((self._names[module], "aten::bmm"))
        recogniser.note_linear(self._names[module], args[0], *read_linear(module), output)
        return output

    def _run_unfollowed(
        self, recogniser: Recogniser, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of a module that takes no part in attention. Its operations are not observed.

        Return NotImplemented if another mode observes the module.
        """
        thread = self._thread
        recogniser.settle()
        if not take_off(recogniser):
            return NotImplemented
        thread.unfollowed = module
        try:
            output = call(module, *args, **kwargs)
        finally:
            thread.unfollowed = None
            if thread.is_on:  # the watch may have been closed meanwhile
                put_back(recogniser)
        if thread.uninvolved.get(module) and isinstance(output, Tensor):
            recogniser.root_unfollowed(output, find_inputs(args, kwargs), self._names[module])
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
            if thread.record is not None:
                thread.record.note_module(frame, recogniser.products, output, recogniser.memory)
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
        if thread.unfollowed is not None and self._uninvolved is not None:
            self._uninvolved.forget()
            if self._known is not None:
                self._known.is_all_fused = False
            with self._lock:
                self.seen.miss(self._names[thread.unfollowed], UNLIKE.format("attention"))
        if not thread.frames or self._known is None or thread.unfollowed is not None:
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
            thread.is_repeated = self._had_repeated = True
            # Now and then the whole model is observed, in case that another module computes attention now.
            if self.seen.calls in WHOLE_CALLS:
                self._enter_fused(self._known)
        else:
            if self._had_repeated and self._uninvolved is not None:  # the last call was unlike earlier ones
                self._uninvolved.forget()
                self._had_repeated = False
            self._follow()

    def _spare(self, uninvolved: Uninvolved) -> None:
        """Leave out uninvolved modules in a model call, or record the call to find such modules."""
        thread = self._thread
        if thread.recogniser is None or uninvolved.is_wrong:
            return
        if uninvolved.count_call(self._model):
            thread.record = CallRecord(thread.recogniser.products)
            return
        thread.uninvolved = dict(uninvolved.modules)
        if self._known is not None:
            self._known.ran.update(uninvolved.covered)
            self._known.heard.update(uninvolved.heard)

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
        record = self._thread.record
        self._stop()
        if record is not None and not has_failed and self._uninvolved is not None:
            self._uninvolved.learn(record, self._model)

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
        for known in (self._known, self._thread.record):
            if known is not None:
                known.heard.update((frame.path, name) for frame in self._thread.frames)

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
        thread.record, thread.uninvolved = None, {}
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
        known, thread = self._known, self._thread
        if thread.record is not None and thread.recogniser is not None:
            thread.record.note_attention(candidate, thread.frames, thread.recogniser.products)
        if self._uninvolved is not None and may_be_unfollowed(call, is_spared=bool(thread.uninvolved)):
            self._uninvolved.give_up()
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
