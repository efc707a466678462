"""Whatever happens to a file of a checkpoint, what is said names that file and a way out."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from mindspeed_testing.worlds import run_world

FLAGS = (
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 "
    "--train-iters 9 --eval-iters 0 --use-distributed-optimizer --no-progress"
).split()
TRACKER, MANIFEST = "latest_checkpointed_iteration.txt", "manifest.json"
FILES = ("__0_0.distcp", "__0_1.distcp", "common.pt", ".metadata", "metadata.json", MANIFEST, TRACKER)
WAYS_OUT = ("--ckpt-step", "--verify-checkpoint", "--load", "loading the newest complete")


def flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero(path, draw):
    content = bytearray(path.read_bytes())
    begin = draw.randrange(len(content))
    content[begin : begin + 64] = bytes(len(content[begin : begin + 64]))
    path.write_bytes(content)


def truncate(path, draw):
    os.truncate(path, draw.randrange(path.stat().st_size))


def delete(path, draw):
    path.unlink()


def replace_by_noise(path, draw):
    path.write_bytes(draw.randbytes(path.stat().st_size))


def replace_by_another(path, draw):
    others = [other for other in path.parent.iterdir() if other != path and other.is_file()]
    content = draw.choice(others).read_bytes()
    path.unlink()
    path.write_bytes(content)


def replace_by_directory(path, draw):
    path.unlink()
    path.mkdir()


def replace_by_pipe(path, draw):
    path.unlink()
    os.mkfifo(path)


def dangle(path, draw):
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = (
    flip,
    zero,
    truncate,
    delete,
    replace_by_noise,
    replace_by_another,
    replace_by_directory,
    replace_by_pipe,
    dangle,
)


def wrong_hash(entries, name, draw):
    size, digest = entries[name]
    at = draw.randrange(64)
    entries[name] = [size, digest[:at] + ("0" if digest[at] != "0" else "1") + digest[at + 1 :]]


def wrong_size(entries, name, draw):
    entries[name] = [entries[name][0] + draw.choice((-1, 1, 512)), entries[name][1]]


def wrong_name(entries, name, draw):
    entries[name + "x"] = entries.pop(name)


ENTRIES = (wrong_hash, wrong_size, wrong_name)


def train_and_damage(folder, count):
    """Save two checkpoints, then damage copies of them and tell what loading and inspecting each says."""
    from mindspeed_core.activation import activate
    from mindspeed_core.errors import CheckpointError
    from mindspeed_train import loop
    from mindspeed_train.checkpoint import load
    from mindspeed_train.checkpoint.inspection import inspect

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("mindspeed_core").addHandler(handler)
    good = Path(folder) / "good"
    found = []
    with activate([*FLAGS, "--save", str(good)], host="standalone") as session:
        run = loop.setup(session)
        for _ in range(2):
            session.call("train_step", run=run)
            run.iteration += 1
            session.call("save_checkpoint", run=run, reason="interval")
        run.args.save = None
        for seed in range(count):
            draw = random.Random(seed)
            copy = Path(folder) / f"damaged-{seed}"
            shutil.copytree(good, copy)
            damage, name, changed, undecided = damage_one(copy, draw)
            run.args.load, run.args.verify_checkpoint = (
                str(copy),
                draw.choice(("hash", "hash", "size", "off")),
            )
            said.clear()
            try:
                text, step = "", load.load(run).iteration
            except CheckpointError as error:
                text, step = str(error), None
            except Exception as error:
                text, step = f"TRACEBACK {type(error).__name__}: {error}", None
            try:
                problems = inspect(copy)["problems"]
            except CheckpointError as error:
                problems = [str(error)]
            except Exception as error:
                problems = [f"TRACEBACK {type(error).__name__}: {error}"]
            found.append(
                {
                    "seed": seed,
                    "damage": damage,
                    "name": name,
                    "changed": changed,
                    "error": text,
                    "verify": run.args.verify_checkpoint,
                    "step": step,
                    "said": list(said),
                    "problems": problems,
                    "undecided": undecided,
                }
            )
            shutil.rmtree(copy)
        loop.teardown(session)
    return found


def damage_one(folder, draw):
    """Damage one file; return how, its name, whether it means anything else now, and whether who is at fault
    cannot be known."""
    if draw.random() < 0.25:
        path = folder / "iter_0000002" / MANIFEST
        description = json.loads(path.read_text())
        old = draw.random() < 0.5
        if old:
            del description["digest"]
        entry = draw.choice(ENTRIES)
        name = draw.choice(sorted(description["files"]))
        entry(description["files"], name, draw)
        path.write_text(json.dumps(description))
        return entry.__name__, MANIFEST, True, old
    name = draw.choice(FILES)
    path = folder / TRACKER if name == TRACKER else folder / "iter_0000002" / name
    before = path.read_bytes()
    damage = draw.choice(DAMAGES)
    damage(path, draw)
    after = path.read_bytes() if path.is_file() else None
    return damage.__name__, name, meaning(name, before) != meaning(name, after), False


def meaning(name, content):
    if content is None or name not in (MANIFEST, TRACKER):
        return content
    try:
        return json.loads(content)
    except ValueError:
        return content.strip()


@pytest.fixture(scope="module", params=[40, pytest.param(300, marks=pytest.mark.thorough)])
def damaged(request, tmp_path_factory):
    (found,) = run_world(
        train_and_damage, 1, str(tmp_path_factory.mktemp("damage")), request.param, timeout=500.0
    )
    return found


def test_no_damage_ends_with_a_traceback(damaged):
    assert [case for case in damaged if "TRACEBACK" in case["error"] + "".join(case["problems"])] == []


def test_what_loading_says_names_the_damaged_file_and_a_way_out(damaged):
    unnamed = []
    for case in damaged:
        text = case["error"] or "\n".join(case["said"])
        detected = bool(case["error"]) or case["name"] == TRACKER or case["verify"] == "hash"
        if (
            case["changed"]
            and detected
            and not (case["name"] in text and any(way in text for way in WAYS_OUT))
        ):
            unnamed.append(case)
    assert unnamed == [], unnamed[0]


def test_nothing_unchanged_is_refused(damaged):
    assert [case for case in damaged if not case["changed"] and (case["error"] or case["problems"])] == []


def test_manifest_or_file_is_said_only_where_it_cannot_be_told(damaged):
    assert any(case["undecided"] for case in damaged)
    for case in damaged:
        if case["verify"] == "hash" and case["error"]:
            assert ("cannot be told apart" in case["error"]) == case["undecided"], case


def test_inspecting_names_the_damaged_file(damaged):
    silent = [
        case
        for case in damaged
        if case["changed"] and not any(case["name"] in problem for problem in case["problems"])
    ]
    # Without a manifest a checkpoint is another program's; a tracker that names the older one is no damage.
    assert [case for case in silent if case["name"] != MANIFEST and case["said"] == []] == []
