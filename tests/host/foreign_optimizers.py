"""Update rules as another package would bring them, each with a state of another form."""

from __future__ import annotations

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.registry import Registry


def rules():
    """The classes by their name on the command line; they need torch."""
    import torch

    from mindspeed_core import DescribedOptimizer

    class Lion(DescribedOptimizer):
        """No second moment."""

        def __init__(self, groups):
            super().__init__(groups, {"betas": (0.9, 0.99)})

        def new_state(self, parameter):
            return {"exp_avg": torch.zeros_like(parameter)}

        def update(self, parameter, gradient, state, group):
            beta1, beta2 = group["betas"]
            direction = state["exp_avg"].lerp(gradient, 1 - beta1).sign_()
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
            state["exp_avg"].lerp_(gradient, 1 - beta2)

    class Cadam(DescribedOptimizer):
        """One moment in 16 bits, under a name of its own."""

        def new_state(self, parameter):
            return {"momentum": torch.zeros_like(parameter, dtype=torch.bfloat16)}

        def update(self, parameter, gradient, state, group):
            momentum = state["momentum"].float().lerp_(gradient, 1 - group["betas"][0])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(momentum.sign(), alpha=group["lr"])
            state["momentum"].copy_(momentum)

        def describe(self, parameter, state):
            return {"exp_avg": state["momentum"].float()}

        def restore(self, parameter, described):
            return {"momentum": described["exp_avg"].bfloat16()}

    class Int8(DescribedOptimizer):
        """Adam with moments of 8 bits in flat blocks, scaled by powers of two."""

        def new_state(self, parameter):
            return {"m": quantised(parameter * 0), "v": quantised(parameter * 0)}

        def update(self, parameter, gradient, state, group):
            (beta1, beta2), count = group["betas"], group["step"]
            first = whole(state["m"], parameter).lerp_(gradient, 1 - beta1)
            second = whole(state["v"], parameter).square_().mul_(beta2)
            second.addcmul_(gradient, gradient, value=1 - beta2)
            divisor = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(first / (1 - beta1**count), divisor, value=-group["lr"])
            state["m"], state["v"] = quantised(first), quantised(second.sqrt_())

        def describe(self, parameter, state):
            first, second = (whole(state[name], parameter) for name in "mv")
            return {"exp_avg": first, "exp_avg_sq": second.square_()}

        def restore(self, parameter, described):
            root = described["exp_avg_sq"].sqrt()
            return {"m": quantised(described["exp_avg"]), "v": quantised(root)}

    class Averaging(DescribedOptimizer):
        """Momentum, and four tensors more."""

        further = ("average", "sum", "last", "largest")

        def new_state(self, parameter):
            zero = torch.zeros_like(parameter)
            extremes = {"last": zero.clone(), "largest": zero.clone()}
            return {"exp_avg": zero, "average": parameter.clone(), "sum": zero.clone(), **extremes}

        def update(self, parameter, gradient, state, group):
            state["exp_avg"].lerp_(gradient, 0.1)
            parameter.sub_(state["exp_avg"], alpha=group["lr"])
            state["average"].lerp_(parameter, 0.5)
            state["sum"].add_(gradient)
            state["last"].copy_(gradient)
            state["largest"].copy_(torch.maximum(state["largest"], gradient.abs()))

    def quantised(tensor, block=128):
        flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % block)).view(-1, block)
        largest = flat.abs().amax(1, keepdim=True).clamp_min(2.0**-60)
        scale = torch.exp2(torch.log2(largest / 127).ceil())
        return (flat / scale).round_().to(torch.int8), scale

    def whole(parts, like):
        values, scale = parts
        return (values * scale).flatten()[: like.numel()].view_as(like)

    return {"yak-lion": Lion, "yak-cadam": Cadam, "yak-int8": Int8, "yak-averaging": Averaging}


class Yak(Feature):
    """Brings values of a flag of the host."""

    name = "yak-optimizers"
    family = "tests"
    summary = "For tests."
    slots = ("optimizer",)
    flags = (
        Flag(
            "--optimizer",
            type=str,
            default="adam",
            choices=("yak-lion", "yak-cadam", "yak-int8", "yak-averaging"),
            help="Ours.",
        ),
    )
    affects_checkpoint = False

    @hookimpl(wrapper=True)
    def build_optimizer(self, session, args):
        optimizer = yield
        from mindspeed_core import put_inside

        put_inside(session, optimizer, rules()[args.optimizer], owner=self.name)
        return optimizer


class OnlyTrain(Feature):
    """Freezes all other parameters."""

    name = "only-train"
    family = "tests"
    summary = "For tests."
    flags = (Flag("--only-train", type=str, help="End of the names of parameters that are trained."),)

    @hookimpl(wrapper=True)
    def build_model(self, args):
        model = yield
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad = name.endswith(args.only_train)
        return model


REGISTRY = Registry.of([Yak, OnlyTrain])
