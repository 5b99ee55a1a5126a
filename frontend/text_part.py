"""The language model inside a multimodal model: its configuration, and its tensors among those of the whole.

A configuration with a text part (`text_config`) belongs to a model that wraps a causal language model, and where
transformers has that one as a class of its own, it is built alone. Given text only, the whole computes the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

from llmc.errors import UserError


def text_config(config: Any, where: str) -> Any:
    """The configuration of the language model in `config`: a copy of its text part, or `config` where it has none.

    where: the file, for the message. Raises UserError for a multimodal model whose text part transformers does not
    have as a causal language model.
    """
    if getattr(config, "is_encoder_decoder", False):  # refused by its architecture
        return config
    text = config.get_text_config(decoder=True)
    if text is config or not _reads_other_inputs(config):
        return config
    if causal_class(text) is None:
        parts = [name.removesuffix("_config") for name in config.sub_configs if getattr(config, name, None) is not text]
        raise UserError(
            f"{where}: {config.model_type} is multimodal (text and {', '.join(parts)}), and transformers has no causal "
            f"language model of its text part alone ({text.model_type}): give a model of text"
        )
    text = copy.deepcopy(text)
    tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)  # the whole model's word counts
    text.tie_word_embeddings = tied
    return text


def causal_class(config: Any) -> Any:
    """transformers' causal language model of a configuration, or None.

    Some text parts have one only under the model type of the whole.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if type(config) in CAUSAL:
        return CAUSAL[type(config)]
    wholes = (CONFIG_MAPPING[name] for name in NAMES)
    found = (CAUSAL[kind] for kind in wholes if type(config) in (kind.sub_configs or {}).values())
    return next((kind for kind in found if kind.config_class is type(config)), None)


def _reads_other_inputs(config: Any) -> bool:
    """Whether transformers has a model of the configuration that makes text of images, sound or both."""
    from transformers.models.auto import modeling_auto as auto

    return any(
        config.model_type in names
        for names in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    )


def text_tensors(names: Iterable[str], parameters: Iterable[str], base: str) -> dict[str, str]:
    """{name in the text model: name in the checkpoint of the whole} of the tensors of the language model.

    parameters: of the text model, whose own part `base` ("model") lies somewhere in the whole: wherever most of its
    parameters are found ("model.language_model", "language_model.model"). Its head has the same name, perhaps with
    something before it. All tensors under that place are its own.
    """
    names, wanted = list(names), set(parameters)
    inner = {name.removeprefix(f"{base}.") for name in wanted if name.startswith(f"{base}.")}
    places: Counter[str] = Counter()
    for name in names:
        pieces = name.split(".")
        for cut in range(len(pieces)):
            if ".".join(pieces[cut:]) in inner:
                places[".".join(pieces[:cut])] += 1
    if not places:
        return {}
    place = places.most_common(1)[0][0]
    under = f"{place}." if place else ""
    found = {f"{base}.{name.removeprefix(under)}": name for name in names if name.startswith(under)}
    outer = [name for name in wanted if not name.startswith(f"{base}.")]
    found |= {own: name for own in outer for name in names if name == own or name.endswith(f".{own}")}
    return found


def left_out(names: Iterable[str], used: Iterable[str]) -> str:
    """What of a checkpoint is not part of the text model, in words: "vision_tower (437 tensors), …"."""
    kept = {name.split(".")[0] for name in used}
    groups = Counter(
        ".".join(name.split(".")[: 2 if name.split(".")[0] in kept else 1]) for name in set(names) - set(used)
    )
    return ", ".join(f"{name} ({count} tensor{'s' if count > 1 else ''})" for name, count in sorted(groups.items()))
