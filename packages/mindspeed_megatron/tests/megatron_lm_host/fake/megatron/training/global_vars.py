"""The arguments of the run, as a global."""

from megatron.training.tokenizer import build_tokenizer

_ARGS = None
_TOKENIZER = None


def get_args():
    assert _ARGS is not None, "args is not initialized."
    return _ARGS


def get_tokenizer():
    assert _TOKENIZER is not None, "tokenizer is not initialized."
    return _TOKENIZER


def set_global_variables(args):
    global _ARGS, _TOKENIZER
    assert _ARGS is None, "args is already initialized."
    _ARGS = args
    _TOKENIZER = build_tokenizer(args)


def destroy_global_vars():
    global _ARGS, _TOKENIZER
    _ARGS = _TOKENIZER = None
