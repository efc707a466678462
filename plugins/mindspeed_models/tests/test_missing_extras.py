"""Without the extras' libraries features are listed, and whoever needs one of them is told its extra."""

import json
import subprocess
import sys

import pytest
from corpora import question, write_lines, write_tokenizer

ABSENT = """
import sys

class Absent:
    names = {"transformers", "peft", "datasets", "pyarrow", "lm_eval"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
LISTED = """
from mindspeed_core.cli.features import main
raise SystemExit(main(["list"]))
"""
USED = """
import contextlib, io, json
from mindspeed_core.errors import UserError
from mindspeed_models.evaluation.engine import check_engine
from mindspeed_models.program import main

def said(*words):
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        return main(list(words)), stream.getvalue()

corpus, tokenizer, arrow = sys.argv[1:]
target = ("--output-prefix", corpus + ".out")
from_hf = ("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", tokenizer)
known = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-name-or-path", tokenizer)
found = {
    "tokenizer": said("preprocess", "--input", corpus, *from_hf, *target),
    "arrow": said("preprocess", "--input", arrow, *known, *target),
    "data set": said("preprocess", "--input", "some/dataset", *known, *target),
}
try:
    check_engine()
except UserError as error:
    found["evaluation"] = 1, str(error)
print(json.dumps(found))
"""
EXTRAS = {"tokenizer": "hf", "arrow": "data", "data set": "data", "evaluation": "eval"}


def run(script, *words):
    done = subprocess.run(
        [sys.executable, "-c", ABSENT + script, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_features_are_listed():
    assert all(name in run(LISTED) for name in ("instruction-data", "lora", "model-recipes"))


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extras")
    write_tokenizer(folder / "tokenizer")
    corpus = write_lines(folder / "texts.jsonl", [question(1)])
    arrow = folder / "texts.arrow"
    arrow.write_bytes(b"ARROW1")
    return json.loads(run(USED, corpus, folder / "tokenizer", arrow).splitlines()[-1])


@pytest.mark.parametrize("case", EXTRAS)
def test_what_needs_a_library_names_its_extra(used, case):
    status, said = used[case]
    assert status != 0
    assert f"pip install 'mindspeed-models[{EXTRAS[case]}]'" in said
