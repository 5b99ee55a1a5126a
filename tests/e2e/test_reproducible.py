"""The same input gives the same bytes, whatever the directory, the caches, the umask and the hash seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from e2e_engine import executor_over, step_logits
from e2e_harness import MODEL, environment, llmc
from e2e_reference import Floats, Reference, log_softmax

from llmc.frontend.pypi import _cache_root
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e

TEXT = """A lighthouse keeper has two duties: to keep the lamp burning and to write down what he sees. The first
is hard work, the second is not, and so it is the second that gets forgotten. In the winter of 1871 the keeper of
a small light on the northern coast wrote nothing for nine days. When the boat came, the lamp was burning, the
brass was clean, the stores were in order, and the man was asleep in his chair with the pen in his hand.
"""


@dataclass
class Pair:
    """Two builds of one model with the same flags. The text of the accuracy report is short, to save time."""

    first: Path
    second: Path
    text: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, int8_plan: Path) -> Pair:
    """`int8_plan` comes first so that the model is in the user's cache: only that is shared."""
    models = _cache_root()
    assert models.is_dir()
    plans = []
    for name, seed in (("one", "1"), ("another-place", "2")):
        home = tmp_path_factory.mktemp(name)
        (home / "cache" / "llmc").mkdir(parents=True)
        (home / "cache" / "llmc" / "pypi").symlink_to(models)
        (home / "text.txt").write_text(TEXT)
        plan = home / "out" / f"{name}.plan"
        plan.parent.mkdir()
        env = environment(XDG_CACHE_HOME=str(home / "cache"), HOME=str(home), PYTHONHASHSEED=seed)
        flags = ("--int8", "--target", "native", "--eval-text", "text.txt", "--max-kl", "0.02")
        done = llmc("build", MODEL, *flags, "-o", plan.relative_to(home), cwd=home, env=env)
        assert done.returncode == 0, done.stderr
        assert list((home / "cache" / "llmc" / "objects").iterdir()), "the code was not compiled afresh"
        assert [p.name for p in plan.parent.iterdir()] == [plan.name]
        plans.append(plan)
    return Pair(plans[0], plans[1], plans[0].parents[1] / "text.txt")


def test_two_builds_are_the_same_file(pair: Pair) -> None:
    first, second = pair.first.read_bytes(), pair.second.read_bytes()
    if first != second:
        ours, theirs = Plan.open(pair.first), Plan.open(pair.second)
        differ = [s.name for s in ours.segments.values() if s != theirs.segments.get(s.name)]
        keys = [k for k in ours.manifest if ours.manifest[k] != theirs.manifest.get(k)]
        pytest.fail(f"segments {differ} and manifest entries {keys} differ")


def test_a_plan_names_no_place_and_no_time(pair: Pair) -> None:
    """Paths of the build, of this user or of the machine would differ on another one."""
    data = pair.first.read_bytes()
    for secret in (str(pair.first.parents[1]), str(Path.home()), "/tmp/", "site-packages"):
        assert secret.encode() not in data, secret


def test_the_text_of_the_report_is_named_and_hashed(pair: Pair) -> None:
    found = Plan.open(pair.first).manifest["accuracy"]
    assert found["text"] == "text.txt"
    assert found["text_sha256"] == hashlib.sha256(pair.text.read_bytes()).hexdigest()


def test_the_stated_accuracy_is_true(pair: Pair, reference: Reference) -> None:
    """The figures again, by other means: transformers' logits, and another loop over the engine's."""
    plan = Plan.open(pair.first)
    stated = plan.manifest["accuracy"]
    tokens = reference.codec.encode(pair.text.read_text())
    assert stated["tokens"] == len(tokens)
    with executor_over(plan, num_pages=32) as executor:
        ours = np.concatenate(list(step_logits(executor, tokens, [33, len(tokens) - 33])))
    theirs = reference.logits(tokens)
    p, q = log_softmax(theirs), log_softmax(ours)
    kl = float((np.exp(p) * (p - q)).sum()) / len(tokens)
    assert stated["mean_kl"] == pytest.approx(kl, rel=0.01)
    agreement = float((theirs.argmax(-1) == ours.argmax(-1)).mean())
    assert stated["top1_agreement"] == pytest.approx(agreement, abs=1.5 / len(tokens))
    assert stated["perplexity_float32"] == pytest.approx(_perplexity(theirs, tokens), rel=1e-3)
    assert stated["perplexity"] == pytest.approx(_perplexity(ours, tokens), rel=1e-3)


def _perplexity(logits: Floats, tokens: list[int]) -> float:
    picked = log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
    return float(np.exp(-picked.mean()))
