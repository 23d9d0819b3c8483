"""Shared by the benchmarks: peers under commands, cells measured in turn, tables of ratios."""
