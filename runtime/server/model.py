"""What a server says it serves: a name, a tokenizer, a chat template and the checkpoint's sampling
defaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmc.runtime.chat import ChatTemplate
from llmc.runtime.detokenizer import TextCodec
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
