"""The measurements that are run first on a machine with a GPU: `python -m benchmarks.gpu`; see `__main__`."""
