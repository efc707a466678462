"""``import mindspeed_core.megatron_adaptor``: the one line that a training script of Megatron-LM needs.

It may stand before or after the imports of megatron. Megatron-LM's checkout has to be importable, as it is in
its own scripts.
"""

from __future__ import annotations

from mindspeed_megatron.hosts.megatron_lm.checkout import require

require()

from mindspeed_megatron.hosts.megatron_lm.entry import entry_patches, install, uninstall  # noqa: E402

__all__ = ["entry_patches", "install", "uninstall"]

install()
