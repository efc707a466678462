"""A trainer in the manner of Hugging Face, on a megatron-core model, whose features change between phases.

The model's configuration is a subclass of ``TransformerConfig`` made from a ``config.json``; the loop is
PyTorch's own: ``loss.backward()``, ``optimizer.step()``, a scheduler from ``torch.optim``. Between the phases
the session is opened again with other flags, and the weights go on.

    python examples/library/hugging_face_style_loop.py
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, Dataset

from mindspeed_core import activate

CONFIG_JSON = """{
  "architectures": ["LlamaForCausalLM"], "vocab_size": 48, "hidden_size": 64, "intermediate_size": 160,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
  "rms_norm_eps": 1e-6, "max_position_embeddings": 24, "rope_theta": 10000.0, "tie_word_embeddings": false
}"""


@dataclass
class LlamaConfig(TransformerConfig):
    """A configuration with fields that megatron-core's does not have."""

    vocab_size: int = 0
    rotary_base: float = 10000.0
    max_position_embeddings: int = 0
    share_embeddings_and_output_weights: bool = False

    @classmethod
    def from_json(cls, text: str) -> LlamaConfig:
        """The configuration that a ``config.json`` describes."""
        found = json.loads(text)
        return cls(
            vocab_size=found["vocab_size"],
            rotary_base=found["rope_theta"],
            max_position_embeddings=found["max_position_embeddings"],
            share_embeddings_and_output_weights=found["tie_word_embeddings"],
            num_layers=found["num_hidden_layers"],
            hidden_size=found["hidden_size"],
            ffn_hidden_size=found["intermediate_size"],
            num_attention_heads=found["num_attention_heads"],
            num_query_groups=found["num_key_value_heads"],
            layernorm_epsilon=found["rms_norm_eps"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )


class Walks(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token decides the next, but for one in ten, which is drawn at random."""

    def __init__(self, size: int, length: int, vocabulary: int) -> None:
        """Draw them all."""
        generator = torch.Generator().manual_seed(11)
        follows = torch.randperm(vocabulary, generator=generator)
        columns = [torch.randint(vocabulary, (size,), generator=generator)]
        for _ in range(length - 1):
            drawn = torch.randint(vocabulary, (size,), generator=generator)
            surprise = torch.rand(size, generator=generator) < 0.1
            columns.append(torch.where(surprise, drawn, follows[columns[-1]]))
        self.tokens = torch.stack(columns, dim=1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Input ids and labels, as a Hugging Face collator returns them."""
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def loss_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch."""
    positions = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
    losses: torch.Tensor = model(inputs["input_ids"], positions, None, labels=inputs["labels"])
    return losses.mean()


class Trainer:
    """The loop: it knows a model that is called with ``input_ids`` and ``labels``, nothing of a session."""

    def __init__(self, model: torch.nn.Module, loader: DataLoader[Any], lr: float, steps: int) -> None:
        """Build the optimizer and its scheduler."""
        self.model, self.loader = model, loader
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=lr, total_steps=steps)

    def training_step(self, inputs: dict[str, torch.Tensor]) -> float:
        """One batch; its mean loss."""
        loss = loss_of(self.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def train(self) -> list[float]:
        """One epoch."""
        self.model.train()
        return [self.training_step(inputs) for inputs in self.loader]


def build(session: Any, config: LlamaConfig) -> GPTModel:
    """The model with what the session's features change."""
    config = session.config(config)
    assert type(config) is LlamaConfig
    model = GPTModel(
        config,
        session.layer_spec(config),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rotary_base),
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
    )
    return session.model(model)


def main() -> None:
    """Two phases with different features; the second goes on with the weights of the first."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = LlamaConfig.from_json(CONFIG_JSON)
    length = config.max_position_embeddings
    loader = DataLoader(Walks(800, length + 1, config.vocab_size), batch_size=16)

    session = activate({"use_fused_rmsnorm": True}, configs=[config])
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model = build(session, config)
    first = Trainer(model, loader, lr=1e-2, steps=len(loader)).train()

    session = session.reopen({"use_flash_attn": True, "use_fused_swiglu": True}, configs=[config])
    following = build(session, config)
    following.load_state_dict(model.state_dict())
    probe = next(iter(loader))
    torch.testing.assert_close(loss_of(following, probe), loss_of(model, probe), rtol=1e-4, atol=1e-5)
    second = Trainer(following, loader, lr=3e-3, steps=len(loader)).train()
    modules = session.report()["modules"]
    session.close()

    print(f"fused norm:              loss {first[0]:.3f} -> {first[-1]:.3f}")
    print(f"flash attention, SwiGLU: loss {second[0]:.3f} -> {second[-1]:.3f}")
    guess = math.log(config.vocab_size)
    # Nine tokens in ten follow the rule, the others are any: no model can do better on average.
    rule = 0.9 + 0.1 / config.vocab_size
    floor = -rule * math.log(rule) - (1 - rule) * math.log((1 - rule) / (config.vocab_size - 1))
    assert abs(first[0] - guess) < 0.3, "an untrained model guesses"
    assert first[-1] < 0.5 * guess, "the first phase learned little"
    assert floor - 0.1 < mean(second[-10:]) < floor + 0.15, f"the second phase did not come near {floor:.3f}"
    assert modules == {"flash-attn": 2, "fused-swiglu": 2}, modules
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
