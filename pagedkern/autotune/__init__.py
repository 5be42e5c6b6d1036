"""The autotuner: `python -m pagedkern.autotune` measures, `store.lookup` is what the kernels read at run time.

space: problems and candidates. measure: the tensors, the correctness check and the clock. search: which candidate runs
next, and what the measurements support. store: what is kept, for which device and code. report: how it is shown.
tune: one run from end to end.
"""
