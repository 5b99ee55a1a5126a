"""llmc/cli.py: every command on good and bad input; a mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from families import VOCAB, save_checkpoint, save_word_tokenizer, tiny_model

from llmc import build as compiler
from llmc.cli import main, size
from llmc.codegen.plan_writer import PlanWriter

COMMANDS = ("build", "serve", "run", "bench", "inspect", "verify")


def llmc(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def refused(result: Any, *words: str) -> str:
    """The one line that says what is wrong."""
    assert result.exit_code == 2, (result.output, result.exception)
    errors = [line for line in result.stderr.splitlines() if line.startswith("llmc: error: ")]
    assert len(errors) == 1 and result.stderr.splitlines()[-1] == errors[0], result.stderr
    assert "Traceback" not in result.stderr and all(word in errors[0] for word in words), errors
    return errors[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokenizer knows the words w0 … w210."""
    path = save_checkpoint(tiny_model("llama"), tmp_path_factory.mktemp("cli") / "tiny")
    save_word_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    path = checkpoint.parent / "text.txt"
    path.write_text(" ".join(f"w{i * i % VOCAB}" for i in range(60)))
    return path


@pytest.fixture(scope="module")
def plan(checkpoint: Path, text: Path) -> Path:
    path = checkpoint.parent / "tiny.plan"
    result = llmc("build", checkpoint, "--fp32", "--target", "native", "--eval-text", text, "-o", path, "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["file_size"] == path.stat().st_size and made["peak_memory"] > 0
    assert made["accuracy"]["tokens"] == 60 and abs(made["accuracy"]["mean_kl"]) < 1e-6
    return path


# ---- parsing


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help(command: tuple[str, ...]) -> None:
    result = llmc(*command, "--help")
    assert result.exit_code == 0 and result.stdout.startswith("Usage: ")
    assert all(name in result.stdout for name in (COMMANDS if not command else ("-h, --help",)))
    assert llmc(*command, "-h").stdout == result.stdout


def test_the_flags_that_are_promised() -> None:
    promised = {
        "build": "int8 int4 bf16 fp32 target max-model-len check-passes dump-ir eval-text max-kl json output sha256",
        "serve": "host port max-model-len max-num-seqs max-num-batched-tokens kv-cache-memory threads api-key "
        "served-model-name",
        "run": "raw max-tokens temperature seed",
        "chat": "system max-tokens temperature seed threads",
        "bench": "input-len batch-size context-len output-len threads profile output-json plot",
        "inspect": "json",
    }
    for command, flags in promised.items():
        shown = llmc(command, "--help").stdout
        assert [f for f in flags.split() if f"--{f}" not in shown] == []


def test_version() -> None:
    assert "0.1.0" in llmc("--version").stdout


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-command",), ("build",), ("run",), ("chat",), ("serve",), ("inspect",), ("verify", "a", "b"),
        ("build", "x", "--no-such-flag"), ("build", "x", "--max-model-len", "many"),
        ("build", "x", "--max-kl", "small"), ("serve", "x", "--port", "http"), ("serve", "x", "--threads", "1.5"),
        ("serve", "x", "--drain-timeout", "nan"), ("serve", "x", "--drain-timeout", "inf"),
        ("serve", "x", "--drain-timeout", "-1"),
        ("serve", "x", "--kv-cache-memory", "lots"), ("serve", "x", "--kv-cache-memory", "-1"),
        ("run", "x", "hello", "--temperature", "hot"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_with_usage(args: tuple[str, ...]) -> None:
    result = llmc(*args)
    assert result.exit_code == 2 and "Usage: " in result.stderr and "\nError: " in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("0", 0), ("17", 17), ("1k", 1024), ("512M", 512 << 20), ("4GiB", 4 << 30), ("4 gb", 4 << 30),
        ("1.5G", 3 << 29), ("2T", 2 << 40), (" 3m ", 3 << 20), ("1073741824", 1 << 30),
        ("7b", 7), ("9" * 28, int("9" * 28)),
    ],
)  # fmt: skip
def test_sizes(written: str, meant: int) -> None:
    assert size(written) == meant


@pytest.mark.parametrize("written", ["", "M", "-1", "1.", ".5G", "1e9", "4GG", "0x10", "four", "1 2", "9" * 400 + "x"])
def test_what_is_no_size(written: str) -> None:
    with pytest.raises(Exception, match="not a size such as 512M or 4GiB"):
        size(written)


def test_a_size_beyond_all_memory_is_still_a_number() -> None:
    assert size("9" * 400 + "T") > 10**400


# ---- help


def test_help_is_in_whole_sentences() -> None:
    text = " ".join(llmc("--help").stdout.partition("Commands:")[2].split())
    assert "..." not in text and len(main.commands) > 6
    for name, command in main.commands.items():
        sentence = " ".join((command.help or "").split("\n\n")[0].split())
        assert f"{name} {sentence}" in text and sentence.endswith(".")
        for param in command.params:
            help_text = getattr(param, "help", None)
            assert help_text or param.param_type_name == "argument" or name == "bench", (name, param.name)


def test_precisions_are_one_choice() -> None:
    shown = llmc("build", "--help").stdout.partition("Precision, one of:\n")[2].partition("\nOptions:\n")
    assert [line.split()[0] for line in shown[0].splitlines() if line.strip().startswith("--")] == [
        "--int8", "--int4", "--bf16", "--fp32"
    ]  # fmt: skip
    assert "--target" in shown[2] and "--int8 " not in shown[2]


# ---- build


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], {"precision": None, "as_stored": None, "evaluate": True, "targets": (), "check_passes": False,
              "max_kl": None}),
        (["--as-stored", "--bf16"], {"precision": "bf16", "as_stored": True}),
        (["--no-as-stored"], {"precision": None, "as_stored": False}),
        (["--int8"], {"precision": "int8"}), (["--int4"], {"precision": "int4"}), (["--bf16"], {"precision": "bf16"}),
        (["--fp32"], {"precision": "fp32"}), (["--no-eval"], {"evaluate": False}),
        (["--max-kl", "0.5"], {"max_kl": 0.5}),
        (["--target", "native", "--target", "cpu:x86-64"], {"targets": ("native", "cpu:x86-64")}),
        (["--check-passes", "--dump-ir", "ir"], {"check_passes": True, "dump_ir": Path("ir")}),
        (["--max-model-len", "64", "--sha256", "ab", "--revision", "main", "--cxx", "g++", "--eval-text", "t"],
         {"max_model_len": 64, "sha256": "ab", "revision": "main", "cxx": "g++", "eval_text": Path("t")}),
    ],
)  # fmt: skip
def test_flags_reach_the_build(monkeypatch: Any, flags: list[str], wanted: dict[str, Any]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(compiler, "build", lambda *args: seen.append(args) or {})
    assert llmc("build", "some/model", "--json", *flags).exit_code == 0
    ((model, output, options, _),) = seen
    assert (model, output) == ("some/model", Path("engine.plan"))
    assert {name: getattr(options, name) for name in wanted} == wanted


def test_build_without_the_extra_says_how_to_get_it(tmp_path: Path) -> None:
    script = "import sys\nsys.modules['torch'] = None\nfrom llmc.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, "build", str(tmp_path), "-o", str(tmp_path / "x.plan")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "llmc: error: building needs the package torch: pip install 'llmc[build]'\n"
    assert list(tmp_path.iterdir()) == []


_REFUSALS = """
import sys
from click.testing import CliRunner
from llmc.cli import main
for model in sys.argv[1:]:
    result = CliRunner().invoke(main, ["build", model, "-o", "x.plan"])
    print(result.exit_code, result.stderr.strip())
print("torch" in sys.modules)
"""


def test_a_bad_model_is_refused_before_torch_is_imported(checkpoint: Path, tmp_path: Path) -> None:
    """Which takes seconds."""
    config = (checkpoint / "config.json").read_text()
    weights = (checkpoint / "model.safetensors").read_bytes()
    spoilt: dict[str, tuple[str, str | bytes, str]] = {
        "json": ("config.json", "{", "is not valid JSON"),
        "type": ("config.json", "{}", "no model_type"),
        "number": ("config.json", json.dumps(json.loads(config) | {"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        "names": ("config.json", '{"model_type": "llama", "to_dict": 1, "head_dim": -1}', "head_dim is -1"),
        "short": ("model.safetensors", weights[:-1], "truncated"),
        "tokenizer": ("tokenizer.json", "{}", "is not a valid tokenizer"),
    }
    for name, (file, data, _) in spoilt.items():
        shutil.copytree(checkpoint, tmp_path / name)
        (tmp_path / name / file).write_bytes(data if isinstance(data, bytes) else data.encode())
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text(config)
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    wanted = {name: words for name, (*_, words) in spoilt.items()}
    wanted |= {"x.gguf": "x.gguf", "pickled": "pickle", "none": "no such model", "y.gguf": "no such model"}
    done = subprocess.run(
        [sys.executable, "-c", _REFUSALS, *(str(tmp_path / name) for name in wanted)], capture_output=True, text=True,
    )  # fmt: skip
    *lines, torch_is_loaded = done.stdout.splitlines()
    assert torch_is_loaded == "False" and len(lines) == len(wanted), done.stdout + done.stderr
    for line, (name, words) in zip(lines, wanted.items(), strict=True):
        assert line.startswith("2 llmc: error: ") and name in line and words in line, line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target", "cpu:z80"], ["--target cpu:z80", "known: cpu:x86-64-v4"]),
        (["--max-model-len", "0"], ["--max-model-len 0", "between 1 and", "128"]),
        (["--max-model-len", "129"], ["--max-model-len 129", "128"]),
        (["--no-eval", "--max-kl", "1"], ["--max-kl", "--no-eval"]),
        (["--eval-text", "/no/such/text"], ["--eval-text /no/such/text", "cannot be read"]),
        (["-o", "/no/such/directory/x.plan"], ["/no/such/directory/x.plan", "there is no directory"]),
        (["-o", "/"], ["-o /", "is a directory"]),
        (["--sha256", "0" * 64], ["sha256"]),
        (["--int4"], ["--int4 and --fp32 are different precisions"]),
        (["--max-kl", "nan"], ["--max-kl nan: is not a finite number"]),
        (["--revision", "main"], ["--revision main", "only a hub model has revisions"]),
        (["--dump-ir", __file__], ["--dump-ir", "is not a directory"]),
        (["-o", "-"], ["-o -", "not to standard output"]),
        (["-o", "x" * 300], ["-o xxx", "File name too long"]),
    ],
)  # fmt: skip
def test_bad_values_of_build(checkpoint: Path, tmp_path: Path, flags: list[str], words: list[str]) -> None:
    output = [] if "-o" in flags else ["-o", tmp_path / "x.plan"]
    eval_off = [] if {"--max-kl", "--eval-text"} & set(flags) else ["--no-eval"]
    refused(llmc("build", checkpoint, "--fp32", "--target", "native", *output, *eval_off, *flags), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    refused(llmc("build", tmp_path / "none", "-o", tmp_path / "x.plan"), str(tmp_path / "none"))
    refused(llmc("build", "x" * 300, "-o", tmp_path / "x.plan"), "no such model: 'xxx")
    assert list(tmp_path.iterdir()) == []


def test_a_build_over_the_kl_limit_leaves_the_older_plan(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    path.write_bytes(b"an older plan")
    result = llmc("build", checkpoint, "--target", "native", "--eval-text", text, "--max-kl", "1e-9", "-o", path)
    refused(result, "mean KL", "over --max-kl 1e-09", "no plan was written")
    assert path.read_bytes() == b"an older plan" and list(tmp_path.iterdir()) == [path]


# ---- reading a plan


@pytest.mark.parametrize("command", ["verify", "inspect", "run", "serve"])
def test_a_plan_that_cannot_be_opened(tmp_path: Path, command: str) -> None:
    more = ["hello"] if command == "run" else []
    (tmp_path / "text").write_text("not a plan" * 1000)
    (tmp_path / "empty").write_bytes(b"")
    refused(llmc(command, tmp_path / "none", *more), f"{tmp_path}/none: no such file", "llmc build")
    refused(llmc(command, tmp_path / "text", *more), f"{tmp_path}/text: not an llmc plan")
    refused(llmc(command, tmp_path / "empty", *more), f"{tmp_path}/empty: empty file")
    refused(llmc(command, tmp_path, *more), f"{tmp_path}: cannot be read")


def test_inspect_and_verify(plan: Path) -> None:
    shown, verified = llmc("inspect", plan), llmc("verify", plan)
    assert shown.exit_code == verified.exit_code == 0
    manifest = json.loads(llmc("inspect", plan, "--json").stdout)
    assert verified.stdout == f"{plan}: ok, engine {manifest['engine_id']}\n"
    for words in ("Llama, 2 layers, vocabulary 211, context 128", "precision    fp32", "perplexity", "weights",
                  manifest["engine_id"][:16], "tokenizer.json", "60 tokens of text.txt"):  # fmt: skip
        assert words in shown.stdout
    assert str(plan.parent) not in json.dumps(manifest), "a path of the builder's machine in the plan"


def test_an_altered_plan_is_not_run(plan: Path, tmp_path: Path) -> None:
    data = bytearray(plan.read_bytes())
    data[5000] ^= 1
    (tmp_path / "x.plan").write_bytes(data)
    for command in (["verify"], ["run"], ["serve"]):
        more = ["w1"] if command == ["run"] else []
        refused(llmc(*command, tmp_path / "x.plan", *more), "segment weights was altered")
    assert llmc("inspect", tmp_path / "x.plan").exit_code == 0


def test_a_plan_without_a_tokenizer_is_not_served(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        writer.add("weights", b"x")
        writer.finish({"tokenizer": None})
    refused(llmc("serve", tmp_path / "x.plan"), "no tokenizer")
    refused(llmc("run", tmp_path / "x.plan", "hello"), "no tokenizer")


@pytest.mark.parametrize("key", ["", " ", "a\nb", "\udcff"])
def test_a_key_that_cannot_be_used_is_refused_wherever_it_comes_from(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(llmc("serve", "x.plan", "--api-key", key), "API key")
    monkeypatch.setenv("LLMC_API_KEY", key)
    refused(llmc("serve", "x.plan"), "API key")


# ---- run


def test_run_streams_the_same_answer_whatever_the_threads(plan: Path) -> None:
    first = llmc("run", plan, "w5 w6 w7", "--raw", "--temperature", "0", "--max-tokens", "6", "--threads", "1")
    assert first.exit_code == 0, first.output
    words = first.stdout.split()
    assert 1 <= len(words) <= 6 and all(w.startswith("w") for w in words)
    assert "3 prompt tokens" in first.stderr and "tokens/s" in first.stderr
    again = llmc("run", plan, "w5 w6 w7", "--raw", "--temperature", "0", "--max-tokens", "6", "--threads", "2",
                 "--max-num-batched-tokens", "2", "--kv-cache-memory", "64k")  # fmt: skip
    assert again.stdout == first.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "0"], ["--threads 0", "between 1 and 256"]),
        (["--threads", "257"], ["--threads 257"]),
        (["--max-model-len", "0"], ["--max-model-len 0"]),
        (["--max-model-len", "129"], ["--max-model-len 129", "1 to 128"]),
        (["--kv-cache-memory", "1"], ["--kv-cache-memory 1", "one page takes"]),
        (["--max-num-batched-tokens", "0"], ["max_num_batched_tokens"]),
        (["--max-num-batched-tokens", "-5"], ["max_num_batched_tokens"]),
        (["--max-tokens", "0"], ["max_tokens"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--top-p", "0"], ["top_p"]),
        (["--top-k", "-2"], ["top_k"]),
    ],
)  # fmt: skip
def test_bad_values_of_run(plan: Path, flags: list[str], words: list[str]) -> None:
    refused(llmc("run", plan, "w1 w2", "--raw", *flags), *words)


def test_prompts_that_cannot_be_answered(plan: Path) -> None:
    refused(llmc("run", plan, "", "--raw"), "prompt")
    refused(llmc("run", plan, " ".join(["w1"] * 129), "--raw"), "128")
    assert llmc("run", plan, " ".join(["w1"] * 127), "--raw", "--temperature", "0").exit_code == 0


@pytest.mark.parametrize("command", [["inspect"], ["run", "PLAN", "hello"]])
def test_a_plan_whose_manifest_lacks_fields_is_refused(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "old.plan"
    with PlanWriter(path) as writer:
        writer.add("weights", b"x")
        writer.finish({"model": 3, "targets": ["cpu:x86-64"]})
    arguments = [str(path) if a == "PLAN" else a for a in command]
    result = CliRunner().invoke(main, arguments if "PLAN" in command else [*arguments, str(path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_an_end_token_beyond_the_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 9999]}))
    refused(llmc("build", model, "--fp32", "-o", tmp_path / "x.plan"), "token 9999", "its vocabulary has 211")
