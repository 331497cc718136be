import io

from relibra.demo.table import STEP_COLUMNS, STEP_LEGEND, LiveTable, step_cells


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(stream, healthy, **options):
    table = LiveTable(STEP_COLUMNS, 3, stream=stream, **options)
    with table.open(STEP_LEGEND) as open_table:
        for step in range(3):
            open_table.add(step_cells(healthy), good=step != 1)
    return stream.getvalue()


def test_plain_lines_without_a_terminal(healthy):
    text = printed(io.StringIO(), healthy)
    header, *rows = text.splitlines()[-4:]
    assert header.split("  ")[-1].strip() == "d logp"
    assert "1.600 -> 1.050" in rows[0]
    assert "12 (5)" in rows[0]
    assert {len(line) for line in (header, *rows)} == {len(header)}
    assert "\x1b" not in text
    assert "\r" not in text


def test_progress_bar_on_a_terminal_only(healthy, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    text = printed(Terminal(), healthy)
    assert "training" in text
    assert "3/3" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert "\x1b[1;31mtraining" not in text  # the colour of a bad row stays in the row
    assert text.count("1.600 -> 1.050") == 3


def test_quiet_prints_nothing(healthy):
    assert printed(io.StringIO(), healthy, quiet=True) == ""


def test_only_times_may_differ_between_equal_runs(healthy):
    assert [column.title for column in STEP_COLUMNS if column.is_time] == ["plan ms"]
    assert len(step_cells(healthy)) == len(STEP_COLUMNS)
