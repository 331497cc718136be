"""A compiler launcher: takes an object of another build where compiling would give the same.

    python reuse_objects.py KNOWN_BUILD COMPILER ARGUMENTS...

KNOWN_BUILD is a CMake build folder with compile_commands.json. The compiler lists what the source
includes, in its own tree: so a header that is missing there is an error as ever. If the other build
compiled the same file with the same compiler and options, every file of both trees has equal bytes
and the object is newer than its sources, the object is copied; in every other case the compiler
runs. Only the paths in messages differ then.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

DEPENDENCY_FILES = ("-MF", "-MT", "-MQ")  # each with a value
DEPENDENCIES = ("-MD", "-MMD")


def option_value(words: list[str], option: str) -> str:
    """What follows an option; "" without it."""
    return words[words.index(option) + 1] if option in words else ""


def without(words: list[str], with_value: tuple[str, ...], alone: tuple[str, ...]) -> list[str]:
    """Words without some options."""
    kept, skip = [], False
    for word in words:
        if skip or word in alone:
            skip = False
        elif word in with_value:
            skip = True
        else:
            kept.append(word)
    return kept


def plain(words: list[str], source: Path, build: Path) -> list[str]:
    """A command as it would be in any source and build folder."""
    kept = without(words, DEPENDENCY_FILES, DEPENDENCIES)
    sources = str(source / "cuda")  # a virtual environment may lie beside it
    return [word.replace(str(build), "<build>").replace(sources, "<cuda>") for word in kept]


def dependencies(words: list[str], folder: Path) -> list[Path] | None:
    """Source and headers, as the compiler finds them; None if it does not."""
    command = without(words, (*DEPENDENCY_FILES, "-o"), (*DEPENDENCIES, "-c"))
    done = subprocess.run([*command, "-M"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    names = done.stdout.replace("\\\n", " ").split(":", 1)[1].split()
    return [folder / name for name in names]


def source_root(build: Path) -> Path:
    """Source folder of a CMake build."""
    lines = (build / "CMakeCache.txt").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("CMAKE_HOME_DIRECTORY:")]
    return Path(found.partition("=")[2])


def reusable(known: Path, words: list[str], build: Path) -> Path | None:
    """Object of another build that this command would make again; None without one.

    Args:
        known: folder of that build.
        words: command, the compiler first.
        build: folder of this build, where the command runs.
    """
    if not (known / "compile_commands.json").is_file() or "-c" not in words:
        return None
    here, there = (source_root(build), build), (source_root(known), known)
    mine = plain(words, *here)
    for entry in json.loads((known / "compile_commands.json").read_text()):
        command = entry["command"].split()
        if plain(command, *there) == mine:
            made, needed = known / option_value(command, "-o"), dependencies(words, build)
            if needed is None or not made.is_file():
                return None
            same = all(is_same(file, counterpart(file, here, there), made) for file in needed)
            return made if same else None
    return None


def counterpart(file: Path, here: tuple[Path, Path], there: tuple[Path, Path]) -> Path:
    """The same file of the other build or source tree; files of neither are their own."""
    for own, other in zip(reversed(here), reversed(there), strict=True):  # the build first
        if file.is_relative_to(own):
            return other / file.relative_to(own)
    return file


def is_same(file: Path, twin: Path, made: Path) -> bool:
    """Whether both have the same bytes, and the object was made after its own one."""
    if not twin.is_file() or twin.stat().st_mtime > made.stat().st_mtime:
        return False
    return file == twin or file.read_bytes() == twin.read_bytes()


def main() -> int:
    """Copies or compiles."""
    known, words = Path(sys.argv[1]), sys.argv[2:]
    found = None
    if (Path.cwd() / "CMakeCache.txt").is_file():
        found = reusable(known, words, Path.cwd())
    if found is None:
        return subprocess.run(words).returncode
    shutil.copyfile(found, option_value(words, "-o"))
    print("reused", found)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
