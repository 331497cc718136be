"""The command line: help, exit codes, and what it must not import."""

import subprocess
import sys
import tokenize

import pytest

from relibra.cli import main

COMMANDS = ("plan", "simulate", "check", "doctor", "demo")


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
        ["check", "t.json", "--moe-layers", "1-"],
        ["check", "t.json", "--moe-layers", "-3"],
        ["check", "t.json", "--moe-layers", "1,"],
        ["check", "t.json", "--moe-layers", "1_0"],
        ["check", "t.json", "--moe-layers", "0-99999999999"],
        ["check", "t.json", "--moe-layers", "4096"],
        ["check", "t.json", "--moe-layers", ",".join(["0-4095"] * 100)],
        ["check", "t.json", "--moe-layers", "9" * 5000],
        ["check", "t.json", "--top-k", "9" * 5000],
        ["check", "t.json", "--format", "vllm"],
        ["doctor", "--fast"],
    ],
)
def test_bad_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert len(lines := capsys.readouterr().err.splitlines()) < 20
    assert "error:" in lines[-1]
    assert len(lines[-1]) < 300


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "need more memory than there is (`relibra --debug check ...` shows where)"),
        (MemoryError("Unable to allocate"), "need more memory than there is: Unable to allocate ("),
        (tokenize.TokenError("EOF", (2, 0)), "TokenError: ('EOF', (2, 0)) (`relibra --debug"),
        (RecursionError("too deep"), "RecursionError: too deep (`relibra --debug check"),
        (OverflowError("too large"), "OverflowError: too large (`relibra --debug check"),
        (KeyError("x"), "KeyError: 'x' (`relibra --debug check"),
        (AssertionError(), "AssertionError (`relibra --debug check"),
        (ValueError("first\nsecond"), "first second\n"),
        (OSError("gone"), "gone\n"),
    ],
)
def test_any_error_is_one_line_and_2(error, message, capsys, monkeypatch, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setattr("relibra.cli_check._read", fail)
    (tmp_path / "t.json").write_text("{}")
    assert main(["check", str(tmp_path / "t.json")]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"relibra check: error: {message}")
    assert text.count("\n") == 1
    assert main(["--debug", "check", str(tmp_path / "t.json")]) == 2
    debug = capsys.readouterr().err
    assert "Traceback" in debug
    assert debug.endswith(text)


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
