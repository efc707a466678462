"""Put this folder on the path: the tests for NPUs below it find `differential` and `device_kernels` too."""
