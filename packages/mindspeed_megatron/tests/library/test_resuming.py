"""A loop of one's own that loads a checkpoint: its model, its schedule and its vocabulary are compared."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from own_loop import OwnLoop, described, of_the_batches, recorded

from mindspeed_core.activation import activate
from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.worlds import run_world

FLAGS = ("--position-embedding-type", "rope", "--weight-decay", "0")


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def scheduler(session, optimizer, lr, min_lr, style, **rule):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rule = {"use_checkpoint_opt_param_scheduler": False, **rule}
    return session.wrap_scheduler(
        OptimizerParamScheduler(optimizer, 0.0, lr, min_lr, 0, 40, style, 0.0, 0.0, 40, "constant", **rule)
    )


def resumed():
    """One run that is saved, and sessions that load it into the same model and into others."""
    with recorded(*FLAGS) as (memory, run):
        args = run.args
    _, configs = described(*FLAGS)
    found = {}

    def loop(session, changed):
        config = replace(configs[0], **changed.get("config", {}))
        optimizer = replace(configs[2], **changed.get("optimizer", {}))
        return OwnLoop(session, (config, configs[1], optimizer), memory, args)

    flags = of_the_batches(args)
    constant = {"optimizer": {"lr": 6e-4, "min_lr": 0.0}}
    with activate(flags, platform="cpu", configs=configs) as session:
        own = loop(session, constant)
        schedule = scheduler(session, own.optimizer, 6e-4, 0.0, "constant")
        own.optimizer.step()
        schedule.step(20)
        state = {
            "features": session.state_dict(),
            "optimizer": own.optimizer.state_dict(),
            "scheduler": schedule.state_dict(),
        }
    changes = {
        "same": constant,
        "epsilon": {"config": {"layernorm_epsilon": 1e-2}},
        "heads": {"config": {"num_attention_heads": 8, "kv_channels": 8, "num_query_groups": 8}},
        "override": {"optimizer": {"lr": 1e-4, "min_lr": 1e-5}},
        "allowed": {
            "config": {"layernorm_epsilon": 1e-2},
            "flags": ["--allow-other-model", "layernorm_epsilon"],
        },
    }
    for name, changed in changes.items():
        said = Said()
        logging.getLogger("mindspeed_core").addHandler(said)
        changed_config = (replace(configs[0], **changed.get("config", {})), *configs[1:])
        with activate([*flags, *changed.get("flags", [])], platform="cpu", configs=changed_config) as session:
            own = loop(session, changed)
            try:
                session.load_state_dict(state["features"])
                found[name] = said.lines
            except CheckpointError as error:
                found[name] = str(error)
            if name in ("same", "override"):
                rule = {"override_opt_param_scheduler": True} if name == "override" else {}
                how = (1e-4, 1e-5, "cosine") if rule else (6e-4, 0.0, "constant")
                schedule = scheduler(session, own.optimizer, *how, **rule)
                # In either order.
                parts = ["optimizer", "scheduler"] if rule else ["scheduler", "optimizer"]
                for part in parts:
                    {"optimizer": own.optimizer, "scheduler": schedule}[part].load_state_dict(state[part])
                found[f"{name} rates"] = []
                for _ in range(5):
                    schedule.step(4)
                    found[f"{name} rates"].append(own.optimizer.param_groups[0]["lr"])
            if name == "same":
                smaller = {**state["features"]}
                record = smaller["mindspeed_model"]
                arguments = {**record["arguments"], "softmax_vocab_size": 100}
                session.load_state_dict({**smaller, "mindspeed_model": {**record, "arguments": arguments}})
                found["kept"] = own.chunks[0].module.output_layer.kept_vocabulary
                found["kept again"] = session.state_dict()["mindspeed_model"]["arguments"][
                    "softmax_vocab_size"
                ]
        logging.getLogger("mindspeed_core").removeHandler(said)
    destroy_megatron_state()
    return found


@pytest.fixture(scope="module")
def sessions():
    return run_world(resumed, 1)[0]


def test_the_same_model_loads_without_a_word(sessions):
    assert sessions["same"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("epsilon", "--norm-epsilon 1e-05 (checkpoint) / 0.01 (this run)"),
        ("heads", "--num-attention-heads 4 (checkpoint) / 8 (this run)"),
    ],
)
def test_another_model_is_refused_with_both_values(sessions, name, words):
    assert words in sessions[name]


def test_a_field_that_may_differ_is_said(sessions):
    assert "--norm-epsilon 1e-05 (checkpoint) / 0.01 (this run)" in sessions["allowed"][0]


def test_an_overridden_schedule_is_that_of_the_caller(sessions):
    expected = [4.109e-5, 2.855e-5, 1.859e-5, 1.220e-5, 1.000e-5]
    assert sessions["override rates"] == pytest.approx(expected, rel=1e-3)
    assert sessions["same rates"] == [6e-4] * 5


def test_the_padding_of_the_checkpoint_is_kept(sessions):
    assert sessions["kept"] == sessions["kept again"] == 100
