"""Arguments of Megatron-LM by the names that its program has for them, and their defaults: for a dump of
them, which lists each one, and for a YAML. The name of an option that switches something off is that of what
it switches off (--disable-bias-linear is add_bias_linear=False), and megatron.core has names of its own.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import yaml

from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_values import gated_width

OPTIONS = {  # a name of megatron.core or Megatron-Bridge -> the option
    "num_moe_experts": "num_experts", "sequence_length": "seq_length", "encoder_seq_length": "seq_length",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "use_custom_fsdp": "use_megatron_fsdp", "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "distribute_checkpointed_activations": "distribute_saved_activations",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32"}
_OPPOSITES = {  # a name -> the option that switches it off, where that is not no_ or disable_ before the name
    "add_bias_linear": "disable_bias_linear", "add_position_embedding": "no_position_embedding",
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "perform_initialization": "no_initialization", "apply_rope_fusion": "no_rope_fusion",
    "use_gloo_process_groups": "disable_gloo_process_groups",
    "enable_gloo_process_groups": "disable_gloo_process_groups",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "offset_sampling_seed_by_dp_rank": "use_same_sampling_seed_across_dp_ranks"}
# What the program works out from other arguments, or counts
_COUNTED = """
    rank local_rank iteration consumed_train_samples consumed_valid_samples consumed_train_tokens
    skipped_train_samples model_type pipeline_dtype autocast_dtype transformer_pipeline_model_parallel_size
    encoder_num_layers inprocess_active_world_size extra_state use_dist_ckpt
    curriculum_learning_legacy rope_type do_train do_valid do_test deepspeed_configuration
    enable_one_logger no_one_logger one_logger_async one_logger_run_name
"""
_DERIVED = frozenset(_COUNTED.split())
# Defaults that are not off, by version where they differ: what has none of them was given.
_DEFAULTS = """
    {activation_offload_fraction: 1.0, adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1.0e-8,
    adlr_autoresume_interval: 1000, align_grad_reduce: true, align_param_gather: true,
    app_tag_run_version: 0.0.0, apply_query_key_layer_scaling: [true, false], async_strategy: [nvrx, mcore],
    attention_backend: auto, attention_dropout: 0.1, barrier_with_L1_time: true,
    batch_invariant_backend: te_native, bert_binary_head: true, bert_embedder_type: megatron,
    check_for_nan_in_loss_and_grad: true, checkpoint_num_layers: 1, ckpt_format: [torch, torch_dist],
    ckpt_fully_parallel_save: true, ckpt_load_validate_sharding_integrity: true, classes_fraction: 1.0,
    clip_grad: 1.0, clone_scatter_output_in_embedding: true, context_parallel_size: 1, cp_comm_type: [[p2p],
    p2p], cross_entropy_fusion_impl: native, cuda_graph_impl: none, cuda_graph_warmup_steps: 3,
    data_impl: infer, data_parallel_sharding_strategy: [no_shard, optim_grads_params],
    data_per_class_fraction: 1.0, data_sharding: true, dataloader_type: single, DDP_impl: local,
    delay_grad_reduce: true, dist_ckpt_strictness: assume_ok_unexpected, distributed_backend: nccl,
    distributed_timeout_minutes: 10, ds_sequence_parallel_fpdt_chunk_size: 65536,
    ds_sequence_parallel_size: 1, dsa_indexer_rotate_activation: true, dsa_indexer_scoring_relu: true,
    dsa_indexer_topk_freq: 1, enable_msc: [true, false], error_injection_type: transient_error,
    eval_interval: 1000, eval_iters: 100, exit_signal: [SIGTERM, 15], exp_avg_dtype: fp32,
    exp_avg_sq_dtype: fp32, expert_gtp_weight_remat_size: 1, expert_interval: 2,
    expert_model_parallel_size: 1, fim_eod_token: "<|endoftext|>", fim_middle_token: <fim_middle>,
    fim_pad_token: <fim_pad>, fim_prefix_token: <fim_prefix>, fim_rate: 0.5, fim_spm_rate: 0.5,
    fim_suffix_token: <fim_suffix>, flight_recorder_dump_on_timeout: true,
    flight_recorder_extra_dump_on_exec: true, flight_recorder_include_only_active: true,
    flight_recorder_trace_buffer_size: 2000, fp4_recipe: nvfp4, fp8_amax_compute_algo: most_recent,
    fp8_amax_history_len: 1, fp8_interval: 1, fp8_recipe: delayed, fp8_wgrad: true, ft_num_warmup_iters: 5,
    gdp_num_chunk_states_to_recompute: 2, gdp_num_householder: 3, gradient_accumulation_fusion: true,
    gradient_reduce_div_fusion: true, gtp_weight_remat_size: 1, head_lr_mult: 1.0, hidden_dropout: 0.1,
    hysteresis: 2, indexer_batch_size: 128, indexer_log_interval: 1000, init_method_std: 0.02,
    initial_loss_scale: 4294967296, kd_alpha_ce: 1, kd_beta_ce: 1, kd_temp: 1.0,
    kitchen_attention_backend: sdpa, kv_lora_rank: 32, layernorm_epsilon: 1.0e-5, linear_conv_kernel_dim: 4,
    linear_key_head_dim: 128, linear_num_key_heads: 16, linear_num_value_heads: 32,
    linear_value_head_dim: 128, lion_beta1: 0.95, lion_beta2: 0.98, log_interval: 100,
    log_learning_rate_to_tensorboard: true, log_loss_scale_to_tensorboard: true,
    logits_load_decode_threads: 4, logits_load_kd_loss_alpha: 1.0, logits_load_msc_prefetch_depth: 2,
    logits_load_prefetch_factor: 3, logits_save_dtype: fp16, logits_save_top_p_min_k: 1,
    loss_scale_window: 1000, lr_decay_style: linear, lr_wsd_decay_style: exponential,
    main_grads_dtype: fp32, main_params_dtype: fp32, make_vocab_size_divisible_by: 128, mamba_head_dim: 64,
    mamba_inference_conv_states_dtype: bf16, mamba_inference_ssm_states_dtype: bf16, mamba_num_groups: 8,
    mamba_state_dim: 128, manual_gc_eval: true, mem_efficient_ln: true,
    memory_snapshot_path: snapshot.pickle, mhc_init_gating_factor: 0.01, mhc_num_residual_streams: 4,
    mhc_sinkhorn_iterations: 20, mid_level_dataset_surplus: 0.005, min_loss_scale: 1.0,
    min_offloaded_tensor_size: 1048576, mlp_chunks_for_prefill: 1, mlp_chunks_for_training: 1,
    mlp_type: standard, moe_combine_bwd_dtype: bf16, moe_deepep_num_sms: 20, moe_dispatch_fwd_dtype: bf16,
    moe_eval_capacity_factor: 1.0, moe_expert_parallel_size: 1, moe_flex_dispatcher_backend: deepep,
    moe_hybridep_num_sms: [16, 32], moe_hybridep_num_sms_preprocessing: 108, moe_layer_freq: 1,
    moe_loss_coeff: 0.1, moe_min_capacity: 4, moe_paged_stash_buffer_size_factor_cuda: 1.1,
    moe_paged_stash_page_size: 64, moe_router_bias_update_rate: 0.001,
    moe_router_load_balancing_type: aux_loss, moe_router_score_function: softmax, moe_router_topk: 2,
    moe_token_dispatcher_type: allgather, moe_token_drop_policy: probs, moe_train_capacity_factor: 1.0,
    moe_upcycling_granularity: 1, mscale: 1.0, mscale_all_dim: [1.0, 0.0], mtp_loss_scaling_factor: 0.1,
    muon_coefficient_type: quintic, muon_extra_scale_factor: 1.0, muon_fp32_matmul_prec: medium,
    muon_momentum: [0.9, 0.95], muon_num_ns_steps: 5, muon_scalar_optimizer: adam,
    muon_scale_mode: spectral, muon_split_qkv: true, muon_tp_mode: [duplicated, blockwise],
    mup_attn_scale_power: 1.0, mup_embedding_mult: 1.0, mup_output_mult: 1.0, mup_width_mult: 1.0,
    non_persistent_local_ckpt_algo: fully_parallel, norm_epsilon: 1.0e-5,
    normalization: [LayerNorm, layernorm], num_dataset_builder_threads: 1,
    num_distributed_optimizer_instances: 1, num_experts: [[1]], num_experts_teacher: [[1]],
    num_layers_at_end_in_bf16: 1, num_layers_at_start_in_bf16: 1, num_query_groups: 1, num_workers: 2,
    one_logger_entity: hwinf_dcm, one_logger_project: [megatron-lm, e2e-tracking], optimizer: adam,
    optimizer_offload_fraction: 1.0, outer_dp_sharding_strategy: no_shard, pad_vocab_size: true,
    pin_cpu_grads: true, pin_cpu_params: true, pipeline_model_parallel_size: 1,
    position_embedding_type: learned_absolute, profile_ranks: [[0]], qk_clip_alpha: 0.5,
    qk_clip_threshold: 100, qk_head_dim: 128, qk_pos_emb_head_dim: 64, query_in_block_prob: 0.1,
    recompute_modules: [[core_attn]], recompute_num_layers: 1, refit_method: gloo,
    relative_attention_max_distance: 128, relative_attention_num_buckets: 32, replication_factor: 2,
    rerun_mode: [validate_results, disabled], rope_scaling_factor: 8.0, rope_theta: 10000,
    rotary_base: 10000, rotary_percent: 1.0, rotary_position_embeddings_theta: 10000,
    rotary_scaling_factor: 1.0, save_tokenizer_assets: true, seed: 1234,
    sft_tokenizer_prompt_format: nemotron-h-aligned, sgd_momentum: 0.9, short_seq_prob: 0.1,
    softmax_type: vanilla, split: "969, 30, 1", strict_fsdp_dtensor_load: true,
    tensor_model_parallel_size: 1, tile_factor: 1, tokenizer_sentencepiece_ignore_extra_whitespaces: true,
    topk: 1, torch_fsdp2_reshard_after_forward: true, transformer_impl: [transformer_engine, local],
    use_contiguous_buffers_in_local_ddp: true, use_layer_wise_param_layout: true,
    use_mamba_mem_eff_path: true, use_tokenizer_model_from_checkpoint_args: true, v_head_dim: 128,
    weight_decay: 0.01, weight_decay_incr_style: constant, yarn_correction_range_round_to_int: true,
    zero_stage: 1.0}
"""
DEFAULTS: dict[str, Any] = {name: value if isinstance(value, list) else [value]
                            for name, value in yaml.safe_load(_DEFAULTS).items()}
# What pretrain_gpt.py does not read: for other programs, or for what watches a job
_ELSEWHERE = ("biencoder_*", "dino_*", "error_injection_*", "fault_injector_*", "grpo_*", "ict_*", "img_*",
              "inference_*", "inprocess_*", "iter_per_epoch", "langrl_*", "mask_*", "max_tokens_to_oom",
              "num_channels", "num_classes", "patch_dim", "retriever_*", "retro_*", "rl_*", "sample_rate",
              "straggler_*", "swin_*", "vision_*")


def option_of(name: str, value: Any) -> tuple[str, Any]:
    """The option and its value for a name that the program has: add_bias_linear=False is
    disable_bias_linear=True."""
    name = OPTIONS.get(name, name)
    if not isinstance(value, bool):
        return name, value
    if name in _OPPOSITES:
        return _OPPOSITES[name], not value
    if MEGATRON.row(name) is None:
        for other in (f"no_{name}", f"disable_{name}"):
            if MEGATRON.row(other) is not None:
                return other, not value
    return name, value


def is_derived(name: str) -> bool:
    """Whether an argument says nothing of its own, or nothing that pretrain_gpt.py reads."""
    return name in _DERIVED or (name != "retro_add_retriever"
                                and any(fnmatchcase(name, pattern) for pattern in _ELSEWHERE))


def usual(given: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-LM takes by default for arguments that others decide."""
    hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
    values = {"end_weight_decay": given.get("weight_decay"), "start_weight_decay": given.get("weight_decay"),
              "expert_tensor_parallel_size": given.get("tensor_model_parallel_size"),
              "moe_ffn_hidden_size": given.get("ffn_hidden_size"), "num_key_value_heads": heads,
              "add_qkv_bias": given.get("add_bias_linear"),
              "no_bias_gelu_fusion": bool(given.get("swiglu")),
              "no_rope_fusion": given.get("position_embedding_type") not in ("rope", "rotary"),
              "eval_global_batch_size": given.get("global_batch_size"),
              "eval_micro_batch_size": given.get("micro_batch_size"),
              "tensor_parallel_num_weight_shards": given.get("tensor_model_parallel_size"),
              "expert_tensor_parallel_num_weight_shards": given.get("tensor_model_parallel_size")}
    if isinstance(hidden, int) and isinstance(heads, int):
        values["kv_channels"] = hidden // heads
        values["ffn_hidden_size"] = gated_width(hidden) if given.get("swiglu") else 4 * hidden
    return values
