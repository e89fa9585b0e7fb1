"""Words of sentences are classified: padding by a collate_fn, a loss that is a mean over tokens.

A port of Hugging Face transformers' examples/pytorch/token-classification. With transformers
installed it trains a small BERT, otherwise a plain encoder of the same size. The sentences are made
here: is a word the name of a person, of a place, or neither? Yours are a Dataset of dicts from a
tokenizer, in the place of `write_sentences`; weights come from
AutoModelForTokenClassification.from_pretrained.

python text_classification.py
python text_classification.py launch=local launch.procs=2
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import echelon

# --- model and data

VERBS, PLACE_WORDS = ("saw", "met", "and"), ("in", "near", "to")
EITHER = ("jordan", "chelsea")
PERSONS, PLACES = ("anna", "carl", "dora", *EITHER), ("paris", "rome", "oslo", *EITHER)
WORDS = ("[PAD]", *sorted({*VERBS, *PLACE_WORDS, *PERSONS, *PLACES}))
CLASSES = 3
IGNORED = -100
"""The label of padding, which the losses of torch leave out."""


@dataclass
class Settings:
    lr: float = 0.003
    width: int = 32
    sentences: int = 1024
    library: str = "auto"
    """Where the model comes from: transformers, torch, or transformers if it is installed."""


def write_sentences(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return tokens and classes of sentences of different lengths. Some names are a person's or a
    place's; what stands before them says which."""
    draw = random.Random(seed)
    sentences = []
    for _ in range(count):
        words, labels = [draw.choice(PERSONS)], [1]
        for _ in range(draw.randint(1, 4)):
            label = draw.choice((1, 2))
            before, names = ((VERBS, PERSONS), (PLACE_WORDS, PLACES))[label - 1]
            words += [draw.choice(before), draw.choice(names)]
            labels += [0, label]
        tokens = [WORDS.index(word) for word in words]
        sentences.append({"input_ids": tokens, "labels": labels})
    return sentences


def pad_sentences(sentences: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest sentence, as DataCollatorForTokenClassification."""
    columns = [[torch.tensor(each[name]) for each in sentences] for name in ("input_ids", "labels")]
    tokens = pad_sequence(columns[0], batch_first=True, padding_value=0)
    labels = pad_sequence(columns[1], batch_first=True, padding_value=IGNORED)
    return {"input_ids": tokens, "attention_mask": (labels != IGNORED).long(), "labels": labels}


class PlainEncoder(nn.Module):
    """What BertForTokenClassification is, in the layers of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(WORDS), width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.places(places)
        return self.head(self.layers(x, src_key_padding_mask=attention_mask == 0))


class BertEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForTokenClassification

        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
        self.bert = BertForTokenClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids, attention_mask).logits


def make_model(width: int, library: str) -> nn.Module:
    if library == "torch":
        return PlainEncoder(width)
    try:
        return BertEncoder(width)
    except ImportError:
        if library == "transformers":
            raise
        return PlainEncoder(width)


def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return scores and labels, one row for each token."""
    scores = model(batch["input_ids"], batch["attention_mask"])
    return scores.flatten(0, 1), batch["labels"].flatten()


def make_metrics() -> dict:
    """Imported here, because torchmetrics takes a second, and only an evaluation needs it."""
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=IGNORED)}


# --- training

DEFAULTS = ["trainer.epochs=5", "trainer.schedule=linear", "trainer.best=accuracy"]


def experiment(cfg: Settings) -> echelon.Experiment:
    model = make_model(cfg.width, cfg.library)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,  # a mean over tokens: those of each process count
        train_data=write_sentences(cfg.sentences, seed=0),
        eval_data=write_sentences(256, seed=1),
        collate_fn=pad_sentences,
        predict=predict,
        metrics=make_metrics,
    )


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)
