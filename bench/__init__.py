"""Benchmarks: every figure beside its reference in the same run. Not tests: nothing here asserts.

Invariant: a figure and its reference are measured warm, interleaved, on the same machine, disk and Spark session.
"""
