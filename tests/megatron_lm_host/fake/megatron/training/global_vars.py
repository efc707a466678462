"""The arguments of the run, as a global."""

_ARGS = None


def get_args():
    assert _ARGS is not None, "args is not initialized."
    return _ARGS


def set_global_variables(args):
    global _ARGS
    assert _ARGS is None, "args is already initialized."
    _ARGS = args


def destroy_global_vars():
    global _ARGS
    _ARGS = None
