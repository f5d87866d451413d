"""The zoo: small configurations, model inputs, guarded processes, the command, and the record that ships."""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import sqrtdk
from quick_child import serve_small
from sqrtdk.commands.cli import main
from sqrtdk.errors import SqrtdkError
from sqrtdk.records.families import DESIGNED, formula_of_family, is_usual, load_zoo
from sqrtdk.torch.models.random_input import BATCH, make_inputs
from sqrtdk.torch.transformers_internals import read_layers
from sqrtdk.zoo.census import WITHIN, measure_families, put_together, take_census, write_reading
from sqrtdk.zoo.shrink import ORDINARY_TOKENS, Size, shrink
from sqrtdk.zoo.small_models import sharpen

INSTALLED = {"transformers": "5", "torch": "2"}
GQA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "intermediate_size": 11008}


def test_heads_keep_their_width_and_at_least_one_key():
    small = shrink({**GQA, "head_dim": 128}, Size(8))
    assert small == {**GQA, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1,
                     "intermediate_size": 1376, "head_dim": 128}  # fmt: skip
    odd = shrink({"hidden_size": 4544, "num_attention_heads": 71}, Size(8))
    assert odd == {"hidden_size": 4544, "num_attention_heads": 71}


def test_one_layer_of_each_sort_stays_with_what_is_said_of_it():
    content = {
        "num_hidden_layers": 6,
        "layer_types": ["linear", "linear", "full", "linear", "linear", "full"],
        "sizes": [1, 1, 2, 1, 1, 2],
        "per_layer": {"02": {"head_dim": 512}, "05": {"head_dim": 512}},
    }
    small = shrink(content, Size(1))
    assert small["layer_types"] == ["linear", "full"]
    assert (small["num_hidden_layers"], small["sizes"]) == (2, [1, 2])
    assert small["per_layer"] == {"1": {"head_dim": 512}}


def test_special_tokens_stay_apart_in_the_small_vocabulary():
    content = {
        "vocab_size": 150_000,
        "image_token_id": 149_000,
        "eos_token_id": [2, 149_001],
        "inner": {"model_type": "x", "vocab_size": 32, "pad_token_id": 0, "image_token_id": 149_000},
    }
    small = shrink(content, Size(1))
    assert small["vocab_size"] == 256
    assert small["image_token_id"] == small["inner"]["image_token_id"] != small["eos_token_id"][1] < 256
    assert (small["eos_token_id"][0], small["inner"]["vocab_size"], small["inner"]["pad_token_id"]) == (2, 32, 0)
    assert shrink(content, Size(1, words=False)) == content


class Eats(nn.Module):
    main_input_name = "pixel_values"

    def forward(self, pixel_values, bbox=None, encoder_hidden_states=None):
        pass


def test_inputs_fit_the_names_of_arguments_and_are_the_same_every_time():
    class Config:
        image_size, num_channels, hidden_size = 32, 1, 6

    model = Eats()
    model.config = Config()
    first, second = (list(make_inputs(model, ORDINARY_TOKENS)) for _ in range(2))
    assert first[0]["pixel_values"].shape == (BATCH, 1, 32, 32)
    assert set(first[0]) == {"pixel_values", "bbox"}
    assert first[1]["encoder_hidden_states"].shape[-1] == 6
    assert all(torch.equal(one[name], two[name]) for one, two in zip(first, second, strict=True) for name in one)


def test_sharpened_projections_keep_the_variance():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    sharpen(model)
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(0))
    assert model[0](x).var().item() == pytest.approx(1.69, rel=0.1)


@pytest.mark.slow
def test_a_family_that_hangs_or_dies_loses_no_other():
    answers = {}
    names = ["a", "hangs", "b", "dies", "c", "d", "raises"]
    measure_families(names, 1, 3.0, lambda answer: answers.update({answer["family"]: answer}), serve_small)
    assert list(answers) == names
    assert answers["hangs"]["reasons"] == ["not finished within 3 s"]
    assert answers["dies"]["reasons"] == ["its process ended with code 7"]
    assert answers["raises"]["reasons"] == ["RuntimeError: out of luck"]
    assert all(answers[name]["layers"] == [] for name in "abcd")
    assert answers["a"]["process"] != answers["b"]["process"] != answers["c"]["process"] == answers["d"]["process"]


def layer(path, measured, d_k=64, **known):
    usual = {"at_the_call": measured, "normalised": False, "softcap": None, "how": "exact", "reason": None}
    more = {"on_the_mask": None, "difference": 1e-7, "declared": None, "declared_by": None}
    return {"layer": path, "d_k": d_k, "effective": measured, **usual, **more, **known}


def answer(family, layers, **known):
    usual = {"missed": [], "left_out": [], "differs_by_sdpa": [], "called": 0, "reasons": []}
    return {"family": family, "layers": layers, **usual, **known}


def test_a_family_is_shown_by_most_of_its_layers_and_the_note_says_the_rest():
    record = put_together(
        [
            answer("plain", [layer("h.0", 0.125), layer("h.1", 0.125002)]),  # but for rounding
            answer("mixed", [layer("v.0", 0.1, 100), layer("h.0", 1.0), layer("h.1", 1.0)], left_out=["audio"]),
            answer("lost", None, reasons=["too large"]),
            answer("conv", []),
            answer("hashed", [], called=2),
            answer("odd", [], missed=[["h.0", "its scores are capped twice"]]),
            answer("loose", [layer("h.0", 0.125, difference=2e-5)], differs_by_sdpa=["h.0: 0.25"]),
        ],
        INSTALLED,
    )
    rows = {row["family"]: row for row in record.tables["families"]}
    assert (rows["plain"]["measured"], rows["plain"]["note"]) == (0.125, None)
    assert (rows["mixed"]["measured"], rows["mixed"]["d_k"]) == (1.0, 64)
    assert rows["mixed"]["note"] == "0.1 at dₖ 100 in 1 layer from v.0; not run: audio"
    assert (rows["lost"]["measured"], rows["lost"]["note"]) == (None, "too large")
    assert rows["conv"]["note"] == "no attention in what ran"
    assert rows["hashed"]["note"] == "no attention was recognised in what ran"
    assert rows["odd"]["note"] == "not understood: its scores are capped twice"
    assert rows["loose"]["note"] == "recovered weights within 2e-05 of its own; with torch's attention: h.0: 0.25"
    assert record.headline.startswith(
        "3 of 7 families of the transformers library were measured. 2 use 1/√dₖ, and 1 uses"
    )
    assert len([row for row in record.tables["layers"] if row["family"] == "mixed"]) == 2


def test_a_declared_scale_that_is_not_measured_is_named():
    right, wrong = layer("h.0", 0.125, declared=0.125), layer("h.0", 0.125, declared=0.25)
    record = put_together([answer("a", [right])], INSTALLED)
    assert record.reading[1] == "Every declared scale equals the measured one."
    record = put_together([answer("a", [right]), answer("b", [wrong])], INSTALLED)
    assert "not the declared one in b." in record.reading[1]
    assert record.reading[-1].endswith(" with transformers 5, torch 2.")


# The record that ships


def test_the_shipped_record_is_of_most_families_dated_with_versions():
    record = load_zoo()
    rows = record.tables["families"]
    names = [row["family"] for row in rows]
    measured = [row for row in rows if row["measured"] is not None]
    assert len(names) == len(set(names))
    assert len(measured) >= 300
    assert {"torch", "transformers", "sqrtdk"} <= set(record.versions)
    assert record.spec["date"] >= "2026-11-16"
    assert all(row["note"] for row in rows if row["measured"] is None)
    assert [*write_reading(rows), record.reading[-1]] == list(record.reading)
    assert record.headline == record.reading[0]
    assert "not models in use" in record.reading[-2]


def test_the_shipped_weights_are_the_models_own_or_the_note_says_how_near():
    record = load_zoo()
    notes = {row["family"]: row["note"] for row in record.tables["families"]}
    for row in record.tables["layers"]:
        if row["measured"] is not None and (row["difference"] or 0.0) > WITHIN:
            assert "recovered weights within" in notes[row["family"]]


def test_families_with_code_of_their_own_are_understood():
    rows = {row["family"]: row for row in load_zoo().tables["families"]}
    own = ("bloom", "falcon", "gptj", "gpt_neo", "mpt", "codegen", "deberta", "deberta-v2", "xlm", "xlnet", "funnel")
    for family in own:
        assert rows[family]["measured"] is not None, rows[family]
        assert "not understood" not in (rows[family]["note"] or "")


def test_scale_formulas_of_families():
    assert formula_of_family("llama").at(128) == pytest.approx(128**-0.5)
    assert formula_of_family("whisper").at(64) == 0.125
    assert formula_of_family("gpt_neo").at(128) == 1.0
    assert formula_of_family("inkling_text").at(64) == 1 / 64
    assert formula_of_family("no such family") is None
    measured = [row for row in load_zoo().tables["families"] if row["measured"] and row["family"] in DESIGNED]
    assert len(measured) >= 8
    for row in measured:
        assert row["measured"] == pytest.approx(DESIGNED[row["family"]].at(row["d_k"]), rel=1e-3), row
        assert row["declared"] == pytest.approx(row["measured"], rel=1e-3)


@pytest.mark.slow
def test_the_command_shows_the_exceptions_unless_all_are_asked_for(capsys):
    for arguments, shows_all in (([], False), (["--all"], True)):
        with pytest.raises(SystemExit):
            main(["zoo", *arguments])
        words = capsys.readouterr().out.split()
        assert {"gpt_neo", "t5", "zamba2"} <= set(words)
        assert ("gpt2" in words) == ("llama" in words) == shows_all
        assert "at its default configuration;" in " ".join(words)


def test_the_reading_counts_in_grammar():
    usual, other = answer("a", [layer("h.0", 0.125)]), answer("b", [layer("h.0", 1.0)])
    assert put_together([usual], INSTALLED).headline.endswith(
        "1 of 1 family of the transformers library was measured. 1 uses 1/√dₖ, and 0 use another scale."
    )
    assert put_together([usual, usual, other], INSTALLED).headline.endswith(
        "were measured. 2 use 1/√dₖ, and 1 uses another scale."
    )


@pytest.mark.long
def test_the_guides_count_folders_and_families(monkeypatch):
    """A folder of the library's source has one file of attention code and may serve several families."""
    transformers = pytest.importorskip("transformers")
    kinds = Counter()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        name = path.parent.name
        if path.stem == f"modeling_{name}" and name != "auto":
            module = ModuleType(f"folder.modeling_{name}")
            module.__file__ = str(path)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            kinds[read_layers(type("Config", (), {"__module__": f"folder.configuration_{name}"}))] += 1
    docs = Path(__file__).parents[2] / "docs"
    guide = " ".join((docs / "huggingface.md").read_text(encoding="utf-8").split())
    assert f"Of the {kinds.total()} model folders in the source of transformers {transformers.__version__}, " in guide
    assert f"{transformers.__version__}, {kinds['own']} (BLOOM," in guide
    assert f"Another {kinds['mixed']} folders have some layers of their own" in guide
    families = len(load_zoo().tables["families"])
    assert f"a folder can have several: {families}." in guide
    page = " ".join((docs / "zoo.md").read_text(encoding="utf-8").split())
    assert f"the library has {families} of them" in page
    assert f"the {kinds.total()} model folders in the library's source" in page


@pytest.mark.long
def test_an_unknown_family_names_similar_ones():
    pytest.importorskip("transformers")
    with pytest.raises(SqrtdkError, match=r"unknown family 'gpt-2'; `sqrtdk zoo --all` lists them; did you mean 'gpt2"):
        take_census(["gpt-2"])


# Whisper, OPT and ESM scale q before a call with 1; T5, GPT-Neo, Gemma 3n and muP's models mean another scale.
AGAIN = ("gpt2", "llama", "whisper", "opt", "esm", "t5", "gpt_neo", "granite", "inkling_text", "gemma3n_text", "bloom",
         "deberta", "deepseek_v3", "swin")  # fmt: skip


@pytest.mark.long
def test_measured_anew_families_are_as_in_the_record_and_none_is_misread(tmp_path):
    pytest.importorskip("transformers")
    record = take_census(AGAIN, store=tmp_path)
    shipped = {row["family"]: row for row in load_zoo().tables["families"]}
    for row in record.tables["families"]:
        known = shipped[row["family"]]
        assert row["measured"] is not None
        for name in ("d_k", "measured", "at_the_call", "declared", "softcap"):
            assert row[name] == (known[name] if known[name] is None else pytest.approx(known[name], rel=1e-3))
        assert row["normalised"] == known["normalised"]
    scales = [
        row | {"layer": f"{row['family']}.{row['first']}", "declared": row["declared"] or _expect(row)}
        for row in record.tables["layers"]
    ]
    assert sqrtdk.diagnose({}, scales=scales, dtype="float32") == []
    kept = take_census(AGAIN, store=tmp_path, seconds=0.01)  # nothing is measured again
    assert kept.tables == record.tables


def _expect(row):
    formula = formula_of_family(row["family"])
    return None if formula is None else formula.at(row["d_k"])


@pytest.mark.long
def test_the_command_measures_what_it_is_asked_and_prints_json(capsys):
    pytest.importorskip("transformers")
    from sqrtdk.commands.cli import main

    with pytest.raises(SystemExit):
        main(["zoo", "--family", "gpt2", "--family", "resnet", "--json"])
    first, second = json.loads(capsys.readouterr().out)["families"]
    assert (first["family"], first["measured"], first["d_k"]) == ("gpt2", 0.125, 64)
    assert set(first) == {
        *("family", "d_k", "declared", "measured", "at_the_call", "normalised", "softcap", "how", "note")
    }
    assert (second["measured"], second["note"]) == (None, "no attention in what ran")


def test_the_command_without_options_shows_the_record(capsys):
    from sqrtdk.commands.cli import main

    with pytest.raises(SystemExit):
        main(["zoo", "--json"])
    record = load_zoo()
    assert json.loads(capsys.readouterr().out) == record.as_json()
    when, by = record.spec["date"], record.versions["transformers"]
    assert record.reading[-1].startswith(f"Measured {when} with transformers {by}, torch ")


def test_most_families_use_the_usual_scale_and_a_few_do_not():
    measured = [row for row in load_zoo().tables["families"] if row["measured"] is not None]
    others = {row["family"]: row["measured"] * math.sqrt(row["d_k"]) for row in measured if not is_usual(row)}
    assert len(others) < len(measured) / 4
    assert {"t5", "gpt_neo", "granite"} <= set(others)
