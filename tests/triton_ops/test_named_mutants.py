"""Mistakes that kernels of this kind are known for: each is a mutant of ours in every place.

``python -m pytest tests/triton_ops tests/relibra_kernels -k mutant --list-mutants`` runs them all
and prints what killed each.
"""

import ast
from pathlib import Path

import pytest

# Mistake -> test module and the start of the mutant's name in its MUTANTS.
NAMED = {
    "gate and up swapped": [
        ("test_expert_up", "gate and up swapped"),
        ("test_grouped_gemm", "gate and up swapped"),
        ("test_expert_down_backward", "gate and up swapped"),
    ],
    "score omitted in F3": [("test_combine", "score_omitted")],
    "score omitted in a'": [
        ("test_expert_down_backward", "score omitted in a'"),
        ("test_scored_activation", "score omitted in F1"),
    ],
    "score omitted in dh": [("test_expert_down_backward", "score omitted in dh")],
    "dSwiGLU term dropped": [("test_expert_down_backward", "second term of dSwiGLU dropped")],
    "replica and home base swapped": [
        ("test_expert_up", "replica rows meet home weights"),
        ("test_expert_up", "home rows meet replica weights"),
        ("test_grouped_gemm", "replica rows meet home weights"),
        ("test_grouped_gemm_wgrad", "home and replica swapped"),
        ("test_bias_grad", "home and replica swapped"),
    ],
    "STORE and ADD swapped": [
        ("test_grouped_gemm_wgrad", "STORE and ADD swapped"),
        ("test_bias_grad", "STORE and ADD swapped"),
    ],
    "k range one tile long": [
        ("test_expert_up", "k range one tile long"),
        ("test_grouped_gemm", "k range one tile long"),
        ("test_grouped_gemm_wgrad", "k range one block long"),
    ],
    "k range one tile short": [
        ("test_expert_up", "k range one tile short"),
        ("test_grouped_gemm", "k range one tile short"),
        ("test_grouped_gemm_wgrad", "k range one block short"),
        ("test_expert_down_backward", "k range one block short"),
    ],
    "pad select removed": [
        ("test_expert_up", "pad select of gate removed"),
        ("test_expert_up", "pad zeros of up removed, tma"),
        ("test_grouped_gemm", "pad select removed"),
        ("test_expert_down_backward", "pad select removed from dh"),
        ("test_expert_down_backward", "pad select removed from a'"),
        ("test_expert_down_backward", "pad select removed from dscore"),
        ("test_grouped_gemm_wgrad", "pad rows not masked"),
        ("test_permute", "pad_select_removed"),
        ("test_combine", "pad_select_removed"),
    ],
    "row_to_choice off by one": [
        ("test_expert_down_backward", "row_to_choice off by one"),
        ("test_permute", "row_to_choice_off_by_one"),
    ],
    "rank order of F4 reversed": [("test_combine", "order_reversed")],
    "b2 term of the score gradient dropped": [("test_expert_down_backward", "b2 term dropped")],
    "tail columns unmasked": [
        ("test_expert_up", "tail columns unmasked"),
        ("test_grouped_gemm", "tail columns unmasked"),
        ("test_grouped_gemm_wgrad", "tail of D unmasked"),
        ("test_grouped_gemm_wgrad", "tail of F unmasked"),
        ("test_expert_down_backward", "tail columns unmasked"),
        ("test_permute", "tail_columns_unmasked"),
        ("test_combine", "tail_columns_unmasked"),
        ("test_peer_copy", "tail_columns_unmasked"),
    ],
}


def keys(module: str, *tables: str) -> set[str]:
    """Keys of dictionaries that a test module defines."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {
        ast.literal_eval(key)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if ast.unparse(node.targets[0]) in tables
        for key in node.value.keys
        if key is not None
    }


@pytest.mark.parametrize("mistake", NAMED)
def test_every_named_mistake_is_a_mutant(mistake):
    for module, name in NAMED[mistake]:
        assert name in keys(module, "MUTANTS", "ACTIVATION_MUTANTS"), module


def test_row_times_stride_in_32_bits_is_a_broken_snippet():
    assert "row times stride" in keys("test_source_rules", "BROKEN")
