"""Every parameter that OpenAI or a common server knows is honoured, refused by name, or cannot change the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from server_harness import Running, running_server

from llmc.runtime.server.parameters import IGNORED, REFUSED
from llmc.runtime.server.protocol import ChatBody, CompletionBody, StreamOptions

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
chat_template_kwargs continue_final_message documents echo frequency_penalty guided_choice guided_decoding_backend
guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids logprobs
max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n priority prompt
prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_token_ids return_tokens_as_token_ids seed skip_special_tokens spaces_between_special_tokens stop stop_token_ids
stream stream_options structural_tag structured_outputs suffix temperature thinking_token_budget tool_choice tools
top_k top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
"""
SGLANG = """
bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
custom_logit_processor custom_params data_parallel_rank ebnf extra_key ignore_eos input_ids json_schema lora_path min_p
min_tokens no_stop_trim priority reasoning_effort regex repetition_penalty return_cached_tokens_details
return_hidden_states return_routed_experts rid routed_dp_rank separate_reasoning session_params skip_special_tokens
stop_regex stop_token_ids stream_reasoning structural_tag top_k use_audio_in_video
"""
LLAMA_CPP = """
adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt chat_template_kwargs
dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
grammar grammar_lazy grammar_triggers id_slot ignore_eos image_data json_schema logit_bias lora min_keep min_p mirostat
mirostat_eta mirostat_tau multimodal_data n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs
parallel_tool_calls parse_tool_calls post_sampling_probs preserved_tokens reasoning_budget_tokens reasoning_format
reasoning_in_content repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
t_max_predict_ms thinking_forced_open timings_per_token top_k top_n_sigma typical_p verbose xtc_probability
xtc_threshold
"""
OPENAI = {
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
}
HONOURED = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


def _post(server: Running, path: str, change: dict[str, Any]) -> Any:
    body = {"model": "org/toy", "max_tokens": 1}
    body |= {"prompt": "a"} if path == ENDPOINTS[0] else {"messages": [{"role": "user", "content": "a"}]}
    return server.post(path, body | change)


def test_every_known_parameter_is_in_one_list() -> None:
    known = OPENAI | set(VLLM.split()) | set(SGLANG.split()) | set(LLAMA_CPP.split())
    assert not known - HONOURED - REFUSED.keys() - IGNORED
    assert not HONOURED & REFUSED.keys() and not HONOURED & IGNORED and not REFUSED.keys() & IGNORED
    assert REFUSED.keys() | IGNORED <= known | {"continuous_usage_stats", "include_obfuscation"}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_would_change_the_answer_is_refused_by_name(server: Running, path: str) -> None:
    for name, neutral in REFUSED.items():
        response = _post(server, path, {name: "x"})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert error["param"] == name and name in error["message"]
        for value in (None, False, 0, "", [], {}, *neutral):
            assert _post(server, path, {name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_cannot_change_the_answer_is_ignored(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in IGNORED:
        assert _post(server, path, {name: "x"}).status_code == 200, name
    assert not caplog.records


def test_parameters_of_the_other_endpoint(server: Running) -> None:
    elsewhere: list[tuple[str, dict[str, Any]]] = [
        (ENDPOINTS[0], {"max_completion_tokens": 5}), (ENDPOINTS[0], {"top_logprobs": 5}),
        (ENDPOINTS[0], {"chat_template_kwargs": {"a": 1}}), (ENDPOINTS[1], {"echo": True}),
        (ENDPOINTS[1], {"suffix": "x"}), (ENDPOINTS[1], {"best_of": 2}),
    ]  # fmt: skip
    for path, change in elsewhere:
        response = _post(server, path, change)
        assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(change))
    assert _post(server, ENDPOINTS[1], {"echo": False, "suffix": None}).status_code == 200


def test_options_of_a_stream(server: Running) -> None:
    assert StreamOptions.model_fields.keys() == {"include_usage"}
    for name, status in (("continuous_usage_stats", 400), ("include_obfuscation", 200)):
        assert _post(server, ENDPOINTS[0], {"stream": True, "stream_options": {name: True}}).status_code == status
