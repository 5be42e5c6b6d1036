"""What is measured, and beside whom: `make bench`; docs/benchmarks.md says how it is done and what came of it."""
