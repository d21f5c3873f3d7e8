"""Logging: format, deduplication, settings and their errors, tracing. What is set up once a process has one of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEADER = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[case\.py:\d+\] "


@pytest.fixture
def run_case(tmp_path: Path):
    """Runs a script that has `logger`, with variables set; returns what came out."""

    def run(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "case.py"
        script.write_text(f"from quire.logger import init_logger\nlogger = init_logger('quire.case')\n{body}\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        return subprocess.run(
            [sys.executable, str(script)], env={**clean, **variables}, capture_output=True, text=True, check=False
        )

    return run


def test_a_line_goes_to_stdout_in_the_given_format(run_case) -> None:
    done = run_case("logger.info('hello %s', 'you')")
    assert re.fullmatch(HEADER + "hello you\n", done.stdout)
    assert done.stderr == ""


def test_every_line_of_a_message_has_the_prefix(run_case) -> None:
    done = run_case("logger.info('1\\n2\\n\\n3')", QUIRE_LOGGING_PREFIX="[node 7] ")
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(re.match(r"\[node 7\] " + HEADER, line) for line in lines)
    assert [line[-1] for line in lines] == ["1", "2", " ", "3"]


def test_a_traceback_has_the_prefix_on_every_line(run_case) -> None:
    done = run_case("try:\n    1 / 0\nexcept ZeroDivisionError:\n    logger.exception('failed')")
    lines = done.stdout.splitlines()
    assert len(lines) > 3 and all(line.startswith("ERROR ") for line in lines)
    assert lines[-1].endswith("ZeroDivisionError: division by zero")


def test_the_level_comes_from_the_environment(run_case) -> None:
    body = "logger.debug('d'); logger.info('i'); logger.warning('w')"
    assert len(run_case(body).stdout.splitlines()) == 2
    assert len(run_case(body, QUIRE_LOGGING_LEVEL="debug").stdout.splitlines()) == 3
    assert len(run_case(body, QUIRE_LOGGING_LEVEL="WARNING").stdout.splitlines()) == 1


def test_once_methods_speak_once_for_each_message_and_arguments(run_case) -> None:
    body = (
        "for _ in range(3):\n"
        "    logger.warning_once('a %s', 1); logger.warning_once('a %s', [2]); logger.info_once('a %s', 1)\n"
        "    logger.debug_once('hidden')"
    )
    lines = run_case(body).stdout.splitlines()
    assert [line.split()[0] + line[-3:] for line in lines] == ["WARNINGa 1", "WARNING[2]", "INFOa 1"]


def test_once_methods_name_the_callers_line(run_case) -> None:
    done = run_case("def deep():\n    logger.warning_once('here')\n\ndeep()")
    assert "[case.py:4] here" in done.stdout


def test_nothing_reaches_the_root_logger(run_case) -> None:
    done = run_case("import logging\nlogging.basicConfig(format='ROOT %(message)s')\nlogger.warning('mine')")
    assert done.stdout.count("mine") == 1
    assert "ROOT" not in done.stderr


def test_the_stream_can_be_stderr(run_case) -> None:
    done = run_case("logger.info('x')", QUIRE_LOGGING_STREAM="stderr")
    assert done.stdout == "" and done.stderr.endswith("x\n")


def test_the_process_label_and_rank_are_part_of_the_prefix(run_case) -> None:
    done = run_case("from quire.logger import set_process_label\nset_process_label('Worker', 3)\nlogger.info('x')")
    assert re.match(r"\(Worker rank=3 pid=\d+\) INFO ", done.stdout)


def test_json_lines_hold_what_text_lines_say(run_case) -> None:
    body = (
        "from quire.logger import set_process_label\nset_process_label('EngineCore')\nlogger.info('a\\nb %d', 1)\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logger.exception('bad')"
    )
    done = run_case(body, QUIRE_LOGGING_FORMAT="json", QUIRE_LOGGING_PREFIX="p")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["message"] == "a\nb 1" and first["level"] == "INFO" and first["file"] == "case.py"
    assert first["process"].startswith("EngineCore") and first["prefix"] == "p" and first["logger"] == "quire.case"
    assert "ZeroDivisionError" in second["exception"]


def test_logging_can_be_left_alone(run_case) -> None:
    done = run_case("logger.info('quiet')\nlogger.warning('loud')", QUIRE_CONFIGURE_LOGGING="0")
    assert done.stdout == "" and done.stderr == "loud\n"


def test_a_configuration_file_takes_over(run_case, tmp_path: Path) -> None:
    path = tmp_path / "logging.json"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"f": {"format": "MINE %(message)s"}},
                "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": "ext://sys.stdout"}},
                "loggers": {"quire": {"handlers": ["h"], "level": "DEBUG"}},
            }
        )
    )
    done = run_case("logger.debug('x')", QUIRE_LOGGING_CONFIG_PATH=str(path))
    assert done.stdout == "MINE x\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist"),
        ("[1]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
        ('{"version": 9}', "is not a logging configuration"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_named(run_case, tmp_path: Path, content, problem: str) -> None:
    path = tmp_path / "logging.json"
    if content is not None:
        path.write_text(content)
    done = run_case("", QUIRE_LOGGING_CONFIG_PATH=str(path))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("quire.errors.ConfigError")
    assert "QUIRE_LOGGING_CONFIG_PATH" in last and str(path) in last and problem in last


def test_a_path_given_while_configuring_is_off_names_both_variables(run_case) -> None:
    done = run_case("", QUIRE_LOGGING_CONFIG_PATH="x.json", QUIRE_CONFIGURE_LOGGING="0")
    last = done.stderr.strip().splitlines()[-1]
    assert "QUIRE_LOGGING_CONFIG_PATH" in last and "QUIRE_CONFIGURE_LOGGING" in last


def test_an_unknown_level_lists_the_levels(run_case) -> None:
    done = run_case("", QUIRE_LOGGING_LEVEL="chatty")
    assert "QUIRE_LOGGING_LEVEL='chatty'" in done.stderr and "DEBUG, INFO, WARNING" in done.stderr


def test_tracing_writes_calls_and_returns_with_their_callers_and_warns(run_case, tmp_path: Path) -> None:
    trace = tmp_path / "trace.log"
    body = (
        "from quire.logger import enable_trace_function_call\n"
        f"enable_trace_function_call({str(trace)!r}, {str(tmp_path)!r})\n"
        "def inner(): return 1\n"
        "def outer(): return inner()\n"
        "outer()"
    )
    done = run_case(body)
    assert "WARNING" in done.stdout and "slow" in done.stdout and str(trace) in done.stdout
    lines = trace.read_text().splitlines()
    assert [re.sub(r"^\S+ \S+ | in \S+", "", line) for line in lines] == [
        "Call to outer from <module>",
        "Call to inner from outer",
        "Return from inner to outer",
        "Return from outer to <module>",
    ]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ Call to outer in \S+case\.py:6 ", lines[0])
    assert done.returncode == 0 and done.stderr == ""


def test_tracing_is_asked_for_by_the_environment_and_is_for_one_thread(run_case, tmp_path: Path) -> None:
    body = (
        "import threading\nfrom quire import envs\nfrom quire.logger import trace_this_thread_if_asked\n"
        "path = trace_this_thread_if_asked('abc')\n"
        "threading.Thread(target=envs.is_set, args=('X',)).start()\n"
        "envs.unknown_variables()\nprint(path)"
    )
    done = run_case(body, QUIRE_TRACE_FUNCTION="1", TMPDIR=str(tmp_path))
    path = Path(done.stdout.strip().splitlines()[-1])
    assert path.is_relative_to(tmp_path) and "abc" in str(path)
    text = path.read_text()
    assert "Call to unknown_variables" in text and "is_set" not in text
    assert run_case(body).stdout.strip() == "None"


def test_the_form_of_lines_can_be_chosen_late_and_children_hear_of_it(run_case) -> None:
    done = run_case(
        "import os\n"
        "from quire.logger import use_log_format\n"
        "logger.info('before')\n"
        "use_log_format('json')\n"
        "logger.info('after %d', 2, extra={'fields': {'tokens': 7}})\n"
        "print(os.environ['QUIRE_LOGGING_FORMAT'])\n"
    )
    before, after, told = done.stdout.splitlines()
    assert before.startswith("INFO") and told == "json"
    entry = json.loads(after)
    assert (entry["message"], entry["tokens"], entry["level"]) == ("after 2", 7, "INFO")
