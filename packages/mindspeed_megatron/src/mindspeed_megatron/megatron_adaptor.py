"""``import mindspeed_core.megatron_adaptor``: the one line that a training script of Megatron-LM needs.

It may stand before or after the imports of megatron::

    import mindspeed_core.megatron_adaptor
    from megatron.training import pretrain

Importing it patches what leads to the call of ``pretrain``; everything else is patched when the session
opens, and taken back when it closes. Megatron-LM's checkout has to be importable, as it is in its own
scripts.

`install` is what the import does, `uninstall` takes it back, and `entry_patches` lists what it patches.
"""

from __future__ import annotations

from mindspeed_megatron.hosts.megatron_lm.checkout import require

require()

from mindspeed_megatron.hosts.megatron_lm.entry import entry_patches, install, uninstall  # noqa: E402

__all__ = ["entry_patches", "install", "uninstall"]

install()
