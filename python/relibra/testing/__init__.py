"""Helpers for tests of code that executes plans."""
