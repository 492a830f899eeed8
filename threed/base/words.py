"""Words that newcomers and other tools have for what threed has, or has not: of keys, commands and machines.
For errors about names that are not known; `synonyms` has the keys of single frameworks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# (what to say, words): of the last part of a key, in lower case with _ for -
_SAYINGS = (
    ("use train.global_batch_size (sequences of a step, over all devices) or train.micro_batch_size (of one"
     " forward)",
     "batch batch_size bs bsz batchsize per_device_batch_size device_batch_size "
     "per_device_train_batch_size batch_size_per_gpu micro_batch local_batch_size"),
    ("threed counts steps: use train.steps; an epoch has tokens / (train.global_batch_size x model.seq_len)"
     " of them (threed data CONFIG counts tokens)",
     "epoch epochs num_epochs n_epochs max_epochs num_train_epochs train_epochs nepochs"),
    ("no key: devices are parallel.dp x tp x pp, and with parallel.dp=auto dp is what tp and pp leave; "
     "commands that only plan take --devices N",
     "gpu gpus num_gpus n_gpus ngpus gpu_count devices num_devices n_devices device_count world_size nproc "
     "nproc_per_node num_processes ranks num_ranks gpus_per_node num_workers_per_node"),
    ("no key: NNODES, NODE_RANK and MASTER_ADDR in the environment say which machine this is; commands that"
     " only plan take --devices N, the devices of all",
     "node nodes num_nodes n_nodes nnodes machines num_machines"),
    ("use parallel.cp, ranks that share each sequence (docs/context.md)",
     "cp cp_size context_parallel context_parallel_degree ring_attention sp_size"),
    ("use parallel.cp with parallel.cp_form=heads (docs/context.md)",
     "ulysses ulysses_size ulysses_degree ulysses_sp_size ulysses_parallel_size"),
    ("use parallel.ep, with model.family=moe",
     "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallelism"),
    ("threed does not cut an expert over tp: parallel.ep takes ranks of tp, too",
     "etp etp_size expert_tensor_parallel"),
    ("use model.family=moe, whose keys are model.experts and model.experts_per_token (docs/experts.md)",
     "expert experts n_experts moe use_moe moe_args moe_enabled num_moe_experts"),
    ("use model.experts_per_token, with model.family=moe",
     "top_k top_k_experts moe_top_k moe_topk num_experts_per_token experts_per_token "
     "num_selected_experts n_activated_experts n_experts_per_token num_active_experts"),
    ("use model.expert_ffn_hidden, with model.family=moe",
     "expert_hidden expert_hidden_size expert_dim moe_dim moe_hidden moe_inter_dim moe_hidden_dim"),
    ("use model.shared_expert_ffn, with model.family=moe (the hidden layer of all shared experts together)",
     "shared_expert shared_experts num_shared_experts num_shared_expert"),
    ("use model.moe_capacity, with model.family=moe (null: no token is dropped)",
     "capacity_factor expert_capacity expert_capacity_factor train_capacity_factor moe_capacity_factor "
     "drop_tokens min_capacity"),
    ("no key: evaluation drops no tokens; model.moe_capacity (with model.family=moe) is of training",
     "eval_capacity_factor"),
    ("use model.balance=sequence, with model.balance_weight (and model.family=moe)",
     "aux_loss aux_loss_coef aux_loss_coeff aux_loss_weight moe_aux_loss moe_aux_loss_coef aux_coef "
     "load_balancing load_balancing_loss load_balance_loss load_balancing_loss_coef balance_loss "
     "router_aux_loss"),
    ("use model.balance=bias, with optimizer.balance_rate (and model.family=moe)",
     "bias_update_speed bias_update_rate aux_loss_free expert_bias router_bias e_score_correction_bias "
     "loss_free_balancing load_balance_coeff"),
    ("use model.z_loss, with model.family=moe (of the router; the head has none)",
     "z_loss zloss router_z_loss router_z_loss_coef router_z_loss_weight z_loss_coef z_loss_weight "
     "moe_z_loss moe_z_loss_coef"),
    ("the router is of model.family=moe: model.router_score, normalize_top_k, routed_scale, balance "
     "(docs/experts.md); it adds no noise",
     "gate router gating router_type router_noise router_jitter noisy_gate_policy gate_type"),
    ("optimizer.name is adamw, lion, muon, polar or sgd; one of your own is a class "
     "(docs/extending/optimizer.md)",
     "adafactor lamb lars shampoo soap sophia adam8bit adamw_8bit adam_8bit galore adagrad rmsprop "
     "novograd adan prodigy schedule_free dion optim"),
    ("use optimizer.name=muon, whose keys are optimizer.momentum, turns, turn_scale and turn_dtype; its "
     "learning rate is optimizer.lr", "muon ns_steps newton_schulz_steps orthogonalize"),
    ("use optimizer.name", "adam adamw sgd lion optimizer_type optimizer_name"),
    ("use optimizer.eps", "epsilon adam_epsilon"),
    ("use optimizer.betas, such as [0.9,0.95]; optimizer.momentum and optimizer.nesterov are muon's, and sgd "
     "has no momentum", "beta momenta"),
    ("threed keeps no average of weights over steps", "ema ema_decay swa weight_averaging"),
    ("threed has no fp8: precision.dtype is fp32, bf16 or fp16",
     "fp8 float8 fp8_recipe fp8_format mxfp8 fp4 nvfp4"),
    ("attention sees the whole sequence; data.document_mask=true keeps it inside a document",
     "sliding_window_size local_attention attention_window"),
    ("threed has no latent attention", "mla use_mla"),
    ("threed has no prediction of more tokens", "mtp mtp_layers num_nextn_predict_layers mtp_depth"),
    ("use model.qk_norm", "use_qk_norm qk_layer_norm qk_normalization"),
    ("threed compiles pieces of blocks (model.fused=auto), not whole models",
     "compile torch_compile use_compile"),
    ("no key: gradients are added up over train.global_batch_size / (train.micro_batch_size x parallel.dp) "
     "micro-batches",
     "grad_accum grad_accum_steps grad_acc grad_acc_steps accumulation_steps accumulate "
     "accumulate_grad_batches gradient_accumulation accum_steps"),
    ("use train.steps",
     "max_steps num_steps n_steps total_steps max_iters num_iters iters iterations num_iterations "
     "training_steps train_steps num_train_steps num_training_steps max_train_steps total_iters"),
    ("use model.layers",
     "n_layers num_layer nlayers nlayer depth num_blocks n_blocks blocks"),
    ("use model.hidden",
     "d_model dmodel n_embed embed_dim embedding_dim embedding_size emb_dim hidden_dim "
     "dim width model_dim n_hidden"),
    ("use model.heads",
     "n_heads nhead nheads num_heads attention_heads"),
    ("use model.kv_heads",
     "n_kv_head n_kv_heads num_kv_heads"),
    ("use model.head_dim",
     "head_size d_head d_k"),
    ("use model.ffn_hidden",
     "d_ff ff_dim ffn_dim mlp_dim mlp_hidden ffn_size"),
    ("use model.vocab",
     "n_vocab vocabulary vocabulary_size num_tokens"),
    ("use model.seq_len",
     "max_seq_len max_seq_length sequence_length seqlen block_size context context_length "
     "context_len context_size ctx_len n_ctx max_length max_tokens "
     "window"),
    ("use model.fused=auto (on a GPU attention is fused anyway; run.attention_backend chooses its kernel)",
     "flash flash_attn flash_attention use_flash_attention attn_implementation"),
    ("use optimizer.lr",
     "learning_rate max_lr base_lr peak_lr initial_lr max_learning_rate learningrate"),
    ("use optimizer.min_lr",
     "min_learning_rate final_lr end_lr lr_min"),
    ("use optimizer.warmup_steps",
     "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup_steps"),
    ("use optimizer.schedule",
     "lr_scheduler scheduler lr_schedule lr_scheduler_type"),
    ("use optimizer.betas, such as [0.9,0.95]",
     "beta beta1 beta2"),
    ("use optimizer.clip_grad",
     "grad_clip gradient_clip gradient_clip_val clip clip_grad_norm grad_norm_clip max_norm"),
    ("use optimizer.weight_decay",
     "wd decay"),
    ("use precision.dtype",
     "half amp torch_dtype"),
    ("use activation.policy=full (or selective)",
     "gradient_checkpointing grad_checkpointing activation_checkpointing recompute remat"),
    ("use parallel.tp",
     "tensor_parallel tensor_parallel_size model_parallel"),
    ("use parallel.pp",
     "pipeline_parallel pp_size pipeline_parallel_size num_stages pipeline_stages"),
    ("use parallel.dp",
     "data_parallel dp_size ddp replicas num_replicas"),
    ("use zero.stage=3",
     "fsdp fully_sharded fully_shard"),
    ("no key: threed init, check and search take --memory BYTES (threed memory counts states alone)",
     "memory device_memory gpu_memory vram"),
    ("use zero.shard_size (of zero.stage=3: copies between groups)",
     "hsdp hybrid_shard"),
    ("use data.source",
     "dataset datasets data_dir train_data dataset_path dataset_name train_file data_file corpus "
     "train_files"),
    ("use run.dir",
     "out_dir output_dir save_dir log_dir output exp_dir logdir checkpoint_dir ckpt_dir"),
    ("use train.eval_every",
     "eval_steps val_interval eval_freq val_check_interval"),
    ("use train.eval_batches",
     "val_batches limit_val_batches"),
    ("use checkpoint.every",
     "save_steps save_every checkpoint_interval ckpt_every save_freq checkpoint_every"),
    ("use checkpoint.keep",
     "save_total_limit max_checkpoints keep_last"),
    ("use train.resume",
     "resume_from resume_from_checkpoint load_from init_from"),
    ("use monitor.console_every",
     "log_every logging_steps print_every log_freq"),
    ("no key: tokens are read from mapped files, which needs no workers",
     "dataloader_workers dataloader_num_workers"),
)
_WORDS = {word: saying for saying, words in _SAYINGS for word in words.split()}

# (what to call, words in place of a command)
_CALLS = (
    ("threed train RUN goes on from the newest checkpoint of a run (so does threed train CONFIG, with the "
     "same run.dir)",
     "resume"),
    ("threed train RUN goes on from the newest checkpoint of a run",
     "continue restart"),
    ("threed train CONFIG trains",
     "run start fit pretrain launch finetune fine-tune sft"),
    ("threed eval RUN",
     "evaluate test val validate-model perplexity"),
    ("threed generate RUN --prompt TEXT",
     "infer inference sample chat complete"),
    ("threed check CONFIG, or threed show CONFIG",
     "validate verify lint plan dry-run"),
    ("threed predict CONFIG",
     "estimate simulate profile cost benchmark bench"),
    ("threed search CONFIG --devices N",
     "tune autotune optimize plan-search"),
    ("threed report CONFIG|RUN",
     "plot draw view visualize dashboard"),
    ("threed runs FOLDER",
     "ls list status ps"),
    ("threed data CONFIG",
     "tokenize preprocess prepare download"),
    ("threed init FILE",
     "new create config quickstart"),
    ("threed --help, and threed COMMAND --help",
     "help"),
    ("threed --version",
     "version"),
)
COMMANDS = {word: call for call, words in _CALLS for word in words.split()}


def meant(key: str) -> str | None:
    """A suggestion for an unknown key, by its last component; None if there is none."""
    return _WORDS.get(key.lstrip("-").rpartition(".")[2].lower().replace("-", "_"))


def nearest(name: str, names: Iterable[str], least: float = 0.6) -> str | None:
    """The name that is most like `name`: one of which it is a part, one that begins with the same word, or
    else by its letters, where at least such a share is equal. None where that would be a guess."""
    names = sorted(names)
    plain = {_plain(each): each for each in reversed(names)}
    mine = _plain(name)
    parts = [each for text, each in plain.items() if len(mine) > 2 and (mine in text or text in mine)]
    parts = sorted(parts, key=len) or [each for text, each in plain.items()
                                       if text.partition("-")[0] == mine.partition("-")[0]]
    near = [plain[text] for text in difflib.get_close_matches(mine, list(plain), 1, least)]
    return next(iter(parts or near), None)


def same(name: str, names: Iterable[str]) -> str | None:
    """The name that differs from `name` in capitals, spaces and underscores alone."""
    return next((each for each in names if _plain(each) == _plain(name)), None)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")
