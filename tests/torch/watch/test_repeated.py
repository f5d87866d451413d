"""Repeated calls of a watched model are followed for fused attention alone, with the results of full following."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.watch.recognise.repeated import NONE
from sqrtdk.torch.watch.session import Watch
from torch_watched import count_followed


class Attention(nn.Module):
    def __init__(self, heads=2, d_k=8):
        super().__init__()
        self.heads, self.qkv, self.way = heads, nn.Linear(heads * d_k, 3 * heads * d_k), "fused"

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if self.way == "fused":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return (torch.softmax(q @ k.mT * 0.5, dim=-1) @ v).transpose(1, 2).flatten(2)


class Gate(nn.Module):
    """Attends only after some calls."""

    def __init__(self, attend=None, silent=2):
        super().__init__()
        self.inner, self.calls, self.silent, self.attend = nn.Linear(16, 16), 0, silent, attend

    def forward(self, x):
        self.calls += 1
        q = self.inner(x)[:, None]
        if self.calls <= self.silent:
            return q[:, 0]
        return (self.attend or functional.scaled_dot_product_attention)(q, q, q)[:, 0]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.Linear(16, 16), Attention())


def test_repeated_calls_give_the_results_of_full_following(monkeypatch):
    model, inputs = make_model(), [torch.randn(2, n, 16) for n in (7, 1, 5, 9, 3)]
    full = count_followed(monkeypatch)
    with torch.no_grad(), watch(model) as seen:
        model(inputs[0])
        after_the_first = len(full)
        for x in inputs[1:]:
            model(x)
    assert len(full) == after_the_first > 0
    with torch.no_grad(), Watch(model) as whole:
        for x in inputs:
            model(x)
    assert len(full) == after_the_first * 6
    assert seen.layers == whole.layers
    assert seen.scales == whole.scales
    assert seen.calls == whole.calls == 5


def test_another_way_of_attention_is_listed_once_and_measured_from_then_on():
    model = make_model()
    with torch.no_grad(), watch(model) as seen:
        for way in ("fused", "fused", "fused", "by hand", "by hand"):
            model[2].way = way
            model(torch.randn(1, 6, 16))
    (missed,) = {(one.layer, one.reason.split(" ran ")[0]) for one in seen.unattributed} - {("2", "aten::_softmax")}
    assert missed == ("2", "aten::bmm")
    assert list(seen.layers["0"]["entropy"].count) == [5 * 6] * 2
    assert list(seen.layers["2"]["entropy"].count) == [4 * 6] * 2


def test_an_unknown_module_is_followed_fully():
    model = nn.ModuleDict({"a": Attention(), "b": Attention()})
    model.forward = lambda x, names: sum(model[name](x) for name in names)
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 6, 16), "a")
        model(torch.randn(1, 6, 16), "a")
        model(torch.randn(1, 6, 16), "ab")
        model(torch.randn(1, 6, 16), "ab")
    assert [record.layer for record in seen.scales] == ["a", "b"]
    assert [record.effective for record in seen.scales] == pytest.approx([8**-0.5] * 2)
    assert [int(summary["entropy"].count[0]) for summary in seen.layers.values()] == [24, 12]


def test_a_module_that_begins_to_call_torchs_function_is_found_at_once():
    model = nn.Sequential(Attention(), Gate())
    with torch.no_grad(), watch(model) as seen:
        for _ in range(8):
            model(torch.randn(1, 6, 16))
    assert list(seen.layers) == ["0", "1"]
    assert int(seen.layers["0"]["entropy"].count[0]) == 48
    # Call 3 is not followed in that module, and later calls are followed fully.
    assert int(seen.layers["1"]["entropy"].count[0]) == 30
    assert [(one.layer, one.times) for one in seen.unattributed] == [("", 1)]


def test_a_module_that_begins_to_attend_by_hand_is_found_when_the_whole_model_is_observed():
    by_hand = lambda q, k, v: torch.softmax(q @ k.mT, dim=-1) @ v  # noqa: E731
    model = nn.Sequential(Attention(), Gate(by_hand))
    with torch.no_grad(), watch(model) as seen:
        for _ in range(8):
            model(torch.randn(1, 6, 16))
    # Call 4 is observed as a whole, and later calls are followed fully.
    assert int(seen.layers["1"]["entropy"].count[0]) == 24
    assert {one.layer for one in seen.unattributed} == {"1"}


def test_a_module_that_stops_to_call_torchs_function_is_listed_and_followed_fully():
    model = make_model()
    with torch.no_grad(), watch(model) as seen:
        for way in ("fused", "fused", "by hand", "by hand", "by hand"):
            model[2].way = way
            model(torch.randn(1, 6, 16))
    assert [(one.layer, one.reason, one.times) for one in seen.unattributed] == [("2", NONE, 1)]
    assert [int(one["entropy"].count[0]) for one in seen.layers.values()] == [5 * 6, 4 * 6]


def test_a_function_under_another_name_is_found_in_every_call(monkeypatch):
    own_name = functional.scaled_dot_product_attention
    model = nn.Sequential(Attention(), Gate(own_name, silent=0))
    full = count_followed(monkeypatch)
    with torch.no_grad(), watch(model) as seen:
        for _ in range(7):
            model(torch.randn(1, 6, 16))
    assert [int(one["entropy"].count[0]) for one in seen.layers.values()] == [7 * 6] * 2
    assert full.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 2
    assert not seen.unattributed


def test_torchs_function_is_as_before_after_watches_that_end_in_any_order():
    before = functional.scaled_dot_product_attention
    one, other, passive = watch(make_model()), watch(make_model()), Watch(make_model())
    one.__enter__()
    passive.__enter__()
    other.__enter__()
    assert functional.scaled_dot_product_attention is not before
    one.__exit__()
    passive.__exit__()
    other.__exit__()
    assert functional.scaled_dot_product_attention is before
    with Watch(make_model()):
        assert functional.scaled_dot_product_attention is before


def test_an_exception_in_a_repeated_call_leaves_no_mode():
    model = make_model()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 6, 16))
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 6, 15))
        assert torch._C._len_torch_dispatch_stack() == 0
        model(torch.randn(1, 6, 16))
    assert int(seen.layers["2"]["entropy"].count[0]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
def test_generate_gives_the_results_of_full_following(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99}
    if family == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 2}
    elif family == "llama":
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 64}
    else:
        sizes |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    kind = transformers.AutoModelForSeq2SeqLM if family == "bart" else transformers.AutoModelForCausalLM
    model = kind.from_config(transformers.AutoConfig.for_model(family, **sizes)).eval()
    ids = torch.randint(3, 99, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    tokens, seen = [], []
    for watching in (watch(model), Watch(model)):
        with watching as one:
            tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0))
        seen.append(one)
    assert torch.equal(*tokens)
    assert seen[0].layers == seen[1].layers
    assert seen[0].scales == seen[1].scales
    assert not seen[0].unattributed
