"""Compilation of the Triton kernels for a device that need not be there."""


def compiled_kernels(capability):
    """Return the assembly of every kernel by name and constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mindspeed_kernels.device_kernels import cross_entropy, rms_norm, rotary, swiglu

    half, single, long = "*bf16", "*fp32", "*i64"
    kernels = [
        (swiglu._swiglu_forward, {"x": half, "y": half}, {"BLOCK": 1024}),
        (swiglu._swiglu_backward, {"x": half, "dy": half, "dx": half}, {"BLOCK": 1024}),
        *(
            (
                rotary._rotary,
                {"x": half, "cos": single, "sin": single, "y": half},
                {"PAIRS": pairs, "BACK": back, "SHARED": shared, "ROWS": 32, "COLUMNS": 32},
            )
            for pairs, back, shared in ((True, False, True), (False, True, False), (False, False, True))
        ),
        *(
            (
                rms_norm._rms_norm_forward,
                {"x": half, "gamma": gamma, "y": half, "rstd": single, "eps": "fp32"},
                {"CENTERED": gamma == single, "BLOCK": 4096},
            )
            for gamma in (half, single)
        ),
        (
            rms_norm._rms_norm_backward,
            {"x": half, "gamma": half, "rstd": single, "dy": half, "dx": half, "shares": single},
            {"CENTERED": False, "ROWS": 4, "BLOCK": 4096},
        ),
        (
            cross_entropy._cross_entropy_statistics,
            {"logits": half, "target": long, "logsum": single, "predicted": single},
            {"BLOCKS": 8, "BLOCK": 4096},
        ),
        (
            cross_entropy._cross_entropy_gradient,
            {"logits": half, "target": long, "logsum": single, "of_loss": single, "gradient": half},
            {"BLOCK": 4096},
        ),
    ]
    found = {}
    for kernel, tensors, constants in kernels:
        signature = dict.fromkeys(kernel.arg_names, "i32") | tensors | dict.fromkeys(constants, "constexpr")
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        found[f"{kernel.__name__} {constants}"] = made.asm["ptx"]
    return found
