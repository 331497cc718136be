"""Readable CPU bodies of the ops, one file an op: each op's contract and example stand there."""
