"""Megatron-LM's options without a key here: what is always so, changes nothing, or is missing in threed."""

from __future__ import annotations

from threed.doors.table import NO_KEY, NOTHING, Row

WITHOUT_VALUE = (
    # What is always so, and what changes nothing
    *(Row(name, NO_KEY + "it always overlaps")
      for name in ("overlap_grad_reduce", "overlap_param_gather*", "tp_comm_*", "overlap_p2p_communication*",
                   "no_async_tensor_model_parallel_allreduce", "align_grad_reduce", "no_overlap_p2p*")),
    *(Row(name, NO_KEY + "it says where and how Megatron-LM runs, and changes no numbers")
      for name in ("use_mcore_models", "transformer_impl", "use_flash_attn", "distributed_backend",
                   "master_*",
                   "node_rank", "rdzv_*", "local_rank", "no_mmap_bin_files", "num_workers", "dataloader_type",
                   "data_cache_path", "no_create_attention_mask_in_dataloader", "manual_gc*",
                   "empty_unused_memory_level", "log_*", "tensorboard_*", "timing_log_*", "profile*",
                   "wandb_save_dir", "wandb_entity", "ckpt_*", "dist_ckpt_*", "use_dist_ckpt*",
                   "auto_detect_ckpt_format", "no_load_*", "no_save_*", "no_initialization",
                   "use_checkpoint_*",
                   "override_opt*", "exit_*", "no_gradient_accumulation_fusion", "no_masked_softmax_fusion",
                   "attention_softmax_in_fp32", "no_rope_fusion", "no_bias_swiglu_fusion",
                   "no_bias_dropout_fusion", "no_persist_layer_norm", "use_cpu_initialization", "check_*",
                   "no_check_*", "ddp_*", "gradient_accumulation_fusion", "tiktoken_*", "yaml_cfg",
                   "use_nccl_ub", "fsdp_*", "trust_remote_code", "init_model_with_meta_device",
                   "record_memory_history",
                   "logging_level", "data_impl", "no_pipeline_parallel",
                   "apply_query_key_layer_scaling", "no_query_key_layer_scaling", "merge_attn_mask",
                   "use_flash_attn_*", "save_retain_interval", "use_persistent_ckpt_worker")),
    Row("deepspeed", NO_KEY + "zero.stage, offload.* and precision.* say what its engine does"),
    Row("deepspeed_config", NO_KEY + "its keys are converted, too"),
    # What threed has not
    *(Row(name, NOTHING + f"threed has no {what}")
      for name, what in (("num_experts", "experts"), ("moe_*", "experts"), ("fp8_*", "fp8"), ("fp4_*", "fp4"),
                         ("multi_latent_attention", "latent attention"),
                         ("mtp_*", "prediction of more tokens"),
                         ("rampup_batch_size", "batch size that grows"),
                         ("step_batch_size_schedule", "batch size that grows"),
                         ("decoupled_*", "learning rate of its own for embeddings"),
                         ("window_size", "sliding windows"),
                         ("ds_sequence_parallel_size", "sequences cut over ranks of their own"),
                         ("curriculum_learning*", "curriculum"), ("data_efficiency_*", "curriculum"),
                         ("random_ltd", "random layer-wise token dropping"),
                         ("rotary_interleaved", "rotation of pairs: it turns halves of a head"),
                         ("squared_relu", "squared ReLU"),
                         ("no_bias_gelu_fusion", "exact GELU: it has the tanh form"),
                         ("init_method_xavier_uniform", "uniform initial weights"),
                         ("start_weight_decay", "weight decay that changes"),
                         ("end_weight_decay", "weight decay that changes"),
                         ("*train_data_path", "separate sets to train and validate"),
                         ("valid_data_path", "separate sets to train and validate"),
                         ("data_args_path", "sources by a file: data.mix lists them"),
                         ("spec", "specifications of modules"),
                         ("finetune", "start from weights of Megatron-LM"))),
)
