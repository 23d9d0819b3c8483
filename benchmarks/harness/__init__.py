"""What the benchmarks share: peers under commands, cells measured in turn, tables of ratios."""
