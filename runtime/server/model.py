"""What a server says it serves: a name, a tokenizer, a chat template and the checkpoint's sampling
defaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmc.errors import UserError
from llmc.runtime.chat import ChatTemplate
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.load import load_codec
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.request import RequestError, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out, from the checkpoint's generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, object]) -> SamplingDefaults:
        """Takes what it knows from a generation_config.json; what is out of range is left out, with a
        warning.

        `do_sample: false` does not make a server greedy.
        """
        kinds = {
            "temperature": float,
            "top_p": float,
            "top_k": int,
            "min_p": float,
            "repetition_penalty": float,
        }
        values = {}
        for name, kind in kinds.items():
            value = config.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            try:
                SamplingParams(**{name: kind(value)})
            except (RequestError, ValueError, OverflowError) as error:
                log.warning("the generation config's %s is ignored: %s", name, error)
            else:
                values[name] = kind(value)
        return cls(**values)


@dataclass(frozen=True)
class ServedModel:
    """One model under its public name. chat_template None: a base model, chat is refused. created: Unix
    time.
    """

    name: str
    codec: TextCodec
    chat_template: ChatTemplate | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    created: int = field(default_factory=lambda: int(time.time()))


def served_model(plan: Plan, name: str | None) -> ServedModel:
    """What the server says it serves. Raises UserError for a plan without a tokenizer."""
    codec = load_codec(plan)
    if codec is None:
        raise UserError(f"{plan.path}: the plan has no tokenizer, so it cannot be served; rebuild it with one")
    template = plan.text("chat_template.jinja")
    with manifest_fields(plan.path):
        tokens = dict(plan.manifest["tokenizer"]["special_tokens"])
        checkpoint = str(plan.manifest["provenance"]["checkpoint"]["name"])
        defaults = SamplingDefaults.from_generation_config(plan.manifest["generation_config"])
    chat_template = ChatTemplate(template, tokens) if template is not None else None
    return ServedModel(name or checkpoint, codec, chat_template, defaults)
