"""A CPU that behaves as late as an accelerator may: streams and collectives are done when somebody waits.

``--platform lagging`` trains as ``--platform cpu`` does, and names every place that relies on an order which
no stream, event or wait promises. `device` follows operations, `memory` the storages, `communication` the
process groups.
"""
