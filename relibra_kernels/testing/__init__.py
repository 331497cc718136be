"""Helpers for tests and for programs that check themselves: comparisons, a launcher of ranks."""
