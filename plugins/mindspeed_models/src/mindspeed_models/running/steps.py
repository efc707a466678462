"""The steps of ``mindspeed-models run`` and the command lines that they stand for.

Every step reads what earlier ones have left in the work folder and leaves one folder there itself. A step is
a function in `STEPS`; a new one needs a line in that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_core.errors import UserError
from mindspeed_models.running.sheets import Sheet, words_of

MODELS, TRAIN = "mindspeed-models", "mindspeed-train"
_HANDLER = "GeneralInstructionHandler"
_TRAINED = ("merged", "finetuned", "pretrained", "converted")
"""Folders of weights, those that were trained longest first."""


@dataclass(frozen=True)
class Asked:
    """The options of a run.

    Attributes:
        sheet: flags and layouts of the model.
        work: the folder of all results.
        nproc: processes on this machine.
        devices: processes on all machines.
        platform: of the trainings; empty for the one that is found.
        hf: folder of Hugging Face with the published model; None for a model that begins with new weights.
        tokenizer: folder or file; None for the model's own, or one that is trained on ``corpus``.
        corpus: texts to pretrain on.
        instructions: records to finetune on.
        load: weights to go on from, in place of those of the step before.
        kernels: use fused kernels.
        prompts: file of texts to continue.
        tasks: benchmarks and their data, as ``NAME=PATH``.
        further: words that the user puts behind those of the step.
    """

    sheet: Sheet
    work: Path
    nproc: int = 1
    devices: int = 1
    platform: str = ""
    hf: Path | None = None
    tokenizer: Path | None = None
    corpus: Path | None = None
    instructions: Path | None = None
    load: Path | None = None
    kernels: bool = True
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    further: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        """Return the folder with the model's ``config.json``."""
        if self.hf is not None:
            return self.hf
        kept = self.work / "converted" / "release" / "hf"
        return kept if (kept / "config.json").is_file() else self.work / "model"

    @property
    def tokenizer_file(self) -> Path:
        """Return the tokenizer: the given one, the model's, or the one that ``preprocess`` trains."""
        if self.tokenizer is not None:
            return self.tokenizer
        if self.hf is not None or (self.model / "tokenizer.json").is_file():
            return self.model
        return self.work / "tokenizer" / "text.tokenizer.json"

    def first(self, *names: str) -> Path:
        """Return the weights to go on from: ``load``, or the first of these folders that exists."""
        if self.load is not None:
            return self.load
        found = (self.work / name for name in names if (self.work / name).is_dir())
        return next(found, self.work / names[0])


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        program: its program.
        words: and everything behind it.
        parallel: it runs in ``nproc`` processes.
    """

    program: str
    words: tuple[str, ...]
    parallel: bool = False


@dataclass(frozen=True)
class Step:
    """A step of a run.

    Attributes:
        summary: its line in ``--help``.
        commands: returns its command lines; further words of the user are put behind the last.
    """

    summary: str
    commands: Callable[[Asked], list[Command]]


def _models(*words: object) -> Command:
    return Command(MODELS, tuple(map(str, words)))


def _convert(asked: Asked) -> list[Command]:
    sheet = asked.sheet
    if asked.hf is not None:
        target = asked.work / "converted"
        return [_models("convert", "--input-model-dir", asked.hf, "--output-model-dir", target)]
    size = () if sheet.vocab_size is None else ("--vocab-size", sheet.vocab_size)
    return [_models("write-config", sheet.model, asked.work / "model", *size)]


def _preprocess(asked: Asked) -> list[Command]:
    if asked.corpus is None and asked.instructions is None:
        raise UserError(
            "preprocess: there is nothing to prepare; name texts with --corpus, or records of instructions "
            "with --instructions, or both"
        )
    found = []
    file = asked.tokenizer_file
    trained = file == asked.work / "tokenizer" / "text.tokenizer.json"
    if trained and asked.corpus is None and not file.is_file():
        raise UserError(
            "preprocess: there is no tokenizer; name one with --tokenizer or a published model with "
            "--hf-dir, or give --corpus, on which one is trained"
        )
    if trained and asked.corpus is not None:
        size = () if asked.sheet.vocab_size is None else ("--vocab-size", str(asked.sheet.vocab_size))
        prefix = str(file.with_name("text"))
        words = ("prepare-text", str(asked.corpus), "--output-prefix", prefix, *size)
        found.append(Command(TRAIN, words))
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-name-or-path", file)
    conversations = words_of(asked.sheet.steps.get("preprocess", {}))
    for source, name, more in (
        (asked.corpus, "pretrain", ()),
        (asked.instructions, "instructions", ("--handler-name", _HANDLER, *conversations)),
    ):
        if source is not None:
            target = asked.work / "data" / name
            words = ("--input", source, *more, *tokenizer, "--append-eod", "--output-prefix", target)
            found.append(_models("preprocess", *words))
    return found


def _train(asked: Asked, step: str, data: str, target: str, base: Path | None) -> Command:
    place = asked.work / target
    flags = asked.sheet.training(step, asked.devices, kernels=asked.kernels)
    words = [
        *(("--platform", asked.platform) if asked.platform else ()),
        *("--model-config", asked.model),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", asked.tokenizer_file),
        *words_of(flags),
        *("--data-path", asked.work / "data" / data),
        *(() if base is None else ("--pretrained-checkpoint", base)),
        *("--load", place, "--save", place, "--run-dir", asked.work / "logs" / step),
    ]
    return Command(TRAIN, tuple(map(str, words)), parallel=True)


def _pretrain(asked: Asked) -> list[Command]:
    base = asked.load
    if base is None and (asked.hf is not None or (asked.work / "converted").is_dir()):
        base = asked.work / "converted"
    return [_train(asked, "pretrain", "pretrain_text_document", "pretrained", base)]


def _finetune(asked: Asked) -> list[Command]:
    base = asked.first("pretrained", "converted")
    return [_train(asked, "finetune", "instructions", "finetuned", base)]


def _base_of_adapters(asked: Asked) -> Path:
    return asked.first("finetuned", "pretrained", "converted")


def _lora(asked: Asked) -> list[Command]:
    return [_train(asked, "lora", "instructions", "adapters", _base_of_adapters(asked))]


def _merge(asked: Asked) -> list[Command]:
    base, target = _base_of_adapters(asked), asked.work / "merged"
    return [_models("merge-lora", "--load", base, "--lora-load", asked.work / "adapters", "--save", target)]


def _asking(asked: Asked, command: str, more: Sequence[object]) -> Command:
    """Return a command that loads the trained model under the layout of the devices."""
    flags = asked.sheet.inference(command, asked.devices, kernels=asked.kernels)
    words = [
        command,
        *("--load", asked.first(*_TRAINED)),
        *more,
        *(("--platform", asked.platform) if asked.platform else ()),
        *("--model-config", asked.model, "--tokenizer-model", asked.tokenizer_file),
        *words_of(flags),
    ]
    return Command(MODELS, tuple(map(str, words)), parallel=True)


def _generate(asked: Asked) -> list[Command]:
    if asked.prompts is None and not _named(asked.further, "--prompt", "--prompt-file"):
        raise UserError(
            "generate: there is nothing to continue; name a file of prompts with --prompts, or end the line "
            "with -- --prompt TEXT"
        )
    answers = asked.work / "answers.jsonl"
    files = () if asked.prompts is None else ("--prompt-file", asked.prompts, "--output", answers)
    return [_asking(asked, "generate", files)]


def _evaluate(asked: Asked) -> list[Command]:
    if not asked.tasks and not _named(asked.further, "--task"):
        raise UserError(
            "evaluate: there is nothing to evaluate on; name a benchmark with its data by --task NAME=PATH"
        )
    words: list[object] = []
    for each in asked.tasks:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise UserError(f"--task {each}: names no data; write NAME=PATH, for instance boolq=data/boolq")
        words += ["--task", name, "--task-data-path", each]
    return [_asking(asked, "evaluate", (*words, "--output", asked.work / "evaluated"))]


def _named(words: Sequence[str], *flags: str) -> bool:
    return any(word.partition("=")[0] in flags for word in words)


def _export(asked: Asked) -> list[Command]:
    source = asked.first(*_TRAINED)
    target = asked.work / "exported"
    return [_models("export", "--load", source, "--model-config", asked.model, "--output-model-dir", target)]


STEPS: Mapping[str, Step] = {
    "convert": Step(
        "published weights (--hf-dir) into WORK/converted, or config.json into WORK/model", _convert
    ),
    "preprocess": Step(
        "--corpus and --instructions into WORK/data, with a tokenizer where none is", _preprocess
    ),
    "pretrain": Step("train on texts, into WORK/pretrained", _pretrain),
    "finetune": Step("train everything on instructions, into WORK/finetuned", _finetune),
    "lora": Step("train adapters on instructions, into WORK/adapters", _lora),
    "merge": Step("merge the adapters into their base, into WORK/merged", _merge),
    "generate": Step("continue --prompts with the trained model, into WORK/answers.jsonl", _generate),
    "evaluate": Step("ask it the questions of --task NAME=PATH, into WORK/evaluated", _evaluate),
    "export": Step("write Hugging Face weights, into WORK/exported", _export),
}
