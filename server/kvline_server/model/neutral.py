"""Fields of config.json that no family reads because they do not change what a model computes.
Imports no torch.

Every other field must be read, or the file is refused: a field that another system gives a meaning,
and this server does not know, may change every answer.
"""

from __future__ import annotations

NAMED = (  # how it is named and stored
    "architectures",
    "is_decoder",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "name_or_path",
    "use_bfloat16",
    "tokenizer_class",
    "unsloth_version",
    "unsloth_fixed",
    "transformers.js_config",
)
TASKS = (  # of another task than the next token
    "prefix",
    "finetuning_task",
    "task_specific_params",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "classifier_dropout",
)
TOKENS = (  # read elsewhere, or of the tokenizer
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    "decoder_start_token_id",
)
TRAINING = (  # training
    "attention_dropout",
    "hidden_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "initializer_range",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
    "pretraining_tp",
    "gradient_checkpointing",
    "max_sequence_length",
    "model_max_length",
    "neftune_noise_alpha",
    "tokenizer_model_max_length",
)
RUNNING = (  # how other software runs it
    "use_cache",
    "cache_implementation",
    "use_flash_attn",
    "attn_implementation",
    "torchscript",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "return_dict_in_generate",
    "tf_legacy_loss",
    "tie_encoder_decoder",
)
SAMPLING = (  # defaults of sampling, which a request gives
    "max_length",
    "max_new_tokens",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "diversity_penalty",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
)
ELSEWHERE = (  # of windows and of rope scaling, where the file has them
    "max_window_layers",
    "original_max_position_embeddings",
)
IGNORED = frozenset(NAMED + TASKS + TOKENS + TRAINING + RUNNING + SAMPLING + ELSEWHERE)
# Those that change nothing with one value alone.
NEUTRAL: dict[str, object] = {
    "activation": "swiglu",
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "interpolate_factor": 1,
    "is_causal": True,
    "is_encoder_decoder": False,
    "is_llama_config": True,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "qkv_bias": False,
    "rope_interleaved": False,
    "shared_expert_intermediate_size": 0,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
ROPE_HINTS = {  # within rope_scaling
    "attn_factor": ": transformers does not read it and other servers multiply by it; remove it, "
    "or give attention_factor",
}
# What an error adds.
HINTS = {
    "auto_map": ": it asks for code of the repository, which is never run",
    "compression_config": "; weights that are not quantised are, and fp8 by quantization_config",
    "quantization": "; weights that are not quantised are, and fp8 by quantization_config",
    "rope_local_base_freq": "; in Gemma 3 it is",
}
