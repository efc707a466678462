"""``mindspeed-features migrate``: launch scripts are read, never run, and each flag gets its verdict."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.cli.features import main
from mindspeed_megatron.migrate.script import launches_of

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))   # ranks
TP=${1:-2}
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $NNODES
"
MODEL_ARGS=(
    --num-layers 4      # few
    --hidden-size "64"
    --num-attention-heads 4
)
MODEL_ARGS+=(--seq-length 32)
DATA='--mock-data'
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $DATA \\
    --tensor-model-parallel-size ${TP} --micro-batch-size 1 \\
    --global-batch-size $WORLD_SIZE --distributed-backend nccl --partial-rotary-factor 0.5 \\
    2>&1 | tee log.txt
"""


def only(text):
    (launch,) = launches_of(text)
    return launch


def flags(text):
    return list(only(f"torchrun pretrain_gpt.py {text}").flags)


def test_variables_arrays_continued_lines_and_sums_are_resolved():
    launch = only(SCRIPT)
    assert launch.launcher == ("torchrun", "--nproc_per_node", "8", "--nnodes", "2")
    assert launch.program == "pretrain_gpt.py"
    assert launch.unresolved == ()
    assert launch.exports == (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    assert launch.flags == tuple(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
        "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
        "--distributed-backend nccl --partial-rotary-factor 0.5".split()
    )


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("A='x y'", '--a "$A"', ["--a", "x y"]),
        ("A='x y'", "--a $A", ["--a", "x", "y"]),
        ("A=(x 'y z')", '--a "${A[@]}"', ["--a", "x", "y z"]),
        ("A=1; B=${A}2", "--a $B", ["--a", "12"]),
        ("A=1\nA=$A,2", "--a $A", ["--a", "1,2"]),
        ("A=a\nA+=b", "--a $A", ["--a", "ab"]),
        ("", "--a ${NO:-3}", ["--a", "3"]),
        ("A=8", "--a $((A / 2 - 1))", ["--a", "3"]),
        ("", "--a 'it is' # not this", ["--a", "it is"]),
        ("", '--a "([0]*3+[1]*4)"', ["--a", "([0]*3+[1]*4)"]),
        ("", "--a=\\$x", ["--a=$x"]),
        ("export A=1", "--a $A > log 2>&1 &", ["--a", "1"]),
    ],
)
def test_words_are_those_of_the_shell(before, text, expected):
    launch = only(f"{before}\ntorchrun pretrain_gpt.py {text}\n")
    assert list(launch.flags) == expected
    assert launch.unresolved == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torchrun t.py --a $(hostname)", "$(hostname) has to be run"),
        ("A=`date`\ntorchrun t.py --a $A", "`date` has to be run"),
        ("torchrun t.py --a $A", "$A is set nowhere in this script"),
        ("torchrun t.py --a $1", "$1 is an argument of the script"),
        ("torchrun --master_addr <master_ip> t.py", "<master_ip> is a placeholder"),
        ("A='your data path'\ntorchrun t.py --a $A", "'your data path' is a placeholder"),
        ("if [ -n x ]; then\nA=1\nfi\ntorchrun t.py --a $A", "line 2 sets it inside of `if`"),
        ("for i in 1 2; do\ntorchrun t.py --a $i\ndone", "running a loop alone tells"),
        ("torchrun t.py --a ${A%x}", "${A%x} is more than a variable"),
        ("torchrun t.py --a $((2 ** 3))", "$((2 ** 3)) cannot be computed"),
    ],
)
def test_what_only_running_could_tell_is_named_and_stays(text, says):
    assert any(says in sentence for sentence in only(text).unresolved)


def test_windows_line_ends_are_line_ends():
    assert only(SCRIPT.replace("\n", "\r\n")) == only(SCRIPT)


def test_nothing_of_a_script_is_run(tmp_path):
    trap = tmp_path / "trap"
    launches_of(f"A=$(touch {trap})\nsource x\ntouch {trap}\ntorchrun t.py --a `touch {trap}` $A")
    assert not trap.exists()


@given(st.text(alphabet="ab $'\"`(){}<>|&;=\\\n#-_1[]@+*", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_to_its_end(text):
    launches_of(text)
    launches_of(f"torchrun t.py {text}")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    return path


def run(capsys, *words):
    status = main(["migrate", *map(str, words)])
    return status, capsys.readouterr()


def test_each_flag_gets_its_verdict_and_the_command_is_shown(script, capsys):
    status, shown = run(capsys, script)
    text = " ".join(shown.out.split())
    assert status == 0
    assert (
        "noted: changes nothing here (1) --distributed-backend nccl: the platform names the backend" in text
    )
    assert "translated (1) --partial-rotary-factor 0.5: --rotary-percent 0.5" in text
    assert "--nnodes 2 -m mindspeed_core.train" in text
    assert "--rotary-percent 0.5" in shown.out.rpartition("torchrun")[2]
    assert "nccl" not in shown.out.rpartition("torchrun")[2]


def test_flags_are_taken_without_a_script_too(capsys):
    status, shown = run(capsys, "--", "--num-layers", "4", "--enable-mhc")
    assert status == 1
    assert "--enable-mhc: this flag of MindSpeed-LLM is refused here" in shown.out
    assert "mindspeed-train" in shown.out


def test_a_new_script_is_written_and_none_is_overwritten(script, tmp_path, capsys):
    target = tmp_path / "new.sh"
    assert run(capsys, script, "--write", target)[0] == 0
    assert target.read_text().startswith(
        "#!/usr/bin/env bash\nset -e\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    )
    assert stat.S_IMODE(target.stat().st_mode) & os.umask(os.umask(0)) == 0
    assert only(target.read_text()).flags[:2] == ("--num-layers", "4")
    status, shown = run(capsys, script, "--write", target)
    assert status == 1
    assert "is there already" in shown.err + shown.out


def test_json_holds_the_same(script, capsys):
    _, shown = run(capsys, script, "--json")
    content = json.loads(shown.out)
    verdicts = {flag["flag"]: flag["verdict"] for flag in content["flags"]}
    assert verdicts["--distributed-backend nccl"] == "noted"
    assert verdicts["--num-layers 4"] == "used"
    assert content["ok"] is True
    assert content["command"][:2] == ["torchrun", "--nproc_per_node"]


def test_the_other_host_keeps_the_script(script, capsys):
    _, shown = run(capsys, script, "--host", "megatron-lm")
    assert "pretrain_gpt.py" in shown.out
    assert "--distributed-backend nccl" in shown.out


def test_a_yaml_file_is_read_as_flags(tmp_path, capsys):
    path = tmp_path / "args.yaml"
    path.write_text(
        "language_model:\n  num_layers: 4\n  activation_func: swiglu\n  layernorm_epsilon: 0.001\n"
        "  add_bias_linear: False\n  apply_rope_fusion: True\nmodel_parallel:\n"
        "  tensor_model_parallel_size: 2\nmicro_batch_size: 1\nconsumed_train_samples: 0\n"
    )
    for words in ((path,), ("--", "--yaml-cfg", path)):
        _, shown = run(capsys, *words, "--json") if len(words) == 1 else run(capsys, "--json", *words)
        command = " ".join(json.loads(shown.out)["command"])
        assert "--num-layers 4 --swiglu --norm-epsilon 0.001 --disable-bias-linear" in command
        assert "--tensor-model-parallel-size 2" in command
        assert "consumed" not in command


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("echo hello\n", "has no command that starts a training"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
    ],
)
def test_a_file_that_is_no_launch_script_is_refused(tmp_path, capsys, content, says):
    path = tmp_path / "x.sh"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, shown = run(capsys, path)
    assert status == 1
    assert says in shown.err + shown.out


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "a: [\n"])
def test_a_yaml_file_without_arguments_is_refused(tmp_path, capsys, content):
    path = Path(tmp_path / "x.yaml")
    path.write_text(content)
    status, shown = run(capsys, path)
    assert status == 1
    assert str(path) in shown.err + shown.out


def test_one_of_several_commands_is_chosen(tmp_path, capsys):
    path = tmp_path / "two.sh"
    path.write_text("torchrun a.py --num-layers 2\ntorchrun a.py --num-layers 3\n")
    _, shown = run(capsys, path, "--launch", 2, "--json")
    assert "3" in json.loads(shown.out)["command"]
    status, shown = run(capsys, path, "--launch", 3)
    assert status == 1
    assert "has 2 commands, in lines 1, 2" in shown.err + shown.out


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("A=''", "--a ${A:-3}", ["--a", "3"]),
        ("A=''", "--a=${A-3}", ["--a="]),
        ("", "--a ${NO:-3 4} --b", ["--a", "3", "4", "--b"]),
        ("V=2", '${V:+--a "$V"} --b', ["--a", "2", "--b"]),
        ("V=''", "${V:+--a} --b", ["--b"]),
        ("V=''", "${V+--a} --b", ["--a", "--b"]),
        ("A=b", '--a "${A:-x y}" "${NO:-x y}"', ["--a", "b", "x y"]),
    ],
)
def test_other_words_take_the_place_of_a_variable_as_in_the_shell(before, text, expected):
    launch = only(f"{before}\ntorchrun pretrain_gpt.py {text}\n")
    assert list(launch.flags) == expected
    assert launch.unresolved == ()


BEGIN = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --mock-data "
REST = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$MOE_ARGS {}", "$MOE_ARGS is set nowhere"),
        ("{} $@", "$@ is an argument"),
        ('${{VP:+--num-layers-per-virtual-pipeline-stage "$VP"}} {}', "$VP is set nowhere"),
    ],
)
def test_a_variable_that_is_set_nowhere_is_nothing_behind_a_whole_flag(tmp_path, capsys, text, said):
    path = tmp_path / "pretrain.sh"
    path.write_text(f"{BEGIN}{text.format(REST)} --vocab-size 128\n")
    assert main(["migrate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (sentence,) = found["left_out"]
    assert said in sentence
    assert not any("$" in word for word in found["command"])


def test_a_variable_that_a_flag_waits_for_is_a_value_to_write(tmp_path, capsys):
    path = tmp_path / "pretrain.sh"
    path.write_text(f"{BEGIN}{REST} --vocab-size $WORDS\n")
    assert main(["migrate", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == []
    assert found["unresolved"] == ["$WORDS is set nowhere in this script; write the value"]


def test_the_shell_replaces_what_was_its_own_and_nothing_else(tmp_path, capsys):
    path, new = tmp_path / "pretrain.sh", tmp_path / "new.sh"
    path.write_text(f"{BEGIN}{REST} --vocab-size 128 --save out/$RUN/$(date) --tiktoken-pattern 'a$b \"c'\n")
    main(["migrate", str(path), "--write", str(new)])
    assert 'out/"$RUN"/"$(date)"' in new.read_text()
    capsys.readouterr()
    main(["migrate", "--", "--save", "$(touch x)"])
    assert "'$(touch x)'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("tasks/pretrain_bert.py", "BERT, T5 and retrieval models are not trained here"),
        ("pretrain_vision_classify.py", "vision models"),
        ("pretrain_mamba.py", "hybrid and Mamba"),
    ],
)
def test_the_training_of_another_model_is_refused_by_its_program(tmp_path, capsys, program, says):
    path = tmp_path / "pretrain.sh"
    path.write_text(f"{BEGIN}{REST} --vocab-size 128\n".replace("pretrain_gpt.py", program))
    assert main(["migrate", str(path), "--json"]) == 1
    (refused,) = [one for one in json.loads(capsys.readouterr().out)["flags"] if one["verdict"] == "refused"]
    assert refused["flag"] == program
    assert says in refused["text"]
    assert main(["migrate", str(path), "--host", "megatron-lm"]) == 0


def test_a_script_that_trains_nothing_names_the_command_that_does_its_work(tmp_path, capsys):
    path = tmp_path / "prepare.sh"
    path.write_text("python ./preprocess_data.py --input a --output-prefix b\n")
    assert main(["migrate", str(path)]) == 1
    assert "line 1 starts ./preprocess_data.py" in capsys.readouterr().err
    path.write_text(f"python ./preprocess_data.py --input a\n{BEGIN}{REST} --vocab-size 128\n")
    assert main(["migrate", str(path)]) == 0
