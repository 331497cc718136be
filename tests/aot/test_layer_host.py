"""The host's time of a layer is measured without a device."""

import itertools
import json
import subprocess
import sys


def test_the_host_of_a_layer_is_timed_by_part(project_root, compiling_env, tmp_path):
    out = tmp_path / "host.json"
    script = [sys.executable, str(project_root / "perf/bench_moe_layer.py"), "--host"]
    options = ["--rounds", "1", "--ranks", "1", "2", "--json", str(out)]
    done = subprocess.run([*script, *options], env=compiling_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("us of the host at least") == 4
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(line["case"], line["name"]) for line in lines]
    assert found == list(itertools.product(("1 rank", "2 ranks"), ("forward", "backward")))
    both = {"launches", "checks of ops", "replicas", "dispatch", "combine", "use and order"}
    own = {
        "forward": {"tables", "checks of arguments", "CPU bodies of table kernels"},
        "backward": {"weight gradients"},
    }
    for line in lines:
        assert 0 < line["least_us"] <= line["median_us"]
        parts = line["parts_us"] | line["not_counted_us"]
        wire = {"exchanges over gloo"} if line["case"] == "2 ranks" else set()
        assert set(parts) == both | own[line["name"]] | wire | {"the rest"}
        assert all(us > 0 for us in parts.values())
