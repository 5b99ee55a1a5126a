"""Request fields that OpenAI's API or a common server knows and this server does not serve.

A field that would change the answer is refused by name until it works; one that cannot is ignored. What is honoured
stands in `protocol.py`. Tests hold this list against the parameters of OpenAI, vLLM, SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmc.runtime.request import RequestError

# Bookkeeping, billing, caching, routing; hints for speed; and settings of something else that is refused.
IGNORED = frozenset(
    """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention
    prediction parallel_tool_calls include_obfuscation
    priority request_id kv_transfer_params
    rid extra_key bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank
    cache_prompt id_slot n_cache_reuse
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_exponent xtc_threshold mirostat_tau
    mirostat_eta adaptive_decay guided_decoding_backend guided_whitespace_pattern truncation_side grammar_lazy
    grammar_triggers preserved_tokens
    """.split()
)

# Field -> the values besides null, false, 0, "" and empty ones that ask for nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    # tools
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "parse_tool_calls": (),
    # output that is bound to a form
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "stop_regex": (),
    # other inputs and outputs
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "documents": (),
    "prompt_embeds": (),
    "input_ids": (),
    "image_data": (),
    "multimodal_data": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "use_audio_in_video": (),
    "lora": (),
    "lora_path": (),
    "session_params": (),
    # the prompt
    "continue_final_message": (),
    "chat_template": (),
    "truncate_prompt_tokens": (),
    "n_keep": (),
    "n_discard": (),
    # reasoning
    "reasoning_effort": (),
    "reasoning_format": ("none",),
    "reasoning_in_content": (),
    "reasoning_budget_tokens": (-1,),
    "thinking_token_budget": (-1,),
    "thinking_forced_open": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    # choosing tokens
    "use_beam_search": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "vllm_xargs": (),
    "samplers": (),
    "backend_sampling": (),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "xtc_probability": (),
    "dynatemp_range": (),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "dry_multiplier": (),
    "mirostat": (),
    "adaptive_target": (-1,),
    "min_keep": (),
    # when to end
    "n_predict": (-1,),
    "n_indent": (),
    "n_cmpl": (1,),
    "t_max_predict_ms": (-1,),
    "repetition_detection": (),
    # what the answer holds
    "include_stop_str_in_output": (),
    "no_stop_trim": (),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "n_probs": (),
    "post_sampling_probs": (),
    "return_token_ids": (),
    "return_tokens_as_token_ids": (),
    "return_tokens": (),
    "return_hidden_states": (),
    "return_routed_experts": (),
    "return_cached_tokens_details": (),
    "return_progress": (),
    "timings_per_token": (),
    "verbose": (),
    "response_fields": (),
    "continuous_usage_stats": (),
}


def unknown_fields(fields: Mapping[str, object], elsewhere: Iterable[str] = (), where: str = "") -> set[str]:
    """Those of `fields`, none of which is honoured, that no list knows.

    elsewhere: what only the other endpoint honours. where: the object that holds the fields, e.g. "stream_options".
    Raises RequestError, naming the field, for one that would change the answer."""
    prefix = f"{where}." if where else ""
    for name in REFUSED.keys() & fields.keys():
        value = fields[name]
        if value and not any(value == neutral for neutral in REFUSED[name]):
            raise RequestError(f"{prefix}{name} is not supported", param=where or name)
    for name in elsewhere:
        if fields.get(name):
            raise RequestError(f"{name} is not a parameter of this endpoint", param=name)
    return fields.keys() - REFUSED.keys() - IGNORED - set(elsewhere)
