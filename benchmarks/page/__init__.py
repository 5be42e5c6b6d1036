"""`python -m benchmarks.page`: results of `make bench` as the tables and pictures of docs/benchmarks.md."""
