"""The parts of an open session: patches, changed instances, process groups, metrics, the rank check."""
