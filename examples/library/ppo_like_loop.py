"""Reinforcement learning in the manner of PPO: an actor and its reference on different plans, in turns.

The actor trains with flash attention, a fused norm and a fused activation in one session; the reference, a
frozen copy of its first weights, runs with none of them in another. Each iteration enters the first session
to sample, the second to score, and the first again to update. The reward counts even tokens; the penalty is
the Kullback-Leibler divergence from the reference.

    python examples/library/ppo_like_loop.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from mindspeed_core import prepare

VOCABULARY, PROMPT, RESPONSE = 32, 4, 12
ROLLOUTS, ITERATIONS, UPDATES = 64, 14, 2
CLIP, KL_WEIGHT = 0.2, 0.05
LENGTH = PROMPT + RESPONSE
ACTOR = {"use_flash_attn": True, "use_fused_rmsnorm": True, "use_fused_swiglu": True}


@dataclass(frozen=True)
class Rollouts:
    """Samples that an update learns from.

    Attributes:
        tokens: prompts and responses ``[b, s]``.
        rewards: of each response ``[b]``.
        old: log-probabilities of the responses when they were sampled ``[b, r]``.
        reference: their log-probabilities under the reference ``[b, r]``.
    """

    tokens: torch.Tensor
    rewards: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor


def model_config() -> TransformerConfig:
    """The same small Llama for both."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
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


def build(session: Any, config: TransformerConfig) -> GPTModel:
    """A model with the features of the session."""
    config = session.config(config)
    model = GPTModel(
        config,
        session.layer_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )
    return session.model(model)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of the responses in ``tokens`` ``[b, s]`` under ``logits`` ``[b, s, v]``; ``[b, r]``."""
    chosen = logits[:, PROMPT - 1 : -1].log_softmax(dim=-1)
    return chosen.gather(2, tokens[:, PROMPT:, None]).squeeze(2)


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[b, s, v]``."""
    size, length = tokens.shape
    return model(tokens, torch.arange(length).expand(size, length), None)


@torch.no_grad()
def sample(model: torch.nn.Module, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts continued by the model, with the log-probabilities of what it chose."""
    tokens = torch.randint(VOCABULARY, (ROLLOUTS, PROMPT), generator=generator)
    for _ in range(RESPONSE):
        chances = logits_of(model, tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return tokens, log_probabilities(logits_of(model, tokens), tokens)


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """The share of even tokens in each response."""
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(dim=1)


def policy_loss(rollouts: Rollouts, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective with advantages against the batch's mean, and the penalty.

    The divergence is estimated as ``exp(d) - d - 1`` with ``d = reference - actor``, which is never negative.
    """
    now = log_probabilities(logits, rollouts.tokens)
    centred = rollouts.rewards - rollouts.rewards.mean()
    advantages = (centred / (rollouts.rewards.std() + 1e-4))[:, None]
    ratio = (now - rollouts.old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    behind = rollouts.reference - now
    divergence = (behind.exp() - behind - 1).mean()
    loss = -objective.mean() + KL_WEIGHT * divergence
    return loss, {"loss": loss.detach().clone(), "kl": divergence.detach().clone()}


class Actor:
    """The model that learns, with everything an update needs."""

    def __init__(self, session: Any, config: TransformerConfig) -> None:
        """Build it in its session, which is open."""
        self.session = session
        self.model = build(session, config)
        self.chunks = session.wrap_ddp([self.model], DistributedDataParallelConfig())
        options = OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0, clip_grad=1.0)
        self.optimizer = session.wrap_optimizer(get_megatron_optimizer(options, self.chunks))
        self.model.config.finalize_model_grads_func = session.finalize_gradients()
        self.schedule = session.forward_backward()
        self.forward = session.forward_step(self._forward)

    def _forward(self, data: Iterator[Rollouts], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        rollouts = next(data)
        return logits_of(chunk, rollouts.tokens), self.session.loss(partial(policy_loss, rollouts))

    def update(self, rollouts: Rollouts) -> float:
        """One step of the optimizer; the divergence before it."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        (report,) = self.schedule(
            forward_step_func=self.forward,
            data_iterator=[iter([rollouts])],
            model=self.chunks,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=ROLLOUTS,
            forward_only=False,
        )
        self.optimizer.step()
        return float(report["kl"])


def main() -> None:
    """Build both models, and let the actor learn."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = model_config()
    acting = prepare(ACTOR, configs=[config])
    referring = prepare({}, configs=[config])

    with acting:
        tensor_parallel.model_parallel_cuda_manual_seed(5)
        torch.manual_seed(5)
        actor = Actor(acting, config)
    with referring:
        reference = build(referring, config).eval()
        reference.load_state_dict(actor.model.state_dict())
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items() if tensor is not None}

    generator = torch.Generator().manual_seed(9)
    rewards, divergences = [], []
    for iteration in range(ITERATIONS):
        with acting:
            tokens, old = sample(actor.model, generator)
        with referring, torch.no_grad():
            scored = log_probabilities(logits_of(reference, tokens), tokens)
        rollouts = Rollouts(tokens, reward(tokens), old, scored)
        with acting:
            divergences += [actor.update(rollouts) for _ in range(UPDATES)]
        rewards.append(float(rollouts.rewards.mean()))
        if iteration == 0:
            # Other kernels, the same weights: both plans say the same about the same tokens.
            torch.testing.assert_close(scored, old, rtol=1e-4, atol=1e-4)
    check(rewards, divergences)
    for name, tensor in before.items():
        assert torch.equal(tensor, reference.state_dict()[name]), f"the reference changed: {name}"
    assert not acting.is_open
    assert not referring.is_open
    dist.destroy_process_group()


def check(rewards: list[float], divergences: list[float]) -> None:
    """A policy that learns gets more reward, and moves away from the reference by doing so."""
    print("reward    ", " ".join(f"{value:.2f}" for value in rewards))
    print("divergence", " ".join(f"{value:.2f}" for value in divergences[::UPDATES]))
    assert abs(rewards[0] - 0.5) < 0.1, "an untrained policy takes even and odd tokens alike"
    assert sum(rewards[-3:]) / 3 > 0.85, "the policy did not learn what is rewarded"
    assert abs(divergences[0]) < 1e-4, "actor and reference start alike"
    assert divergences[-1] > 0.1, "a policy that learned differs from the reference"


if __name__ == "__main__":
    main()
