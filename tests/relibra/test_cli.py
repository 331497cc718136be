"""The command line: help, exit codes, and what it must not import."""

import subprocess
import sys

import pytest

from relibra.cli import main

COMMANDS = ("plan", "check", "doctor", "demo")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_has_examples_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"relibra {command[0] if command else 'plan'}" in text
    assert "exit codes: 0" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unheard-of"],
        ["plan"],
        ["plan", "t.npz", "--nodes", "0", "--ranks-per-node", "8"],
        ["plan", "t.npz", "--nodes", "x", "--ranks-per-node", "8"],
        ["check", "t.json", "--moe-layers", "5-1"],
        ["check", "t.json", "--format", "vllm"],
        ["doctor", "--fast"],
    ],
)
def test_bad_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("relibra 0.")


def test_the_module_is_the_command_and_a_closed_pipe_is_no_error():
    script = "import sys; from relibra.cli import main; sys.exit(main(['doctor', '--json']))"
    command = f'{sys.executable} -c "{script}" | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")
    done = subprocess.run(
        [sys.executable, "-m", "relibra", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout[:8]) == (0, "relibra ")


def test_importing_relibra_stays_light():
    script = (
        "import sys, relibra, relibra.cli; relibra.cli.build_parser(); "
        "print({'transformers', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_sizes_that_fit_no_memory_are_an_error_line(monkeypatch, capsys):
    from relibra import cli, cli_plan

    def greedy(args):
        raise MemoryError("Unable to allocate 128 GiB")

    monkeypatch.setattr(cli_plan, "run", greedy)
    assert cli.main(["plan", "x.npz", "--nodes", "1", "--ranks-per-node", "2"]) == 2
    assert "sizes too large for memory: Unable to allocate 128 GiB" in capsys.readouterr().err
