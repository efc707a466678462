"""Layer norm with a gate for each channel: ``norm(x) * (1 + gate)``."""

import torch

from mindspeed_core.layer_spec import NORM_ROLES, SpecEditor


class GatedNorm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5, marked=True, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.gate = torch.nn.Parameter(torch.zeros(hidden_size))
        for parameter in (self.weight, self.bias, *((self.gate,) if marked else ())):
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden):
        normed = torch.nn.functional.layer_norm(
            hidden, hidden.shape[-1:], self.weight, self.bias, eps=self.eps
        )
        return normed * (1 + self.gate)


def place_gated_norms(session, spec, owner, marked):
    editor = SpecEditor(spec, owner=owner, session=session)
    editor.replace(NORM_ROLES, lambda site: site.carry(GatedNorm, marked=marked))
    return editor.spec
