"""`python -m pagedkern.gpucheck`: what the GPU backends do on the GPU at hand, in one JSON file and a short table.

Needs nothing but the library and runs without a network. Each part is tried by itself: what fails is named in the
result, and the rest is still reported. On a machine without a GPU the emulated backends are checked on small shapes,
and no speed is measured.
"""
