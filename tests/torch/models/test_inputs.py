"""Input that is made up for models: the text decides whether a tokenizer can read it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sqrtdk import SqrtdkError
from sqrtdk.torch.models.inputs import propose_feeds

LETTERS = "LAGVSERTIDPKQNFYMHWC"


class Letters:
    """Knows single letters, as tokenizers of amino acids do; all else is unknown."""

    unk_token_id = 0
    model_max_length = 64

    def __init__(self, letters=LETTERS):
        self.known = {letter: at for at, letter in enumerate(letters, start=1)}

    def __call__(self, text, *, add_special_tokens=True, truncation=False, max_length=None, **options):
        ids = [self.known.get(letter, 0) for letter in text if not letter.isspace()]
        return {"input_ids": ids[:max_length] if truncation else ids}


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=21, max_position_embeddings=64, pad_token_id=0)
        self.config.get_text_config = lambda: self.config

    def forward(self, input_ids, attention_mask=None):
        return input_ids


def feed(text, tokenizer, *, is_chosen):
    (only,) = propose_feeds(Reading(), tokenizer, text, "the text", is_chosen=is_chosen)
    return only


def test_a_chosen_text_is_read_in_whatever_language_it_is():
    text = "MKTAYIAKQRQISFVKSHFSRQ"
    read = feed(text, Letters(), is_chosen=True)
    assert read.words == "the text, 22 tokens"
    assert read.batch["input_ids"].tolist() == [[LETTERS.index(letter) + 1 for letter in text]]
    assert feed("AAAA", Letters(), is_chosen=True).words == "the text, 4 tokens"
    assert feed("MK?TA!", Letters(), is_chosen=True).words == "the text, 6 tokens, 2 of them unknown to the tokenizer"


def test_a_chosen_text_of_which_nothing_is_known_is_refused():
    for text in ("the quick brown fox", "   "):
        with pytest.raises(SqrtdkError, match="in the text there is nothing that the model's tokenizer knows"):
            feed(text, Letters(), is_chosen=True)


@pytest.mark.parametrize(("text", "is_read"), [("MKbrown", False), ("MKTbrow", False), ("MKTbro", True)])
def test_random_tokens_take_the_place_of_a_text_that_nobody_chose_and_is_unknown(text, is_read):
    made = feed(text, Letters(), is_chosen=False)
    assert (made.words == "the text, 6 tokens, 3 of them unknown to the tokenizer") == is_read
    if not is_read:
        assert (
            "random tokens in 8 sequences, of a vocabulary of 21 (the tokenizer does not know the text)" in made.words
        )
        assert torch.equal(made.batch["input_ids"], feed(text, Letters(), is_chosen=False).batch["input_ids"])


def test_without_a_tokenizer_tokens_are_random_and_it_says_so():
    assert "(there is no tokenizer)" in feed("MK", None, is_chosen=False).words
