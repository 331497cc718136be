import json

import numpy as np
import pytest

from relibra.demo.report import build_trace, to_json, write_report
from relibra.demo.settings import DemoSettings

SETTINGS = DemoSettings(num_prompts=16, samples_per_prompt=2)  # 8 samples a rank, 2 a micro-batch


def recorded(rank, step):
    """Ids that tell rank, step and sample apart: sample b of a rank chooses (rank*4 + step, b)."""
    ids = np.zeros((8, 3, 1, 2), np.uint8)
    ids[..., 0] = rank * 4 + step
    ids[..., 1] = np.arange(8)[:, None, None] + (8 if step else 0)
    return ids


def test_trace_is_ordered_by_step_micro_batch_rank_sample():
    trace = build_trace([[recorded(r, s) for s in range(2)] for r in range(4)], SETTINGS)
    assert trace.num_samples == 2 * 4 * 8
    firsts = trace.ids[trace.cu_seqlens[:-1], 0].tolist()
    expected = [
        [rank * 4 + step, micro_batch * 2 + sample + (8 if step else 0)]
        for step in range(2)
        for micro_batch in range(4)
        for rank in range(4)
        for sample in range(2)
    ]
    assert firsts == expected
    assert trace.num_experts == 16
    assert set(np.diff(trace.cu_seqlens)) == {3}


def test_the_trace_can_be_saved_and_loaded(tmp_path):
    pytest.importorskip("relibra.formats.relibra_file")
    trace = build_trace([[recorded(r, 0)] for r in range(4)], SETTINGS)
    trace.save(tmp_path / "routing.safetensors")
    again = type(trace).load(tmp_path / "routing.safetensors")
    assert np.array_equal(again.ids, trace.ids)
    assert again.moe_layers == (0,)


def test_report_is_valid_json_also_with_numbers_that_are_not_finite(tmp_path):
    report = {"value": float("inf"), "rows": np.arange(3), "nested": [{"nan": float("nan")}]}
    assert json.loads(to_json(report)) == {
        "value": None,
        "rows": [0, 1, 2],
        "nested": [{"nan": None}],
    }
    write_report(tmp_path, report)
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == [0, 1, 2]
