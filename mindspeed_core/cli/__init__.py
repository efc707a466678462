"""The programs ``mindspeed-features`` and ``mindspeed-train``.

One module per sub-command, imported only when it is used: listing features must not pay for training them.
"""
