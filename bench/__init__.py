"""Benchmarks: each figure and its reference, measured in the same run.

Invariant: a figure and its reference are measured warm, in turns, on the same disk and Spark session.
"""
