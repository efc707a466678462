"""Features that look at the life of a session, and configurations as frameworks have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Conflict, Feature, Flag, Patch, Requirement, hookimpl
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.registry import Registry
from mindspeed_megatron.hosts.library import HOST


@dataclass
class OwnConfig(TransformerConfig):
    """A framework's configuration, with a field of its own."""

    rope_scaling_kind: str = "none"


def small(**changes: Any) -> OwnConfig:
    """A small Llama's configuration."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "rope_scaling_kind": "linear",
    }
    return OwnConfig(**{**values, **changes})


def parallel(tensor: int = 1) -> None:
    """megatron-core's groups in the world of a test."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)


def build(session: Any, config: TransformerConfig, position: str = "rope", seed: int = 3) -> GPTModel:
    """A model through a session."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = session.config(config)
    spec = session.layer_spec(config)
    model = GPTModel(config, spec, 64, 16, position_embedding_type=position)
    return session.model(model).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of a model for a fixed batch ``[2, 16]``."""
    tokens = torch.arange(32).reshape(2, 16)
    result: torch.Tensor = model(tokens, torch.arange(16).expand(2, 16), None)
    return result


class Doubled(Feature):
    """Changes a built instance, which works only in its session."""

    name, family, summary = "doubled", "tests", "doubles word embeddings"
    flags = (Flag("--doubled"),)
    places_modules = True
    needs_open_session = True

    @hookimpl(wrapper=True)
    def build_model(self, session):
        model = yield
        for chunk in model:
            embedding = chunk.embedding.word_embeddings
            session.instances.set(self.name, embedding, "forward", _twice(embedding.forward))
        return model


def _twice(forward):
    return lambda *args: 2.0 * forward(*args)


class Pair(Feature):
    """Makes two groups of the same ranks."""

    name, family, summary = "pair", "tests", "creates groups"
    flags = (Flag("--pair"), Flag("--pair-backwards"))

    @hookimpl(wrapper=True)
    def build_process_groups(self, session, args, dist_info):
        pg = yield
        ranks = [list(range(dist_info.world_size))]
        session.groups.create("pair.forward", ranks)
        if args.pair_backwards:
            session.groups.create("pair.backward", ranks)
        session.groups.create("pair.alone", [[rank] for rank in range(dist_info.world_size)])
        return pg


class Deeper(Feature):
    """Changes an argument, which becomes a field of the configuration."""

    name, family, summary = "deeper", "tests", "adds a layer"
    flags = (Flag("--deeper"),)

    @hookimpl(wrapper=True)
    def validate_arguments_early(self):
        args = yield
        args.num_layers = (args.num_layers or 0) + 1
        return args


class Remembers(Feature):
    """Has state, and counts what it lives through."""

    name, family, summary = "remembers", "tests", "counts steps and ends"
    flags = (Flag("--remembers"),)

    def __init__(self):
        self._steps, self._ends = 0, 0

    @hookimpl(wrapper=True)
    def train_step(self):
        self._steps += 1
        return (yield)

    @hookimpl(wrapper=True)
    def finish_run(self):
        self._ends += 1
        return (yield)

    @hookimpl
    def checkpoint_state(self):
        return {self.name: {"steps": self._steps, "ends": self._ends}}

    @hookimpl
    def restore_checkpoint_state(self, state):
        self._steps = state[self.name]["steps"]


class Shouts(Feature):
    """A patch of a symbol of torch."""

    name, family, summary = "shouts", "tests", "patches the version"
    flags = (Flag("--shouts"),)
    patches = (Patch("torch.distributed:get_rank", new=f"{__name__}:same", kind="wrap", reason="for a test"),)


def same(function):
    return lambda *args, **options: function(*args, **options)


class NoBias(Feature):
    """Requires and forbids what only a configuration says here."""

    name, family, summary = "no-bias", "tests", "looks at the configuration"
    flags = (Flag("--no-bias"),)
    requires = (
        Requirement(flag="--disable-bias-linear"),
        Requirement(flag="--normalization", equals="RMSNorm"),
    )
    conflicts = (Conflict(flag="--qk-layernorm"),)

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        return (yield)


class OnlyLoads(Feature):
    """Takes part in nothing that a library session calls."""

    name, family, summary = "only-loads", "tests", "loads weights"
    flags = (Flag("--only-loads"),)

    @hookimpl
    def load_checkpoint(self):
        raise AssertionError("never called")


def registry() -> Registry:
    """These features on the library host."""
    features = (Doubled, Pair, Deeper, Remembers, Shouts, NoBias, OnlyLoads)
    standalone = HostDeclaration(
        "other", "another host", flags="mindspeed_megatron.hosts.library.flags:host_flags", stages=()
    )
    return Registry.of((HOST, standalone, CpuPlatform, *features))
