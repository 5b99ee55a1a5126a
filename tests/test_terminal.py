"""`llmc run` and `llmc chat` over pipes, and whatever else a terminal can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from families import save_checkpoint, save_word_tokenizer, tiny_model

from llmc.errors import UserError
from llmc.run import Session, run_chat
from llmc.runtime.config import LoadOptions
from llmc.runtime.plan import Plan
from llmc.terminal import checked_text

TEMPLATE = "{% for m in messages %}w{{ m.role | length }} {{ m.content }} {% endfor %}w9"
"""Each message is its role's length and its words: "user" is w4, "assistant" w9, "system" w6."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokenizer knows the words w0 … w210, with a chat template."""
    path = save_checkpoint(tiny_model("llama"), tmp_path_factory.mktemp("terminal") / "tiny")
    save_word_tokenizer(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    output = path.parent / "tiny.plan"
    command = [sys.executable, "-m", "llmc.cli", "build", str(path), "--fp32", "--no-eval", "--target", "native"]
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def start(*arguments: str | os.PathLike[str], stdin: int = subprocess.PIPE, **env: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llmc.cli", *map(os.fsencode, arguments)]
    pipe = subprocess.PIPE
    # A shell's background jobs ignore SIGINT, and so would what these tests start: it would wait for ever.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, env=os.environ | env, preexec_fn=heed)


FLAGS = ("--temperature", "0", "--max-tokens", "6")


def test_a_prompt_from_standard_input_is_the_same_prompt(plan: Path) -> None:
    given, _ = start("run", plan, "w5 w6", *FLAGS).communicate()
    for arguments in ((plan, "-"), (plan,)):
        out, err = start("run", *arguments, *FLAGS).communicate(b"w5 w6\n")
        assert out == given and b"tokens/s" in err and out.strip()


@pytest.mark.parametrize(("data", "words"), [(b"w5 \xff", b"not UTF-8: byte 3 is 0xff"), (b"", b"prompt")])
def test_input_that_is_no_prompt_is_one_line(plan: Path, data: bytes, words: bytes) -> None:
    process = start("run", plan, "-", "--raw", *FLAGS)
    _, err = process.communicate(data)
    assert process.returncode == 2 and words in err and b"Traceback" not in err


def test_an_argument_that_is_not_utf_8_is_one_line(plan: Path) -> None:
    process = start("run", plan, os.fsdecode(b"w5 \xff\xfe"), *FLAGS)
    _, err = process.communicate()
    assert process.returncode == 2 and b"the prompt is not UTF-8" in err and b"Traceback" not in err
    with pytest.raises(UserError, match="--system is not UTF-8"):
        checked_text("\udcff", "--system")


def test_a_closed_output_ends_quietly(plan: Path) -> None:
    process = start("run", plan, "w5", "--temperature", "0", "--max-tokens", "100")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 128 + signal.SIGPIPE
    assert b"Traceback" not in err and b"BrokenPipe" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_is_one_line(plan: Path) -> None:
    command = [sys.executable, "-m", "llmc.cli", "run", str(plan), "w5", *FLAGS]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"standard output cannot be written: No space left" in done.stderr
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_an_ascii_terminal_gets_question_marks() -> None:
    script = "from llmc.terminal import write; write('a\\u00e9b\\u4e2d\\n')"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env)
    assert done.stdout == b"a?b?\n" and done.returncode == 0, done.stderr


# ---- chat


def dialogue(plan: Path, lines: list[str], system: str | None = None) -> tuple[list[str], list[list[int]]]:
    """What was said besides answers, and the prompts that reached the engine."""
    session = Session(Plan.open(plan), LoadOptions(max_num_seqs=1, threads=1), 4, None, {"temperature": 0})
    prompts: list[list[int]] = []
    answer = session.answer

    def answering(ids: list[int]) -> object:
        prompts.append(ids)
        return answer(ids)

    session.answer = answering  # type: ignore[method-assign, assignment]
    said: list[str] = []
    waiting: Iterator[str] = iter(lines)
    run_chat(session, system, lambda: next(waiting, None), said.append)
    return said, prompts


def test_a_turn_holds_all_turns_before_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, prompts = dialogue(plan, ["w5", "", "w6"], system="w7")
    answers = capsys.readouterr().out.splitlines()
    assert len(prompts) == 2 == len(answers) and answers[0].strip()
    first = [6, 7, 4, 5, 9]
    assert prompts[0] == first
    words = [int(word[1:]) for word in answers[0].split()]
    assert prompts[1] == [*first[:-1], 9, *words, 4, 6, 9]


def test_reset_forgets_and_exit_ends(plan: Path) -> None:
    said, prompts = dialogue(plan, ["w5", "/reset", "w6", "/what", "/exit", "w8"])
    assert prompts == [[4, 5, 9], [4, 6, 9]]
    assert "forgotten" in said[1] and "/reset" in said[2] and len(said) == 3


def test_a_turn_that_does_not_fit_is_said_and_left_out(plan: Path) -> None:
    said, prompts = dialogue(plan, [" ".join(["w1"] * 200), "w6"])
    assert "128" in said[1] and "/reset" in said[1] and prompts[-1] == [4, 6, 9]


def test_ctrl_c_stops_the_answer_and_not_the_program(plan: Path) -> None:
    process = start("chat", plan, "--temperature", "0", "--max-tokens", "120", "--threads", "1")
    assert process.stdin is not None and process.stderr is not None and process.stdout is not None
    assert b"/reset" in process.stderr.readline()
    time.sleep(0.3)  # it waits for a line
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"\n" and process.poll() is None
    process.stdin.write(b"w5\n")
    process.stdin.flush()
    assert process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in process.stderr.read()
