"""Small models of packages that do not know sqrtdk, and the expected results of a watch on each.

As a program with a folder of packages as argument, this file watches all models and prints the results as JSON. Only
that process has the folder on its path.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

SLOPES = "an ALiBi bias is added to the logits, with slopes from 0.003906 to 0.25"
BEFORE = "heads are mixed before the softmax, and statistics are of what it sees"
AFTER = "heads are mixed after the softmax, and statistics are of the weights before that"
FEATURES = "exponentials of its scores pass add and are not divided by their sum"
LINEAR = "queries meet a product of keys and values: linear attention, without a softmax of scores"
THREE = "three projections are multiplied without a softmax, as in linear attention"
UNKNOWN = "the scores of its softmax could not be followed back to a product of queries and keys"
PAIRS = "its softmax is taken over pairs of queries and keys, one by one"


@dataclass(frozen=True)
class Other:
    """Model of a package, with heads and scale of its layers in the order of their first call.

    `missed` has the modules whose attention is listed as missed, with the reason; `notes` are the beginnings of notes.
    """

    make: Callable[[], Call]
    heads: list[int]
    scales: list[float | None]
    missed: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _find(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _tokens(count: int = 24, vocabulary: int = 64) -> Tensor:
    return torch.randint(4, vocabulary, (2, count))


def _build(path: str, feed: Callable[[], tuple[Any, ...]], /, *args: Any, **options: Any) -> Call:
    return _find(path)(*args, **options), feed(), {}


def _root(width: int) -> float:
    return width**-0.5


def _alike(make: Callable[[], Call], layers: int, scale: float | None = 8**-0.5, heads: int = 4, **more: Any) -> Other:
    """Return a model whose layers all have the same heads and scale."""
    return Other(make, [heads] * layers, [scale] * layers, **more)


# x-transformers


def _x_transformer(kind: str = "Decoder", **options: Any) -> Call:
    layers = _find(f"x_transformers.{kind}")(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    wrapper = _find("x_transformers.TransformerWrapper")
    return wrapper(num_tokens=64, max_seq_len=64, attn_layers=layers), (_tokens(),), {}


def _list_x_transformers() -> Iterator[tuple[str, Other]]:
    attend = ("attn_layers.layers.0.1.attend", "attn_layers.layers.2.1.attend")
    for name, options, more in (
        ("x-transformers", {}, {}),
        ("x-transformers, encoder", {"kind": "Encoder"}, {}),
        ("x-transformers, fused", {"attn_flash": True}, {}),
        ("x-transformers, rotary", {"rotary_pos_emb": True}, {}),
        ("x-transformers, ALiBi", {"alibi_pos_bias": True, "alibi_num_heads": 4}, {"notes": (SLOPES,)}),
        ("x-transformers, talking heads", {"attn_pre_talking_heads": True}, {"notes": (BEFORE,)}),
        ("x-transformers, talking heads after", {"attn_post_talking_heads": True}, {"notes": (AFTER,)}),
        ("x-transformers, QK-norm", {"attn_qk_norm": True}, {"scale": 10.0}),
        # q and k each have a gain of √√8, and the scale is 1/√8.
        ("x-transformers, QK-norm and gain", {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True}, {"scale": 1.0}),
        ("x-transformers, memory keys", {"attn_num_mem_kv": 3}, {}),
        ("x-transformers, zero key", {"attn_add_zero_kv": True}, {}),
        ("x-transformers, learnt sinks", {"attn_head_learned_sink": True}, {}),
        ("x-transformers, one key head", {"attn_one_kv_head": True}, {}),
        ("x-transformers, soft cap", {"attn_softclamp_logits": True}, {}),
        ("x-transformers, best keys", {"attn_sparse_topk": 4}, {}),
    ):
        yield name, _alike(partial(_x_transformer, **options), 2, **more)
    for name, options, reason in (
        ("x-transformers, sigmoid", {"attn_sigmoid": True}, "its scores pass sigmoid instead of a softmax"),
        ("x-transformers, distances", {"attn_l2_distance": True}, UNKNOWN),
    ):
        yield name, Other(partial(_x_transformer, **options), [], [], dict.fromkeys(attend, reason))
    # Positions change the lengths of q and k, so there is no single scale.
    yield "x-transformers, xPos", _alike(partial(_x_transformer, rotary_xpos=True), 2, None)


# Images


_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
_SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}


def _vit(path: str, feed: Callable[[], Any] = _images, **options: Any) -> Callable[[], Call]:
    given = {**_VIT, "dim_head": 8, **options}
    return partial(_build, f"vit_pytorch.{path}", lambda: (feed(),), **given)


def _timm(path: str, size: int = 32, **options: Any) -> Callable[[], Call]:
    return partial(_build, f"timm.models.{path}", lambda: (_images(size, 1),), **options)


def _timm_by_name(name: str, **options: Any) -> Call:
    return _find("timm.create_model")(name, num_classes=5, **options), (_images(64, 1),), {}


def _max_vit(head_dim: int) -> Call:
    sizes = {"input_size": (64, 64), "stem_channels": 16, "partition_size": 4, "block_channels": [32, 32]}
    model = _find("torchvision.models.maxvit.MaxVit")
    rest = {"block_layers": [1, 1], "stochastic_depth_prob": 0.0, "num_classes": 5}
    return model(**sizes, **rest, head_dim=head_dim), (_images(64),), {}


def _navit_images() -> list[Tensor]:
    return [torch.randn(3, 16, 16), torch.randn(3, 32, 16), torch.randn(3, 16, 24)]


def _open_clip() -> Call:
    vision = _find("open_clip.model.CLIPVisionCfg")(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = _find("open_clip.model.CLIPTextCfg")(context_length=16, vocab_size=64, width=32, heads=4, layers=2)
    model = _find("open_clip.model.CLIP")(embed_dim=32, vision_cfg=vision, text_cfg=text)
    return model, (_images(), _tokens(16)), {}


def _list_images() -> Iterator[tuple[str, Other]]:
    yield "vit-pytorch", _alike(_vit("vit.ViT"), 2)
    yield "vit-pytorch, DeepViT", _alike(_vit("deepvit.DeepViT"), 2, notes=(AFTER,))
    yield "vit-pytorch, CaiT", _alike(_vit("cait.CaiT", cls_depth=1), 3, notes=(BEFORE, AFTER))
    yield "vit-pytorch, NaViT", _alike(_vit("na_vit_nested_tensor.NaViT", _navit_images), 3)
    # Normalised q and k each have a gain of √√16, and the scale is 1.
    yield "vit-pytorch, nViT", _alike(_vit("normalized_vit.nViT", dim_head=16), 2, 4.0)
    yield (
        "vit-pytorch, hyper-connections",
        _alike(_vit("simple_vit_with_hyper_connections.SimpleViT", num_residual_streams=2), 2),
    )
    # Keys come from a convolution, or from a norm after which half of the vectors are kept; only numbers multiply them.
    yield "vit-pytorch, RvT", _alike(_vit("rvt.RvT"), 2)
    yield "timm", _alike(_timm("vision_transformer.VisionTransformer", **_SIZES), 2)
    yield "timm, CaiT", _alike(_timm("cait.Cait", **_SIZES), 4, notes=(BEFORE, AFTER))
    swin = {"img_size": 64, "patch_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (4, 8), "window_size": 4}
    for name, path, scale in (("Swin", "", _root(8)), ("Swin v2", "_v2", 10.0)):
        make = _timm(f"swin_transformer{path}.SwinTransformer{path.strip('_').upper()}", 64, **swin)
        yield f"timm, {name}", Other(make, [4, 4, 8, 8], [scale] * 4)
    yield (
        "timm, MViT v2",
        Other(partial(_timm_by_name, "mvitv2_tiny", img_size=64), [1, 2, 2, 4, 4, 4, 4, 4, 8, 8], [_root(96)] * 10),
    )
    blocks = [f"serial_blocks{stage}.{block}.factoratt_crpe" for stage in (1, 2, 3, 4) for block in (0, 1)]
    coat = partial(_timm_by_name, "coat_lite_tiny", img_size=64)
    yield "timm, CoaT", Other(coat, [], [], dict.fromkeys(blocks, LINEAR))
    mixers = [f"stages.{stage}.blocks.{block}.context_module.main" for stage in (2, 3) for block in (1, 2)]
    yield "timm, EfficientViT", Other(partial(_timm_by_name, "efficientvit_b0"), [], [], dict.fromkeys(mixers, THREE))
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    make = partial(_build, "torchvision.models.vision_transformer.VisionTransformer", lambda: (_images(),), **sizes)
    yield "torchvision", _alike(make, 2)
    yield "torchvision, MaxViT", _alike(partial(_max_vit, 32), 4, _root(32), 1)
    # This model divides by the root of the full width, for any number of heads.
    yield "torchvision, MaxViT with two heads", _alike(partial(_max_vit, 16), 4, _root(32), 2)
    yield "open_clip", _alike(_open_clip, 4)
    sam = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "use_rel_pos": True}
    windows = {"window_size": 4, "global_attn_indexes": (1,), "rel_pos_zero_init": False}
    path = "segment_anything.modeling.ImageEncoderViT"
    yield "segment-anything", _alike(partial(_build, path, lambda: (_images(64, 1),), **sam, **windows), 2)
    frames = {"dim": 32, "image_size": 16, "patch_size": 4, "num_frames": 3, "num_classes": 5, "depth": 2, "heads": 4}
    path = "timesformer_pytorch.TimeSformer"
    make = partial(_build, path, lambda: (torch.randn(2, 3, 3, 16, 16),), **frames, dim_head=8)
    yield "timesformer-pytorch", _alike(make, 4)


# Diffusion


def _unet(change: Callable[[Any], None]) -> Call:
    model = _find("diffusers.UNet2DConditionModel")(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    change(model)
    return model, (torch.randn(2, 4, 8, 8), torch.tensor(1), torch.randn(2, 5, 32)), {}


def _sana() -> Call:
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 8, "caption_channels": 16}
    heads = {"attention_head_dim": 8, "num_attention_heads": 4, "num_cross_attention_heads": 4}
    model = _find("diffusers.SanaTransformer2DModel")
    feed = {"encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.ones(1)}
    built = model(**sizes, **heads, cross_attention_head_dim=8, cross_attention_dim=32)
    return built, (torch.randn(1, 4, 8, 8),), feed


def _use_plain(model: Any) -> None:
    model.set_attn_processor(_find("diffusers.models.attention_processor.AttnProcessor")())


def _list_diffusion() -> Iterator[tuple[str, Other]]:
    changes: dict[str, Callable[[Any], None]] = {
        "diffusers": lambda model: None,
        "diffusers, by hand": _use_plain,
        "diffusers, head by head": lambda model: model.set_attention_slice(1),
        "diffusers, in slices": lambda model: model.set_attention_slice("auto"),
    }
    for name, change in changes.items():
        yield name, _alike(partial(_unet, change), 8)
    yield "diffusers, Sana", _alike(_sana, 1, missed={"transformer_blocks.0.attn1": THREE})


# Sequences of other things


def _esm_alignments() -> Call:
    from argparse import Namespace

    alphabet = _find("esm.data.Alphabet").from_architecture("msa_transformer")
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    sizes = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4, "max_positions": 64}
    places = {"embed_positions_msa": True, "max_tokens_per_msa": 2**14, "max_tokens": 2**14, "logit_bias": True}
    model = _find("esm.model.msa_transformer.MSATransformer")(Namespace(**sizes, **rates, **places), alphabet)
    return model, (torch.randint(4, 20, (2, 5, 9)),), {}


def _keras(**options: Any) -> Call:
    os.environ["KERAS_BACKEND"] = "torch"
    keras = importlib.import_module("keras")
    given = keras.Input((12, 32))
    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, **options)
    return keras.Model(given, layer(given, given)), (torch.randn(2, 12, 32),), {}


def _graph(name: str, *args: Any, **options: Any) -> Call:
    layer = _find(f"torch_geometric.nn.{name}")(16, *args, **options)
    return layer, (torch.randn(7, 16), torch.randint(0, 7, (2, 20))), {}


def _graph_transformer() -> Call:
    graph = importlib.import_module("torch_geometric.nn")
    layer = graph.GPSConv(32, graph.GCNConv(32, 32), heads=4)
    return layer, (torch.randn(7, 32), torch.randint(0, 7, (2, 20))), {}


def _kornia_matcher(kind: str) -> Call:
    sizes = {"d_model": 32, "nhead": 4, "layer_names": ["self", "cross"], "attention": kind}
    model = _find("kornia.feature.loftr.loftr_module.transformer.LocalFeatureTransformer")(sizes)
    return model, (torch.randn(1, 12, 32), torch.randn(1, 12, 32)), {}


def _prefix_tuning() -> Call:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    config = _find("peft.PrefixTuningConfig")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return _find("peft.get_peft_model")(model, config), (), {"input_ids": _tokens()}


def _list_sequences() -> Iterator[tuple[str, Other]]:
    def noise() -> tuple[Tensor]:
        return (torch.randn(2, 24, 32),)

    def words() -> tuple[Tensor]:
        return (_tokens(),)

    def table() -> tuple[Tensor, Tensor]:
        return torch.randint(0, 5, (4, 3)), torch.randn(4, 3)

    plain = {"dim": 32, "depth": 2, "heads": 4}
    narrow = {**plain, "dim_head": 8}
    esm = partial(_build, "esm.model.esm2.ESM2", lambda: (_tokens(12, 20),), 2, 32, 4)
    yield "fair-esm", _alike(esm, 2)
    # Rows of an alignment are attended to together, so the scale is 1/√(8·5).
    yield "fair-esm, alignments", Other(_esm_alignments, [4] * 4, [_root(40), _root(8)] * 2)
    yield "keras", _alike(_keras, 1)
    yield "keras, by hand", _alike(partial(_keras, flash_attention=False), 1)
    yield "torch_geometric, dense", _alike(_graph_transformer, 1)
    edges = partial(_graph, "TransformerConv", 8, heads=4)
    yield "torch_geometric", Other(edges, [], [], {"": PAIRS})
    # Additive attention has no product of queries and keys.
    yield "torch_geometric, additive", Other(partial(_graph, "GATv2Conv", 8, heads=4), [], [])
    yield "kornia", _alike(partial(_kornia_matcher, "full"), 4)
    features = dict.fromkeys(("layers.0.attention", "layers.1.attention"), LINEAR)
    yield "kornia, linear", Other(partial(_kornia_matcher, "linear"), [], [], features)
    performer = partial(_build, "performer_pytorch.Performer", noise, **narrow, local_attn_heads=2, local_window_size=8)
    fast = dict.fromkeys((f"net.layers.{layer}.0.fn.fast_attention" for layer in (0, 1)), FEATURES)
    yield "performer-pytorch", _alike(performer, 2, heads=2, missed=fast)
    sizes = {"num_tokens": 64, **plain}
    yield "linformer", _alike(partial(_build, "linformer.LinformerLM", words, **sizes, seq_len=24, k=6), 2)
    local = {**sizes, "dim_head": 8, "max_seq_len": 64, "local_attn_window_size": 8}
    yield "local-attention", _alike(partial(_build, "local_attention.LocalTransformer", words, **local), 2)
    reformer = {**sizes, "max_seq_len": 64, "bucket_size": 8, "n_hashes": 2, "causal": True}
    make = partial(_build, "reformer_pytorch.ReformerLM", lambda: (_tokens(32),), **reformer)
    # Heads have 64 columns for any width.
    yield "reformer-pytorch", _alike(make, 2, _root(64))
    latents = {"latent_dim": 32, "num_latents": 8, "cross_heads": 1, "latent_heads": 4}
    widths = {"cross_dim_head": 8, "latent_dim_head": 8, "num_classes": 5}
    inputs = {"input_channels": 3, "input_axis": 2, "num_freq_bands": 2, "max_freq": 10.0, "depth": 2}
    path = "perceiver_pytorch.Perceiver"
    perceiver = partial(_build, path, lambda: (torch.randn(2, 8, 8, 3),), **latents, **widths, **inputs)
    yield "perceiver-pytorch", Other(perceiver, [1, 4, 1, 4], [_root(8)] * 4)
    # Landmarks are means of queries and of keys.
    landmarks = {**narrow, "num_landmarks": 4, "pinv_iterations": 3}
    yield "nystrom-attention", _alike(partial(_build, "nystrom_attention.Nystromformer", noise, **landmarks), 2, None)
    tabular = {**narrow, "categories": (5, 6, 7), "num_continuous": 3, "dim_out": 1}
    yield (
        "tab-transformer-pytorch",
        _alike(partial(_build, "tab_transformer_pytorch.FTTransformer", table, **tabular), 2),
    )
    rates = dict.fromkeys(("attention_dropout", "ffn_dropout", "residual_dropout"), 0.0)
    blocks = {"n_blocks": 2, "d_block": 64, "attention_n_heads": 8, "ffn_d_hidden_multiplier": 2, "ffn_d_hidden": None}
    columns = {"n_cont_features": 3, "cat_cardinalities": [5, 6, 7], "d_out": 1}
    path = "rtdl_revisiting_models.FTTransformer"
    make = partial(_build, path, lambda: table()[::-1], **columns, **blocks, **rates)
    yield "rtdl_revisiting_models", _alike(make, 2, heads=8)
    yield "conformer", _alike(partial(_build, "conformer.Conformer", noise, **narrow), 2)
    blocks = {"compress_block_size": 4, "compress_block_sliding_stride": 2, "selection_block_size": 4}
    windows = {"sliding_window_size": 4, "num_selected_blocks": 2, "dim": 32, "dim_head": 8, "heads": 4}
    path = "native_sparse_attention_pytorch.SparseAttention"
    # The second layer uses selected keys, rotated by more than their number.
    yield (
        "native-sparse-attention-pytorch",
        Other(partial(_build, path, noise, **blocks, **windows), [4, 4], [_root(8), None]),
    )
    yield "peft, prefix tuning", _alike(_prefix_tuning, 2)


OTHERS: dict[str, Other] = dict(
    entry for entries in (_list_x_transformers, _list_images, _list_diffusion, _list_sequences) for entry in entries()
)


def _flatten(outputs: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    if hasattr(outputs, "to_tuple"):
        outputs = outputs.to_tuple()
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _look_at(other: Other) -> list[dict[str, Any]]:
    """Return the results of two watches, the second of which follows less."""
    from sqrtdk.torch import watch

    torch.manual_seed(0)
    model, args, options = other.make()
    model.eval()

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        with torch.no_grad():
            return _flatten(model(*args, **options))

    expected = run()
    found = []
    for _ in range(2):
        with watch(model) as seen:
            outputs = run()
        pairs = zip(expected, outputs, strict=True)
        found.append(
            {
                "same": bool(expected) and all(torch.equal(one, two) for one, two in pairs),
                "heads": [summary.heads for summary in seen.layers.values()],
                "scales": [record.effective for record in seen.scales],
                "missed": {missed.layer: missed.reason for missed in seen.unattributed},
                "notes": seen.notes,
                "rows": str(seen.layers),
                "causes": str(seen.causes),
            }
        )
    return found


def add_packages(folder: str) -> torch.library.Library:
    """Put the folder's packages on the path; keep what is returned while they are used.

    torchvision cannot be imported without its compiled operators, which nothing here uses.
    """
    sys.path.append(folder)
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _main(folder: str) -> None:
    from sqrtdk import errors

    library = add_packages(folder)  # noqa: F841
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    errors.faults_are_raised = True  # as in the process of the tests
    found: dict[str, Any] = {}
    for name, other in OTHERS.items():
        try:
            found[name] = _look_at(other)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
