"""Small corpora and a tokenizer for tests of data preparation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mindspeed_models.data.settings import Settings
from mindspeed_models.data.tokenizers import TokenizerChoice

WORDS = "the cat saw a dog and it ran to its house where nobody had ever been before that day".split()
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, *, bos: bool = False) -> Path:
    """Write a byte-level tokenizer as saved models have it; with ``bos`` it begins every text."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text(number: int, words: int) -> str:
    """A text of so many words that depends on a number."""
    generator = np.random.RandomState(number)
    return " ".join(generator.choice(WORDS, size=words))


def question(number: int) -> dict[str, str]:
    """A record of alpaca's format."""
    return {
        "instruction": text(number, 3 + number % 7),
        "input": text(number + 1000, 2) if number % 3 else "",
        "output": text(number + 2000, 2 + number % 11),
    }


def write_lines(path: Path, records: list[object]) -> Path:
    """Write records as JSON lines; text is written as it is."""
    lines = [
        record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def instructions(corpus: Path, **more: object) -> Settings:
    """Settings of the seed's handler of instructions, with the tokenizer of a corpus."""
    choice = TokenizerChoice(path=str(corpus / "tokenizer"))
    return Settings(choice, handler_name="GeneralInstructionHandler", append_eod=True, **more)  # type: ignore[arg-type]
