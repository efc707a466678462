"""Updates by the sign of a momentum, inside megatron-core's optimizer."""

import torch


class Signs(torch.optim.Optimizer):
    def __init__(self, groups, keeps_state):
        super().__init__(groups, {})
        self.elsewhere = None if keeps_state else {}

    def momentum(self, parameter):
        kept = self.state if self.elsewhere is None else self.elsewhere
        state = kept.setdefault(parameter, {})
        return state.setdefault("exp_avg", torch.zeros_like(parameter))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.momentum(parameter)
                    momentum.lerp_(parameter.grad, 0.5)
                    parameter.sub_(torch.tanh(1e3 * momentum), alpha=group["lr"])


def put_signs_into(optimizer, keeps_state):
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.optimizer = Signs(part.optimizer.param_groups, keeps_state)
        part.init_state_fn = lambda signs, config=None: [
            signs.momentum(parameter) for group in signs.param_groups for parameter in group["params"]
        ]
    return optimizer
