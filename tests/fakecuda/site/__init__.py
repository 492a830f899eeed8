"""The fake CUDA under whole processes: put this folder on PYTHONPATH, and FAKE_CUDA=N in the environment."""
