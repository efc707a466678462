"""Trainings inside the made-up Megatron-LM of ``fake/``, run in processes of their own."""

from __future__ import annotations

import importlib
import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

from mindspeed_core.feature import Feature, Flag, Requirement, hookimpl
from mindspeed_core.registry import Registry
from mindspeed_megatron.group_options import OF_OWN_GROUPS

FAKE = Path(__file__).parent / "fake"
SCRIPT = FAKE / "pretrain_fake.py"
GPT = ("--no-persist-layer-norm",)


def use_fake():
    """Put the made-up package on the module path, as a checkout is."""
    if str(FAKE) not in sys.path:
        sys.path.insert(0, str(FAKE))
    importlib.invalidate_caches()


def adapt(*declarations, extra=()):
    """Import the adaptor as the script would; only these features are installed."""
    use_fake()
    adaptor = importlib.import_module("mindspeed_core.megatron_adaptor")
    adaptor.install(registry=Registry.of(declarations), extra_plugins=extra)
    return adaptor


def run_script(*flags, script=SCRIPT):
    """Run the script as a program; what it printed, and the log of the made-up loop."""
    sys.argv = [str(script), *flags]
    training = importlib.import_module("megatron.training.training")
    training.printed.clear()
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            status = stop.code
    return {"out": out.getvalue(), "err": err.getvalue(), "log": list(training.printed), "status": status}


def changed_script(path, changes, script=SCRIPT):
    """A copy of the script with some text replaced."""
    text = script.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def forget_run():
    """Reset as Megatron-LM does before it trains again in the same process; ranks stay connected."""
    importlib.import_module("megatron.training.training").destroy_global_state()


class ForTests(Feature):
    family = "tests"
    summary = "For tests."


class Scaled(ForTests):
    """Changes a module, a configuration and a batch, and says so in the log."""

    name = "scaled"
    flags = (
        Flag("--scaled-tokens", type=int, help="Add this to every token."),
        Flag("--scaled-dropout", type=float, default=0.0, help="Dropout of the configuration."),
    )

    @classmethod
    def notes(cls, args):
        return [f"every token is {args.scaled_tokens} larger"]

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args):
        config = yield
        config.hidden_dropout = args.scaled_dropout
        configurations.append(config)
        return config

    @hookimpl(wrapper=True)
    def get_batch(self, run):
        batch = yield
        return batch.with_(tokens=(batch.tokens + run.args.scaled_tokens) % run.args.vocab_size)

    @hookimpl(wrapper=True)
    def log_step(self, run):
        numbers = yield
        return {**numbers, "added to tokens": run.args.scaled_tokens}


class Marked(ForTests):
    """Gives process groups options of the backend, and says in the log for which it was asked."""

    name = "marked"
    flags = (Flag("--marked-groups", help="Ask for it."),)
    patches = (OF_OWN_GROUPS,)

    def __init__(self):
        self.names = []

    def _rule(self, name):
        self.names.append(name)

    @hookimpl(wrapper=True)
    def prepare_process(self, session):
        session.groups.choose_options(self._rule)
        return (yield)

    @hookimpl(wrapper=True)
    def build_process_groups(self, session):
        groups = yield
        session.groups.create("marked", [[0]])
        return groups

    @hookimpl(wrapper=True)
    def log_step(self):
        numbers = yield
        return {**numbers, **{f"asked for {name}": 1 for name in self.names}}


class Unsure(ForTests):
    """Reads what Megatron-LM's arguments lack, whoever trains."""

    name = "unsure"
    flags = (Flag("--unsure", help="Ask for it."),)

    @classmethod
    def enabled(cls, args):
        return args.of_another_host > 0


class Twice(ForTests):
    """A loss of its own."""

    name = "twice"
    flags = (Flag("--twice", help="Report twice the loss."),)

    @hookimpl(wrapper=True)
    def compute_loss(self, run, batch):
        loss = yield
        run.metrics.add("largest token", batch.tokens.max(), "max")
        run.metrics.add("micro-batch", run.context.microbatch, "max")
        doubled = {
            name: value * loss.report["lm loss"].new_tensor([2.0, 1.0]) for name, value in loss.report.items()
        }
        return type(loss)(loss.total, loss.num_tokens, doubled)


class Average(ForTests):
    """State of its own in checkpoints."""

    name = "average"
    flags = (Flag("--average", help="Count steps in the checkpoint."),)
    affects_checkpoint = True

    def __init__(self):
        self.steps = 0

    @hookimpl(wrapper=True)
    def train_step(self):
        result = yield
        self.steps += 1
        return result

    @hookimpl
    def checkpoint_state(self):
        import torch
        from megatron.core.dist_checkpointing import ShardedTensor

        tensor, rank = torch.full((2,), float(self.steps)), torch.distributed.get_rank()
        part = ShardedTensor.from_rank_offsets("tensor", tensor, replica_id=rank)
        return {"average": {"steps": self.steps, "tensor": part}}

    @hookimpl
    def restore_checkpoint_state(self, state):
        if "average" in state:
            assert state["average"]["tensor"].tolist() == [float(state["average"]["steps"])] * 2
            self.steps = state["average"]["steps"]

    @hookimpl(wrapper=True)
    def log_step(self):
        numbers = yield
        return {**numbers, "steps counted": self.steps}


class Rotary(ForTests):
    """Extends a flag of Megatron-LM, changes a default of it, and needs another."""

    name = "rotary"
    flags = (
        Flag(
            "--position-embedding-type",
            type=str,
            choices=("learned_absolute", "rope", "spiral"),
            help="spiral is ours.",
        ),
    )
    requires = (Requirement(flag="--normalization", equals="RMSNorm", reason="spirals need RMSNorm"),)

    @classmethod
    def enabled(cls, args):
        return args.position_embedding_type == "spiral"

    @classmethod
    def presets(cls, args):
        return {"hidden_size": 64} if args.position_embedding_type == "spiral" else {}

    @hookimpl(wrapper=True)
    def validate_arguments_early(self):
        args = yield
        args.position_embedding_type = "rope"
        return args


class OwnProfile(ForTests):
    """Takes a flag over from the loop."""

    name = "own-profile"
    flags = (Flag("--profile", help="Record."),)

    @hookimpl(wrapper=True)
    def log_step(self, run):
        numbers = yield
        return {**numbers, "profiled": float(run.args.profile)}


class OwnDropout(ForTests):
    """Seeds dropout anew when everything is built."""

    name = "own-dropout"
    flags = (Flag("--own-dropout", type=int, default=0, help="The seed."),)

    @hookimpl(wrapper=True)
    def start_run(self, run):
        import torch

        result = yield
        torch.manual_seed(run.args.own_dropout)
        return result


class Failing(ForTests):
    """Fails in a step."""

    name = "failing"
    flags = (Flag("--failing", help="Fail."),)

    @hookimpl(wrapper=True)
    def train_step(self):
        yield
        raise ValueError("this step fails")


class Stopping(ForTests):
    """Ends a run."""

    name = "stopping"
    flags = (Flag("--stop-after", type=int, help="Steps."),)

    @hookimpl(wrapper=True)
    def should_stop(self, run):
        reason = yield
        return reason or ("enough" if run.iteration + 1 >= run.args.stop_after else "")


class WholeBatch(ForTests):
    """Wants positions everywhere, and remembers which parts of a batch came."""

    name = "whole-batch"
    flags = (Flag("--whole-batch", help="Positions on every stage."),)

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def batch_fields(self):
        return (yield) | {"position_ids"}

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        named = ("tokens", "labels", "loss_mask", "position_ids")
        parts = {name: getattr(batch, name) for name in named}
        self.seen.append({name: part.sum().item() for name, part in parts.items() if part is not None})
        return batch

    @hookimpl(wrapper=True)
    def finish_run(self):
        result = yield
        batches_seen.append(self.seen)
        return result


class Wider(ForTests):
    """Sends two times the width between pipeline stages, which are interleaved."""

    name = "wider"
    flags = (Flag("--wider", help="Two times the width."),)

    @hookimpl(wrapper=True)
    def validate_arguments(self):
        args = yield
        args.virtual_pipeline_model_parallel_size = 2
        return args

    @hookimpl
    def get_forward_backward(self, pg):
        from megatron.core.pipeline_parallel import schedules

        assert pg.pp.size() == 2
        return schedules.forward_backward_pipelining_with_interleaving

    @hookimpl(wrapper=True)
    def boundary_schema(self):
        schema = yield
        spec = schema.tensors[0]
        wide = replace(spec, shape=(*spec.shape[:-1], 2 * spec.shape[-1]))
        return replace(schema, tensors=(wide,))


class Weighted(ForTests):
    """Wants what no script gives."""

    name = "weighted"
    flags = (Flag("--weighted", help="Weights of samples."),)

    @hookimpl(wrapper=True)
    def batch_fields(self):
        return (yield) | {"weights"}


class Described(ForTests):
    """Describes a batch for attention."""

    name = "described"
    flags = (Flag("--described", help="Give every batch a description."),)

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        return batch.with_(packed_seq_params=object())


configurations = []
"""Configurations that `Scaled` returned in this run."""

batches_seen = []
"""What `WholeBatch` saw in each run, one entry per micro-batch."""
