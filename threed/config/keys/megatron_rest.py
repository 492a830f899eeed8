"""Megatron-LM's options without a key here: what is always so, changes nothing, or is missing in threed. Each
sentence says what becomes of the option's effect."""

from __future__ import annotations

from threed.config.keys import megatron_values as take
from threed.config.keys.deepspeed import ulysses
from threed.config.keys.table import NO_KEY, NOTHING, Key

_ONE = (1,)
_ALWAYS = (  # (what is true here, the options that ask for it or choose how it is done)
    ("it always overlaps",
     "overlap_grad_reduce overlap_param_gather* tp_comm_* overlap_p2p_comm* no_overlap_p2p* "
     "align_grad_reduce align_param_gather "
     "no_async_tensor_model_parallel_allreduce use_ring_exchange_p2p defer_embedding_wgrad_compute "
     "wgrad_deferral_limit delay_wgrad_compute deallocate_pipeline_outputs batch_p2p_*"),
    ("torchrun's place and NCCL's buffers change no numbers",
     "distributed_backend master_* node_rank rdzv_* local_rank lazy_mpu_init use_nccl_ub nccl_* ddp_* "
     "disable_gloo_process_groups use_sharp DDP_impl use_contiguous_buffers_in_local_ddp "
     "no_contiguous_buffers_in_local_ddp fsdp_* megatron_fsdp_* init_model_with_meta_device "
     "high_priority_stream_groups"),
    ("it chooses between kernels of the same sums, which differ in rounding alone",
     "use_mcore_models use_legacy_models transformer_impl use_flash_attn use_flash_attn_* "
     "no_gradient_accumulation_fusion gradient_accumulation_fusion no_masked_softmax_fusion "
     "no_scaled_masked_softmax_fusion no_rope_fusion no_bias_swiglu_fusion no_bias_dropout_fusion "
     "no_persist_layer_norm cross_entropy_fusion_impl apply_query_key_layer_scaling "
     "no_query_key_layer_scaling ds_fused_adam cpu_torch_adam use_tutel te_rng_tracker use_te_rng_tracker "
     "bias_activation_fusion disable_jit_fuser fused_residual_rmsnorm fused_single_qkv_rope "
     "use_te_activation_func use_transformer_engine_op_fuser"),
    ("softmax is computed in fp32", "attention_softmax_in_fp32"),
    ("gelu has the tanh form", "openai_gelu"),
    ("the mask of attention is never an input", "no_create_attention_mask_in_dataloader merge_attn_mask"),
    ("how files of data are read changes no numbers",
     "no_mmap_bin_files mmap_warmup num_workers data_cache_path data_impl dataloader_fast_cache_load "
     "dataloader_defer_npy_index_mmap no_data_sharding data_sharding "
     "num_dataset_builder_threads object_storage_cache_path"),
    ("initial weights never depend on the mesh or the device", "use_cpu_initialization"),
    ("Python's and torch's memory changes no numbers", "manual_gc* empty_unused_memory_level"),
    ("metrics.jsonl and wandb have what is measured; monitor.trace_every times each instruction",
     "log_* tensorboard_* timing_log_* profile* use_pytorch_profiler pytorch_profiler_* record_* "
     "logging_level wandb_save_dir barrier_with_L1_time nvtx_ranges "
     "one_logger_* no_one_logger app_tag_* config_logger_dir"),
    ("set WANDB_ENTITY in the environment", "wandb_entity"),
    ("checkpoints have one form, which any mesh loads",
     "ckpt_format ckpt_fully_parallel_* ckpt_assume_constant_structure ckpt_pg_* ckpt_drop_* async_ckpt_* "
     "dist_ckpt_* use_dist_ckpt auto_detect_ckpt_format use_persistent_ckpt_worker no_load_rng no_save_rng "
     "no_save_optim universal_checkpoint"),
    ("checkpoint.keep says how many stay", "save_retain_interval"),
    ("train.resume=PATH fails where there is no checkpoint, and auto begins anew",
     "exit_on_missing_checkpoint"),
    ("a run always saves and ends on SIGTERM", "exit_signal_handler* exit_signal"),
    ("the schedule is always that of the config, also when a run goes on",
     "override_opt* override_lr_scheduler"),
    ("train.on_nonfinite says what happens to what is not finite",
     "check_for_* no_check_for_* disable_check_for_* check_weight_hash_*"),
    ("the tokenizer.json of data.tokenizer says it", "tiktoken_* trust_remote_code tokenizer_hf_*"),
    ("zero.stage, offload.* and precision.* say what its engine does", "deepspeed"),
    ("its keys are converted, too", "deepspeed_config"),
    ("parallel.pp says it", "no_pipeline_parallel"),
    ("parameters and gradients of a unit always lie in one buffer",
     "zero_contigious_gradients zero_reduce_scatter zero_reduce_bucket_size zero_allgather_bucket_size "
     "use_pin_memory remote_device memory_centric_tiled_linear tile_factor split_transformers "
     "synchronize_each_layer profile_backward scattered_embeddings"),
    ("run.cuda_graphs says it", "cuda_graph_*"),
)
_MISSING = (  # (what threed has not, the options that ask for it)
    ("fp8", "fp8_*"), ("fp4", "fp4_*"), ("latent attention", "multi_latent_attention"),
    ("prediction of more tokens", "mtp_*"),
    ("batch size that grows", "rampup_batch_size step_batch_size_schedule"),
    ("learning rate of its own for embeddings", "decoupled_*"), ("sliding windows", "window_size"),
    ("curriculum", "curriculum_learning* data_efficiency_*"),
    ("random layer-wise token dropping", "random_ltd"),
    ("rotation of pairs: it turns halves of a head", "rotary_interleaved"), ("squared ReLU", "squared_relu"),
    ("exact GELU: it has the tanh form", "onnx_safe"),
    ("gated GELU: of gated activations it has swiglu", "gated_linear_unit quick_geglu"),
    ("uniform initial weights", "init_method_xavier_uniform"),
    ("layers left as they are built: initial weights are those of model.init_std", "no_initialization"),
    ("residual stream in fp32 under 16-bit layers", "fp32_residual_connection"),
    ("loss in 16 bits", "fp16_lm_cross_entropy"),
    ("weight decay that changes", "start_weight_decay end_weight_decay"),
    ("separate sets to train and validate", "*train_data_path valid_data_path"),
    ("sources by a file: data.mix lists them", "data_args_path"), ("specifications of modules", "spec"),
    ("start from weights of Megatron-LM", "finetune pretrained_checkpoint"),
    ("model whose sizes are in a checkpoint: give them",
     "use_checkpoint_args use_mp_args_from_checkpoint_args"),
    ("schedule from a checkpoint: it is that of the config, also when a run goes on",
     "use_checkpoint_opt_param_scheduler use_checkpoint_lr_scheduler"),
    ("way to go on without the optimizer's state", "no_load_optim"),
    ("choice of a step to go on from: train.resume takes the path of a checkpoint", "ckpt_step"),
    ("conversion of Megatron-LM's checkpoints", "ckpt_convert_*"),
    ("options in a second file: threed convert --megatron takes that file", "yaml_cfg"),
)
WITHOUT_VALUE = (
    *(Key(name, "parallel.stage_units (which units each stage has)", take.units_of_stages)
      for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                   "pipeline_model_parallel_layout")),
    Key("exit_duration_in_mins", "run.stop_after (such as 230m)", take.stop_after),
    Key("no_bias_gelu_fusion", NOTHING + "threed has no exact GELU: it has the tanh form", take.of_gelu),
    Key("exit_interval", NOTHING + "run.stop_after ends a job by its time, train.steps a run",
        take.exit_interval),
    Key("dataloader_type", NO_KEY + "each source is shuffled by train.seed", take.one_order),
    Key("ds_sequence_parallel_size", "parallel.cp (with parallel.cp_form=heads)", ulysses, (1,)),
    *(Key(name, NO_KEY + what) for what, names in _ALWAYS for name in names.split()),
    *(Key(name, NOTHING + f"threed has no {what}") for what, names in _MISSING for name in names.split()),
)
