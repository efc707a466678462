"""Put this folder on the path, so that the tests for NPUs below it find the package `differential` too."""
