"""The tests. The docstring of a test names the fault that it would catch ("A shard that is stepped twice."),
or says what must hold."""
