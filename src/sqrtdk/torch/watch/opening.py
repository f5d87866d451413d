"""Opens a watch of a model after checking the arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache

import torch
from torch import nn

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import has_numbers
from sqrtdk.torch.transformers_internals import is_loaded_per_call
from sqrtdk.torch.watch.recognise.repeated import Known
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.torch.watch.session import Watch
from sqrtdk.torch.watch.uninvolved import recall_uninvolved

# Limit up to which glibc adapts to the blocks that a program frees.
_LARGE = 31 << 20


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

    From the second call of a model on, also in another watch, modules that took no part in attention are not followed:
    they ran before the projections of queries and keys or after attention, and so did every module inside. Calls 4, 16,
    64 and so on follow them again. If such a module calls F.scaled_dot_product_attention, `unattributed` lists it, and
    the next call is followed fully. Attention of another kind that begins there is found by calls 4, 16, 64 and so on.
    If queries or keys come from such a module, their scale is unknown in that call, and later calls are followed fully.

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
    _keep_freed_memory()
    watching = Watch(model, known=Known(), uninvolved=recall_uninvolved(model))
    watching.seen.keep_rows = keep_rows
    return watching


@lru_cache(maxsize=1)
def _keep_freed_memory() -> None:
    """Free one large block, after which glibc keeps up to twice as much freed memory of the process for later use.

    Small arrays of a watch lie between a model's activations. Memory that glibc returned to the system between
    operations came back page by page, which took up to 15 of 150 ms.
    """
    torch.empty(_LARGE, dtype=torch.uint8)


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
