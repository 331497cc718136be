"""Rules on the text of the project's files: what a reader, a machine or a release must not meet."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = {".py", ".pyi"}
CPP = {".cpp", ".hpp", ".h", ".cu", ".cuh"}
TEXT = PYTHON | CPP | {".md", ".toml", ".txt", ".in", ".cmake", ".yml", ".yaml", ""}

MAX_LINES = 400
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60  # without its docstring
MAX_KERNEL_LINES = 120  # a function under @triton.jit

MACHINE_PATH = re.compile(r"(?<![\w.$}>-])/(?:work|root|home|tmp|opt|mnt|scratch)/[\w.]")
REGISTRY_HOST = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org", re.I)
LEFT_OVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|Not[I]mplementedError)\b")
CPP_STOP = re.compile(r"(?<![\w.>])(?:assert|(?:std::)?exit|std::abort)\s*\(")


def project_files() -> list[str]:
    """Files of the checkout that git does not ignore; links are left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.split("\0")
    else:  # an unpacked source archive
        skipped = {"build", "__pycache__"}
        names = []
        for folder, folders, found in os.walk(ROOT):
            folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
            names += [os.path.relpath(Path(folder) / name, ROOT) for name in found]
    paths = [ROOT / name for name in sorted(set(names)) if name]
    return [str(p.relative_to(ROOT)) for p in paths if p.is_file() and not p.is_symlink()]


def suffix_of(file: str) -> str:
    return Path(file).suffix


def check_text(file: str, text: str) -> list[str]:
    """Rules for every text file."""
    found = []
    suffix = suffix_of(file)
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{file}:{number}"
        if match := MACHINE_PATH.search(line):
            found.append(f"{where}: path of a machine: {match[0]}")
        if match := REGISTRY_HOST.search(line):
            found.append(f"{where}: host of a registry: {match[0]}")
        if match := LEFT_OVER.search(line):
            found.append(f"{where}: left over: {match[0]}")
        if line != line.rstrip():
            found.append(f"{where}: space or carriage return at the end of the line")
        if suffix in PYTHON | CPP and len(line) > MAX_COLUMNS:
            found.append(f"{where}: {len(line)} columns, limit {MAX_COLUMNS}")
        if suffix in CPP and not file.startswith("cuda/tests/") and CPP_STOP.search(line):
            found.append(f"{where}: native code returns or throws its errors")
    if text and not text.endswith("\n"):
        found.append(f"{file}: no newline at the end")
    if suffix in PYTHON | CPP and text.count("\n") > MAX_LINES:
        found.append(f"{file}: {text.count(chr(10))} lines, limit {MAX_LINES}")
    return found


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def check_function(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_kernel = any("triton.jit" in text for text in decorators)
    limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
    found = []
    if (lines := code_lines(node)) > limit:
        found.append(f"{file}:{node.lineno}: {node.name} has {lines} lines, limit {limit}")
    if any(re.match(r"(triton\.)?autotune\b", text) for text in decorators):
        found.append(f"{file}:{node.lineno}: {node.name} is autotuned; use a row in configs.py")
    return found


def loads_pickles(call: ast.Call) -> bool:
    """Whether a call is torch.load without weights_only=True."""
    safe = any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value
        for word in call.keywords
    )
    return ast.unparse(call.func) == "torch.load" and not safe


def check_python(file: str, text: str) -> list[str]:
    """Rules that need the syntax tree."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += check_function(file, node)
        elif isinstance(node, ast.Call) and loads_pickles(node):
            found.append(f"{file}:{node.lineno}: torch.load without weights_only=True")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if {"pickle", "cloudpickle", "dill"} & {name.split(".")[0] for name in names}:
                found.append(f"{file}:{node.lineno}: pickle runs code of whoever wrote the file")
    return found


def check(file: str, text: str) -> list[str]:
    return check_text(file, text) + (check_python(file, text) if suffix_of(file) == ".py" else [])


def test_project_files_keep_the_rules() -> None:
    files = [name for name in project_files() if suffix_of(name) in TEXT and name != "LICENSE"]
    assert len(files) > 5
    found = []
    for file in files:
        found += check(file, (ROOT / file).read_bytes().decode("utf-8"))
    assert not found, "\n" + "\n".join(found)


BODY = "\n".join(f"    x = {i}" for i in range(60))


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("a.md", "see /" + "work/data\n", "path of a machine"),
        ("a.py", "x = '/" + "tmp/file'\n", "path of a machine"),
        ("a.md", "https://pypi" + ".org/simple\n", "host of a registry"),
        ("a.cpp", "// TO" + "DO later\n", "left over"),
        ("a.py", "raise NotImplemented" + "Error\n", "left over"),
        ("a.md", "text \n", "end of the line"),
        ("a.md", "text\r\n", "end of the line"),
        ("a.md", "text", "no newline"),
        ("a.cu", "x" * 101 + "\n", "101 columns"),
        ("a.hpp", "\n" * 401, "401 lines"),
        ("cuda/planner/a.cpp", "  assert(x > 0);\n", "returns or throws"),
        ("cuda/planner/a.cpp", "  std::exit(1);\n", "returns or throws"),
        ("a.py", f"def f():\n{BODY}\n", "f has 61 lines"),
        ("a.py", "@triton.autotune([], [])\n@triton.jit\ndef f(): ...\n", "is autotuned"),
        ("a.py", "import pickle\n", "pickle"),
        ("a.py", "from pickle import load\n", "pickle"),
        ("a.py", "torch.load(path)\n", "weights_only"),
        ("a.py", "torch.load(path, weights_only=False)\n", "weights_only"),
    ],
)
def test_a_broken_rule_is_found(file: str, text: str, expected: str) -> None:
    assert any(expected in message for message in check(file, text))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", f"@triton.jit\ndef f():\n{BODY}\n"),
        ("a.py", 'def f():\n    """A.\n' + "\n" * 70 + '    """\n'),
        ("a.py", "torch.load(path, weights_only=True)\n"),
        ("cuda/planner/a.cpp", "static_assert(sizeof(int) == 4);\n"),
        ("a.md", "https://example.com/home/page, ../shared/, a/tmp/b\n"),
    ],
)
def test_what_the_rules_allow(file: str, text: str) -> None:
    assert check(file, text) == []
