"""MMLU: 57 subjects, four options each, five examples of the same subject before the question."""

from __future__ import annotations

from pathlib import Path

from mindspeed_core.errors import DataError
from mindspeed_models.evaluation.files import files_in, read_rows, sibling
from mindspeed_models.evaluation.items import Answer, Item, Scores, Task, TaskOptions, choice_scores
from mindspeed_models.evaluation.tasks.letters import LETTERS, lettered, seed_letter

_SHOTS = 5
_COLUMNS = 6
_STEM = (
    "abstract_algebra astronomy college_biology college_chemistry college_computer_science "
    "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
    "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
    "high_school_mathematics high_school_physics high_school_statistics machine_learning"
)
_HUMANITIES = (
    "formal_logic high_school_european_history high_school_us_history high_school_world_history "
    "international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory "
    "professional_law world_religions"
)
_SOCIAL = (
    "econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics "
    "high_school_microeconomics high_school_psychology human_sexuality professional_psychology "
    "public_relations security_studies sociology us_foreign_policy"
)
_OTHER = (
    "anatomy business_ethics "
    "clinical_knowledge college_medicine global_facts human_aging management marketing "
    "medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology"
)
GROUPS = {
    "stem": _STEM.split(),
    "humanities": _HUMANITIES.split(),
    "social sciences": _SOCIAL.split(),
    "other": _OTHER.split(),
}


def load(path: Path, options: TaskOptions) -> list[Item]:
    """Read ``SUBJECT_test.csv`` without a header, and examples from ``dev/SUBJECT_dev.csv``."""
    split = options.split or "test"
    folder = sibling(path, split) if path.is_dir() and not list(path.glob(f"*_{split}.csv")) else None
    items: list[Item] = []
    for file in files_in(folder or path, f"*_{split}.csv", "mmlu"):
        subject = file.stem.removesuffix(f"_{split}")
        examples = _examples(file, subject, options)
        topic = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
        shots = "".join(f"{_asked(row)} {row[-1].strip()}\n\n" for row in examples)
        for number, row in enumerate(_rows(file)):
            gold = row[-1].strip()
            seed = options.scoring == "seed"
            items.append(
                Item(
                    subject,
                    number,
                    f"{head}{shots}{_asked(row)}",
                    gold,
                    choices=() if seed else tuple(f" {letter}" for letter in LETTERS),
                    gold=LETTERS.index(gold),
                    new_tokens=(options.new_tokens or 4) if seed else 0,
                    shots=len(examples),
                )
            )
    return items


def score(item: Item, answer: Answer, options: TaskOptions) -> Scores:
    """Judge by the likeliest letter, or as the seed does by the letter in the text."""
    if options.scoring == "seed":
        return {"acc": float(seed_letter(str(answer[0])) == item.target)}
    return choice_scores(item, answer, options)


def _asked(row: list[str]) -> str:
    return f"{row[0].strip()}\n{lettered(row[1:5])}\nAnswer:"


def _rows(file: Path) -> list[list[str]]:
    rows = read_rows(file, _COLUMNS)
    for number, row in enumerate(rows, start=1):
        letter = row[-1].strip()
        if len(letter) != 1 or letter not in LETTERS:
            raise DataError(f"{file} row {number}: the answer is {letter[:20]!r}, not one of A to D")
    return rows


def _examples(file: Path, subject: str, options: TaskOptions) -> list[list[str]]:
    wanted = _SHOTS if options.shots is None else options.shots
    if not wanted:
        return []
    found = sibling(file, f"dev/{subject}_dev.csv", f"{subject}_dev.csv")
    if found is None:
        options.warn(f"mmlu {subject}: there is no dev/{subject}_dev.csv, so no examples are shown")
        return []
    return _rows(found)[:wanted]


TASK = Task("mmlu", "four options in 57 subjects", ("acc",), load, score, GROUPS, ("test", "val"))
